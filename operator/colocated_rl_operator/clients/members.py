"""Keep one long-lived connection to each member, which no other module does: targets go down, facts come up.

A connection is opened to the pod's address, checked against the authority and the pod's TLS name, and counts only once
the member has sent the pod UID and job UID that we expect: a reused address belongs to a stranger. While it is up, the
newest facts stand for the member; once it is lost, nothing does. Targets are a state too: the newest wins, an equal one
is not sent twice, and a new connection starts with none, so that no target of an older epoch is ever repeated.

Handshakes take turns, because each costs time of the one event loop. A member that sends nothing costs none, and soon
loses its turn.

Over the same connection a member gets new keys: `Renewals` says which, when it has come and once in a while. Nothing is
connected anew for that.

Nothing polls: each message calls `changed` with the UID of the job whose loop has something to see.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import NoReturn, Protocol, Self

import pydantic

from colocated_rl_api import names
from colocated_rl_api.facts import PodFacts, RolloutFacts
from colocated_rl_api.logs import bind, in_words, log
from colocated_rl_api.member_wire import (
    HEARTBEAT_S,
    WIRE_VERSION,
    FromMember,
    HeldKeys,
    Hello,
    Keys,
    PodTarget,
    Refusal,
    Renewed,
    RolloutTarget,
    from_member,
)
from colocated_rl_api.names import JobUid, PodUid
from colocated_rl_operator.clients.authority import Keyholder
from colocated_rl_operator.clients.errors import ContractBroken
from colocated_rl_operator.clients.link import (
    TEXT,
    Link,
    connect,
    make_frame,
    reach,
)

LOG = logging.getLogger(__name__)

HANDSHAKE_DEADLINE_S = 10.0  # for TLS, upgrade and hello; the TCP connection has as much before
RETRY_S, MAX_RETRY_S = 0.1, 2.0
HANDSHAKES_AT_ONCE = 64
RENEWED_AT_ONCE = 16  # members, a third of a millisecond each
TURN_S = 0.5  # many times what a handshake takes; one that takes longer goes on without a turn
KINDS_OF_TARGETS = 4  # a pass sends fewer: to the rollout controller, to pods new in the epoch, to the rest

Target = PodTarget | RolloutTarget
Facts = PodFacts | RolloutFacts


class Changed(Protocol):
    """Report that a member of the job has something new. hurry: the group may go on, or a member is lost."""

    def __call__(self, job_uid: JobUid, *, hurry: bool = True) -> None: ...


class Renewals(Protocol):
    """This protocol names the calls of `authority.Keyring` that connections need."""

    def is_current(self, held: HeldKeys, member: Keyholder) -> bool: ...
    def keys(self, member: Keyholder) -> Keys: ...


@dataclass(frozen=True)
class Address:
    """An address names one member of a job: its pod and port. has_own_keys: its certificate names the pod."""

    pod: str
    pod_uid: PodUid
    role: str
    host: str
    port: int = names.CONTROL_PORT
    has_own_keys: bool = True  # False: an older operator gave all members of the job one certificate


@dataclass(frozen=True, eq=False)
class MemberReport:
    """A report holds what is known of a member now; it is the same object until that changes.

    facts: None unless connected. silent_since: when it was last heard, or first asked, monotonic; None while connected.
    """

    facts: Facts | None
    highest_epoch: int
    silent_since: float | None


@dataclass(frozen=True, eq=False)
class _SentTarget:
    """This value holds a target, and the frame that carries it to every member that gets it."""

    target: Target
    frame: bytes


@dataclass(eq=False)
class _Member:
    """This record follows one member across its connections. `sent` belongs to the present one."""

    job: _Job
    address: Address
    answer: MemberReport
    link: Link | None = None  # from its hello onwards
    sent: _SentTarget | None = None
    held: HeldKeys | None = None  # as it said last; None: unknown, or it takes no others
    task: asyncio.Task[None] | None = None


@dataclass(eq=False)
class _Job:
    uid: JobUid
    members: dict[str, _Member] = field(default_factory=dict)  # by pod name
    kept: Collection[Address] = ()  # as `keep` was called with
    token_name: str = ""
    heard_at: float | None = None
    awaited: set[str] = field(default_factory=set)  # pods that have sent nothing since they became awaited
    sent: deque[_SentTarget] = field(default_factory=lambda: deque(maxlen=KINDS_OF_TARGETS))  # newest first

    def frame_of(self, target: Target) -> _SentTarget:
        """Return a target's frame; the same object for an equal target."""
        for each in self.sent:
            if each.target == target:
                return each
        self.sent.appendleft(_SentTarget(target, make_frame(TEXT, target.model_dump_json(by_alias=True).encode())))
        return self.sent[0]


class Members:
    """This object keeps the connections to every member of every job, while its context is entered.

    tls: client side, with the operator's certificate, of the connections from now on. renewals: which keys members get;
    None: no others than they have. changed: called with a job's UID when one of its members has
    something new. lost: called once for each connection that we did not end (metrics). rest: sleeps for the seconds
    between two attempts at one member.
    """

    def __init__(
        self,
        tls: ssl.SSLContext,
        changed: Changed,
        *,
        lost: Callable[[], None] = lambda: None,
        renewals: Renewals | None = None,
        clock: Callable[[], float] = time.monotonic,
        rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
        ping_s: float = HEARTBEAT_S,
    ) -> None:
        self.tls = tls
        self._renewals = renewals
        self._rest = rest
        self._ping_s = ping_s
        self._changed = changed
        self._lost = lost
        self._clock = clock
        self._jobs: dict[JobUid, _Job] = {}
        self._tasks = asyncio.TaskGroup()
        self._handshakes = asyncio.Semaphore(HANDSHAKES_AT_ONCE)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for job_uid in list(self._jobs):
            self.keep(job_uid, ())
        await self._tasks.__aexit__(kind, error, trace)

    # ------------------------------------------------------------------------------------------- used by the job's loop
    def keep(self, job_uid: JobUid, addresses: Collection[Address], *, token_name: str = "") -> None:
        """Keep connections to exactly these members of the job: open those that are missing, close all others.

        token_name: which data token they should have.
        """
        job = self._jobs.get(job_uid) or _Job(job_uid)
        if token_name != job.token_name:
            job.token_name = token_name
            for member in job.members.values():
                self._renew(member)
        if addresses == job.kept:
            return
        self._jobs[job_uid] = job
        job.kept = addresses
        wanted = {address.pod: address for address in addresses}
        for pod, member in list(job.members.items()):
            if wanted.get(pod) != member.address:
                del job.members[pod]
                job.awaited.discard(pod)
                if member.task is not None:
                    member.task.cancel()
        for pod, address in wanted.items():
            if pod not in job.members:
                member = job.members[pod] = _Member(job, address, MemberReport(None, 0, silent_since=self._clock()))
                member.task = self._tasks.create_task(self._stay_connected(member), name=f"member/{pod}")
        if not job.members:
            del self._jobs[job_uid]

    def answers(self, job_uid: JobUid) -> dict[str, MemberReport]:
        """Return the report of each member of the job, by pod name."""
        job = self._jobs.get(job_uid)
        return {} if job is None else {pod: member.answer for pod, member in job.members.items()}

    def send(self, job_uid: JobUid, targets: Mapping[str, Target], awaited: Iterable[str] = ()) -> int:
        """Send connected members their targets, by pod name; return to how many of them the target is new.

        awaited: pods without which the group can't go on. `changed` hurries once each of them has sent a message.
        """
        job, sent = self._jobs.get(job_uid), 0
        if job is None:
            return 0
        job.awaited = set(awaited)
        framed_targets: dict[int, _SentTarget] = {}  # by the target's identity: most members get the same one
        for pod, target in targets.items():
            member = job.members.get(pod)
            if member is None or member.link is None or member.answer.facts is None:
                continue
            framed = framed_targets.get(id(target))
            if framed is None:
                before = member.sent
                framed = before if before is not None and before.target == target else job.frame_of(target)
                framed_targets[id(target)] = framed
            if member.sent is not framed:
                member.sent = framed
                member.link.send(framed.frame)
                sent += 1
        return sent

    def heard_at(self, job_uid: JobUid) -> float | None:
        """Return when the newest message of any of the job's members came."""
        job = self._jobs.get(job_uid)
        return None if job is None else job.heard_at

    async def renew(self) -> None:
        """Send new keys to all members that need some; once in a while give others of the process their turn."""
        members = [member for job in self._jobs.values() for member in job.members.values()]
        for number, member in enumerate(members):
            self._renew(member)
            if number % RENEWED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def wake_all(self) -> None:
        """Have the loop of each job look again: some pods get other keys only with another pod."""
        for job_uid in self._jobs:
            self._changed(job_uid, hurry=False)

    @property
    def outdated(self) -> int:
        """Return the number of connected members that should have other keys than they have."""
        return sum(self._needs_keys(member) for job in self._jobs.values() for member in job.members.values())

    @property
    def first_end(self) -> datetime | None:
        """Return when the first certificate of a connected member ends; None without members."""
        held = (member.held for job in self._jobs.values() for member in job.members.values())
        return min((each.ends for each in held if each is not None), default=None)

    @property
    def connected(self) -> int:
        return sum(member.answer.facts is not None for job in self._jobs.values() for member in job.members.values())

    # ------------------------------------------------------------------------------------------------- one connection
    async def _stay_connected(self, member: _Member) -> None:
        delay_s, address = RETRY_S, member.address
        with bind(job_uid=member.job.uid, pod=address.pod, role=address.role):
            while True:
                is_broken = False
                try:
                    await self._converse(member)
                except ContractBroken as error:
                    reason, is_broken = str(error), True
                    log(LOG, "contract broken by a member", logging.ERROR, reason=reason)
                except (TimeoutError, OSError) as error:
                    reason = in_words(error)
                if self._forget(member, reason):
                    delay_s = RETRY_S
                if is_broken:
                    delay_s = MAX_RETRY_S
                await self._rest(delay_s * random.uniform(0.5, 1.5))
                delay_s = min(2 * delay_s, MAX_RETRY_S)

    def _renew(self, member: _Member) -> None:
        """Send the member its newest keys if it needs them. To one that reads slowly they go another time."""
        if self._renewals is None or member.link is None or member.link.is_slow or not self._needs_keys(member):
            return
        keys = self._renewals.keys(_keyholder(member))
        member.link.send(make_frame(TEXT, keys.model_dump_json(by_alias=True).encode()))

    def _needs_keys(self, member: _Member) -> bool:
        return (
            self._renewals is not None
            and member.held is not None
            and not self._renewals.is_current(member.held, _keyholder(member))
        )

    def _forget(self, member: _Member, reason: str) -> bool:
        """Drop the member's facts, as its connection ended; return whether it had sent any."""
        link, member.link = member.link, None
        member.sent = member.held = None
        member.job.awaited.discard(member.address.pod)
        if link is None or member.answer.silent_since is not None:
            log(LOG, "member not reached", logging.DEBUG, reason=reason)
            return False
        member.answer = MemberReport(None, member.answer.highest_epoch, link.silent_since)
        self._lost()
        log(LOG, "member lost", logging.WARNING, reason=reason)
        self._changed(member.job.uid)
        return True

    async def _converse(self, member: _Member) -> NoReturn:
        """Hold one connection from handshake to end, and raise the reason for the end."""
        async with asyncio.timeout(HANDSHAKE_DEADLINE_S):  # without a turn: lost nodes would take them all
            reached = await reach(member.address.host, member.address.port)
        with ExitStack() as until_its_turn:
            until_its_turn.callback(reached.close)
            async with self._turn(), asyncio.timeout(HANDSHAKE_DEADLINE_S):
                until_its_turn.pop_all()
                link = await connect(
                    reached,
                    tls=self.tls,
                    server_name=_server_name(member),
                    ping_s=self._ping_s,
                    hear=partial(self._hear, member),
                    clock=self._clock,
                )
        try:
            await link.ended()
        except asyncio.CancelledError:
            await link.close()
            raise

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Take a turn, which ends with the block or after TURN_S, whichever is first."""
        await self._handshakes.acquire()
        with ExitStack() as turn:
            turn.callback(self._handshakes.release)
            over = asyncio.get_running_loop().call_later(TURN_S, turn.close)
            turn.callback(over.cancel)
            yield

    def _hear(self, member: _Member, link: Link, text: bytes) -> None:
        message = _decode(text)
        if member.link is link:
            self._take(member, message)
        else:
            hello = _check_hello(member, message)
            member.link, member.held = link, hello.keys
            _raise_epoch(member, hello.highest_epoch)
            self._renew(member)

    def _take(self, member: _Member, message: FromMember) -> None:
        if isinstance(message, Renewed):
            member.held = message.keys
            return
        job, pod, before = member.job, member.address.pod, member.answer.facts
        expected = RolloutFacts if member.address.role == names.ROLE_ROLLOUT else PodFacts
        match message:
            case PodFacts() | RolloutFacts() if isinstance(message, expected):
                if before is None:
                    log(LOG, "member connected", epoch=message.epoch)
                member.answer = MemberReport(
                    message, max(member.answer.highest_epoch, message.epoch), silent_since=None
                )
            case Refusal(reason="StaleEpoch"):
                log(LOG, "target refused", logging.WARNING, epoch=message.epoch, reason=message.message)
                _raise_epoch(member, message.highest_epoch)
            case _:
                raise ContractBroken(f"{pod} sent {message.type}: the connection ends")
        job.heard_at = self._clock()
        is_last = job.awaited == {pod}
        job.awaited.discard(pod)
        self._changed(job.uid, hurry=is_last or _has_news(before, message))


def _keyholder(member: _Member) -> Keyholder:
    return Keyholder(member.job.uid, member.address.pod, member.address.role, member.job.token_name)


def _server_name(member: _Member) -> str:
    if member.address.has_own_keys:
        return names.pod_server_name(member.job.uid, member.address.pod)
    return names.member_server_name(member.job.uid)


def _has_news(before: Facts | None, message: object) -> bool:
    """Return whether the message reports a new batch or evaluation, for which the whole group may wait."""
    return isinstance(message, RolloutFacts) and (
        not isinstance(before, RolloutFacts) or (before.sealed, before.evaluated) != (message.sealed, message.evaluated)
    )


def _raise_epoch(member: _Member, epoch: int) -> None:
    answer = member.answer
    member.answer = MemberReport(answer.facts, max(answer.highest_epoch, epoch), answer.silent_since)


def _check_hello(member: _Member, message: FromMember) -> Hello:
    address = member.address
    if not isinstance(message, Hello):
        raise ContractBroken(f"{address.pod} began with {message.type}, not with hello")
    found = (message.wire, message.pod_uid, message.job_uid, message.role)
    expected = (WIRE_VERSION, address.pod_uid, member.job.uid, address.role)
    if found != expected:
        raise ContractBroken(
            f"at {address.host} expected wire, pod, job, role {expected}, found {found}: unknown member"
        )
    return message


def _decode(text: bytes) -> FromMember:
    try:
        return from_member.validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise ContractBroken(f"unreadable message, {first['loc']}: {first['msg']}: the connection ends") from error
