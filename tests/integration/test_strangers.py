"""Whoever holds connections that anybody may open keeps nobody else from a port, whatever he says on them.

All connections of an attack come before that of the caller, and none is late before the test ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Metric

from colocated_rl_agent.gate import data_port as data_port_module
from colocated_rl_agent.gate.call import Call
from colocated_rl_agent.gate.data_port import DataPort
from colocated_rl_api import names
from colocated_rl_api.shared import SHARE
from colocated_rl_member import accepting as accepting_module
from colocated_rl_member import data as data_module
from colocated_rl_member import server as server_module
from colocated_rl_member.data import data_application
from colocated_rl_member.tls import MemberTls
from colocated_rl_operator.metrics import OperatorMetrics
from colocated_rl_operator.probes import Probes
from colocated_rl_trainer.ref_policy import ports as reference_ports
from colocated_rl_trainer.ref_policy.figures import ScoreCounts
from colocated_rl_trainer.ref_policy.ports import MetricsPort, ScorePort
from colocated_rl_trainer.ref_policy.score_queue import ScoreQueue
from colocated_rl_trainer.ref_policy.score_requests import ScoreRequests
from fakes.authority import FakeAuthority
from fakes.idle_member import JOB_UID, idle_member
from fakes.silent import silence

DEADLINE_S = 60.0
NEVER_S = 100 * DEADLINE_S
MANY = 2000
TOKEN = "t" * 32


@pytest.fixture(autouse=True)
def nobody_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline would end an attack in the end; here nothing but the room that is made for others does."""
    monkeypatch.setattr(accepting_module, "PATIENCE_S", NEVER_S)
    for module in (server_module, data_port_module):
        monkeypatch.setattr(module, "HANDSHAKE_S", NEVER_S)
    monkeypatch.setattr(data_port_module, "CALLER_S", NEVER_S)
    monkeypatch.setattr(server_module, "IDLE_S", NEVER_S)
    monkeypatch.setattr(reference_ports, "UNAUTHENTICATED_S", NEVER_S)
    monkeypatch.setattr(reference_ports._PortHandler, "timeout", NEVER_S)


@pytest.fixture
def tls(tmp_path: Path) -> MemberTls:
    return MemberTls.read(FakeAuthority().member_directory(tmp_path / "tls", job_uid=JOB_UID, token=TOKEN))


class StandbyLeadership:
    age_s = None


async def answered(call: Call) -> None:
    call.answer(200, b"{}")


@asynccontextmanager
async def a_member(tls: MemberTls) -> AsyncIterator[int]:
    async with idle_member(tls, data_application(tls, max_request_bytes=1024)) as member:
        yield member.ports.metrics


@asynccontextmanager
async def the_operator(tls: MemberTls) -> AsyncIterator[int]:
    async with Probes(OperatorMetrics(CollectorRegistry()), StandbyLeadership(), port=0) as probes:
        yield probes.port


def no_requests() -> ScoreRequests:
    return ScoreRequests(ScoreQueue(1), 1, ScoreCounts(CollectorRegistry()))


@asynccontextmanager
async def a_reference(tls: MemberTls) -> AsyncIterator[int]:
    port = MetricsPort("127.0.0.1", 0, requests=no_requests())
    port.listen("metrics")
    try:
        yield port.number
    finally:
        await asyncio.to_thread(port.shutdown)
        port.server_close()


async def status(port: int, tls: MemberTls | None, path: str, **headers: str) -> bytes:
    """Return the status of the first answer to a caller from an address of its own. Nothing is tried twice."""
    options = {} if tls is None else {
        "ssl": tls.client_context(), "server_hostname": names.member_server_name(JOB_UID),
    }  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)  # type: ignore[arg-type]
    try:
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(head.encode() + b"\r\n")
        return (await reader.readline()).split()[1]
    finally:
        writer.transport.abort()  # `close` would wait for the other side to end TLS, perhaps longer than the loop lasts


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("word", [b"", b"GET /healthz HT", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"])
@pytest.mark.parametrize("whose", [a_member, the_operator, a_reference])
async def test_kubelet_hears_that_a_process_is_healthy_past_connections_that_anybody_may_hold(
    tls: MemberTls, whose: Callable[[MemberTls], contextlib.AbstractAsyncContextManager[int]], word: bytes
) -> None:
    """A member answered 429 to it after 256 of them, and a reference nothing: kubelet would have ended both.

    The operator kept them all, up to the last descriptor, which calls of the API server need.
    """
    before = open_files()
    async with asyncio.timeout(DEADLINE_S), whose(tls) as port, silence(port, MANY, word=word):
        assert b"200" == await status(port, None, "/healthz")
        assert open_files() < before + MANY // 3


class SlowMetrics:
    """Metrics that take a while, as of many jobs. made: how often."""

    made = 0
    takes_s = 0.005

    def collect(self) -> list[Metric]:
        self.made += 1
        time.sleep(self.takes_s)
        return []


@asynccontextmanager
async def a_slow_member(tls: MemberTls, slow: SlowMetrics) -> AsyncIterator[int]:
    registry = CollectorRegistry()
    registry.register(slow)
    async with idle_member(tls, data_application(tls, max_request_bytes=1024), registry=registry) as member:
        yield member.ports.metrics


@asynccontextmanager
async def a_slow_operator(_: MemberTls, slow: SlowMetrics) -> AsyncIterator[int]:
    registry = CollectorRegistry()
    registry.register(slow)
    async with Probes(OperatorMetrics(registry), StandbyLeadership(), port=0) as probes:
        yield probes.port


@pytest.mark.parametrize("whose", [a_slow_member, a_slow_operator])
async def test_metrics_that_anybody_may_ask_for_are_made_once_for_all_who_ask(
    tls: MemberTls, whose: Callable[[MemberTls, SlowMetrics], contextlib.AbstractAsyncContextManager[int]]
) -> None:
    """Whoever asked often enough had all of the event loop, on which links, leases and gates are served."""
    slow = SlowMetrics()
    async with asyncio.timeout(DEADLINE_S), whose(tls, slow) as port:
        slow.made, began = 0, time.monotonic()  # a registry asks once when it is told of it
        assert [b"200"] * 200 == await asyncio.gather(*(status(port, None, "/metrics") for _ in range(200)))
        assert 1 <= slow.made <= 1 + (time.monotonic() - began) / (SHARE * slow.takes_s), "however long all of it takes"
        before = slow.made
        assert b"200" == await status(port, None, "/metrics")
        assert before + 1 == slow.made, "nothing old is shown"


@asynccontextmanager
async def a_gate(tls: MemberTls) -> AsyncIterator[int]:
    port = DataPort(answered, admits=tls.admits, max_strangers=100)
    async with port.listening("127.0.0.1", 0, tls.data_context) as number:
        yield number


@asynccontextmanager
async def a_rollout_controller(tls: MemberTls) -> AsyncIterator[int]:
    async with idle_member(tls, data_application(tls, max_request_bytes=1024)) as member:
        yield member.ports.data


@asynccontextmanager
async def a_reference_for_scores(tls: MemberTls) -> AsyncIterator[int]:
    keys = tls._keys
    with tempfile.TemporaryDirectory() as directory:
        for name, text in (
            (names.CERT_FILE, keys.certificate), (names.KEY_FILE, keys.key), (names.DATA_TOKEN_FILE, keys.token)
        ):  # fmt: skip
            (Path(directory) / name).write_text(text)
        port = ScorePort(
            "127.0.0.1", 0, tls=Path(directory), requests=no_requests(), unauthenticated_s=NEVER_S,
        )  # fmt: skip
    port.listen("data")
    try:
        yield port.number
    finally:
        await asyncio.to_thread(port.shutdown)
        port.server_close()


data_ports = pytest.mark.parametrize("whose", [a_gate, a_rollout_controller, a_reference_for_scores])
HELLO_BEGINS = b"\x16\x03\x01\x02\x00"


@data_ports
@pytest.mark.parametrize("peers", [1, 3])
async def test_a_member_connects_past_handshakes_that_never_end(
    tls: MemberTls, whose: Callable[[MemberTls], contextlib.AbstractAsyncContextManager[int]], peers: int
) -> None:
    """It waited behind all of them, five seconds for each 64."""
    async with asyncio.timeout(DEADLINE_S), whose(tls) as port, silence(port, MANY, peers=peers, word=HELLO_BEGINS):
        assert (await status(port, tls, "/x", Authorization=tls.authorization))[:1] in b"245"


class StrangersEnd(asyncio.Protocol):
    def __init__(self) -> None:
        self.lost = asyncio.Event()

    def connection_lost(self, _: Exception | None) -> None:
        self.lost.set()


@asynccontextmanager
async def connected(port: int, tls: MemberTls) -> AsyncIterator[asyncio.Transport]:
    """Make a handshake from an address that no member has."""
    with socket.socket() as made:
        made.bind(("127.0.2.1", 0))
        made.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(made, ("127.0.0.1", port))
        transport, protocol = await loop.create_connection(
            StrangersEnd, sock=made, ssl=tls.client_context(), server_hostname=names.member_server_name(JOB_UID)
        )
        try:
            yield transport
        finally:
            transport.abort()
            await protocol.lost.wait()


@data_ports
async def test_a_member_connects_past_those_who_made_a_handshake_and_show_no_token(
    tls: MemberTls, whose: Callable[[MemberTls], contextlib.AbstractAsyncContextManager[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It was told that the port has no room, or hung up on."""
    monkeypatch.setattr(data_module, "MAX_STRANGERS", 100)
    monkeypatch.setattr(reference_ports, "MAX_CONNECTIONS", 100)
    async with asyncio.timeout(DEADLINE_S), whose(tls) as port, AsyncExitStack() as stack:
        for number in range(150):
            stranger = await stack.enter_async_context(connected(port, tls))
            stranger.write(b"GET / HTT" * (number % 2))
        assert (await status(port, tls, "/x", Authorization=tls.authorization))[:1] in b"245"
        assert b"429" != await status(port, tls, "/x", Authorization=tls.authorization)


async def test_a_reference_waits_for_the_room_that_a_stranger_makes(
    tls: MemberTls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stranger's thread takes a while to end where scoring has the cores, and the member was hung up on."""
    ends = reference_ports.ScorePort.shutdown_request

    def late(port: reference_ports.ScorePort, request: socket.socket) -> None:
        time.sleep(0.5)
        ends(port, request)

    monkeypatch.setattr(reference_ports.ScorePort, "shutdown_request", late)
    monkeypatch.setattr(reference_ports, "MAX_CONNECTIONS", 2)
    async with asyncio.timeout(DEADLINE_S), a_reference_for_scores(tls) as port, AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(connected(port, tls))
        assert (await status(port, tls, "/x", Authorization=tls.authorization))[:1] in b"245"
