"""This driver asks a reference beside the engines, over its Unix socket, by `colocated_rl_api.reference_wire`."""

from __future__ import annotations

import io
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import aiohttp
from yarl import URL

from colocated_rl_agent.drivers.base import OutcomeUnknown, read_body, within
from colocated_rl_api.reference_wire import READY_PATH, SCORE_PATH

READY_S = 10.0
AT_ONCE = 64  # connections, each a thread of the reference; further requests wait
MAX_ERROR_BYTES = 64 * 1024


class Scored(NamedTuple):
    """Holds an answer of the reference: log-probabilities as bytes with status 200, else a `ScoreError`."""

    status: int
    body: bytes


class ReferenceProcess:
    """A ReferenceProcess is the client of one reference. answer_s: deadline of its answer to a sample."""

    def __init__(self, socket: Path, *, answer_s: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(socket), limit=AT_ONCE),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        )
        self._answer_s = answer_s

    async def close(self) -> None:
        await self._session.close()

    async def is_ready(self) -> bool:
        """Return whether it has loaded its model. False while the socket is not there yet."""
        try:
            async with within(READY_S, READY_PATH), self._session.get(f"http://reference{READY_PATH}") as answer:
                return answer.status == HTTPStatus.OK
        except OutcomeUnknown:
            return False

    async def score(self, query: str, sample: bytes) -> Scored:
        """Return the answer to a request, whatever it is. Raises OutcomeUnknown."""
        url = URL(f"http://reference{SCORE_PATH}?{query}", encoded=True)
        async with within(self._answer_s, SCORE_PATH), self._session.post(url, data=io.BytesIO(sample)) as answer:
            body = await read_body(answer, SCORE_PATH, most_bytes=max(len(sample), MAX_ERROR_BYTES))
            return Scored(answer.status, body)
