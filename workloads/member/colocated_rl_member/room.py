"""This module bounds a port's connections. One too many gets 429 for its first request, and may come again later.

Each connection costs a member memory, some 100 KB with TLS, whoever is at the other end. Only their deadline bounds
handshakes in progress.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import cast

from colocated_rl_member.connection import error_body

TOLD_AT_MOST = 256  # at the same time; further connections are aborted
LINGER_S = 2.0  # for the caller to send its request and read the answer
BODY = json.dumps(error_body(429, "this port has no room for another connection: come again later")).encode()
ANSWER = (
    b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    b"Retry-After: 1\r\nConnection: close\r\n\r\n%b" % (len(BODY), BODY)
)


class RoomFor:
    """A RoomFor makes a port's protocols: its own for up to `most` connections, beyond them ones that turn away.

    held: returns how many of its own are open.
    """

    def __init__(self, most: int, held: Callable[[], int], own: Callable[[], asyncio.BaseProtocol]) -> None:
        self._most, self._held, self._own = most, held, own
        self._told: set[_NoRoom] = set()

    def __call__(self) -> asyncio.BaseProtocol:
        return self._own() if self._held() < self._most else _NoRoom(self._told)


class _NoRoom(asyncio.Protocol):
    """A _NoRoom answers after the first data: closing earlier would reach the caller as a broken connection."""

    def __init__(self, told: set[_NoRoom]) -> None:
        self._told = told
        self._has_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if len(self._told) >= TOLD_AT_MOST:
            self._transport.abort()
            return
        self._told.add(self)
        self._deadline = asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        if not self._has_answered:
            self._has_answered = True
            self._transport.write(ANSWER)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._told:
            self._told.remove(self)
            self._deadline.cancel()
