"""This module holds the event loop of the tests."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

ENDING_S = 60.0  # longer than any connection takes that somebody has closed: TLS waits half a minute for a busy peer


class ConnectionsLeft(AssertionError):
    """A test, or what it tests, opened connections that nobody closed."""


class TidyLoop(asyncio.SelectorEventLoop):
    """An event loop that closes after its connections have ended.

    One that is closed in order may still have bytes to write or, over TLS, an answer to wait for when its test is over.
    If the loop is gone by then, it never ends, and fails whichever test runs when it is collected. One that nobody has
    closed fails here, in the test that opened it. One that is accepted in the turn in which its server closes is closed
    too: asyncio forgets it half-made (CPython 3.11, `base_events.Server._attach`), to the same effect.
    """

    _transports: Mapping[int, asyncio.Transport]  # asyncio's own, by file descriptor

    async def _accept_connection2(
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        conn: socket.socket,
        extra: dict[str, Any],
        sslcontext: ssl.SSLContext | None = None,
        server: asyncio.Server | None = None,
        *deadlines: float | None,
    ) -> None:
        if server is not None and not server.sockets:
            conn.close()
            return
        await super()._accept_connection2(protocol_factory, conn, extra, sslcontext, server, *deadlines)  # type: ignore[misc]

    def time(self) -> float:
        """Count whole milliseconds, as uvloop does, on which the product runs: timers come early by a rounding."""
        return int(1000 * super().time()) / 1000

    def close(self) -> None:
        """Raises ConnectionsLeft."""
        if self.is_closed():
            return
        try:
            deadline = self.time() + ENDING_S
            while (left := self._open()) and self.time() < deadline:
                self.run_until_complete(asyncio.sleep(0.001))
            if left:
                for each in left:
                    each.abort()
                self.run_until_complete(asyncio.sleep(0))  # asyncio closes their sockets in its next turn
                raise ConnectionsLeft(f"close what the test opened: {', '.join(left.values())}")
        finally:
            super().close()

    def _open(self) -> dict[asyncio.Transport, str]:
        """Return connections that have a socket, and how asyncio describes each."""
        known = list(self._transports.values())
        return {each: repr(each) for each in known if getattr(each, "_sock", None) is not None}
