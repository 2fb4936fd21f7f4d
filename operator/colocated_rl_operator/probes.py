"""Serve the operator's own port, in standbys too: metrics for Prometheus, probes for the kubelet.

Anybody may connect to it. Whoever holds connections must not keep the kubelet from its answer, which would have the
container ended, nor take the descriptors that calls of the API server need: beyond MAX_CONNECTIONS the oldest ends.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol, Self

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from colocated_rl_api.listening import EVERYWHERE, listen
from colocated_rl_api.shared import SharedResult
from colocated_rl_operator.metrics import OperatorMetrics

MAX_CONNECTIONS = 256
MAX_LEASE_AGE_S = 60.0  # the Lease's own thread ends the process long before


class Leadership(Protocol):
    @property
    def age_s(self) -> float | None: ...


class Probes:
    def __init__(self, metrics: OperatorMetrics, leadership: Leadership, *, port: int) -> None:
        self._text = SharedResult(lambda: generate_latest(metrics.registry))
        self._leadership = leadership
        self._asked_port = port
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._show_metrics),
                web.get("/healthz", self._show_health),
                web.get("/readyz", self._show_health),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        self._listening: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._listening is not None, "inside the context"
        return int(self._listening.sockets[0].getsockname()[1])

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        listener = listen(EVERYWHERE, self._asked_port)
        self._listening = await asyncio.get_running_loop().create_server(self._connection, sock=listener)
        return self

    def _connection(self) -> asyncio.Protocol:
        """Make a connection, and break off the oldest one where all places are taken."""
        http = self._runner.server
        assert http is not None, "it was set up"
        open_ = [each for each in http.connections if each.transport is not None and not each.transport.is_closing()]
        if len(open_) >= MAX_CONNECTIONS and open_[0].transport is not None:
            open_[0].transport.abort()
        return http()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=await self._text.get(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _show_health(self, request: web.Request) -> web.Response:
        """Report health: any answer shows that the event loop runs. A candidate is as healthy as a leader."""
        age_s = self._leadership.age_s
        if age_s is not None and age_s > MAX_LEASE_AGE_S:
            return web.Response(status=503, text=f"lease not renewed for {age_s:.0f} s\n")
        return web.Response(text="candidate\n" if age_s is None else "leader\n")
