"""This module follows the gates that the operator names, and picks the one for the next request.

A sample goes back to the engine that has its prefix, if its gate is open; otherwise to the one with the fewest of our
requests. After a switch gates open one after another, and everything waits: for a moment each gets its share and no
more, or the first one would take all. No engine gets more than BURST requests in PACE_S, in the order in which they are
asked for: a thousand connections and prompts at once would hold up the loop, the gate and the most urgent of them. An
engine that is no longer named is forgotten at once, and its requests end as lost attempts (H36).
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from colocated_rl_api import descriptors
from colocated_rl_api.back_off import MOMENT_S
from colocated_rl_api.member_wire import Endpoint
from colocated_rl_member.data import DataClient
from colocated_rl_member.room import Bound
from colocated_rl_member.server import OWN_REQUESTS
from colocated_rl_rollout.engines.engine_client import EngineClient
from colocated_rl_rollout.rules.samples import Tokens

SHARE_S = 3.0  # from the first gate that opens: the time others may take to follow
BURST, PACE_S = 64, 0.1  # requests that one engine is sent at once, and the time until it gets more


class Engines:
    """Holds the gates by endpoint. `follow` may be called at any time while `run` is up.

    changed: called when it may be possible to send a request.
    count: called with the tokens that an attempt brought.
    accepts_unversioned: an answer may have tokens without a weight version of the job.
    requests_at_most: at a time, to all of them; by default as many as descriptors allow.
    """

    def __init__(
        self,
        client: DataClient,
        *,
        settle_s: float,
        changed: Callable[[], None],
        count: Callable[[Tokens], None],
        accepts_unversioned: bool = False,
        requests_at_most: int | None = None,
    ) -> None:
        part, whole = OWN_REQUESTS
        most = descriptors.for_sockets(descriptors.limit()) * part // whole
        self._full = Bound(requests_at_most or max(1, most), "no descriptors for more requests to engines")
        self.in_flight = 0
        self._client = client
        self._settle_s = settle_s
        self._changed = changed
        self._count = count
        self._accepts_unversioned = accepts_unversioned
        self._named: tuple[Endpoint, ...] = ()
        self._renamed = asyncio.Event()
        self._clients: dict[Endpoint, EngineClient] = {}
        self._share_until = 0.0
        self._any_open = False
        self._sent: Counter[EngineClient] = Counter()  # in the last PACE_S
        self._open: list[EngineClient] = []
        self._named_so: dict[str, EngineClient] = {}  # those that are open
        # a heap of them by their requests; an entry with another number than the engine has is outdated
        self._ranked: list[tuple[int, str, int, EngineClient]] = []

    def follow(self, endpoints: Iterable[Endpoint]) -> None:
        """Follow these gates, and no others, from now on."""
        named = tuple(endpoints)
        if named != self._named:
            self._named = named
            self._renamed.set()

    def __iter__(self) -> Iterator[EngineClient]:
        """Iterate over all gates that are followed, open or not."""
        return iter(self._clients.values())

    @property
    def open(self) -> list[EngineClient]:
        return self._open

    def share(self, demand: int) -> int:
        """Return how many of `demand` requests one engine may have: all, except while more gates may soon open."""
        opening = 0 < len(self.open) < len(self._named) and asyncio.get_running_loop().time() < self._share_until
        return -(-demand // len(self._named)) if opening else demand

    def pick(self, *, preferred: str | None = None, step: int | None = None, at_most: int) -> EngineClient | None:
        """Return the gate for a request, or None while there is none.

        preferred: used if it can take the request. step: only weights of this step. at_most: requests per engine.
        """
        if self._full.is_reached(self.in_flight):  # what is not sent waits, as it does while gates are closed
            return None
        if step is not None:  # few ask, and not for each sample
            candidates = [client for client in self._open if self._takes(client, at_most, step)]
            return min(candidates, key=lambda client: (client.in_flight, client.name), default=None)
        if (client := self._named_so.get(preferred or "")) and self._takes(client, at_most):
            return client
        while self._ranked:
            in_flight, _, _, client = self._ranked[0]
            if in_flight == client.in_flight and self._takes(client, in_flight + 1):
                return client if in_flight < at_most else None
            heapq.heappop(self._ranked)  # outdated, or ranked again when the engine takes requests
        return None

    def _takes(self, client: EngineClient, at_most: int, step: int | None = None) -> bool:
        return (
            client.takes_requests
            and client.in_flight < at_most
            and self._sent[client] < BURST
            and (step is None or (client.version is not None and client.version.step == step))
        )

    def _rank(self, *clients: EngineClient) -> None:
        """Rank gates whose number of requests changed, or that take requests again; rerank all now and then."""
        for client in clients:
            heapq.heappush(self._ranked, (client.in_flight, client.name, id(client), client))
        if not clients or len(self._ranked) > 4 * len(self._open) + BURST:
            self._ranked = [(client.in_flight, client.name, id(client), client) for client in self._open]
            heapq.heapify(self._ranked)

    def send(
        self, group: asyncio.TaskGroup, engine: EngineClient, attempt: Coroutine[Any, Any, None], *, name: str
    ) -> asyncio.Task[None]:
        """Run an attempt, which counts from now on: a burst must not see an engine as idle until its first one runs."""
        engine.in_flight += 1
        self.in_flight += 1
        if not self._sent[engine]:
            asyncio.get_running_loop().call_later(PACE_S, self._refill, engine)
        self._sent[engine] += 1
        self._rank(engine)
        task = group.create_task(attempt, name=name)
        task.add_done_callback(lambda _: self._ended(engine))
        return task

    def _refill(self, engine: EngineClient) -> None:
        if self._sent.pop(engine) >= BURST:
            self._rank(engine)
            self._changed()

    async def run(self) -> None:
        """Keep one watcher for each gate until cancelled."""
        watchers: dict[Endpoint, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._renamed.clear()
                for endpoint in set(watchers) - set(self._named):
                    watchers.pop(endpoint).cancel()
                    self._clients.pop(endpoint).abandon()
                for endpoint in self._named:
                    if endpoint not in watchers:
                        engine = self._clients[endpoint] = self._client_of(endpoint)
                        watchers[endpoint] = group.create_task(engine.watch(), name=f"gate/{endpoint.pod}")
                self._gate_changed()
                await self._renamed.wait()

    def _client_of(self, endpoint: Endpoint) -> EngineClient:
        return EngineClient(
            endpoint,
            self._client,
            settle_s=self._settle_s,
            changed=self._gate_changed,
            count=self._count,
            accepts_unversioned=self._accepts_unversioned,
        )

    def _gate_changed(self) -> None:
        self._open = [client for client in self._clients.values() if client.is_open]
        self._named_so = {client.name: client for client in self._open}
        self._rank()
        was_open, self._any_open = self._any_open, bool(self._open)
        if self._any_open and not was_open:
            loop = asyncio.get_running_loop()
            self._share_until = loop.time() + SHARE_S
            loop.call_later(SHARE_S + MOMENT_S, self._changed)
        self._changed()

    def _ended(self, engine: EngineClient) -> None:
        engine.in_flight -= 1
        self.in_flight -= 1
        self._rank(engine)
        self._changed()
