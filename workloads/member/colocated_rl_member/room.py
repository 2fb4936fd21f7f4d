"""How many connections a port takes. Who comes beyond them is told so when it asks, and may come again later.

Each connection costs a member memory, with TLS some 100 KB, whoever is at the other end. Handshakes that are under way
are bounded by their deadline alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import cast

from colocated_rl_member.connection import error_body

TOLD_AT_MOST = 256  # at the same time; others are hung up on
LINGER_S = 2.0  # to ask, and to see the answer
BODY = json.dumps(error_body(429, "this port has no room for another connection: come again later")).encode()
ANSWER = (
    b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    b"Retry-After: 1\r\nConnection: close\r\n\r\n%b" % (len(BODY), BODY)
)


class RoomFor:
    """Makes the protocols of a port: its own for so many connections, beyond them such as turn away.

    held: how many of its own are open.
    """

    def __init__(self, most: int, held: Callable[[], int], own: Callable[[], asyncio.BaseProtocol]) -> None:
        self._most, self._held, self._own = most, held, own
        self._told: set[_NoRoom] = set()

    def __call__(self) -> asyncio.BaseProtocol:
        return self._own() if self._held() < self._most else _NoRoom(self._told)


class _NoRoom(asyncio.Protocol):
    """Answers when something was asked: before that, its end would reach a caller as a broken connection."""

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
