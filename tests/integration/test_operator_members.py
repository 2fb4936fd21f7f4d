"""The operator's connections to members: who counts as a member, what is said, and what is left when one ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from builders import UID, facts_at, rollout_facts
from colocated_rl_api import names
from colocated_rl_api.facts import MOST_PARTS, GateFacts, PodFacts, RolloutFacts
from colocated_rl_api.member_wire import (
    MAX_MESSAGE_BYTES,
    Goal,
    Hello,
    PodTarget,
)
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_member.server import MemberServer, Ports
from colocated_rl_member.tls import MemberTls
from colocated_rl_operator.clients.authority import Authority, Keyholder, Keyring, secret_files
from colocated_rl_operator.clients.errors import ContractBroken
from colocated_rl_operator.clients.members import (
    HANDSHAKES_AT_ONCE,
    MAX_RETRY_S,
    RETRY_S,
    Address,
    Members,
    _decode,
)
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


TOKEN_KEY = b"k" * 32


def trusting(authority: Authority) -> ssl.SSLContext:
    return Keyring(authority, TOKEN_KEY).operator_context()


def write_files(authority: Authority, directory: Path, job_uid: names.JobUid) -> None:
    directory.mkdir(exist_ok=True)
    keys = Keyring(authority, TOKEN_KEY).keys(Keyholder(job_uid, POD, names.ROLE_ROLLOUT))  # for the job's name too
    for name, text in secret_files(keys).items():
        (directory / name).write_text(text)


@asynccontextmanager
async def agent(
    authority: Authority,
    directory: Path,
    *,
    highest_epoch: int = 0,
    job_uid: names.JobUid = UID,
    has_held_keys: bool = True,
    **hello: Any,
) -> AsyncIterator[RememberingAgent]:
    write_files(authority, directory, job_uid)
    if not has_held_keys:
        (directory / names.HELD_KEYS_FILE).unlink()
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
    async with agent(authority, tmp_path) as member, operator(trusting(authority)) as door:
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
    async with agent(authority, tmp_path) as member, operator(trusting(authority)) as door:
        door.members.keep(UID, [member.address])
        await door.until(lambda: door.answer().facts)
        assert 1 == door.members.send(UID, {POD: make_target(1)})
        assert 0 == door.members.send(UID, {POD: make_target(1)})
        door.members.send(UID, {POD: make_target(2)})
        await door.until(lambda: door.answer().facts.epoch == 2)
        assert member.targets[-1] == make_target(2)
        assert len(member.targets) <= 2


async def test_a_target_that_a_member_has_is_not_sent_again_however_many_others_have_other_ones(
    authority: Authority, tmp_path: Path
) -> None:
    """With engines over pods each pod has its own: all of them were sent again in each pass."""
    async with agent(authority, tmp_path) as member, operator(trusting(authority)) as door:
        door.members.keep(UID, [member.address])
        await door.until(lambda: door.answer().facts)
        assert 1 == door.members.send(UID, {POD: make_target(1)})
        job = door.members._jobs[UID]
        for other in range(2, 12):
            job.frame_of(make_target(other))
        assert 0 == door.members.send(UID, {POD: make_target(1)})


async def test_a_member_that_is_not_wanted_any_more_is_left(authority: Authority, tmp_path: Path) -> None:
    async with agent(authority, tmp_path) as member, operator(trusting(authority)) as door:
        door.members.keep(UID, [member.address])
        await door.until(lambda: door.answer().facts)
        door.members.keep(UID, [])
        assert {} == door.members.answers(UID)
        assert 0 == door.members.send(UID, {POD: make_target(1)})
        assert 0 == door.members.connected


# ------------------------------------------------------------------------------------------------------ losing a member
async def test_a_lost_member_is_unknown_at_once_and_found_again(authority: Authority, tmp_path: Path) -> None:
    async with operator(trusting(authority)) as door:
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


async def test_a_half_open_connection_is_noticed_by_its_heartbeat_and_silent_since_a_word_before(
    authority: Authority, tmp_path: Path
) -> None:
    """Its silence began with the loss of its link, after two pings in vain."""
    frozen, ping_s = asyncio.Event(), 0.2
    async with (
        agent(authority, tmp_path) as member,
        operator(trusting(authority), ping_s=ping_s) as door,
        relayed(0, member.server.ports.control, frozen) as port,
    ):
        door.members.keep(UID, [Address(POD, POD_UID, names.ROLE_GPU, "127.0.0.1", port)])
        await door.until(lambda: door.answer().facts)
        frozen.set()
        await door.until(lambda: door.answer().facts is None)
        assert door.answer().silent_since <= time.monotonic() - ping_s, "it had until the second ping"
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

    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # and listens to nobody
        port = deaf.getsockname()[1]
        async with operator(trusting(authority), rest=rest) as door, asyncio.timeout(DEADLINE_S):
            door.members.keep(
                UID, [Address(pod, names.PodUid(pod), names.ROLE_GPU, "127.0.0.1", port) for pod in rests]
            )
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
        async with agent(authority, tmp_path) as member, operator(trusting(authority)) as door:
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
        async with agent(authority, tmp_path) as member, operator(trusting(authority)) as door:
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
    async with agent(authority, tmp_path, **lie) as member, operator(trusting(authority)) as door:
        door.members.keep(UID, [member.address])
        await stays_unknown(door)
        assert 0 == door.members.send(UID, {POD: make_target(1)})


async def test_a_certificate_of_another_job_is_no_member(authority: Authority, tmp_path: Path) -> None:
    context = trusting(authority)
    async with agent(authority, tmp_path, job_uid=names.JobUid("another-job")) as member, operator(context) as door:
        door.members.keep(UID, [member.address])
        await stays_unknown(door)


async def test_a_certificate_of_another_authority_is_no_member(authority: Authority, tmp_path: Path) -> None:
    async with agent(Authority.new(), tmp_path) as member, operator(trusting(authority)) as door:
        door.members.keep(UID, [member.address])
        await stays_unknown(door)


async def test_facts_of_the_other_kind_end_the_connection(authority: Authority, tmp_path: Path) -> None:
    async with agent(authority, tmp_path) as member, operator(trusting(authority)) as door:
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
        async with operator(trusting(authority)) as door:
            address = Address(POD, POD_UID, names.ROLE_GPU, "127.0.0.1", runner.addresses[0][1])
            door.members.keep(UID, [address])
            await stays_unknown(door)
    finally:
        await serving.end(runner)


async def test_a_member_that_knows_a_newer_epoch_says_so(authority: Authority, tmp_path: Path) -> None:
    async with agent(authority, tmp_path, highest_epoch=7) as member, operator(trusting(authority)) as door:
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


# ---------------------------------------------------------------------------------------------------------------- keys
class KeyedScene:
    """An agent and the operator's door to it, with the keyring by which it gets its keys."""

    def __init__(self, member: RememberingAgent, door: OperatorDoor, keyring: Keyring) -> None:
        self.member, self.door, self.keyring = member, door, keyring

    @property
    def is_renewed(self) -> bool:
        held = self.member.server.hello.keys
        return held is not None and self.keyring.is_current(held, GPU_POD) and not self.door.members.outdated

    async def renew(self, authority: Authority, token_key: bytes = TOKEN_KEY) -> None:
        """Issue keys by these, as a leader does that has read other Secrets, until the member uses them."""
        assert self.keyring.replace(authority, token_key)
        self.door.members.tls = self.keyring.operator_context()
        await self.door.members.renew()
        await self.renewed()

    async def renewed(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not self.is_renewed:  # noqa: ASYNC110 - nobody is told of renewed keys
                await asyncio.sleep(0.01)

    async def admits(self, context: ssl.SSLContext) -> bool:
        """Return whether a caller with this context is let in, and accepts the member."""
        name = names.pod_server_name(UID, POD)
        port = self.member.server.ports.control
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
            writer.write(b"GET /v1/state HTTP/1.1\r\nHost: member\r\nConnection: close\r\n\r\n")
            answer = await reader.readline()
            writer.transport.abort()
        except OSError:
            return False
        return b" 200 " in answer


@asynccontextmanager
async def keyed(authority: Authority, directory: Path) -> AsyncIterator[KeyedScene]:
    keyring = Keyring(authority, TOKEN_KEY)
    async with (
        agent(authority, directory) as member,
        operator(keyring.operator_context(), renewals=keyring) as door,
    ):
        door.members.keep(UID, [member.address])
        await door.until(lambda: door.answer().facts)
        yield KeyedScene(member, door, keyring)
        assert [] == door.lost, "a connection ended for new keys"


GPU_POD = Keyholder(UID, POD, names.ROLE_GPU)


async def test_an_authority_is_replaced_under_a_running_member_that_trusts_both_meanwhile(
    authority: Authority, tmp_path: Path
) -> None:
    """Members trusted the one authority that their process began with: each job lost all its pods for another."""
    following = Authority.new()
    by_former = Keyring(authority, TOKEN_KEY).operator_context()
    by_following = Keyring(following, TOKEN_KEY).operator_context()
    async with keyed(authority, tmp_path) as it:
        assert (True, False) == (await it.admits(by_former), await it.admits(by_following))
        both = replace(authority, others=(following.certificate,))
        await it.renew(both)
        trusting_both = Keyring(both, TOKEN_KEY).operator_context()
        assert await it.admits(trusting_both)
        await it.renew(replace(following, others=(authority.certificate,)))
        assert (True, True) == (await it.admits(trusting_both), await it.admits(by_following))
        await it.renew(following)
        assert (False, True) == (await it.admits(trusting_both), await it.admits(by_following))


async def test_member_whose_certificate_ends_soon_gets_another_when_it_connects(
    authority: Authority, tmp_path: Path
) -> None:
    later = datetime.now(UTC) + timedelta(days=21)
    keyring = Keyring(authority, TOKEN_KEY, wall=lambda: later)
    context = trusting(authority)
    async with agent(authority, tmp_path) as member, operator(context, renewals=keyring) as door:
        first = member.server.hello.keys
        door.members.keep(UID, [member.address])
        await KeyedScene(member, door, keyring).renewed()
        second = member.server.hello.keys
        assert first is not None
        assert second is not None
        assert timedelta(days=20) < second.ends - first.ends < timedelta(days=22)


async def test_member_of_an_older_operator_is_sent_no_keys(authority: Authority, tmp_path: Path) -> None:
    """It would close the connection: it knows no such message."""
    keyring = Keyring(Authority.new(), TOKEN_KEY)
    async with (
        agent(authority, tmp_path, has_held_keys=False) as member,
        operator(trusting(authority), renewals=keyring) as door,
    ):
        door.members.keep(UID, [replace(member.address, has_own_keys=False)])
        await door.until(lambda: door.answer().facts)
        await door.members.renew()
        door.members.send(UID, {POD: make_target(1)})
        await door.until(lambda: door.answer().highest_epoch == 1)
        assert (0, [], None) == (door.members.outdated, door.lost, door.members.first_end)


@pytest.mark.parametrize("ends", ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2030-01-01T00:00:00", "soon"])
async def test_whatever_a_member_says_of_its_keys_costs_the_operator_nothing(
    authority: Authority, tmp_path: Path, ends: str
) -> None:
    """One that named a moment of no time zone, or the first of all, ended the operator, of all jobs."""
    async with keyed(authority, tmp_path) as it:
        held = it.member.server.hello.keys
        assert held is not None
        words = {"type": "renewed", "keys": held.model_dump(mode="json", by_alias=True) | {"ends": ends}}
        [member] = it.door.members._jobs[UID].members.values()
        assert member.link is not None
        with contextlib.suppress(ContractBroken):  # which ends the connection
            it.door.members._hear(member, member.link, json.dumps(words).encode())
        await it.door.members.renew()
        assert it.door.members.outdated in (0, 1)
        assert it.door.members.first_end is not None


@pytest.mark.parametrize("many", ["engines", "trainers", "devices"])
def test_a_member_that_lists_more_than_a_pod_can_have_is_not_heard(many: str) -> None:
    """A message full of ranks took 50 ms of the operator, and 7 MiB of its memory for as long as they were known."""
    facts = json.loads(facts_at(Rung.SERVING, WeightVersion(1, 1)).model_dump_json(by_alias=True))
    [one, *_] = facts[many] or [{"index": 0}]
    text = json.dumps(facts | {many: [one] * (MOST_PARTS + 1)})
    with pytest.raises(ContractBroken, match=rf"{many}.*at most {MOST_PARTS} items"):
        _decode(text.encode())


async def test_another_name_of_the_token_sends_members_another_token(authority: Authority, tmp_path: Path) -> None:
    async with keyed(authority, tmp_path) as it:
        before = it.member.server.hello.keys
        it.door.members.keep(UID, [it.member.address], token_name="2")
        async with asyncio.timeout(DEADLINE_S):
            while it.member.server.hello.keys == before:  # noqa: ASYNC110 - nobody is told of renewed keys
                await asyncio.sleep(0.01)
        held = it.member.server.hello.keys
        assert held is not None
        assert it.keyring.is_current(held, replace(GPU_POD, token_name="2"))


async def test_damaged_keys_change_nothing_and_end_no_connection(authority: Authority, tmp_path: Path) -> None:
    async with keyed(authority, tmp_path) as it:
        good = it.keyring.keys
        broken = [{"certificate": "none"}, {"key": good(GPU_POD).key}, {"token": "short"}, {"authorities": "none"}]

        async def outdated_after(epoch: int, damage: dict[str, Any]) -> int:
            it.keyring.keys = lambda who: good(who).model_copy(update=damage)  # type: ignore[method-assign, assignment]
            it.door.members.keep(UID, [it.member.address], token_name=str(damage))
            it.door.members.send(UID, {POD: make_target(epoch)})
            await it.door.until(lambda: it.door.answer().highest_epoch == epoch)  # behind the keys
            return it.door.members.outdated

        assert [1, 1, 1, 1] == [await outdated_after(*each) for each in enumerate(broken, 1)]
        assert await it.admits(it.keyring.operator_context())


def test_token_that_was_replaced_is_shown_and_admitted_for_a_while_and_then_refused(
    authority: Authority, tmp_path: Path
) -> None:
    now = [1000.0]
    keyring = Keyring(authority, TOKEN_KEY)
    tls = MemberTls(keyring.keys(GPU_POD), clock=lambda: now[0])
    former = tls.authorization
    tls.take(keyring.keys(replace(GPU_POD, token_name="2")))
    following = f"Bearer {keyring.token(replace(GPU_POD, token_name='2'))}"

    def seen(at: float) -> tuple[bool, bool, bool]:
        now[0] = at
        return tls.authorization == former, tls.admits(former), tls.admits(following)

    assert [(True, True, True), (False, True, True), (False, False, True)] == [seen(1000), seen(1031), seen(1121)]
    assert following == tls.authorization


def test_process_that_starts_again_uses_what_was_renewed_and_not_its_secret(
    authority: Authority, tmp_path: Path
) -> None:
    keyring, kept = Keyring(authority, TOKEN_KEY), tmp_path / "kept"
    kept.mkdir()
    write_files(authority, tmp_path / "tls", UID)
    renewed = keyring.keys(replace(GPU_POD, token_name="2"))
    MemberTls.read(tmp_path / "tls", kept=kept).take(renewed)
    again = MemberTls.read(tmp_path / "tls", kept=kept)
    assert (renewed.held, f"Bearer {renewed.token}") == (again.held, again.authorization)
    assert [0o600] == [path.stat().st_mode & 0o777 for path in kept.iterdir()]


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
