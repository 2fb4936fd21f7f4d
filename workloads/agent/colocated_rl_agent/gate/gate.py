"""The gate is the only way into a pod's engines. It counts, forwards and hands back; it never waits.

It has an entrance for each engine, open or closed, and owns the count of requests that were let in there. The count
rises before a request is sent, with no await after the check that the entrance is open, and falls when the request has
ended at the engine, not when its caller left: `settled` means that the engine holds no request of the gate (H1-H3, H13,
H37).

* A closed gate answers 503 at once, with the epoch. The rollout controller keeps the request; nothing is parked here.
* The gate serves only the routes of `dialects`: nobody reaches the engine's control routes through it. Scores of a
  reference beside the engines are asked for here too, whether or not an entrance is open.
* It refuses requests that kill an engine: one caller's token id that the model does not know would cost all callers.
* Each request gets an id of fixed length, so that no id is the prefix of another (H4), and is always streamed from the
  engine: generated tokens survive an abort and a crash (H58).
* If a caller leaves, or does not read its answer, the gate aborts its request at the engine (H38): one caller must
  never hold up a switch. Once the gate is closed, a caller has CLOSING_S to read.
* Events pass from the engine's connection to the caller's as they come in, without a task in between; a caller that
  does not read pauses the engine's connection.
* Requests, each of which takes two descriptors (`data_port.Capacity`), bodies, the bytes held for all requests
  together, and the time for a caller to send or read are bounded.

`data_port` handles HTTP on the caller's side, `upstream` on the engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import NamedTuple

from colocated_rl_agent.drivers.base import DriverError
from colocated_rl_agent.gate.call import Call, Malformed
from colocated_rl_agent.gate.data_port import CALLER_S, Capacity
from colocated_rl_agent.gate.dialects import (
    DIALECTS,
    JSON,
    Dialect,
    EngineReply,
    GateRefusal,
    Request,
)
from colocated_rl_agent.gate.entrance import Backend, Entrance, PromptAffinity
from colocated_rl_agent.gate.limiter import Limiter
from colocated_rl_agent.gate.running import Running
from colocated_rl_agent.gate.upstream import Upstream
from colocated_rl_api import descriptors
from colocated_rl_api.columns import COLUMNS, HEADER_READ
from colocated_rl_api.descriptors import Seldom
from colocated_rl_api.gate_wire import GATE_LINE_S, Closed, GateState
from colocated_rl_api.logs import failure_of, log
from colocated_rl_api.reference_wire import SCORE_PATH, SCORE_TYPE
from colocated_rl_member.room import Bound

LOG = logging.getLogger(__name__)

ABORT_S = 5.0
CLOSING_S = 0.5  # time for a caller to read a chunk once the gate is closed
MAX_READING = 32  # bodies that are read at the same time
MAX_HELD_BYTES = 192 * 1024 * 1024  # for all requests together: past it no tokens are kept in case the engine is lost
MAX_LARGE = 64  # large chunks that are read at the same time: a switch ends all requests at once
MAX_LARGE_BYTES = 64 * 1024 * 1024  # of incomplete large chunks together
STATE = "/v1/gate"


class GateRoute(NamedTuple):
    """Names the one method that a path takes, and its handler."""

    method: str
    serve: Callable[[Call], Awaitable[None]]


class Gate:
    """The Gate admits requests to the engines whose entrances are open.

    engines: how many there are. changed: called when state or settledness changed. count: called with (ending, tokens)
    of each ended request. score: returns a reference's answer to a query and a sample; None: there is no reference.
    """

    def __init__(
        self,
        *,
        engines: int = 1,
        changed: Callable[[], None] = lambda: None,
        count: Callable[[str, int], None] = lambda ending, tokens: None,
        score: Callable[[str, bytes], Awaitable[tuple[int, bytes]]] | None = None,
    ) -> None:
        self._changed = changed
        self._count = count
        self.entrances = tuple(Entrance() for _ in range(engines))
        self._affinity = PromptAffinity() if engines > 1 else None
        self._held_bytes = 0
        self._reading = asyncio.Semaphore(MAX_READING)
        self._large = Limiter(MAX_LARGE, MAX_LARGE_BYTES)
        self._full = Bound(Capacity.of(descriptors.limit()).requests, "gate is full")
        self._troubled = Seldom()
        self._news = asyncio.Event()
        self._routes = {dialect.path: GateRoute("POST", partial(self._serve, dialect)) for dialect in DIALECTS}
        self._routes[STATE] = GateRoute("GET", self._serve_state)
        if score is not None:
            self._routes[SCORE_PATH] = GateRoute("POST", partial(self._serve_scores, score))
        self.epoch = 0
        self.in_flight = 0

    # ------------------------------------------------------------------------------------------------- for the agent
    @property
    def is_open(self) -> bool:
        """Return whether any entrance is."""
        return any(entrance.is_open for entrance in self.entrances)

    @property
    def state(self) -> GateState:
        """Return the state for callers. Open entrances have one version: the ladders see to that."""
        backend = next((entrance.backend for entrance in self.entrances if entrance.backend), None)
        return GateState(
            open=backend is not None,
            epoch=self.epoch,
            incarnation=backend.incarnation if backend else None,
            version=backend.version if backend else None,
            in_flight=self.in_flight,
        )

    def open(self, backend: Backend, *, engine: int = 0) -> None:
        self.entrances[engine].open(backend)
        self._notify()

    def close(self, *, engine: int | None = None) -> None:
        """Close the entrance to an engine, or to all. It is effective on return: every later request is refused."""
        for entrance in self.entrances if engine is None else (self.entrances[engine],):
            entrance.close(within_s=CLOSING_S)
        self._notify()

    def enter_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._notify()

    async def settled(self) -> None:
        """Wait until nothing is in flight."""
        for entrance in self.entrances:
            await entrance.settled()

    async def serve(self, call: Call) -> None:
        """Answer a call that came to the data port."""
        route = self._routes.get(call.path)
        if route is None:
            call.refuse(404, f"{call.path!r} is not served here")
        elif call.method != route.method:
            call.refuse(405, f"{call.path} takes {route.method}", more=f"Allow: {route.method}\r\n")
        else:
            await route.serve(call)

    # --------------------------------------------------------------------------------------------------- the state
    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
        self._changed()

    async def _serve_state(self, call: Call) -> None:
        """Stream the gate's state until the caller leaves or does not read for the time of two lines."""
        call.wait_for_caller(2 * GATE_LINE_S)
        while True:
            news = self._news
            if not call.is_stalled:
                line = self.state.model_dump_json(by_alias=True).encode() + b"\n"
                call.give(line, "application/x-ndjson")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATE_LINE_S):
                    await news.wait()

    # --------------------------------------------------------------------------------------------------- scores
    async def _serve_scores(self, score: Callable[[str, bytes], Awaitable[tuple[int, bytes]]], call: Call) -> None:
        """Pass a sample on to the reference, and its answer back. The gate counts no more of it than its bytes."""
        try:
            sample = await self._body(call)
        except (Malformed, GateRefusal) as refusal:
            call.refuse(refusal.status, str(refusal))
            return
        held = 2 * len(sample)  # an answer is as large
        if self._held_bytes + held > MAX_HELD_BYTES:
            call.refuse(429, f"requests in flight hold {self._held_bytes} bytes: send it later")
            return
        self._held_bytes += held
        try:
            status, answer = await score(call.target.partition(b"?")[2].decode("latin-1"), sample)
        finally:
            self._held_bytes -= held
        call.answer(status, answer, content_type=SCORE_TYPE if status == HTTPStatus.OK else JSON)

    # --------------------------------------------------------------------------------------------------- requests
    async def _serve(self, dialect: Dialect, call: Call) -> None:
        if not self.is_open:
            self._refuse(call)
            return
        try:
            asked = await self._asked(dialect, call)
        except (Malformed, GateRefusal) as refusal:
            call.refuse(refusal.status, str(refusal))
            return
        entrance = self._entrance_for(asked)
        if entrance is None:  # it closed while the body was being read
            self._refuse(call)
            return
        if self._full.is_reached(self.in_flight) or self._held_bytes >= MAX_HELD_BYTES:
            call.refuse(429, f"{self.in_flight} requests in flight hold {self._held_bytes} bytes: send it later")
            return
        try:
            running = await self._run(call, dialect, asked, entrance)
            running.finish()
        except GateRefusal as refusal:
            call.refuse(refusal.status, str(refusal))

    async def _run(self, call: Call, dialect: Dialect, asked: Request, entrance: Entrance) -> Running:
        """Return the request once it has ended. An engine that takes no connection has not heard of it, so the next one
        gets it. Raises GateRefusal.
        """
        failed: list[Entrance] = []
        while True:
            backend, upstream = entrance.backend, entrance.upstream
            assert backend is not None, "an entrance that takes requests is open"
            assert upstream is not None, "an entrance that takes requests is open"
            running = Running(call, asked, dialect.reply(asked, backend.version), self._hold, self._large)
            with self._let_in(entrance, running):
                is_sent = await self._forward(backend, upstream, dialect.path, running)
            if not is_sent:
                if entrance.backend is backend:
                    entrance.pass_over()
                failed.append(entrance)
                other = self._entrance_for(asked, without=failed)
                if other is not None:
                    entrance = other
                    continue
            self._count(running.reply.ending, running.reply.tokens)
            return running

    def _entrance_for(self, asked: Request, *, without: Collection[Entrance] = ()) -> Entrance | None:
        """Return the entrance that the request takes, or None if all are closed."""
        left = [entrance for entrance in self.entrances if entrance not in without] if without else self.entrances
        if self._affinity is not None:
            return self._affinity.choose(left, asked.beginnings)
        return next((entrance for entrance in left if entrance.is_open), None)

    async def _asked(self, dialect: Dialect, call: Call) -> Request:
        """Read and parse the request. A function of its own, so that the caller's body is freed before the engine
        answers. Raises Malformed and GateRefusal.
        """
        body = await self._body(call)
        backend = next((entrance.backend for entrance in self.entrances if entrance.backend), None)
        asked = dialect.request(body, backend.vocabulary if backend else None, keyed=self._affinity is not None)
        wants_columns = not asked.streams and call.headers.get(HEADER_READ) == COLUMNS
        return replace(asked, wants_columns=True) if wants_columns else asked

    async def _body(self, call: Call) -> bytes:
        if call.is_whole:
            return await call.read()
        try:
            async with asyncio.timeout(CALLER_S), self._reading:
                return await call.read()
        except TimeoutError as error:
            call.keep_alive = False
            raise GateRefusal(408, f"the body did not come within {CALLER_S:.0f} s") from error

    @contextlib.contextmanager
    def _let_in(self, entrance: Entrance, running: Running) -> Iterator[None]:
        """Let a request in, and out at the end of the block. One that is refused or left there is counted here."""
        self.in_flight += 1
        self._held_bytes += len(running.asked.body)
        entrance.let_in(running)
        try:
            yield
        except BaseException as error:
            self._count("error" if isinstance(error, GateRefusal) else "client_gone", running.reply.tokens)
            raise
        finally:
            self.in_flight -= 1
            self._held_bytes -= len(running.asked.body) + running.reply.size
            entrance.let_out(running)
            if entrance.in_flight == 0 and not entrance.is_open:
                self._changed()

    def _hold(self, reply: EngineReply, before: int) -> None:
        """Count the bytes by which a reply has grown. Raises GateRefusal if there is no room for more of it."""
        self._held_bytes += reply.size - before
        if self._held_bytes > MAX_HELD_BYTES:
            full = reply.size
            reply.forget()
            self._held_bytes += reply.size - full

    def _refuse(self, call: Call) -> None:
        call.answer(503, Closed(epoch=self.epoch).model_dump_json(by_alias=True).encode())

    async def _forward(self, backend: Backend, upstream: Upstream, path: str, running: Running) -> bool:
        """Forward the request until the engine has ended it or is lost. Return False if the engine took no connection.

        Raises GateRefusal.
        """
        try:
            connection = await upstream.connect()
        except OSError as error:
            if descriptors.is_exhausted(error):  # here: no fault of the engine, which has not heard of the request
                self._troubled.log(LOG, "descriptors exhausted", reason=failure_of(error))
                raise GateRefusal(429, "there is no descriptor for another request: send it later") from error
            _log_lost(running, backend, error)
            return False
        running.begin(connection)
        try:
            try:
                status = await connection.exchange(upstream.request(path, running.asked.body), running.take)
            finally:
                running.end()
        except OSError as error:
            _log_lost(running, backend, error)
            await self._abort(backend, running.asked.rid)
        except BaseException:  # the caller left, or the answer can't be taken
            await self._abort(backend, running.asked.rid)
            raise
        else:
            if status != 200:
                raise running.refusal(status)
        return True

    async def _abort(self, backend: Backend, rid: str) -> None:
        """Make sure that the engine stops working on a request whose caller or connection is gone."""

        async def abort() -> None:
            with contextlib.suppress(DriverError):  # the engine is gone, and the request with it
                await backend.abort(rid)

        await asyncio.wait({asyncio.create_task(abort(), name="abort")}, timeout=ABORT_S)  # it goes on after that


def _log_lost(running: Running, backend: Backend, error: OSError) -> None:
    rid, reason = running.asked.rid, failure_of(error)
    log(LOG, "request lost", logging.DEBUG, rid=rid, reason=reason, incarnation=backend.incarnation)
