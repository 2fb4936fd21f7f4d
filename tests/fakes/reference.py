"""A reference that a test steers: its route over real TLS, and log-probabilities that follow from tokens alone.

What it answers is held to what the real one answers by `contract/test_reference_contract.py`.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from aiohttp import web
from aiohttp.typedefs import Handler
from numpy.typing import NDArray

from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.reference_wire import MAX_SAMPLE_BYTES, SCORE_PATH, ScoreError
from colocated_rl_member.data import data_application
from colocated_rl_member.tls import MemberTls
from fakes import serving

ERRORS = {400: "BadRequest", 401: "TokenNeeded", 404: "NotFound"}


def reference_logp(ids: NDArray[np.int32], temperature: float) -> NDArray[np.float32]:
    """Return the log-probability of each token."""
    return (-0.25 - (ids % 7) / 16 - temperature / 32).astype(np.float32)


class FakeReference:
    """One pod. holds: nobody is answered meanwhile. faults: status of the next answers, 0 for one that is cut short."""

    def __init__(self, name: str, tls: MemberTls, *, vocabulary: int = 2**31) -> None:
        self.name = name
        self.faults: deque[int] = deque()
        self.is_down = False  # every answer is 503
        self.asked: list[tuple[int, int, float]] = []  # tokens, start, temperature
        self.at_once = self.most_at_once = 0
        self._free = asyncio.Event()
        self._free.set()
        self._tls = tls
        self._vocabulary = vocabulary
        self._port = 0

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(pod=self.name, address="127.0.0.1", port=self._port)

    def hold(self) -> None:
        self._free.clear()

    def release(self) -> None:
        self._free.set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[FakeReference]:
        application = data_application(self._tls, max_request_bytes=MAX_SAMPLE_BYTES + 1)
        application.middlewares.insert(0, _in_its_words)
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
            await serving.end(runner)

    async def _score(self, request: web.Request) -> web.Response:
        ids, start, temperature = await self._question(request)
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
            return web.Response(status=status, text=f"as the test has it: {status}")
        return web.Response(body=logp if status else logp[:-4], content_type="application/octet-stream")

    async def _question(self, request: web.Request) -> tuple[NDArray[np.int32], int, float]:
        """Raises HTTPBadRequest."""
        if (request.content_length or 0) > MAX_SAMPLE_BYTES:
            raise web.HTTPBadRequest(text="larger than any sample", headers={"Connection": "close"})
        body = await request.read()
        try:
            start, temperature = int(request.query["start"]), float(request.query["temperature"])
            ids = np.frombuffer(body, "<i4")
        except (KeyError, ValueError) as error:
            raise web.HTTPBadRequest(text=f"no question: {error}") from error
        is_of_the_model = 1 <= start < len(ids) and 0 <= ids.min() <= ids.max() < self._vocabulary
        if not (is_of_the_model and math.isfinite(temperature) and temperature > 0):
            raise web.HTTPBadRequest(text="no question that a model has an answer to")
        return ids, start, temperature


@web.middleware
async def _in_its_words(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Everything but an answer is a `ScoreError`."""
    try:
        answer = await handler(request)
    except web.HTTPException as refused:
        answer = refused
    if answer.status == 200:
        return answer
    assert isinstance(answer, web.Response)
    error = ScoreError(error=ERRORS.get(answer.status, "Fault"), message=answer.text or "")
    refusal = web.json_response(text=error.model_dump_json(by_alias=True), status=answer.status)
    if answer.keep_alive is False or answer.headers.get("Connection") == "close":
        refusal.force_close()
    return refusal
