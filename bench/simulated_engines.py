"""Engines in virtual time, with stated rates, behind the rollout controller's own `Engines` and `EngineClient`.

An engine decodes up to `slots` requests together; the others wait in it, first come, first served. All of them get one
token every `base_s + each_s * (how many)`; nobody gets any while it prefills, which takes its time for each token of a
prompt and of what was generated before. Nothing stays in its cache over a switch, and a group's prompt is not shared.

How long a sample is says the trace, by its prompt and its number in the group. The number is in its tokens; an attempt
that brings none takes the lowest that is free.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.virtual_time import loop
from colocated_rl_api.gate_wire import GateState
from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.engines.engine_client import (
    EngineClient,
    GateClosed,
    Generated,
    GenerateRequest,
)
from colocated_rl_rollout.rules.samples import Finish, Span, Tokens

NUMBER = 10  # token of sample 0 of a group; no end token of any model
PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Rates:
    """base_s, each_s: of one token of each request that is decoded. prefill: tokens per second."""

    base_s: float = 0.010
    each_s: float = 0.00006
    prefill: float = 20_000.0
    slots: int = 32

    def token_s(self, requests: int) -> float:
        return self.base_s + self.each_s * requests

    def throughput(self, requests: float) -> float:
        """Tokens per second of an engine that decodes so many."""
        return requests / (self.base_s + self.each_s * requests)


@dataclass(eq=False)
class _EngineRequest:
    prefill: int
    length: int  # tokens to the end
    ended: asyncio.Future[int]  # tokens it got
    began: float = 0.0  # progress of the engine


class EngineMachine:
    """One engine. busy_token_s: the time that requests spent decoding."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.prefilled = 0
        self._queue: deque[_EngineRequest] = deque()
        self._ends: list[tuple[float, int, _EngineRequest]] = []
        self._count = itertools.count()
        self._progress = 0.0  # tokens that each running request has got since the start
        self._stall_s = 0.0  # of prefill that is left
        self._updated = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, *, prefill: int, length: int) -> int:
        """Tokens that a request of `length` got before its end, or before all were aborted."""
        request = _EngineRequest(prefill, length, loop().create_future())
        self._queue.append(request)
        self._go_on()
        return await request.ended

    def abort_all(self) -> None:
        self._advance()
        for _, _, request in self._ends:
            got = min(int(self._progress - request.began + 1e-6), request.length - 1)
            request.ended.set_result(max(0, got))
        for request in self._queue:
            request.ended.set_result(0)
        self._ends.clear()
        self._queue.clear()
        self._stall_s = 0.0
        self._go_on()

    def _advance(self) -> None:
        now = loop().now
        elapsed, self._updated = now - self._updated, now
        stalled = min(self._stall_s, elapsed)
        self._stall_s -= stalled
        if self._ends:
            self._progress += (elapsed - stalled) / self.rates.token_s(len(self._ends))

    def _go_on(self) -> None:
        self._advance()
        while self._ends and self._ends[0][0] <= self._progress + 1e-6:
            request = heapq.heappop(self._ends)[2]
            request.ended.set_result(request.length)
        while self._queue and len(self._ends) < self.rates.slots:
            request = self._queue.popleft()
            self._stall_s += request.prefill / self.rates.prefill
            self.prefilled += request.prefill
            request.began = self._progress
            heapq.heappush(self._ends, (self._progress + request.length, next(self._count), request))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._ends:
            tokens = max(0.0, self._ends[0][0] - self._progress)
            wait_s = self._stall_s + tokens * self.rates.token_s(len(self._ends))
            self._timer = loop().call_later(wait_s, self._go_on)


Trace = Callable[[int, int], int]
"""Tokens of a sample, by its prompt and its number in the group."""


class Numbers:
    """Numbers holds which samples of each prompt no engine has at the moment, and which of these have no tokens yet."""

    def __init__(self, group_size: int) -> None:
        self._free: dict[int, list[int]] = defaultdict(lambda: list(range(group_size)))

    def take(self, prompt: int) -> int:
        return heapq.heappop(self._free[prompt])

    def put_back(self, prompt: int, number: int) -> None:
        heapq.heappush(self._free[prompt], number)


class SimulatedEngine(EngineClient):
    """Simulates an engine.

    keeps: what an interrupted attempt brought is continued; otherwise the sample starts over.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        machine: EngineMachine,
        *,
        trace: Trace,
        numbers: Numbers,
        keeps: bool,
        changed: Callable[[], None],
    ) -> None:
        self.endpoint = endpoint
        self.machine = machine
        self.in_flight = 0
        self.state: GateState | None = None
        self._trace = trace
        self._numbers = numbers
        self._keeps = keeps
        self._tell = changed

    @property
    def takes_requests(self) -> bool:
        return self.is_open

    async def watch(self) -> None:
        await asyncio.Event().wait()

    def open(self, version: WeightVersion) -> None:
        self.state = GateState(open=True, epoch=version.step, version=version)
        self._tell()

    def close(self) -> None:
        """Close as a switch does: nothing more comes in, and every request gets the tokens that there are."""
        self.state = GateState(open=False, epoch=0)
        self.machine.abort_all()
        self._tell()

    async def generate(self, request: GenerateRequest, grew: Callable[[Tokens], None] | None = None) -> Generated:
        version = self.version
        if version is None:
            raise GateClosed(self.name)
        prompt, *so_far = request.input_ids
        number = so_far[0] - NUMBER if so_far else self._numbers.take(prompt)
        length = self._trace(prompt, number) - len(so_far)
        got = await self.machine.generate(prefill=PROMPT_TOKENS + len(so_far), length=length)
        if got < length and not (so_far or (got and self._keeps)):
            self._numbers.put_back(prompt, number)
        ids = np.full(got, NUMBER + number, np.int32)
        tokens = Tokens(ids, np.full(got, -1.0, np.float32), (Span(version, 0, got),) if got else ())
        return Generated(tokens, Finish.STOP if got == length else None)
