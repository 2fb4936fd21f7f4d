"""What is written to a client: no client is waited for without a deadline, and one that does not read is hung up on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

CLIENT_S = 30.0  # for a client to read an answer, or a piece of one


class ClientGone(Exception):
    """The client does not read its answer any more."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__()
        self.response = response


async def send_within_deadline(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """An answer once its client has taken it: the framework would wait for that for ever. Raises ClientGone."""
    async with reading(request, response):
        await response.prepare(request)
        await response.write_eof()
    return response


@asynccontextmanager
async def reading(request: web.Request, response: web.StreamResponse) -> AsyncIterator[None]:
    """While something is written: who does not read it in time is hung up on. Raises ClientGone."""
    try:
        async with asyncio.timeout(CLIENT_S):
            yield
    except (OSError, TimeoutError) as error:
        if request.transport is not None:
            request.transport.abort()
        raise ClientGone(response) from error


async def wait_until_set(event: asyncio.Event, within_s: float) -> bool:
    """Whether it is set by then."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
