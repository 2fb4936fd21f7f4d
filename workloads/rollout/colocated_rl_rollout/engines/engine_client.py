"""The client of one agent's gate tracks whether it is open and sends engine attempts. Only this code calls a gate.

`watch` follows the gate's stream, so that nobody polls. `generate` translates every answer into the few outcomes the
worker acts on; above it nobody sees HTTP. A request has no deadline of its own, because a long response may take any
time: it is given up when its gate has been silent, or closed for longer than a switch may take to settle, and lost when
the machine at the other end disappears.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import aiohttp
import numpy as np
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.tracing import Trace
from numpy.typing import NDArray
from pydantic_core import from_json, to_json

from colocated_rl_api.back_off import MOMENT_S
from colocated_rl_api.columns import COLUMNS, CONTENT_TYPE, HEADER, unpack
from colocated_rl_api.descriptors import Seldom, is_exhausted
from colocated_rl_api.gate_wire import GATE_LINE_S, GateState
from colocated_rl_api.logs import failure_of, log
from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_member.data import DataClient
from colocated_rl_rollout.rules.resume import (
    NO_EXPERTS,
    GarbledAnswer,
    UnversionedAnswer,
    read_answer,
    read_experts,
    read_preemptions,
)
from colocated_rl_rollout.rules.samples import NO_TOKENS, Finish, Tokens

LOG = logging.getLogger(__name__)

CONNECT_S = 10.0
SILENCE_S = 4 * GATE_LINE_S  # a gate that sends nothing for so long counts as lost
RECONNECT_S = 0.5  # with jitter
REST_S = 0.1  # rest of an engine after an attempt that brought nothing, doubled each time
REST_AT_MOST_S = 30.0
GIVE_UP_MARGIN_S = 30.0  # beyond settleSeconds, in which the agent itself ends every request
BEGIN_AT_ONCE = 32  # connections at one gate, which has room for several times as many
IDLE_CONNECTION_S = 600.0  # requests come in bursts, a training step apart; a handshake costs more than a connection
KEEPALIVE_S = 20  # silence on a connection before the first probe, and then between two probes
KEEPALIVE_PROBES = 3
MAX_ANSWER_BYTES = 256 * 1024 * 1024
MAX_ERROR_BYTES = 2048
TOO_LONG = ("context length", "longer than", "maximum allowed length")  # as SGLang 0.5.23 words it


NO_DESCRIPTOR = Seldom()


class GateRefused(Exception):
    """GateRefused        no attempt was made, or nothing of it is known: send the request again when a gate is open
    ├─ GateClosed       the gate reported it, at once
    │  └─ GateBusy      it is open and took no more, or not from us
    ├─ AttemptLost      the connection, the agent or the engine broke: the tokens it generated are lost
    ├─ AnswerGarbled    the answer contradicts itself: dropped and counted
    └─ AnswerUnversioned  it has tokens without a weight version, which the job refuses: dropped and counted
    RequestRejected       no engine will ever take this request: the sample fails, with the engine's reason

    ending: under which an attempt that ended so is counted.
    """

    ending: ClassVar[str] = "lost"


class GateClosed(GateRefused):
    """No attempt was made: nothing was sent to the engine."""

    ending = "refused"


class GateBusy(GateClosed):
    """No attempt was made either. The engine rests before it is asked again."""


class AttemptLost(GateRefused):
    """The attempt brought no tokens."""


class AnswerGarbled(GateRefused):
    """The attempt brought no tokens that can be used (H27)."""

    ending = "garbled"


class AnswerUnversioned(GateRefused):
    """The attempt brought tokens for which the engine names no weight version of ours (H22)."""

    ending = "unversioned"


class RequestRejected(Exception):
    """The engine itself rejected the request, 4xx (H8).

    detail: its message, only for the sender of the request, because it may quote it. is_too_long: the request is too
    long.
    """

    def __init__(self, message: str, *, detail: str = "", is_too_long: bool = False) -> None:
        super().__init__(message)
        self.detail = detail
        self.is_too_long = is_too_long


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Asks for one engine attempt: the prompt with everything generated so far, and how many tokens may be added.

    seed: the same in each attempt of a response: an engine that honours it derives noise from seed and position.
    experts_from: the first token of prompt and response whose routed experts are wanted; None: no experts are.
    experts_width: how many experts each token before it has, where there are any.
    top_p, top_k, min_p: log-probabilities are of the whole distribution all the same: not for tokens to be trained.
    min_new_tokens: nor with these, below which the end tokens are taken away.
    """

    input_ids: list[int]
    max_new_tokens: int
    temperature: float
    end_ids: Collection[int]
    stops: Sequence[str] = ()
    seed: int | None = None
    experts_from: int | None = None
    experts_width: int = 0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    min_new_tokens: int = 0

    def body(self, *, stream: bool = False) -> bytes:
        """Return the body for the engine's /generate, with all that it does not have explicitly off."""
        own: dict[str, Any] = {"stop": list(self.stops)} if self.stops else {}
        own |= {} if self.seed is None else {"sampling_seed": self.seed}
        experts = {"return_routed_experts": True, "routed_experts_start_len": self.experts_from}
        return to_json(
            {
                "input_ids": self.input_ids,
                "sampling_params": {
                    "max_new_tokens": self.max_new_tokens,  # its default is 128
                    "temperature": self.temperature,
                    "top_p": self.top_p,
                    "top_k": -1 if self.top_k is None else self.top_k,
                    "min_p": self.min_p,
                    "min_new_tokens": self.min_new_tokens,
                    "repetition_penalty": 1.0,
                    "frequency_penalty": 0.0,
                    "presence_penalty": 0.0,
                    "stop_token_ids": sorted(self.end_ids),
                    **own,
                },
                "return_logprob": True,
                "stream": stream,
                **({} if self.experts_from is None else experts),
            }
        )


@dataclass(frozen=True, slots=True)
class Generated:
    """Holds the result of one engine attempt. experts: of each token but the last, where they were wanted."""

    tokens: Tokens
    finish: Finish | None  # None: it was interrupted
    experts: NDArray[np.int32] = field(default_factory=lambda: NO_EXPERTS)
    preemptions: int = 0  # how often the engine set it aside for want of cache


NOTHING = Generated(NO_TOKENS, finish=None)


class GateConnector(aiohttp.TCPConnector):
    """Connects to gates without a limit of connections, each of which ends when the other machine is gone.

    Only so many begin together at each gate: of thousands at once, each would be silent until TLS has begun for all of
    them, and a port ends what is silent for longest when it has no room.
    """

    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=IDLE_CONNECTION_S, socket_factory=gate_socket)
        self._beginning: WeakValueDictionary[ConnectionKey, asyncio.Semaphore] = WeakValueDictionary()

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        async with self._beginning.setdefault(req.connection_key, asyncio.Semaphore(BEGIN_AT_ONCE)):
            return await super()._create_connection(req, traces, timeout)


def gate_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket that probes a silent peer: otherwise a client waits for ever for a lost answer."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_S),
        (socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        (socket.TCP_USER_TIMEOUT, KEEPALIVE_S * (1 + KEEPALIVE_PROBES) * 1000),  # for what was sent
    ):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


class EngineClient:
    """Talks to one gate. `state` is None while it is unknown: not yet connected, silent, or broken.

    changed: called when the gate opens, closes, is lost, or has other weights behind it.
    count: called with the tokens that an attempt brought.
    accepts_unversioned: an answer may have tokens without a weight version of the job.
    in_flight: this process's attempts, also those about to be sent; `Engines` counts them.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        client: DataClient,
        *,
        settle_s: float,
        changed: Callable[[], None],
        count: Callable[[Tokens], None] = lambda tokens: None,
        accepts_unversioned: bool = False,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self.endpoint = endpoint
        self._max_answer_bytes = max_answer_bytes
        self._client = client
        self._settle_s = settle_s
        self._changed = changed
        self._count = count
        self._accepts_unversioned = accepts_unversioned
        self.in_flight = 0
        self.state: GateState | None = None
        self._under_way: set[asyncio.Timeout] = set()
        self._given_up_at: float | None = None  # on the loop's clock: when attempts end, also those that begin now
        self._failures = 0  # attempts in a row that brought nothing
        self._rests_until = 0.0

    @property
    def name(self) -> str:
        return self.endpoint.pod

    @property
    def is_open(self) -> bool:
        return self.state is not None and self.state.open

    @property
    def takes_requests(self) -> bool:
        """Return whether the gate is open and does not rest after attempts that brought nothing."""
        return self.is_open and asyncio.get_running_loop().time() >= self._rests_until

    @property
    def version(self) -> WeightVersion | None:
        """Return the weight version behind the gate while it is open, else None."""
        return self.state.version if self.state and self.state.open else None

    # ------------------------------------------------------------------------------------------------- the stream
    async def watch(self) -> None:
        """Follow the gate until cancelled."""
        while True:
            try:
                await self._follow()
                self._set(None, "its stream ended")
            except (aiohttp.ClientError, OSError, TimeoutError, GateRefused, ValueError) as error:
                if not is_exhausted(error):  # that is no fault of the gate
                    self._set(None, failure_of(error)[:200])
            await asyncio.sleep(RECONNECT_S * (0.5 + random.random()))

    async def _follow(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        async with self._client.request("GET", self.endpoint, "/v1/gate", timeout=timeout) as response:
            if response.status != 200:
                raise GateRefused(f"its stream has status {response.status}")
            async for line in response.content:
                self._set(GateState.model_validate_json(line))

    def _set(self, state: GateState | None, reason: str | None = None) -> None:
        was, self.state = self.state, state
        if _reported(was) == _reported(state):
            return
        if state is None:
            event, patience_s = "gate lost", SILENCE_S
        elif state.open:
            event, patience_s, self._rests_until = "gate open", None, 0.0
        else:
            event, patience_s = "gate closed", self._settle_s + GIVE_UP_MARGIN_S
        self._end_attempts(None if patience_s is None else asyncio.get_running_loop().time() + patience_s)
        version = str(state.version) if state and state.version else None
        log(LOG, event, gate=self.name, epoch=state and state.epoch, version=version, reason=reason)
        self._changed()

    def abandon(self) -> None:
        """End all attempts: the job no longer has this engine."""
        self.state = None
        self._end_attempts(0.0)

    def _end_attempts(self, at: float | None) -> None:
        """End all attempts at this time on the loop's clock, unless it is moved again; those past theirs are ending."""
        self._given_up_at = at
        for attempt in self._under_way:
            if not attempt.expired():
                attempt.reschedule(at)

    # ------------------------------------------------------------------------------------------------- one attempt
    async def generate(self, request: GenerateRequest, grew: Callable[[Tokens], None] | None = None) -> Generated:
        """Run one engine attempt. Raises GateRefused and RequestRejected.

        grew: called with the attempt's tokens so far each time there are more. Tokens passed to it are never taken
        back: an attempt that breaks afterwards is an interrupted one.
        """
        how = (self.name, self._max_answer_bytes, request, self._accepts_unversioned)
        read = _GateAnswer(*how) if grew is None else _Stream(*how, grew)
        try:
            async with asyncio.timeout_at(self._given_up_at) as attempt:
                self._under_way.add(attempt)
                try:
                    generated = await self._post(request.body(stream=grew is not None), read)
                finally:
                    self._under_way.discard(attempt)
        except (GateRefused, RequestRejected) as refusal:
            if type(refusal) not in (GateClosed, RequestRejected):  # an engine that rejects a request answers
                self._rest()
            if not len(read.so_far.tokens):
                raise
            generated = read.so_far
        except (aiohttp.ClientError, OSError) as error:
            if is_exhausted(error) and not len(read.so_far.tokens):  # here: the gate has not heard of it
                self._rest()
                NO_DESCRIPTOR.log(LOG, "descriptors exhausted", reason=failure_of(error))
                raise GateBusy("there is no descriptor for a request") from error
            late = type(error) is TimeoutError  # the attempt's own; those of the connection are of subclasses
            if not late:
                self._set(None, f"a request broke: {type(error).__name__}")
            if not len(read.so_far.tokens):
                what = "given up: its gate is silent, or closed for too long" if late else f"broke: {failure_of(error)}"
                raise AttemptLost(f"request to {self.name} {what}") from error
            generated = read.so_far
        self._count(generated.tokens)
        if len(generated.tokens):
            self._failures = 0
        else:
            self._rest()
        return generated

    def _rest(self) -> None:
        """Rest the engine after an attempt that brought nothing, longer each time, until one brings something."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._rests_until:
            pause_s = min(REST_S * 2**self._failures, REST_AT_MOST_S)
            self._failures = min(self._failures + 1, 30)
            self._rests_until = loop.time() + pause_s
            loop.call_later(pause_s + MOMENT_S, self._changed)

    async def _post(self, body: bytes, read: _GateAnswer) -> Generated:
        headers = {"Content-Type": "application/json", HEADER: COLUMNS}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with self._client.request(
            "POST", self.endpoint, "/generate", data=body, headers=headers, timeout=timeout
        ) as response:
            if response.status != 200:
                raise _refusal(
                    self.name, response.status, (await response.content.read(MAX_ERROR_BYTES)).decode(errors="replace")
                )
            async for piece in response.content.iter_any():
                read.feed(piece)
        return read.end(response.content_type)


class _GateAnswer:
    """Reads the body of an answer, piece by piece. so_far: tokens that were passed on, and are never taken back."""

    def __init__(self, name: str, max_bytes: int, request: GenerateRequest, accepts_unversioned: bool) -> None:
        self._name = name
        self._max_bytes = max_bytes
        self._request = request
        self._accepts_unversioned = accepts_unversioned
        self._bytes = bytearray()
        self.so_far = NOTHING

    def feed(self, piece: bytes) -> None:
        """Take the next piece. Raises GateRefused and RequestRejected."""
        self._bytes += piece
        if len(self._bytes) > self._max_bytes:
            raise AnswerGarbled(f"{self._name} answered with more than {self._max_bytes} bytes")

    def end(self, content_type: str) -> Generated:
        """Return the result after the last piece. Raises GateRefused."""
        if content_type != CONTENT_TYPE:
            return self._read(self._parse(self._bytes))
        try:
            packed = unpack(self._bytes)
        except ValueError as error:
            raise AnswerGarbled(f"answer of {self._name} is not in columns: {failure_of(error)}") from error
        columns = np.frombuffer(packed.ids, "<i4").copy(), np.frombuffer(packed.logp, "<f4").copy()
        return self._read(packed.head, columns)

    def _parse(self, text: bytes | bytearray) -> Any:
        try:
            return from_json(text)
        except ValueError as error:
            raise AnswerGarbled(f"answer of {self._name} is not JSON: {failure_of(error)}") from error

    def _read(self, answer: Any, columns: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None) -> Generated:
        try:
            tokens, finish = read_answer(answer, columns=columns, accepts_unversioned=self._accepts_unversioned)
            first = self._request.experts_from
            if first is None or not len(tokens):
                return Generated(tokens, finish, preemptions=read_preemptions(answer))
            rows = len(self._request.input_ids) + len(tokens) - 1 - first  # the last token was sampled, and not read
            experts = read_experts(answer, rows=rows, width=self._request.experts_width)
            return Generated(tokens, finish, experts, read_preemptions(answer))
        except UnversionedAnswer as error:
            raise AnswerUnversioned(f"answer of {self._name}: {error}") from error
        except GarbledAnswer as error:
            raise AnswerGarbled(f"answer of {self._name}: {error}") from error


class _Stream(_GateAnswer):
    """Reads an answer in events, each of which has all tokens so far."""

    def __init__(
        self,
        name: str,
        max_bytes: int,
        request: GenerateRequest,
        accepts_unversioned: bool,
        grew: Callable[[Tokens], None],
    ) -> None:
        super().__init__(name, max_bytes, request, accepts_unversioned)
        self._grew = grew

    def feed(self, piece: bytes) -> None:
        super().feed(piece)
        *events, self._bytes = self._bytes.split(b"\n\n")
        data = [event for event in events if event.startswith(b"data: ") and event != b"data: [DONE]"]
        if data:
            self._take(bytes(data[-1].removeprefix(b"data: ")))  # the last event includes those before it

    def end(self, content_type: str) -> Generated:
        return self.so_far

    def _take(self, event: bytes) -> None:
        event_body = self._parse(event)
        if failure := _failure_in(event_body):
            raise _refusal(self._name, *failure)
        generated = self._read(event_body)
        if len(generated.tokens) < len(self.so_far.tokens):
            raise AnswerGarbled(f"{self._name} took back tokens that it had sent")
        grown = len(generated.tokens) > len(self.so_far.tokens)
        self.so_far = generated
        if grown:
            self._grew(generated.tokens)


def _refusal(name: str, status: int, text: str) -> Exception:
    """Translate a status (H8): a switch, trouble that may pass, or a request that no engine will take."""
    if status == 503 and _error_in(text) == "closed":
        return GateClosed(f"gate of {name} is closed")
    if status == 400 and "Aborted by AbortReq." in text:  # while its grammar compiled: a switch like any other
        return AttemptLost(f"{name}: aborted before it began")
    answered = f"{name} answered {status} and {len(text)} characters"
    if status in (401, 403, 408, 425, 429):  # the gate's own, not the engine's
        return GateBusy(answered)
    if 400 <= status < 500:
        too_long = any(words in text for words in TOO_LONG)
        why = ": prompt and response are longer than its context" if too_long else ""
        return RequestRejected(answered + why, detail=f"{name} answered {status}: {text[:300]}", is_too_long=too_long)
    return AttemptLost(answered)


def _failure_in(event: Any) -> tuple[int, str] | None:
    """Return status and text of an event that is an error, or an abort that is one (H8), else None."""
    match event:
        case {"error": {"code": int(code), "message": str(text)}}:
            return code, text
        case {"error": error} if error is not None:
            return 500, str(error)
        case {"meta_info": {"finish_reason": {"type": "abort", "status_code": int(status)} as reason}}:
            return status, str(reason.get("message"))
        case _:
            return None


def _reported(state: GateState | None) -> tuple[bool, WeightVersion | None] | None:
    """Return the part of a gate's state that anybody acts on."""
    return None if state is None else (state.open, state.version)


def _error_in(text: str) -> str | None:
    try:
        body: Mapping[str, Any] = json.loads(text)
        error = body.get("error")
    except (ValueError, AttributeError, RecursionError):
        return None
    return error if isinstance(error, str) else None
