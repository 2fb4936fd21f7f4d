"""This module bounds a port's connections. One too many gets 429 for its first request, and may come again later.

Each connection costs a member memory, some 100 KB with TLS, and a descriptor, whoever is at the other end.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import cast

from colocated_rl_api.logs import log
from colocated_rl_member.connection import error_body

LOG = logging.getLogger(__name__)

LINGER_S = 2.0  # for the caller to send its request and read the answer
BODY = json.dumps(error_body(429, "this port has no room for another connection: come again later")).encode()
ANSWER = (
    b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    b"Retry-After: 1\r\nConnection: close\r\n\r\n%b" % (len(BODY), BODY)
)


class Bound:
    """Bounds a number of things. The log reports once that it is reached, and again after three quarters of it."""

    def __init__(self, most: int, event: str) -> None:
        self.most = most
        self._event = event
        self._is_logged = False

    def is_reached(self, count: int) -> bool:
        if count >= self.most and not self._is_logged:
            self._is_logged = True
            log(LOG, self._event, logging.WARNING, most=self.most)
        elif count <= self.most * 3 // 4:
            self._is_logged = False
        return count >= self.most


class RoomFor:
    """A RoomFor makes a port's protocols: its own for up to `most` connections, beyond them ones that turn away.

    held: returns how many of its own are open. own: makes one, for a caller at that address. refused: connections that
    are turned away. freed: one of those has ended.
    """

    def __init__(self, most: int, held: Callable[[], int], own: Callable[[str], asyncio.BaseProtocol]) -> None:
        self._bound, self._held, self._own = Bound(most, "port has no room"), held, own
        self.refused: set[asyncio.BaseProtocol] = set()
        self.freed = asyncio.Event()

    def __call__(self, peer: str) -> asyncio.BaseProtocol:
        return _NoRoom(self) if self._bound.is_reached(self._held()) else self._own(peer)


class _NoRoom(asyncio.Protocol):
    """A _NoRoom answers after the first data: closing earlier would reach the caller as a broken connection."""

    def __init__(self, room: RoomFor) -> None:
        self._room = room
        self._has_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._room.refused.add(self)
        self._deadline = asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        if not self._has_answered:
            self._has_answered = True
            self._transport.write(ANSWER)

    def connection_lost(self, error: Exception | None) -> None:
        self._room.refused.discard(self)
        self._room.freed.set()
        self._deadline.cancel()
