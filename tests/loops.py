"""This module holds the event loop of the tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

ENDING_S = 5.0  # longer than any connection takes that somebody has closed, TLS included


class ConnectionsLeft(AssertionError):
    """A test, or what it tests, opened connections that nobody closed."""


class TidyLoop(asyncio.SelectorEventLoop):
    """An event loop that closes after its connections have ended.

    One that is closed in order may still have bytes to write or, over TLS, an answer to wait for when its test is over.
    If the loop is gone by then, it never ends, and fails whichever test runs when it is collected. One that nobody has
    closed fails here, in the test that opened it.
    """

    _transports: Mapping[int, asyncio.Transport]  # asyncio's own, by file descriptor

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
