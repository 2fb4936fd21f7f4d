"""The gate: the only way into a pod's engine, open or closed. It counts, forwards and hands back; it never waits.

Owns the count of requests that were let in. It rises before the first await, and falls when the request has ended at
the engine, not when its caller left: `settled` means that the engine has nothing of ours (H1-H3, H13, H37).

* Closed: 503 at once, with the epoch. The rollout controller keeps the request; nothing is parked here.
* Each request gets an id of fixed length, so that no id is the prefix of another (H4), and is always streamed from the
  engine: what was generated survives an abort and a crash (H58). Chunks are cumulative, so the last one is everything,
  and only that one is parsed.
* A caller that leaves gets its request aborted at the engine (H38).
* An engine's own error keeps its HTTP status, so that it is never taken for a switch (H8).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from colocated_rl_agent.drivers.base import DriverError
from colocated_rl_api.gate_wire import GATE_LINE_S, Closed, GateState
from colocated_rl_api.ladder import WeightVersion
from colocated_rl_api.logs import log

LOG = logging.getLogger(__name__)

STREAM_INTERVAL = 16  # tokens between chunks where the caller names none; cumulative bytes grow with length squared
SILENCE_S = 600.0  # between two chunks: a request may queue in a busy engine
CONNECT_S = 5.0
ABORT_S = 5.0
MAX_IN_FLIGHT = 16_384
MAX_EVENT_BYTES = 64 * 1024 * 1024  # one chunk: all tokens of a sample with their log-probabilities
MAX_ERROR_BYTES = 64 * 1024
ABORTED_WHILE_COMPILING = "Aborted by AbortReq."  # the one abort of ours that carries an error status


class Refused(Exception):
    """A request that the gate or the engine answers with an HTTP error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Backend:
    """The engine behind the gate."""

    url: str
    incarnation: str
    version: WeightVersion
    abort: Callable[[str], Awaitable[None]]  # one request, by its id at the engine


class Gate:
    """changed: called when state or settledness changed. count: called with (outcome, tokens) of each ended request."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        changed: Callable[[], None] = lambda: None,
        count: Callable[[str, int], None] = lambda outcome, tokens: None,
    ) -> None:
        self._session = session
        self._changed = changed
        self._count = count
        self._backend: Backend | None = None
        self._closings = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._news = asyncio.Event()
        self.epoch = 0
        self.in_flight = 0

    # ------------------------------------------------------------------------------------------------- for the agent
    @property
    def is_open(self) -> bool:
        return self._backend is not None

    @property
    def state(self) -> GateState:
        backend = self._backend
        return GateState(
            open=backend is not None,
            epoch=self.epoch,
            incarnation=backend.incarnation if backend else None,
            version=backend.version if backend else None,
            in_flight=self.in_flight,
        )

    def open(self, backend: Backend) -> None:
        self._backend = backend
        self._tell()

    def close(self) -> None:
        """Effective when it returns: whoever comes from now on is refused."""
        self._backend = None
        self._closings += 1
        self._tell()

    def enter_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._tell()

    async def settled(self) -> None:
        """Until nothing is in flight."""
        await self._settled.wait()

    def routes(self) -> list[web.RouteDef]:
        """For an application that has asked for the data token."""
        return [web.post("/generate", self._serve_generate), web.get("/v1/gate", self._serve_state)]

    # --------------------------------------------------------------------------------------------------- the state
    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
        self._changed()

    async def _serve_state(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        while True:
            news = self._news
            async with asyncio.timeout(2 * GATE_LINE_S):
                await response.write(self.state.model_dump_json(by_alias=True).encode() + b"\n")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATE_LINE_S):
                    await news.wait()

    # --------------------------------------------------------------------------------------------------- requests
    async def _serve_generate(self, request: web.Request) -> web.Response:
        backend = self._backend
        if backend is None:
            return self._refuse()
        if self.in_flight >= MAX_IN_FLIGHT:
            return web.json_response({"error": f"{MAX_IN_FLIGHT} requests are in flight"}, status=429)
        closings = self._closings
        self._let_in()
        outcome, tokens = "client_gone", 0
        try:
            body = engine_request(await request.read())
            if self._closings != closings:  # it closed while the body was being read
                outcome = "refused"
                return self._refuse()
            answer = await self._forward(backend, body)
            outcome = "aborted" if answer["meta_info"]["finish_reason"]["type"] == "abort" else "finished"
            tokens = len(answer.get("output_ids", ()))
            return web.json_response(answer)
        except Refused as refusal:
            outcome = "error"
            return web.json_response({"error": str(refusal)}, status=refusal.status)
        except web.HTTPException:
            outcome = "error"
            raise
        finally:
            self._let_out()
            self._count(outcome, tokens)

    def _let_in(self) -> None:
        self.in_flight += 1
        self._settled.clear()

    def _let_out(self) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self._settled.set()
            if self._backend is None:
                self._changed()

    def _refuse(self) -> web.Response:
        return web.Response(
            status=503, text=Closed(epoch=self.epoch).model_dump_json(by_alias=True), content_type="application/json"
        )

    async def _forward(self, backend: Backend, body: dict[str, Any]) -> dict[str, Any]:
        """The engine's last word on a request, in the shape of a finished one. Raises Refused."""
        last, lost = b"", ""
        ended = False
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        try:
            async with self._session.post(f"{backend.url}/generate", json=body, timeout=timeout) as answer:
                if answer.status != 200:
                    text = (await answer.content.read(MAX_ERROR_BYTES)).decode(errors="replace")
                    ended = True
                    raise Refused(answer.status, text)
                async for event in events(answer.content):
                    if event == b"[DONE]":
                        break
                    last = event
                ended = True
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            lost = repr(error)
        finally:
            if not ended:
                await self._abort(backend, body["rid"])
        if lost:
            log(LOG, "request lost", logging.DEBUG, reason=lost, incarnation=backend.incarnation)
        return last_state(last, rid=body["rid"], version=backend.version)

    async def _abort(self, backend: Backend, rid: str) -> None:
        """The caller or the connection is gone: make sure that the engine stops working on it."""
        task = asyncio.ensure_future(backend.abort(rid))
        with contextlib.suppress(TimeoutError, DriverError):  # the engine is gone, and the request with it
            async with asyncio.timeout(ABORT_S):
                await asyncio.shield(task)


def engine_request(body: bytes) -> dict[str, Any]:
    """What the engine is asked for, from what the caller asked for. Raises Refused with 400."""
    try:
        asked = json.loads(body)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(asked, dict):
        raise Refused(400, "the body must be an object with input_ids or text")
    if asked.get("stream"):
        raise Refused(400, "stream: true is not served by a gate: leave it out")
    text, input_ids, sampling = asked.get("text"), asked.get("input_ids"), asked.get("sampling_params")
    if text is not None and not isinstance(text, str):
        raise Refused(400, "text must be one string: send each sample as a request of its own")
    if input_ids is not None and not (isinstance(input_ids, list) and all(type(token) is int for token in input_ids)):
        raise Refused(400, "input_ids must be one list of numbers: send each sample as a request of its own")
    if sampling is not None and not isinstance(sampling, dict):
        raise Refused(400, "sampling_params must be an object")
    sampling = sampling or {}
    if sampling.get("n", 1) != 1:
        raise Refused(400, "n must be 1: send each sample as a request of its own")
    return {
        **asked,
        "rid": uuid.uuid4().hex,
        "stream": True,
        "sampling_params": {"stream_interval": STREAM_INTERVAL, **sampling},
    }


async def events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Data of server-sent events, whole ones only: what a broken connection cut off is not an event."""
    buffer = bytearray()
    async for piece in content.iter_any():
        buffer += piece
        while (end := buffer.find(b"\n\n")) >= 0:
            event = bytes(buffer[:end])
            del buffer[: end + 2]
            if event.startswith(b"data: "):
                yield event[len(b"data: ") :]
        if len(buffer) > MAX_EVENT_BYTES:
            raise Refused(502, f"the engine sent a chunk of more than {MAX_EVENT_BYTES} bytes")


def last_state(event: bytes, *, rid: str, version: WeightVersion) -> dict[str, Any]:
    """A finished answer from the last chunk; one that was cut off counts as aborted. Raises Refused."""
    state: dict[str, Any] = json.loads(event) if event else {"text": "", "output_ids": []}
    if (error := state.get("error")) is not None:
        raise Refused(int(error.get("code") or 400), str(error.get("message", error)))
    meta: dict[str, Any] = {"id": rid, "weight_version": str(version), "completion_tokens": 0} | state.get(
        "meta_info", {}
    )
    reason = meta.get("finish_reason")
    if reason is None:
        reason = {"type": "abort", "message": "the engine was lost"}
    elif reason["type"] == "abort" and reason.get("status_code") is not None:
        if reason.get("message") != ABORTED_WHILE_COMPILING:
            raise Refused(int(reason["status_code"]), str(reason.get("message", "aborted by the engine")))
        reason = {"type": "abort", "message": reason["message"]}
    return {**state, "meta_info": {**meta, "finish_reason": reason}}
