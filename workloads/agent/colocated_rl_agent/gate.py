"""The gate: the only way into a pod's engine, open or closed. It counts, forwards and hands back; it never waits.

Owns the count of requests that were let in. It rises before the request is sent, with no await since the gate was seen
open, and falls when the request has ended at the engine, not when its caller left: `settled` means that the engine has
nothing of ours (H1-H3, H13, H37).

* Closed: 503 at once, with the epoch. The rollout controller keeps the request; nothing is parked here.
* The routes of `dialects` and no others: nobody reaches the engine's control routes through a gate.
* Each request gets an id of fixed length, so that no id is the prefix of another (H4), and is always streamed from the
  engine: what was generated survives an abort and a crash (H58).
* A caller that leaves, or that does not read what it asked for, gets its request aborted at the engine (H38): one
  caller must never hold up a switch. Once the gate is closed it has CLOSING_S.
* Bounded: bodies, what is held for all requests together, and the time that a caller may take to send or to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial

import aiohttp
from aiohttp import web

from colocated_rl_agent.dialects import DIALECTS, DONE, Dialect, Refused, Reply, Request
from colocated_rl_agent.drivers.base import DriverError
from colocated_rl_api.gate_wire import GATE_LINE_S, Closed, GateState
from colocated_rl_api.ladder import WeightVersion
from colocated_rl_api.logs import log

LOG = logging.getLogger(__name__)

SILENCE_S = 600.0  # between two chunks: a request may queue in a busy engine
CONNECT_S = 5.0
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
ABORT_S = 5.0
CALLER_S = 20.0  # for a caller to send its body, or to read a chunk
CLOSING_S = 0.5  # to read a chunk, once the gate is closed
WAITS_FROM_BYTES = 16 * 1024  # unsent to a caller: below it a write waits for nobody
MAX_IN_FLIGHT = 16_384
MAX_READING = 32  # bodies that are read at the same time
MAX_HELD_BYTES = 192 * 1024 * 1024  # for all requests together: past it nothing is kept for an engine that is lost
MAX_LARGE = 64  # chunks above LARGE_BYTES that are read at the same time: a switch ends all requests at once
LARGE_BYTES = 64 * 1024
MAX_EVENT_BYTES = 64 * 1024 * 1024  # one chunk: all tokens of a sample with their log-probabilities
MAX_ERROR_BYTES = 64 * 1024
JSON_BODY = {"Content-Type": "application/json"}


class CallerGone(Exception):
    """The caller of a stream has left, or does not read it."""


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
        self._held_bytes = 0
        self._reading = asyncio.Semaphore(MAX_READING)
        self._large = asyncio.Semaphore(MAX_LARGE)
        self._giving: set[asyncio.Timeout] = set()  # chunks that callers have yet to read
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
        closing_by = asyncio.get_running_loop().time() + CLOSING_S
        for chunk in self._giving:
            if not chunk.expired() and (chunk.when() or closing_by) >= closing_by:
                chunk.reschedule(closing_by)
        self._tell()

    def enter_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._tell()

    async def settled(self) -> None:
        """Until nothing is in flight."""
        await self._settled.wait()

    def routes(self) -> list[web.RouteDef]:
        """For an application that has asked for the data token."""
        forwarded = [web.post(dialect.path, partial(self._serve, dialect)) for dialect in DIALECTS]
        return [*forwarded, web.get("/v1/gate", self._serve_state)]

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
    async def _serve(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        if not self.is_open:
            return self._refuse()
        try:
            async with asyncio.timeout(CALLER_S), self._reading:
                asked = dialect.request(await request.read())
        except TimeoutError:
            return _error(408, f"the body did not come within {CALLER_S:.0f} s")
        except Refused as refusal:
            return _error(refusal.status, str(refusal))
        backend = self._backend
        if backend is None:  # it closed while the body was being read
            return self._refuse()
        if self.in_flight >= MAX_IN_FLIGHT or self._held_bytes >= MAX_HELD_BYTES:
            return _error(429, f"{self.in_flight} requests in flight hold {self._held_bytes} bytes: send it later")
        caller = Caller(request, self._giving, streams=asked.streams)
        reply = dialect.reply(asked, backend.version)
        try:
            await self._exchange(backend, dialect.path, asked, reply, caller)
            if not asked.streams:
                return await caller.give_whole(web.Response(body=reply.answer(), content_type="application/json"))
            return await caller.give_rest(reply.rest(), DONE)
        except Refused as refusal:
            return await caller.give_whole(_error(refusal.status, str(refusal)))
        except CallerGone:
            return caller.response

    async def _exchange(self, backend: Backend, path: str, asked: Request, reply: Reply, caller: Caller) -> None:
        """From letting a request in to its end at the engine. Raises Refused, CallerGone."""
        outcome = "client_gone"
        self._let_in(len(asked.body))

        async def take(event: bytes) -> None:
            before = reply.size
            given = reply.take(event)
            if self._held_bytes + reply.size - before > MAX_HELD_BYTES:
                reply.forget()
            self._held_bytes += reply.size - before
            if asked.streams and given is not None:
                await caller.give(given, within_s=CALLER_S if self.is_open else CLOSING_S)

        try:
            await self._forward(backend, path, asked, take)
            outcome = reply.outcome
        except Refused:
            outcome = "error"
            raise
        finally:
            self._let_out(len(asked.body) + reply.size)
            self._count(outcome, reply.tokens)

    def _let_in(self, held_bytes: int) -> None:
        self.in_flight += 1
        self._held_bytes += held_bytes
        self._settled.clear()

    def _let_out(self, held_bytes: int) -> None:
        self.in_flight -= 1
        self._held_bytes -= held_bytes
        if self.in_flight == 0:
            self._settled.set()
            if self._backend is None:
                self._changed()

    def _refuse(self) -> web.Response:
        return web.Response(
            status=503, text=Closed(epoch=self.epoch).model_dump_json(by_alias=True), content_type="application/json"
        )

    async def _forward(
        self, backend: Backend, path: str, asked: Request, take: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Until the engine has ended the request, or is lost. Raises Refused, and what `take` raises."""
        ended = False
        try:
            async with self._session.post(
                backend.url + path, data=asked.body, headers=JSON_BODY, timeout=TIMEOUT
            ) as answer:
                if answer.status != 200:
                    text = (await answer.content.read(MAX_ERROR_BYTES)).decode(errors="replace")
                    ended = True
                    raise Refused(answer.status, text)
                await self._read(answer.content, take)
                ended = True
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log(LOG, "request lost", logging.DEBUG, rid=asked.rid, reason=repr(error), incarnation=backend.incarnation)
        finally:
            if not ended:
                await self._abort(backend, asked.rid)

    async def _read(self, content: aiohttp.StreamReader, take: Callable[[bytes], Awaitable[None]]) -> None:
        """Events, to the end of the answer, so that its connection can be used again. Most of a large one stays at the
        engine until there is room for it here.
        """
        events = Events()
        async with contextlib.AsyncExitStack() as room:
            has_room = False
            async for piece in content.iter_any():
                whole = list(events.feed(piece))
                if has_room != (events.pending > LARGE_BYTES):
                    has_room = not has_room
                    await (room.enter_async_context(self._large) if has_room else room.aclose())
                for event in whole:
                    if event != DONE:
                        await take(event)

    async def _abort(self, backend: Backend, rid: str) -> None:
        """The caller or the connection is gone: make sure that the engine stops working on it."""
        task = asyncio.ensure_future(backend.abort(rid))
        with contextlib.suppress(TimeoutError, DriverError):  # the engine is gone, and the request with it
            async with asyncio.timeout(ABORT_S):
                await asyncio.shield(task)


class Caller:
    """Who sent a request, while it is answered. giving: what callers have yet to read, for a closing gate to hurry."""

    def __init__(self, request: web.Request, giving: set[asyncio.Timeout], *, streams: bool) -> None:
        self._request = request
        self._giving = giving
        self.response: web.StreamResponse = web.StreamResponse(
            headers={"Content-Type": "text/event-stream"} if streams else None
        )

    async def give(self, event: bytes, *, within_s: float = CALLER_S) -> None:
        """One event of a stream. Raises CallerGone."""
        transport = self._request.transport
        if transport is not None and transport.get_write_buffer_size() + len(event) < WAITS_FROM_BYTES:
            await self._write(event)
            return
        async with self._reads(within_s):
            await self._write(event)

    async def _write(self, event: bytes) -> None:
        try:
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await self.response.write(b"data: " + event + b"\n\n")
        except OSError as error:
            self._hang_up()
            raise CallerGone from error

    async def give_rest(self, *events: bytes | None) -> web.StreamResponse:
        """What ends a stream. Raises CallerGone."""
        for event in events:
            if event is not None:
                await self.give(event)
        async with self._reads(CALLER_S):
            await self.response.write_eof()
        return self.response

    async def give_whole(self, response: web.Response) -> web.StreamResponse:
        """An answer that is not streamed; too late for it, a stream just breaks off."""
        if self.response.prepared:
            self._hang_up()
            return self.response
        self.response = response
        with contextlib.suppress(CallerGone):
            async with self._reads(CALLER_S):
                await response.prepare(self._request)
                await response.write_eof()
        return response

    @contextlib.asynccontextmanager
    async def _reads(self, within_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(within_s) as chunk:
                self._giving.add(chunk)
                try:
                    yield
                finally:
                    self._giving.discard(chunk)
        except (TimeoutError, OSError) as error:
            self._hang_up()
            raise CallerGone from error

    def _hang_up(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


class Events:
    """Data of server-sent events, whole ones only: what a broken connection cut off is not an event."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._seen = 0  # no event ends before it

    @property
    def pending(self) -> int:
        """Bytes of an event that is not whole yet."""
        return len(self._buffer)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Events that are whole now. Raises Refused for one that is too large."""
        buffer = self._buffer
        buffer += piece
        while (end := buffer.find(b"\n\n", self._seen)) >= 0:
            event = bytes(buffer[:end])
            del buffer[: end + 2]
            self._seen = 0
            if event.startswith(b"data: "):
                yield event[len(b"data: ") :]
        self._seen = max(0, len(buffer) - 1)
        if len(buffer) > MAX_EVENT_BYTES:
            raise Refused(502, f"the engine sent a chunk of more than {MAX_EVENT_BYTES} bytes")
