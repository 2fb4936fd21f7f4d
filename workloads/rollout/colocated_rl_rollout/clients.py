"""Serve clients: each write has a deadline, who does not read is disconnected, and few threads work for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import web

ResultT = TypeVar("ResultT")
CLIENT_S = 30.0  # for a client to read a piece of an answer
PIECE_BYTES = 256 * 1024  # so slow may a client be: 70 kbit/s


class ClientGone(Exception):
    """The client does not read its answer any more."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__()
        self.response = response


async def send_within_deadline(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Send an answer and return once its client has taken it; the framework would wait for ever. Raises ClientGone."""
    async with reading(request, response):
        await response.prepare(request)
    if isinstance(response, web.Response) and isinstance(response.body, bytes) and request.method != "HEAD":
        body, response.body = response.body, None
        await write_within_deadlines(request, response, body)
    async with reading(request, response):
        await response.write_eof()
    return response


async def write_within_deadlines(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write in pieces, each with a deadline of its own, so that whoever reads slowly gets all. Raises ClientGone."""
    for begin in range(0, len(data), PIECE_BYTES):
        async with reading(request, response):
            await response.write(data[begin : begin + PIECE_BYTES])


@asynccontextmanager
async def reading(request: web.Request, response: web.StreamResponse) -> AsyncIterator[None]:
    """Disconnect the client if it does not read what the block writes in time. Raises ClientGone."""
    try:
        async with asyncio.timeout(CLIENT_S):
            yield
    except (OSError, TimeoutError) as error:
        if request.transport is not None:
            request.transport.abort()
        raise ClientGone(response) from error


async def wait_until_set(event: asyncio.Event, within_s: float) -> bool:
    """Wait for the event; return whether it is set in time."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def in_thread(work: Callable[[], ResultT], *, places: asyncio.Semaphore) -> ResultT:
    """Work in a thread, of which there are as many at a time as `places`: others write batches and make prompts.

    A thread can't be cancelled: where its client has left, it keeps its place until it is done.
    """
    await places.acquire()
    working = asyncio.get_running_loop().run_in_executor(None, work)
    working.add_done_callback(lambda _: places.release())
    return await asyncio.shield(working)
