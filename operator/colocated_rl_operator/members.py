"""The only door to members: one long-lived connection to each, targets down, facts up.

A connection is opened to the pod's address, checked against the authority and the job's TLS name, and counts only once
the member has said the pod UID and job UID that we expect: a reused address is nobody we know. While it is up, the
newest facts stand for the member; the moment it is lost, nothing does. Targets are a state too: the newest wins, the
same one is not sent twice, and a new connection starts with none, so that nothing of an older epoch is ever repeated.

Nothing polls: each message calls `changed`, with the job whose loop has something to see.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from asyncio import sslproto
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import aiohttp
import pydantic

from colocated_rl_api import names
from colocated_rl_api.logs import bind, log
from colocated_rl_api.member_wire import (
    HEARTBEAT_S,
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    Hello,
    PodFacts,
    PodTarget,
    Refusal,
    RolloutFacts,
    RolloutTarget,
    from_member,
)
from colocated_rl_operator.errors import ContractBroken

LOG = logging.getLogger(__name__)

HANDSHAKE_DEADLINE_S = 10.0  # connection, TLS, upgrade, hello
SEND_DEADLINE_S = 10.0
RETRY_S, MAX_RETRY_S = 0.1, 2.0
HANDSHAKES_AT_ONCE = 64
TLS_BUFFER_BYTES = 16 * 1024
PING_S = HEARTBEAT_S * 4 / 3  # aiohttp allows half of it for the pong: lost after 2 * HEARTBEAT_S

Target = PodTarget | RolloutTarget


class Changed(Protocol):
    """A member of the job has something new. hurry: all who were told something have answered, or one is lost."""

    def __call__(self, job_uid: str, *, hurry: bool = True) -> None: ...


def bound_tls_memory() -> None:
    """16 KiB for each connection's read buffer instead of asyncio's 256 KiB: a thousand members fit into 30 MB."""
    sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES


@dataclass(frozen=True)
class Address:
    """One member of a job: pod and port."""

    pod: str
    pod_uid: str
    role: str
    host: str
    port: int = names.CONTROL_PORT


@dataclass(frozen=True, eq=False)
class Answer:
    """What is known of a member now; the same object until that changes.

    facts: None unless connected. silent_since: monotonic; None while connected.
    """

    facts: PodFacts | RolloutFacts | None
    highest_epoch: int
    silent_since: float | None


@dataclass(eq=False)
class _Link:
    """One member, across its connections. `target` belongs to the present connection."""

    job_uid: str
    address: Address
    answer: Answer
    target: Target | None = None
    text: str = ""  # of the target
    has_target: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Members:
    """Every member of every job, while its context is entered.

    tls: client side, with the operator's certificate. changed: called with a job's UID when one of its members has
    something new. lost: called once for each connection that ended without our wish (metrics).
    """

    def __init__(
        self,
        tls: ssl.SSLContext,
        changed: Changed,
        *,
        lost: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        ping_s: float = PING_S,
    ) -> None:
        self._tls = tls
        self._ping_s = ping_s
        self._changed = changed
        self._lost = lost
        self._clock = clock
        self._links: dict[str, dict[str, _Link]] = {}  # by job UID and pod name
        self._kept: dict[str, Collection[Address]] = {}  # as they were asked for, by job UID
        self._heard_at: dict[str, float] = {}
        self._unheard: dict[str, set[str]] = {}  # pods that were told something since they last said something
        self._tasks = asyncio.TaskGroup()
        self._handshakes = asyncio.Semaphore(HANDSHAKES_AT_ONCE)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._tls, limit=0, force_close=True), trust_env=False
        )
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for job_uid in list(self._links):
            self.keep(job_uid, ())
        try:
            await self._tasks.__aexit__(kind, error, trace)
        finally:
            assert self._session is not None
            await self._session.close()

    # ------------------------------------------------------------------------------------------- used by the job's loop
    def keep(self, job_uid: str, addresses: Collection[Address]) -> None:
        """Have a connection to exactly these members of the job: open what is missing, close what is not wanted."""
        if addresses == self._kept.get(job_uid):
            return
        self._kept[job_uid] = addresses
        links = self._links.setdefault(job_uid, {})
        wanted = {address.pod: address for address in addresses}
        for pod, link in list(links.items()):
            if wanted.get(pod) != link.address:
                del links[pod]
                self._unheard.get(job_uid, set()).discard(pod)
                if link.task is not None:
                    link.task.cancel()
        for pod, address in wanted.items():
            if pod not in links:
                link = links[pod] = _Link(job_uid, address, Answer(None, 0, silent_since=self._clock()))
                link.task = self._tasks.create_task(self._stay_connected(link), name=f"member/{pod}")
        if not links:
            del self._links[job_uid], self._kept[job_uid]
            self._heard_at.pop(job_uid, None)
            self._unheard.pop(job_uid, None)

    def answers(self, job_uid: str) -> dict[str, Answer]:
        """By pod name."""
        return {pod: link.answer for pod, link in self._links.get(job_uid, {}).items()}

    def send(self, job_uid: str, targets: Mapping[str, Target]) -> int:
        """Give connected members their targets, by pod name; returns to how many something new is on its way."""
        links, sent = self._links.get(job_uid, {}), 0
        texts: dict[int, str] = {}  # by the target's identity: most members get the same one
        for pod, target in targets.items():
            link = links.get(pod)
            if link is not None and link.answer.facts is not None and link.target != target:
                if id(target) not in texts:
                    texts[id(target)] = target.model_dump_json(by_alias=True)
                link.target, link.text = target, texts[id(target)]
                link.has_target.set()
                self._unheard.setdefault(job_uid, set()).add(pod)
                sent += 1
        return sent

    def heard_at(self, job_uid: str) -> float | None:
        """When the newest message of any of the job's members came."""
        return self._heard_at.get(job_uid)

    @property
    def connected(self) -> int:
        return sum(link.answer.facts is not None for links in self._links.values() for link in links.values())

    # ------------------------------------------------------------------------------------------------- one connection
    async def _stay_connected(self, link: _Link) -> None:
        delay_s = RETRY_S
        with bind(job_uid=link.job_uid, pod=link.address.pod, role=link.address.role):
            while True:
                reason, is_broken = "the member closed the connection", False
                try:
                    await self._converse(link)
                except* ContractBroken as errors:
                    reason, is_broken = _words(errors), True
                    log(LOG, "member broke the contract", logging.ERROR, reason=reason)
                except* (aiohttp.ClientError, TimeoutError, OSError) as errors:
                    reason = _words(errors)
                if self._forget(link, reason):
                    delay_s = RETRY_S
                if is_broken:
                    delay_s = MAX_RETRY_S
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))
                delay_s = min(2 * delay_s, MAX_RETRY_S)

    def _forget(self, link: _Link, reason: str) -> bool:
        """The connection is over: nothing stands for the member. Whether it had said anything."""
        link.target = None
        self._unheard.get(link.job_uid, set()).discard(link.address.pod)
        if link.answer.silent_since is not None:
            log(LOG, "member not reached", logging.DEBUG, reason=reason)
            return False
        link.answer = Answer(None, link.answer.highest_epoch, silent_since=self._clock())
        self._lost()
        log(LOG, "member lost", logging.WARNING, reason=reason)
        self._changed(link.job_uid)
        return True

    async def _converse(self, link: _Link) -> None:
        """One connection, from handshake to its end."""
        assert self._session is not None
        address = link.address
        host = f"[{address.host}]" if ":" in address.host else address.host
        async with self._handshakes, asyncio.timeout(HANDSHAKE_DEADLINE_S):
            socket = await self._session.ws_connect(
                f"wss://{host}:{address.port}/v1/link",
                server_hostname=names.member_server_name(link.job_uid),
                max_msg_size=MAX_MESSAGE_BYTES,
                heartbeat=self._ping_s,
                timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
            )
        async with socket:
            async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
                _check_hello(link, _decode(await socket.receive()))
            async with asyncio.TaskGroup() as group:
                sender = group.create_task(_send_targets(socket, link), name="targets")
                async for message in socket:
                    self._take(link, _decode(message))
                sender.cancel()

    def _take(self, link: _Link, message: Hello | PodFacts | RolloutFacts | Refusal) -> None:
        expected = PodFacts if link.address.role == names.ROLE_GPU else RolloutFacts
        match message:
            case PodFacts() | RolloutFacts() if isinstance(message, expected):
                if link.answer.facts is None:
                    log(LOG, "member connected", epoch=message.epoch)
                link.answer = Answer(message, max(link.answer.highest_epoch, message.epoch), silent_since=None)
            case Refusal(reason="StaleEpoch"):
                log(LOG, "target refused", logging.WARNING, epoch=message.epoch, reason=message.message)
                _raise_epoch(link, message.highest_epoch)
            case _:
                raise ContractBroken(f"{link.address.pod} sent {message.type}: the connection ends")
        self._heard_at[link.job_uid] = self._clock()
        unheard = self._unheard.get(link.job_uid, set())
        was_unheard = link.address.pod in unheard
        unheard.discard(link.address.pod)
        self._changed(link.job_uid, hurry=was_unheard and not unheard)


async def _send_targets(socket: aiohttp.ClientWebSocketResponse, link: _Link) -> None:
    sent: Target | None = None
    while True:
        await link.has_target.wait()
        link.has_target.clear()
        target = link.target
        if target is not None and target != sent:
            async with asyncio.timeout(SEND_DEADLINE_S):
                await socket.send_str(link.text)
            sent = target


def _raise_epoch(link: _Link, epoch: int) -> None:
    answer = link.answer
    link.answer = Answer(answer.facts, max(answer.highest_epoch, epoch), answer.silent_since)


def _check_hello(link: _Link, message: Hello | PodFacts | RolloutFacts | Refusal) -> None:
    address = link.address
    if not isinstance(message, Hello):
        raise ContractBroken(f"{address.pod} began with {message.type}, not with hello")
    said = (message.wire, message.pod_uid, message.job_uid, message.role)
    expected = (WIRE_VERSION, address.pod_uid, link.job_uid, address.role)
    if said != expected:
        raise ContractBroken(
            f"at {address.host} expected wire, pod, job, role {expected}, found {said}: unknown member"
        )
    _raise_epoch(link, message.highest_epoch)


def _words(errors: BaseExceptionGroup[Exception]) -> str:
    return "; ".join(
        _words(error) if isinstance(error, BaseExceptionGroup) else repr(error) for error in errors.exceptions
    )


def _decode(message: aiohttp.WSMessage) -> Hello | PodFacts | RolloutFacts | Refusal:
    if message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED):
        raise ConnectionError("closed before hello")
    if message.type is aiohttp.WSMsgType.ERROR:
        raise ConnectionError(f"broken: {message.data!r}")
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise ContractBroken(f"a {message.type.name} frame instead of JSON text: the connection ends")
    try:
        return from_member.validate_json(message.data)
    except pydantic.ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise ContractBroken(f"unreadable message, {first['loc']}: {first['msg']}: the connection ends") from error
