"""Members that cost next to nothing: a real TLS session each, the real messages, and pods that reach a rung at once, or
after a time that is given.

Not `MemberServer`, which would be the limit itself with a thousand of them on one core: as much of WebSocket as the
operator's client uses, and answers that are formatted beforehand. What is sent is what an agent or a rollout controller
would send, by the same models. Nothing is batched across members.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ssl
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from builders import absent_engine, absent_trainer, facts_at, pod_facts, rollout_facts
from colocated_rl_api import names
from colocated_rl_api.facts import EvaluationResult
from colocated_rl_api.ladder import TIME_SLICED
from colocated_rl_api.member_wire import (
    FromOperator,
    Goal,
    Hello,
    PodTarget,
    RolloutTarget,
    read_from_operator,
)
from colocated_rl_api.rungs import Rung, WeightVersion

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
TEXT, CLOSE, PING, PONG = 0x81, 0x88, 0x89, 0x8A
INCARNATION = "incarnation-of-this-engine"


@dataclass
class BarrierTimes:
    """The times of one rung in one epoch, in seconds of this process's clock."""

    first_target: float = 0.0
    last_target: float = 0.0
    last_fact: float = 0.0


@dataclass
class MembersJournal:
    """A journal holds what the members of one job are to do, and when targets came and facts went.

    batches: how many of them the rollout controller may seal. work_s: of a pod, from a target to standing there.
    """

    batches: int
    work_s: float = 0.0
    barriers: dict[tuple[int, Rung], BarrierTimes] = field(default_factory=lambda: defaultdict(BarrierTimes))
    epochs: dict[int, int] = field(default_factory=dict)  # of each step, the newest
    sealed_at: dict[int, float] = field(default_factory=dict)  # by step
    messages: int = 0  # both ways
    connected: int = 0
    tell: Callable[[], None] = lambda: None  # the rollout controller says what it has

    def seal(self) -> None:
        """Seal one more batch."""
        self.batches += 1
        self.tell()


@dataclass(frozen=True)
class Who:
    """One member, by its TLS name. tls: with the keys of its pod."""

    hello: Hello
    journal: MembersJournal
    changed: Callable[[], None]
    tls: ssl.SSLContext


class ServedMember(asyncio.Protocol):
    """The server's side of one link. by_name: who listens there, by the name that a client asks for."""

    def __init__(self, by_name: Mapping[str, Who]) -> None:
        self._by_name = by_name
        self._received = bytearray()
        self._is_open = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._who = self._by_name[transport.get_extra_info("ssl_object").asked]
        self._pod = GpuState(self._who) if self._who.hello.role == names.ROLE_GPU else RolloutState(self._who)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._is_open:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return
            head, self._received = bytes(self._received[:end]), self._received[end + 4 :]
            self._open(head)
        while (message := self._message()) is not None:
            kind, payload = message
            if kind == PING:
                self._send(payload, PONG)
            elif kind == CLOSE:
                self._transport.close()
            elif kind == TEXT:
                self._who.journal.messages += 1
                self._pod.take(payload)
                if work_s := self._who.journal.work_s:
                    asyncio.get_running_loop().call_later(work_s, self._tell)
                else:
                    self._tell()

    def _tell(self) -> None:
        if not self._transport.is_closing():
            self._send(self._pod.facts())

    def _open(self, head: bytes) -> None:
        (key,) = (line[18:].strip() for line in head.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key:"))
        accepted = base64.b64encode(hashlib.sha1(key + GUID, usedforsecurity=False).digest())
        self._transport.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
            b"Sec-WebSocket-Accept: " + accepted + b"\r\n\r\n"
        )
        self._is_open = True
        self._who.journal.connected += 1
        self._send(self._who.hello.model_dump_json(by_alias=True).encode())
        self._tell()
        if isinstance(self._pod, RolloutState):
            self._who.journal.tell = self._tell

    def _message(self) -> tuple[int, bytes] | None:
        """The next whole frame, unmasked."""
        got = self._received
        if len(got) < 6:
            return None
        length, at = got[1] & 0x7F, 2
        if length == 126:
            length, at = int.from_bytes(got[2:4]), 4
        elif length == 127:
            length, at = int.from_bytes(got[2:10]), 10
        if len(got) < at + 4 + length:
            return None
        mask, payload = bytes(got[at : at + 4]), bytes(got[at + 4 : at + 4 + length])
        kind = got[0]
        del got[: at + 4 + length]
        whole = (mask * (length // 4 + 1))[:length]
        return kind, (int.from_bytes(payload) ^ int.from_bytes(whole)).to_bytes(length)

    def _send(self, payload: bytes, kind: int = TEXT) -> None:
        length = len(payload)
        head = bytes([kind, length]) if length < 126 else bytes([kind, 126]) + length.to_bytes(2)
        self._transport.write(head + payload)
        self._who.journal.messages += 1


class GpuState:
    """A pod that stands where its target says as soon as it is asked."""

    def __init__(self, who: Who) -> None:
        self._who = who
        self._stands: Callable[[int], bytes] = first
        self._epoch = 0
        self._barrier: BarrierTimes | None = None  # that it is on its way to

    def facts(self) -> bytes:
        facts = self._stands(self._epoch).replace(INCARNATION.encode(), self._who.hello.pod_uid[:26].encode())
        if self._barrier is not None:
            self._barrier.last_fact = time.perf_counter()
        return facts

    def take(self, text: bytes) -> None:
        now, message = time.perf_counter(), read(text)
        assert isinstance(message, PodTarget)
        journal = self._who.journal
        journal.epochs[message.step] = message.epoch
        barrier = self._barrier = journal.barriers[message.epoch, message.rung]
        barrier.first_target, barrier.last_target = barrier.first_target or now, now
        self._epoch = message.epoch
        if message.goal is Goal.STOP:
            self._stands = stopped
        elif message.rung is not TIME_SLICED.next_barrier(Rung.UNKNOWN):
            self._stands = partial(reached, message.rung, message.version)


class RolloutState:
    """A rollout controller that has the next batch as soon as the last one is trained, if it may seal one more."""

    def __init__(self, who: Who) -> None:
        self._who = who
        self._told: RolloutTarget | None = None

    def facts(self) -> bytes:
        epoch_and_journal, journal = self._told, self._who.journal
        trained = epoch_and_journal.trained_step if epoch_and_journal else 0
        sealed = min(trained + 1, journal.batches)
        journal.sealed_at.setdefault(sealed, time.perf_counter())
        facts = rollout_facts(
            sealed=sealed,
            trained=trained,
            epoch=epoch_and_journal.epoch if epoch_and_journal else 0,
            evaluated=(EvaluationResult(step=trained, samples=1, mean=0, stderr=0),),
            stopped=epoch_and_journal is not None and epoch_and_journal.goal is Goal.STOP,
        )
        return facts.model_dump_json(by_alias=True).encode()

    def take(self, text: bytes) -> None:
        message = read(text)
        assert isinstance(message, RolloutTarget)
        self._told = message
        self._who.changed()


@cache
def read(text: bytes) -> FromOperator:
    return read_from_operator(text)


@cache
def first(epoch: int) -> bytes:
    """Nothing runs yet."""
    return pod_facts(absent_engine(), absent_trainer(), epoch=epoch).model_dump_json(by_alias=True).encode()


@cache
def stopped(epoch: int) -> bytes:
    facts = pod_facts(absent_engine(), absent_trainer(), epoch=epoch).model_copy(update={"stopped": True})
    return facts.model_dump_json(by_alias=True).encode()


@cache
def reached(rung: Rung, at: WeightVersion, epoch: int) -> bytes:
    facts = facts_at(rung, at, epoch=epoch)
    (engine,), (trainer,) = facts.engines, facts.trainers
    parts: dict[str, Any] = {
        "engines": (engine.model_copy(update={"incarnation": INCARNATION}),),
        "trainers": (trainer.model_copy(update={"saved": at.step if rung is Rung.SERVING else None}),),
    }
    return facts.model_copy(update=parts).model_dump_json(by_alias=True).encode()


async def listen(by_name: Mapping[str, Who], address: str, tls: ssl.SSLContext) -> asyncio.Server:
    """Open one listening socket for all members of a job: each is known by the name that the operator asks for.

    So ten thousand members take half as many descriptors. tls: of any of them.
    """

    def choose(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        connection.asked = name  # type: ignore[attr-defined]
        connection.context = by_name[name or ""].tls

    tls.sni_callback = choose
    made = partial(ServedMember, by_name)
    return await asyncio.get_running_loop().create_server(made, address, names.CONTROL_PORT, ssl=tls, backlog=1024)
