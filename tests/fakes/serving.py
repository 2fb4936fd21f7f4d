"""This module ends a server of aiohttp in a test's own process."""

from __future__ import annotations

from aiohttp import web


def hang_up(runner: web.BaseRunner) -> None:
    """Every connection breaks at once, as those of a process that is killed."""
    for connection in runner.server.connections if runner.server else ():
        if connection.transport is not None:
            connection.transport.abort()


async def end(runner: web.BaseRunner) -> None:
    """No connection is left. One over TLS that is closed in order waits for its peer, and may outlive the loop."""
    hang_up(runner)
    await runner.cleanup()
