"""The operator's connections to members: who counts as a member, what is said, and what is left when one ends."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from builders import UID, rollout_facts
from colocated_rl_api import names
from colocated_rl_api.facts import GateFacts, PodFacts, RolloutFacts
from colocated_rl_api.member_wire import (
    MAX_MESSAGE_BYTES,
    Goal,
    Hello,
    PodTarget,
)
from colocated_rl_api.rungs import Rung
from colocated_rl_member.server import MemberServer, Ports
from colocated_rl_member.tls import MemberTls
from colocated_rl_operator.clients.authority import Authority
from colocated_rl_operator.clients.members import (
    HANDSHAKES_AT_ONCE,
    MAX_RETRY_S,
    RETRY_S,
    Address,
    Members,
)
from colocated_rl_trainer.conformance.ranks import free_port
from fakes import serving
from fakes.relay import relayed

TESTS = Path(__file__).parents[1]
DEADLINE_S = 60.0
POD = "sums-gpu-0-0"
POD_UID, ANOTHER = names.PodUid("uid-0"), names.JobUid("another")


def make_target(epoch: int, rung: Rung = Rung.SEALED) -> PodTarget:
    return PodTarget(epoch=epoch, goal=Goal.CLIMB, step=0, lineage=1, rung=rung)


def make_facts(epoch: int = 0) -> PodFacts:
    return PodFacts(epoch=epoch, gate=GateFacts(open=False, settled=True), engines=(), trainers=())


@dataclass
class RememberingAgent:
    """A member that remembers what it was told."""

    server: MemberServer[PodTarget]
    facts: PodFacts | RolloutFacts
    answers: dict[int, PodFacts] = field(default_factory=dict)  # by epoch; otherwise it says the same as before
    targets: list[PodTarget] = field(default_factory=list)

    @property
    def address(self) -> Address:
        return Address(POD, POD_UID, names.ROLE_GPU, "127.0.0.1", self.server.ports.control)


@pytest.fixture
def authority() -> Authority:
    return Authority.new()


def write_files(authority: Authority, directory: Path, job_uid: names.JobUid) -> None:
    directory.mkdir(exist_ok=True)
    for name, text in authority.job_files(job_uid).items():
        (directory / name).write_text(text)


@asynccontextmanager
async def agent(
    authority: Authority, directory: Path, *, highest_epoch: int = 0, job_uid: names.JobUid = UID, **hello: Any
) -> AsyncIterator[RememberingAgent]:
    write_files(authority, directory, job_uid)
    usual: dict[str, Any] = {"pod": POD, "pod_uid": POD_UID, "job_uid": UID, "role": names.ROLE_GPU, "incarnation": "a"}
    made: RememberingAgent

    def accept(target: PodTarget) -> None:
        made.targets.append(target)
        if isinstance(made.facts, PodFacts):
            same = made.facts.model_copy(update={"epoch": target.epoch})
            made.facts = made.answers.get(target.epoch, same)

    server: MemberServer[PodTarget] = MemberServer(
        hello=Hello(**usual | hello, highest_epoch=highest_epoch),
        kind=PodTarget,
        tls=MemberTls.read(directory),
        facts=lambda: made.facts,
        accept=accept,
        remember_epoch=lambda epoch: None,
        ports=Ports(control=0, data=0, metrics=0, pages=0, host="127.0.0.1"),
        registry=CollectorRegistry(),
    )
    made = RememberingAgent(server, make_facts())
    async with server:
        yield made


@dataclass
class OperatorDoor:
    """The door, and a wake-up for whoever waits."""

    members: Members
    woken: asyncio.Event
    lost: list[None]

    def answer(self, pod: str = POD) -> Any:
        return self.members.answers(UID)[pod]

    async def until(self, what: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not what():
                self.woken.clear()
                await self.woken.wait()


@asynccontextmanager
async def operator(context: ssl.SSLContext, **options: Any) -> AsyncIterator[OperatorDoor]:
    woken, lost = asyncio.Event(), list[None]()
    members = Members(context, lambda job_uid, *, hurry=True: woken.set(), lost=lambda: lost.append(None), **options)
    async with members:
        yield OperatorDoor(members, woken, lost)


async def stays_unknown(door: OperatorDoor) -> None:
    """Check that the member stays unknown for as long as several attempts take."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await door.until(lambda: door.answer().facts)


# ----------------------------------------------------------------------------------------------------------- ordinary
async def test_facts_come_up_and_targets_go_down(authority: Authority, tmp_path: Path) -> None:
    async with agent(authority, tmp_path) as member, operator(authority.operator_context()) as door:
        door.members.keep(UID, [member.address])
        assert door.answer().silent_since is not None
        await door.until(lambda: door.answer().facts)
        assert door.answer().silent_since is None
        assert 1 == door.members.connected
        assert 1 == door.members.send(UID, {POD: make_target(1)})
        await door.until(lambda: door.answer().facts.epoch == 1)
        assert [make_target(1)] == member.targets
        assert 1 == door.answer().highest_epoch


async def test_the_same_target_is_not_sent_twice_and_the_newest_wins(authority: Authority, tmp_path: Path) -> None:
    async with agent(authority, tmp_path) as member, operator(authority.operator_context()) as door:
        door.members.keep(UID, [member.address])
        await door.until(lambda: door.answer().facts)
        assert 1 == door.members.send(UID, {POD: make_target(1)})
        assert 0 == door.members.send(UID, {POD: make_target(1)})
        door.members.send(UID, {POD: make_target(2)})
        await door.until(lambda: door.answer().facts.epoch == 2)
        assert member.targets[-1] == make_target(2)
        assert len(member.targets) <= 2


async def test_a_member_that_is_not_wanted_any_more_is_left(authority: Authority, tmp_path: Path) -> None:
    async with agent(authority, tmp_path) as member, operator(authority.operator_context()) as door:
        door.members.keep(UID, [member.address])
        await door.until(lambda: door.answer().facts)
        door.members.keep(UID, [])
        assert {} == door.members.answers(UID)
        assert 0 == door.members.send(UID, {POD: make_target(1)})
        assert 0 == door.members.connected


# ------------------------------------------------------------------------------------------------------ losing a member
async def test_a_lost_member_is_unknown_at_once_and_found_again(authority: Authority, tmp_path: Path) -> None:
    async with operator(authority.operator_context()) as door:
        async with agent(authority, tmp_path) as member:
            port = member.server.ports.control
            door.members.keep(UID, [member.address])
            await door.until(lambda: door.answer().facts)
            door.members.send(UID, {POD: make_target(1)})
            await door.until(lambda: door.answer().facts.epoch == 1)
        await door.until(lambda: door.answer().facts is None)
        assert door.answer().silent_since is not None
        assert 1 == len(door.lost)
        assert 1 == door.answer().highest_epoch
        relay = asyncio.Event()
        async with agent(authority, tmp_path) as again, relayed(port, again.server.ports.control, relay):
            await door.until(lambda: door.answer().facts)
            assert [] == again.targets  # a new connection begins without a target: nothing old is repeated


async def test_a_half_open_connection_is_noticed_by_its_heartbeat(authority: Authority, tmp_path: Path) -> None:
    frozen = asyncio.Event()
    async with agent(authority, tmp_path) as member, operator(authority.operator_context(), ping_s=0.2) as door:
        port = free_port()
        async with relayed(port, member.server.ports.control, frozen):
            door.members.keep(UID, [Address(POD, POD_UID, names.ROLE_GPU, "127.0.0.1", port)])
            await door.until(lambda: door.answer().facts)
            frozen.set()
            await door.until(lambda: door.answer().facts is None)
            door.members.keep(UID, [])


async def test_members_that_were_lost_at_one_moment_are_asked_again_at_different_ones(authority: Authority) -> None:
    """Otherwise each outage would end in a thousand handshakes at once, and again at each attempt."""
    rests: dict[str, list[float]] = {f"sums-gpu-{number}-0": [] for number in range(40)}
    attempts, is_enough = 8, asyncio.Event()

    async def rest(seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        mine = rests[task.get_name().removeprefix("member/")]
        mine.append(seconds)
        if all(len(each) >= attempts for each in rests.values()):
            is_enough.set()
        await asyncio.sleep(0)

    async with operator(authority.operator_context(), rest=rest) as door:
        nobody = free_port()
        door.members.keep(UID, [Address(pod, names.PodUid(pod), names.ROLE_GPU, "127.0.0.1", nobody) for pod in rests])
        async with asyncio.timeout(DEADLINE_S):
            await is_enough.wait()
    for attempt in range(attempts):
        usual = min(RETRY_S * 2**attempt, MAX_RETRY_S)
        shares = [each[attempt] / usual for each in rests.values()]
        assert 0.5 <= min(shares) < 0.8
        assert 1.2 < max(shares) <= 1.5
        assert len(set(shares)) == len(shares)


@contextmanager
def port_of_a_lost_node() -> Iterator[int]:
    """Yield a port on which callers hear nothing: the few places that a listener has are taken."""
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port: int = listener.getsockname()[1]
        for _ in range(4):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield port


async def test_members_of_lost_nodes_keep_no_other_job_from_its_own(authority: Authority, tmp_path: Path) -> None:
    """Each of their attempts took a turn for as long as it lasted, and pods of other jobs were replaced for silence."""
    with port_of_a_lost_node() as port:
        lost = [f"lost-gpu-{number}-0" for number in range(2 * HANDSHAKES_AT_ONCE)]
        async with agent(authority, tmp_path) as member, operator(authority.operator_context()) as door:
            door.members.keep(
                ANOTHER, [Address(pod, names.PodUid(pod), names.ROLE_GPU, "127.0.0.1", port) for pod in lost]
            )
            door.members.keep(UID, [member.address])
            await door.until(lambda: door.answer().facts)
        assert not [answer for answer in door.members.answers(ANOTHER).values() if answer.facts]


async def test_members_that_accept_and_send_nothing_keep_no_other_job_from_its_own(
    authority: Authority, tmp_path: Path
) -> None:
    """Each had its turn to shake hands for 10 s: a few hundred hung processes, and pods of other jobs were replaced."""
    mute = 8 * HANDSHAKES_AT_ONCE  # more than have their turns of the whole deadline before the test's
    with socket.create_server(("127.0.0.1", 0), backlog=mute) as listener:
        hung, port = [f"hung-gpu-{number}-0" for number in range(mute)], listener.getsockname()[1]
        async with agent(authority, tmp_path) as member, operator(authority.operator_context()) as door:
            door.members.keep(
                ANOTHER, [Address(pod, names.PodUid(pod), names.ROLE_GPU, "127.0.0.1", port) for pod in hung]
            )
            door.members.keep(UID, [member.address])
            await door.until(lambda: door.answer().facts)
        assert not [answer for answer in door.members.answers(ANOTHER).values() if answer.facts]


# --------------------------------------------------------------------------------------------------- who is no member
@pytest.mark.parametrize(
    "lie", [{"pod_uid": "uid-of-another-pod"}, {"job_uid": "another-job"}, {"role": names.ROLE_ROLLOUT}, {"wire": 99}]
)
async def test_whoever_says_it_is_somebody_else_is_nobody(
    authority: Authority, tmp_path: Path, lie: dict[str, Any]
) -> None:
    async with agent(authority, tmp_path, **lie) as member, operator(authority.operator_context()) as door:
        door.members.keep(UID, [member.address])
        await stays_unknown(door)
        assert 0 == door.members.send(UID, {POD: make_target(1)})


async def test_a_certificate_of_another_job_is_no_member(authority: Authority, tmp_path: Path) -> None:
    context = authority.operator_context()
    async with agent(authority, tmp_path, job_uid=names.JobUid("another-job")) as member, operator(context) as door:
        door.members.keep(UID, [member.address])
        await stays_unknown(door)


async def test_a_certificate_of_another_authority_is_no_member(authority: Authority, tmp_path: Path) -> None:
    async with agent(Authority.new(), tmp_path) as member, operator(authority.operator_context()) as door:
        door.members.keep(UID, [member.address])
        await stays_unknown(door)


async def test_facts_of_the_other_kind_end_the_connection(authority: Authority, tmp_path: Path) -> None:
    async with agent(authority, tmp_path) as member, operator(authority.operator_context()) as door:
        member.facts = rollout_facts()
        door.members.keep(UID, [member.address])
        await stays_unknown(door)


@pytest.mark.parametrize("garbage", [b"\x00\x01", "not json", '{"type":"podFacts"}', "x" * 300_000])
async def test_garbage_ends_the_connection_and_nothing_else(
    authority: Authority, tmp_path: Path, garbage: bytes | str
) -> None:
    write_files(authority, tmp_path, UID)

    async def link(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await (socket.send_bytes(garbage) if isinstance(garbage, bytes) else socket.send_str(garbage))
        await socket.receive()
        return socket

    app = web.Application()
    app.add_routes([web.get("/v1/link", link)])
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=MemberTls.read(tmp_path).control_context()).start()
    try:
        async with operator(authority.operator_context()) as door:
            address = Address(POD, POD_UID, names.ROLE_GPU, "127.0.0.1", runner.addresses[0][1])
            door.members.keep(UID, [address])
            await stays_unknown(door)
    finally:
        await serving.end(runner)


async def test_a_member_that_knows_a_newer_epoch_says_so(authority: Authority, tmp_path: Path) -> None:
    async with agent(authority, tmp_path, highest_epoch=7) as member, operator(authority.operator_context()) as door:
        door.members.keep(UID, [member.address])
        await door.until(lambda: door.answer().facts)
        assert 7 == door.answer().highest_epoch
        door.members.send(UID, {POD: make_target(3)})
        await asyncio.sleep(0)
        door.members.send(UID, {POD: make_target(8)})
        await door.until(lambda: door.answer().facts.epoch == 8)
        assert [make_target(8)] == member.targets


async def test_the_members_own_certificate_sends_no_targets(authority: Authority, tmp_path: Path) -> None:
    """Another job's member has a certificate of the same authority; it is not the operator."""
    async with agent(authority, tmp_path) as member:
        thief = tmp_path / "thief"
        write_files(authority, thief, names.JobUid("thief"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(thief / names.CA_FILE)
        context.load_cert_chain(thief / names.CERT_FILE, thief / names.KEY_FILE)
        async with operator(context) as door:
            door.members.keep(UID, [member.address])
            await stays_unknown(door)
        assert [] == member.targets


# -------------------------------------------------------------------------------------------------------------- memory
class LongFacts(PodFacts):
    """A member whose version has more to say reports LongFacts."""

    more: str = "x" * (MAX_MESSAGE_BYTES - 1024)


async def test_a_connection_takes_less_than_100_kib_of_the_operators_memory_and_few_times_as_much_at_most(
    authority: Authority, tmp_path: Path
) -> None:
    """300 with asyncio's TLS, which fills a buffer of 256 KiB for each. In the second epoch all send the largest
    message that is taken: 570, where all of it could come at once.
    """
    largest = LongFacts(epoch=2, gate=GateFacts(open=False, settled=True), engines=(), trainers=())
    async with AsyncExitStack() as stack:
        agents = [await stack.enter_async_context(agent(authority, tmp_path)) for _ in range(40)]
        for each in agents:
            each.answers = {2: largest, 3: make_facts(epoch=3)}
        files = {name: text.decode() for name, text in authority.files().items()}
        setup = {"authority": files, "ports": [each.server.ports.control for each in agents]}
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fakes.linked_operator"), cwd=TESTS, stdin=PIPE, stdout=PIPE
        )
        try:
            async with asyncio.timeout(60):
                output, _ = await program.communicate(json.dumps(setup).encode() + b"\n")
        finally:
            if program.returncode is None:
                program.kill()
    assert 0 == program.returncode
    usual, after_the_largest = map(float, output.split())
    assert 10 < usual < 100
    assert usual < after_the_largest < 400
