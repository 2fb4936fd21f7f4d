"""A reference that a test steers: its route over real TLS, and log-probabilities that follow from tokens alone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.reference_wire import MAX_SAMPLE_BYTES, SCORE_PATH, ScoreError
from colocated_rl_member.data import data_application
from colocated_rl_member.tls import MemberTls


def reference_logp(ids: NDArray[np.int32], temperature: float) -> NDArray[np.float32]:
    """Of each token."""
    return (-0.25 - (ids % 7) / 16 - temperature / 32).astype(np.float32)


class FakeReference:
    """One pod. holds: nobody is answered meanwhile. faults: status of the next answers, 0 for one that is cut short."""

    def __init__(self, name: str, tls: MemberTls) -> None:
        self.name = name
        self.faults: deque[int] = deque()
        self.is_down = False  # every answer is 503
        self.asked: list[tuple[int, int, float]] = []  # tokens, start, temperature
        self.at_once = self.most_at_once = 0
        self._free = asyncio.Event()
        self._free.set()
        self._tls = tls
        self._port = 0

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(pod=self.name, address="127.0.0.1", port=self._port)

    def hold(self) -> None:
        self._free.clear()

    def let_go(self) -> None:
        self._free.set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[FakeReference]:
        application = data_application(self._tls, max_request_bytes=MAX_SAMPLE_BYTES)
        application.add_routes([web.post(SCORE_PATH, self._score)])
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._tls.data_context())
        await site.start()
        assert runner.addresses
        self._port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _score(self, request: web.Request) -> web.Response:
        ids = np.frombuffer(await request.read(), "<i4")
        start, temperature = int(request.query["start"]), float(request.query["temperature"])
        self.asked.append((len(ids), start, temperature))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self._free.wait()
        finally:
            self.at_once -= 1
        status = self.faults.popleft() if self.faults else 503 if self.is_down else 200
        logp = reference_logp(ids, temperature)[start:].tobytes()
        if status > 200:
            words = ScoreError(error="Fault", message=f"as the test has it: {status}")
            return web.Response(status=status, text=words.model_dump_json(by_alias=True))
        return web.Response(body=logp if status else logp[:-4], content_type="application/octet-stream")
