"""All gates of the job: follows those the operator names, and says which one takes the next request.

A sample goes back to the engine that has its prefix, if that one is open; otherwise to the one with the fewest of our
requests. Engines that are named no more are forgotten at once, their requests end as lost attempts (H36).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from colocated_rl_api.member_wire import Endpoint
from colocated_rl_member.data import DataClient
from colocated_rl_rollout.engine_client import EngineClient


class Engines:
    """Gates by endpoint. `follow` may be called at any time while `run` is up.

    changed: called when a gate's state has changed.
    """

    def __init__(self, client: DataClient, *, settle_s: float, changed: Callable[[], None]) -> None:
        self._client = client
        self._settle_s = settle_s
        self._changed = changed
        self._named: tuple[Endpoint, ...] = ()
        self._renamed = asyncio.Event()
        self._clients: dict[Endpoint, EngineClient] = {}

    def follow(self, endpoints: Iterable[Endpoint]) -> None:
        """These are the gates from now on."""
        named = tuple(endpoints)
        if named != self._named:
            self._named = named
            self._renamed.set()

    @property
    def open(self) -> list[EngineClient]:
        return [client for client in self._clients.values() if client.is_open]

    def pick(self, *, preferred: str | None = None, step: int | None = None) -> EngineClient | None:
        """The gate for a request, of those that serve the weights of `step` if it matters; None while there is none."""
        candidates = [
            client
            for client in self._clients.values()
            if client.takes_requests and (step is None or (client.version and client.version.step == step))
        ]
        return next(
            (client for client in candidates if client.name == preferred),
            min(candidates, key=lambda client: (client.in_flight, client.name), default=None),
        )

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
                        engine = EngineClient(endpoint, self._client, settle_s=self._settle_s, changed=self._changed)
                        self._clients[endpoint] = engine
                        watchers[endpoint] = group.create_task(engine.watch(), name=f"gate/{endpoint.pod}")
                self._changed()
                await self._renamed.wait()
