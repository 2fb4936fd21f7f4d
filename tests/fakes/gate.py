"""A gate of an agent with an engine that a test steers: the real routes over real TLS, and no clock of its own.

Each request gets the tokens of a whole response, fixed by its prompt, as far as `pace` lets it: after `pace` tokens in
one attempt it waits for the gate to close. What a real engine does at an abort happens here too: one more token, and a
natural end in it is hidden (H7, H49). Log-probabilities tell the version that made them (`logp_of`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from aiohttp import web

from colocated_rl_api.columns import COLUMNS, CONTENT_TYPE, HEADER, pack
from colocated_rl_api.gate_wire import GATE_LINE_S, MAX_REQUEST_BYTES, Closed, GateState
from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_member.data import data_application
from colocated_rl_member.tls import MemberTls
from fakes import serving

Response = Callable[[Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""This function maps prompt and tokens so far to the whole response and the part of it that was sent."""


class GateFault(Enum):
    """A Fault happens to the next request instead of an answer."""

    ERROR_500 = "error 500"
    BUSY = "busy"
    REJECTED = "rejected"
    GARBLED = "garbled"  # one log-probability is missing
    CUT_OFF = "cut off"  # the last byte of the last column is missing
    DROPPED = "dropped"  # the connection breaks
    EMPTY = "empty"  # aborted in the waiting queue


def logp_of(version: WeightVersion, token: int) -> float:
    """The log-probability that the fake engine reports of a token made by `version`."""
    return -0.5 - version.step / 8 - (token % 5) / 64


def experts_of(version: WeightVersion, token: int) -> list[int]:
    """The experts that a token goes to under the weights that read it: two layers of one each."""
    return [token % 50, version.step]


@dataclass(eq=False)
class _Attempt:
    ids: list[int] = field(default_factory=list)
    left: deque[int] = field(default_factory=deque)
    limit: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    reason: dict[str, Any] | None = None
    sent: list[int] | None = None  # where experts are wanted

    def step(self) -> None:
        self.ids.append(self.left.popleft())
        self.news.set()

    @property
    def natural_end(self) -> dict[str, Any] | None:
        if not self.left:
            return {"type": "stop", "matched": self.ids[-1] if self.ids else None}
        return {"type": "length", "length": self.limit} if len(self.ids) >= self.limit else None


class FakeGate:
    """One gate. Closed until `open`.

    requests: bodies of all requests that were let in. refused: requests that came while it was closed.
    words: with which the engine refuses, instead of its usual ones.
    """

    def __init__(self, name: str, tls: MemberTls, respond: Response) -> None:
        self.name = name
        self.pace: int | None = None
        self.preemptions = 0  # of each attempt
        self.names_versions = True  # False: somebody else has updated the engine
        self.packs_columns = True  # False: of an older agent
        self.faults: deque[GateFault] = deque()
        self.requests: list[dict[str, Any]] = []
        self.refused = 0
        self.words: str | None = None
        self._respond = respond
        self._tls = tls
        self._state = GateState(open=False, epoch=0)
        self._attempts: set[_Attempt] = set()
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._port = 0

    # ------------------------------------------------------------------------------------------------- the test's end
    @asynccontextmanager
    async def listening(self) -> AsyncIterator[FakeGate]:
        await self.start()
        try:
            yield self
        finally:
            await self.crash_agent()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(pod=self.name, address="127.0.0.1", port=self._port)

    @property
    def is_open(self) -> bool:
        return self._state.open

    @property
    def in_flight(self) -> int:
        return len(self._attempts)

    async def open(self, version: WeightVersion, *, epoch: int = 1, pace: int | None = None) -> None:
        """Serve `version`; each attempt makes at most `pace` tokens and then waits for the gate to close."""
        self.pace = pace
        await self._tell(GateState(open=True, epoch=epoch, version=version, incarnation="a"))

    async def close(self, *, epoch: int = 1) -> None:
        """A switch: every attempt runs one step more and is aborted."""
        state = self._state
        await self._tell(GateState(open=False, epoch=epoch, version=state.version))
        for attempt in list(self._attempts):
            if attempt.left:
                attempt.step()
            self._end(attempt, {"type": "abort", "message": "Aborted", "status_code": None})
        self._state = self._state.model_copy(update={"version": None})

    async def release(self) -> None:
        """Let every attempt go on to its end, and later ones too."""
        self.pace = None
        for attempt in list(self._attempts):
            self._advance(attempt)

    async def crash_engine(self) -> None:
        """The engine dies: the agent answers with what it has read, and closes."""
        await self._tell(GateState(open=False, epoch=self._state.epoch))
        for attempt in list(self._attempts):
            self._end(attempt, None)

    async def start(self) -> None:
        """The agent listens, on the port it had before if it had one."""
        application = data_application(self._tls, max_request_bytes=MAX_REQUEST_BYTES)
        application.add_routes([web.post("/generate", self._generate), web.get("/v1/gate", self._stream)])
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.05, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(
            self._runner, "127.0.0.1", self._port, ssl_context=self._tls.data_context(), reuse_address=True
        )
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def crash_agent(self) -> None:
        """The pod's agent is gone, and every connection with it."""
        if self._runner is not None:
            await serving.end(self._runner)
        self._runner = None
        self._attempts.clear()

    # ------------------------------------------------------------------------------------------------- the routes
    async def _tell(self, state: GateState) -> None:
        self._state = state
        async with self._changed:
            self._changed.notify_all()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        while True:
            sent = self._state
            await response.write(sent.model_dump_json(by_alias=True).encode() + b"\n")
            await self._until_it_is_not(sent)

    async def _until_it_is_not(self, sent: GateState) -> None:
        """Wait until the state is another one, or a heartbeat is due."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATE_LINE_S):
                    await self._changed.wait_for(lambda: self._state is not sent)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not self._state.open or self._state.version is None:
            self.refused += 1
            return web.json_response(Closed(epoch=self._state.epoch).model_dump(), status=503)
        version = self._state.version
        self.requests.append(body)
        fault = self.faults.popleft() if self.faults else None
        match fault:
            case GateFault.ERROR_500:
                return web.json_response({"error": {"message": self.words or "internal"}}, status=500)
            case GateFault.BUSY:
                return web.json_response({"error": "16384 requests in flight: send it later"}, status=429)
            case GateFault.REJECTED:
                words = self.words or "prompt is longer than the context"
                return web.json_response({"error": {"message": words}}, status=400)
            case GateFault.DROPPED:
                if request.transport is not None:
                    request.transport.abort()
                return web.Response()
            case _:
                pass
        attempt = self._begin(body)
        try:
            if fault is GateFault.EMPTY:
                self._end(attempt, {"type": "abort", "message": "Abort in waiting queue"})
            else:
                self._advance(attempt)
            if body["stream"]:
                return await self._tell_all(request, attempt, version)
            await attempt.ended.wait()
        finally:
            self._attempts.discard(attempt)
        answer = self._answer(attempt, version)
        if fault is GateFault.GARBLED:
            answer["meta_info"]["output_token_logprobs"].pop()
        wants_columns = self.packs_columns and request.headers.get(HEADER) == COLUMNS
        packed = pack(answer) if wants_columns else None
        if packed is None:
            return web.json_response(answer)
        if fault is GateFault.CUT_OFF:
            packed = packed[:-1]
        return web.Response(body=packed, content_type=CONTENT_TYPE)

    async def _tell_all(self, request: web.Request, attempt: _Attempt, version: WeightVersion) -> web.StreamResponse:
        """Events, each with all tokens so far."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            attempt.news.clear()
            ended = attempt.ended.is_set()
            answer = self._answer(attempt, version)
            await response.write(b"data: " + json.dumps(answer).encode() + b"\n\n")
            if ended:
                await response.write(b"data: [DONE]\n\n")
                return response
            await attempt.news.wait()

    # ------------------------------------------------------------------------------------------------- the engine
    def _begin(self, body: dict[str, Any]) -> _Attempt:
        whole, so_far = self._respond(body["input_ids"])
        assert list(whole[: len(so_far)]) == list(so_far), "tokens so far are sent back as they were made"
        attempt = _Attempt(left=deque(whole[len(so_far) :]), limit=body["sampling_params"]["max_new_tokens"])
        attempt.sent = list(body["input_ids"]) if body.get("return_routed_experts") else None
        self._attempts.add(attempt)
        return attempt

    def _advance(self, attempt: _Attempt) -> None:
        while attempt.natural_end is None and (self.pace is None or len(attempt.ids) < self.pace):
            attempt.step()
        if attempt.natural_end is not None:
            self._end(attempt, attempt.natural_end)

    def _end(self, attempt: _Attempt, reason: dict[str, Any] | None) -> None:
        if not attempt.ended.is_set():
            attempt.reason = reason
            attempt.ended.set()
            attempt.news.set()

    def _answer(self, attempt: _Attempt, version: WeightVersion) -> dict[str, Any]:
        ids, named = attempt.ids, str(version) if self.names_versions else "default"
        meta: dict[str, Any] = {
            "id": "engine's own",
            "finish_reason": attempt.reason,
            "weight_version": named,
            "completion_tokens": len(ids),
            "num_retractions": self.preemptions,
            "output_token_logprobs": [[logp_of(version, token), token, None] for token in ids],
        }
        if attempt.reason is not None:  # a finished answer has spans, what was read before a crash has not
            meta["weight_versions"] = [{"version": named, "start": 0, "end": len(ids)}]
            if attempt.sent is not None:
                read = (attempt.sent + ids)[:-1]
                numbers = [number for token in read for number in experts_of(version, token)]
                meta["routed_experts"] = base64.b64encode(struct.pack(f"<{len(numbers)}i", *numbers)).decode()
        return {"text": "", "output_ids": ids, "meta_info": meta}
