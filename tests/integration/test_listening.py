"""Ports answer at every address of their pod, be the cluster's network of IPv4 or of IPv6."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from colocated_rl_agent.gate.call import Call
from colocated_rl_agent.gate.data_port import DataPort
from colocated_rl_api import names
from colocated_rl_api.listening import EVERYWHERE, listen
from colocated_rl_api.member_wire import Endpoint, PodTarget
from colocated_rl_member.data import DataClient, data_application
from colocated_rl_member.server import MemberServer
from colocated_rl_member.tls import MemberTls
from colocated_rl_operator.clients.members import Address, Members
from colocated_rl_operator.metrics import OperatorMetrics
from colocated_rl_operator.probes import Probes
from colocated_rl_trainer.ref_policy.figures import ScoreCounts
from colocated_rl_trainer.ref_policy.ports import MetricsPort
from fakes.authority import Authority
from fakes.idle_member import JOB_UID, idle_member

DEADLINE_S = 60.0
LOOPBACKS = ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]


async def answers(host: str, port: int, path: str = "/healthz") -> bool:
    shown = f"[{host}]" if ":" in host else host
    async with aiohttp.ClientSession() as session, session.get(f"http://{shown}:{port}{path}") as answer:
        return answer.status == 200


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_port_is_one_port_of_all_addresses(host: str) -> None:
    with listen(EVERYWHERE, 0) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection((host, port), timeout=DEADLINE_S):
            listening.accept()[0].close()
    with listen(host, 0) as listening:
        assert host == listening.getsockname()[0]


def test_where_the_kernel_has_no_ipv6_a_port_is_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen(EVERYWHERE, 0) as listening:
        assert "0.0.0.0" == listening.getsockname()[0]


async def _there(_: web.Request) -> web.Response:
    return web.Response()


@asynccontextmanager
async def member(directory: Path) -> AsyncIterator[tuple[MemberServer[PodTarget], MemberTls, Authority]]:
    """As it listens in a pod, but for its ports' numbers."""
    authority = Authority()
    tls = MemberTls.read(authority.member_directory(directory / "tls", job_uid=JOB_UID, token="t" * 32))
    data = data_application(tls, max_request_bytes=1024)
    data.router.add_get("/there", _there)
    async with idle_member(tls, data) as server:
        yield server, tls, authority


@pytest.mark.parametrize("host", LOOPBACKS)
async def test_a_member_is_reached_by_operator_and_members_at_an_address_of_either_kind(
    tmp_path: Path, host: str
) -> None:
    async with asyncio.timeout(DEADLINE_S), member(tmp_path) as (server, tls, authority):
        assert await answers(host, server.ports.metrics)
        endpoint = Endpoint(pod="job-gpu-0-0", address=host, port=server.ports.data)
        async with (
            aiohttp.ClientSession() as session,
            DataClient(session, tls, JOB_UID).request("GET", endpoint, "/there") as answer,
        ):
            assert 200 == answer.status
        heard = asyncio.Event()
        async with Members(authority.client_context(tmp_path / "operator"), lambda *_, **__: heard.set()) as members:
            members.keep(JOB_UID, [Address("job-gpu-0-0", "uid-0", names.ROLE_GPU, host, server.ports.control)])
            await heard.wait()


async def fine(call: Call) -> None:
    call.answer(200, b"{}")


class Standby:
    age_s = None


@pytest.mark.parametrize("host", LOOPBACKS)
async def test_ports_of_agent_operator_and_reference_answer_at_an_address_of_either_kind(host: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with DataPort(fine).listening(EVERYWHERE, 0) as port:
            assert await answers(host, port)
        async with Probes(OperatorMetrics(CollectorRegistry()), Standby(), port=0) as probes:
            assert await answers(host, probes.port)
        reference = MetricsPort(EVERYWHERE, 0, is_ready=lambda: True, figures=ScoreCounts(CollectorRegistry()))
        reference.listen("metrics")
        assert await answers(host, reference.number)
        await asyncio.to_thread(reference.shutdown)
        reference.server_close()
