"""Serve files of samples to people: a process (`parquet`) makes them, and they are sent as they grow, one at a time."""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from colocated_rl_api.logs import log
from colocated_rl_rollout.clients import ClientGone, reading
from colocated_rl_rollout.rules.samples import SampleState
from colocated_rl_rollout.store.reader import StoreReader

LOG = logging.getLogger(__name__)

PARQUET = "application/vnd.apache.parquet"
PIECE_BYTES = 256 * 1024
QUIET_S = 40.0  # for the next piece
WORDS_AT_MOST = 500


class SampleExports:
    """Serves one file at a time. model: its tokenizer turns tokens into words."""

    def __init__(self, store: StoreReader, model: Path) -> None:
        self._store = store
        self._model = model
        self._is_busy = False

    async def serve(
        self, request: web.Request, *, state: SampleState | None, limit: int | None, text: bool
    ) -> web.StreamResponse:
        """Send the file; where it is not whole, cut the answer off instead of ending it."""
        if self._is_busy:
            raise web.HTTPTooManyRequests(
                text="a file of samples is being written already: ask again when it is done\n",
                headers={"Retry-After": "10"},
            )
        words = [
            *([f"--state={state}"] if state else []),
            *([f"--limit={limit}"] if limit is not None else []),
            *([f"--model={self._model}"] if text else []),
        ]
        self._is_busy = True
        try:
            await self._store.flushed()
            async with _writing(self._store.path.parent, *words) as process:
                return await _handed_on(request, process)
        except ClientGone as gone:
            return gone.response
        finally:
            self._is_busy = False


@asynccontextmanager
async def _writing(store: Path, *words: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "colocated_rl_rollout.pages.parquet", str(store), *words),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        limit=PIECE_BYTES,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _handed_on(request: web.Request, process: Process) -> web.StreamResponse:
    assert process.stdout is not None
    assert process.stderr is not None
    complaints = asyncio.create_task(process.stderr.read(), name="export/complaints")
    response = web.StreamResponse(headers={"Content-Type": PARQUET})
    try:
        while piece := await asyncio.wait_for(process.stdout.read(PIECE_BYTES), QUIET_S):
            async with reading(request, response):
                if not response.prepared:
                    await response.prepare(request)
                await response.write(piece)
        code = await asyncio.wait_for(process.wait(), QUIET_S)
        complaint = (await complaints).decode(errors="replace").strip()[-WORDS_AT_MOST:]
    except TimeoutError:
        code, complaint = -1, f"nothing more of it for {QUIET_S:.0f} s"
    finally:
        complaints.cancel()
    if code == 0:
        async with reading(request, response):
            await response.write_eof()
        return response
    log(LOG, "samples not exported", logging.ERROR, reason=complaint)
    if not response.prepared:
        raise web.HTTPInternalServerError(text=f"no file of samples could be written: {complaint}\n")
    if request.transport is not None:
        request.transport.abort()
    raise ClientGone(response)
