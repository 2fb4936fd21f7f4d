"""This module runs and ends a server of aiohttp in a test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web

ACCEPTING = 4  # turns of the loop from when a connection is taken from the kernel until it is one of the server's


async def listen(stack: AsyncExitStack, app: web.Application) -> int:
    """Serve on a port of this machine, and return it, until the stack closes."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05, handler_cancellation=True)
    await runner.setup()
    stack.push_async_callback(end, runner)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port: int = runner.addresses[0][1]
    return port


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    """Yield the address of a server that ends with the context."""
    async with AsyncExitStack() as stack:
        yield f"http://127.0.0.1:{await listen(stack, app)}"


def hang_up(runner: web.BaseRunner) -> None:
    """Every connection breaks at once, as those of a process that is killed."""
    for connection in runner.server.connections if runner.server else ():
        if connection.transport is not None:
            connection.transport.abort()


async def end(runner: web.BaseRunner) -> None:
    """No connection is left. One over TLS that is closed in order waits for its peer, and may outlive the loop.

    Nor does asyncio close one that it is about to accept while its server closes: none is taken from here on.
    """
    for site in runner.sites:
        for listening in site._server.sockets if isinstance(site._server, asyncio.Server) else ():
            asyncio.get_running_loop().remove_reader(listening.fileno())
    for _ in range(ACCEPTING):
        await asyncio.sleep(0)
    hang_up(runner)
    await runner.cleanup()
