"""Ports answer at every address of their pod, be the cluster's network of IPv4 or of IPv6."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
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
from colocated_rl_member import accepting as accepting_module
from colocated_rl_member.accepting import accepting
from colocated_rl_member.data import DataClient, data_application
from colocated_rl_member.room import RoomFor
from colocated_rl_member.server import MemberServer
from colocated_rl_member.tls import MemberTls
from colocated_rl_operator.clients.members import Address, Members
from colocated_rl_operator.metrics import OperatorMetrics
from colocated_rl_operator.probes import Probes
from colocated_rl_trainer.ref_policy.figures import ScoreCounts
from colocated_rl_trainer.ref_policy.ports import MetricsPort
from colocated_rl_trainer.ref_policy.score_queue import ScoreQueue
from colocated_rl_trainer.ref_policy.score_requests import ScoreRequests
from fakes.authority import FakeAuthority
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


async def test_the_oldest_silent_connections_make_room_at_once_for_a_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member waited five seconds for each round of them. Who has spoken keeps its place, however slow it is."""
    monkeypatch.setattr(accepting_module, "PATIENCE_S", 100 * DEADLINE_S)
    tls = MemberTls.read(FakeAuthority().member_directory(tmp_path / "tls", job_uid=JOB_UID, token="t" * 32))
    loop = asyncio.get_running_loop()
    listener, room = listen("127.0.0.1", 0), RoomFor(100, lambda: 0, lambda _: asyncio.Protocol())
    async with (
        asyncio.timeout(DEADLINE_S),
        accepting(listener, room, at_a_time=8, context=tls.data_context, handshake_s=100 * DEADLINE_S) as port,
    ):
        with ExitStack() as sockets:

            async def connect() -> socket.socket:
                made = sockets.enter_context(socket.socket())
                made.setblocking(False)
                await loop.sock_connect(made, ("127.0.0.1", port))
                return made

            slow = await connect()
            await loop.sock_sendall(slow, b"\x16")
            silent = [await connect() for _ in range(40)]
            assert b"" == await loop.sock_recv(silent[0], 1)
            _, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=tls.client_context(), server_hostname=names.member_server_name(JOB_UID)
            )
            writer.transport.abort()
            for kept in (slow, *silent[-4:]):
                with pytest.raises(BlockingIOError):
                    kept.recv(1)


async def _there(_: web.Request) -> web.Response:
    return web.Response()


@asynccontextmanager
async def member(directory: Path) -> AsyncIterator[tuple[MemberServer[PodTarget], MemberTls, FakeAuthority]]:
    """Run a member that listens as it does in a pod, on other ports."""
    authority = FakeAuthority()
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
            members.keep(
                names.JobUid(JOB_UID),
                [Address("job-gpu-0-0", names.PodUid("uid-0"), names.ROLE_GPU, host, server.ports.control)],
            )
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
        reference = MetricsPort(
            EVERYWHERE, 0, requests=ScoreRequests(ScoreQueue(1), 1, ScoreCounts(CollectorRegistry()))
        )
        reference.listen("metrics")
        assert await answers(host, reference.number)
        await asyncio.to_thread(reference.shutdown)
        reference.server_close()
