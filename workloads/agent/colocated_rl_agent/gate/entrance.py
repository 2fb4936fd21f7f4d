"""An entrance is the part of the gate that leads to one engine: open or closed, with the requests behind it.

Engines of a pod start, die and are replaced one by one, so each has an entrance of its own. All share one port, one set
of bounds, and `PromptAffinity`, which chooses among the open ones.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from colocated_rl_agent.gate.running import Running
from colocated_rl_agent.gate.upstream import Upstream
from colocated_rl_api.rungs import WeightVersion

MOST_KEYS = 65_536  # beginnings of prompts that are remembered: about 10 MiB
PASSED_OVER_S = 1.0  # an engine that took no connection, while others do
MORE, MORE_BY = 8, 1.25  # an engine may have so many requests more, and so many times as many, as the idlest one


@dataclass(frozen=True)
class Backend:
    """A Backend is an engine behind the gate."""

    url: str
    incarnation: str
    version: WeightVersion
    abort: Callable[[str], Awaitable[None]]  # aborts one request, by its id at the engine
    vocabulary: int | None = None  # token ids are below it; None: unknown


class Entrance:
    """An Entrance lets requests in to one engine while it is open, and counts those that have not ended there."""

    def __init__(self) -> None:
        self.backend: Backend | None = None
        self.upstream: Upstream | None = None
        self.running: set[Running] = set()
        self.in_flight = 0
        self._passed_over_until = 0.0
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def is_open(self) -> bool:
        return self.backend is not None

    @property
    def is_passed_over(self) -> bool:
        return time.monotonic() < self._passed_over_until

    def pass_over(self) -> None:
        """Prefer others for a while, or until it is opened again: its engine took no connection."""
        self._passed_over_until = time.monotonic() + PASSED_OVER_S

    def open(self, backend: Backend) -> None:
        self._leave_upstream()
        self.backend, self.upstream = backend, Upstream(backend.url)
        self._passed_over_until = 0.0

    def close(self, *, within_s: float) -> None:
        """Refuse every later request, and give callers this long to read what comes for those that are in."""
        self.backend = None
        self._leave_upstream()
        for running in self.running:
            running.call.wait_for_caller(within_s)

    async def settled(self) -> None:
        """Wait until nothing is in flight."""
        await self._settled.wait()

    def let_in(self, running: Running) -> None:
        self.in_flight += 1
        self.running.add(running)
        self._settled.clear()

    def let_out(self, running: Running) -> None:
        self.in_flight -= 1
        self.running.discard(running)
        if self.in_flight == 0:
            self._settled.set()

    def _leave_upstream(self) -> None:
        if self.upstream is not None:
            self.upstream.close()
            self.upstream = None


class PromptAffinity:
    """A PromptAffinity sends a prompt to the engine that last had the longest beginning of it, unless that one is far
    busier than the others.

    Samples of one group and turns of one session begin alike, and find it in that engine's cache. The rule is that of
    SGLang's router (`cache_aware`): the cache counts while loads are balanced, and the load when they are not.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[int, Entrance] = OrderedDict()  # by the beginning of a prompt; the newest is last

    def choose(self, entrances: Sequence[Entrance], beginnings: Sequence[int]) -> Entrance | None:
        """Return an open entrance, or None. beginnings: hashes of a prompt's beginnings, the longest first."""
        ready = [each for each in entrances if each.is_open]
        if not ready:
            return None
        ready = [each for each in ready if not each.is_passed_over] or ready
        idlest = min(ready, key=lambda entrance: entrance.in_flight)
        most = max(idlest.in_flight + MORE, idlest.in_flight * MORE_BY)
        known = next((self._last[key] for key in beginnings if key in self._last), None)
        chosen = known if known in ready and known.in_flight <= most else idlest
        for key in beginnings:
            self._last[key] = chosen
            self._last.move_to_end(key)
        while len(self._last) > MOST_KEYS:
            self._last.popitem(last=False)
        return chosen
