"""Followers watch samples as they end: they get a line of JSON for each, in order of ending, once it is durable.

A sample ends once: it has its reward, or failed, or was given up. Its place among all that ended (`ended`, from 1 on,
without a gap) is durable with it, so a follower that lost its connection resumes after the last place that it saw, also
at the controller's next start. Later moves of a sample (sealed, trained, filtered) are not reported again.

A follower costs nothing while nothing ends, and then at most one short read of the file every PACE_S, one follower at a
time. A slow reader holds a page of lines; one that does not read for CLIENT_S is disconnected.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from colocated_rl_rollout.clients import ClientGone, in_thread, reading, wait_until_set
from colocated_rl_rollout.rules.samples import SampleState
from colocated_rl_rollout.store.reader import StoreReader, Words

ReadT = TypeVar("ReadT")
AT_MOST = 16
PAGE = 500  # lines read at a time
PAGE_OF_TEXTS = 50
PACE_S = 0.25
SILENCE_S = 15.0  # then an empty line keeps the connection alive
LINES = "application/x-ndjson"
BEGINS_AFTER = "X-Begins-After"


class Followers:
    """Serves followers, at_most at a time. words: of a sample. pace_s: between reads. silence_s: to an empty line."""

    def __init__(
        self,
        store: StoreReader,
        words: Words,
        *,
        at_most: int = AT_MOST,
        pace_s: float = PACE_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._store = store
        self._words = words
        self._at_most = at_most
        self._pace_s, self._silence_s = pace_s, silence_s
        self._one_reads = asyncio.Semaphore(1)
        self._is_over = False

    def end(self) -> None:
        """Send all followers the last samples, then end their answers: no sample ends any more."""
        self._is_over = True
        for news in self._store.followers:
            news.set()

    async def serve(
        self, request: web.Request, *, after: int, state: SampleState | None, text: bool
    ) -> web.StreamResponse:
        """Serve a follower until the client leaves, or the controller ends."""
        if len(self._store.followers) >= self._at_most:
            raise web.HTTPTooManyRequests(
                text=f"{self._at_most} clients follow the samples already: end one of them\n",
                headers={"Retry-After": "10"},
            )
        news = asyncio.Event()
        self._store.followers.add(news)
        try:
            return await self._send(request, news, after, state, self._words if text else None)
        except ClientGone as gone:
            return gone.response
        finally:
            self._store.followers.discard(news)

    async def _send(
        self,
        request: web.Request,
        news: asyncio.Event,
        after: int,
        state: SampleState | None,
        words: Words | None,
    ) -> web.StreamResponse:
        headers = {"Content-Type": LINES, "Cache-Control": "no-cache", BEGINS_AFTER: str(after)}
        response = web.StreamResponse(headers=headers)
        async with reading(request, response):
            await response.prepare(request)
        while after < self._store.ended or not self._is_over:
            news.clear()
            if after < self._store.ended:
                lines, after = await self._lines(after, state, words)
                for line in lines:
                    async with reading(request, response):
                        await response.write(line)
                await asyncio.sleep(self._pace_s)
            elif not await wait_until_set(news, self._silence_s):
                async with reading(request, response):
                    await response.write(b"\n")
        async with reading(request, response):
            await response.write_eof()
        return response

    async def _lines(self, after: int, state: SampleState | None, words: Words | None) -> tuple[list[bytes], int]:
        """Return a page of lines, and the place that it reaches to."""
        up_to, page = self._store.ended, PAGE_OF_TEXTS if words else PAGE

        def read() -> tuple[list[bytes], int]:
            rows = self._store.ended_after(after, up_to, state, limit=page, words=words)
            return [json.dumps(row).encode() + b"\n" for row in rows], rows[-1]["ended"] if len(rows) == page else up_to

        await self._store.flushed()
        return await self.in_turn(read)

    async def in_turn(self, read: Callable[[], ReadT]) -> ReadT:
        """Read the store in a thread, one after the other."""
        return await in_thread(read, places=self._one_reads)
