"""A call is one request at the data port and its answer: all that a handler sees of HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from colocated_rl_api.gate_wire import MAX_REQUEST_BYTES

PHRASES = {status.value: status.phrase for status in HTTPStatus}


class Malformed(Exception):
    """The request can't be served here; its connection ends with this answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def too_large() -> Malformed:
    return Malformed(413, f"a body has at most {MAX_REQUEST_BYTES} bytes")


class Caller(Protocol):
    """A Caller is the connection of a request, as its handler needs it."""

    caller_s: float  # how long the caller may take to send or to read
    is_stalled: bool  # it does not read what was written

    def want(self, call: Call) -> None:
        """Read the rest of the request's body."""

    def write(self, data: bytes) -> None: ...
    def abort(self) -> None: ...
    def stalls_for(self, within_s: float) -> None:
        """Let the caller go at most `within_s` seconds without reading from now on."""


class Call:
    """A Call is one request and its answer. `flows`: called when `is_stalled` has changed."""

    __slots__ = (
        "_arrived", "_body", "_connection", "broken", "flows", "has_begun", "headers", "is_answered",
        "is_whole", "keep_alive", "may_stall_s", "method", "target",
    )  # fmt: skip

    def __init__(self, connection: Caller) -> None:
        self._connection = connection
        self._body = bytearray()
        self._arrived: asyncio.Future[None] | None = None
        self.target = b""
        self.method = ""  # empty until the head has arrived
        self.headers: dict[bytes, str] = {}
        self.keep_alive = True
        self.broken: Malformed | None = None
        self.is_whole = False  # the whole request has arrived
        self.has_begun = False
        self.is_answered = False
        self.may_stall_s = connection.caller_s
        self.flows: Callable[[], None] | None = None

    @property
    def path(self) -> str:
        target = self.target.partition(b"?")[0].decode("latin-1")
        if target.startswith(("http://", "https://")):  # sent by clients that take this for a proxy
            return "/" + target.partition("://")[2].partition("/")[2]
        return target

    @property
    def has_body(self) -> bool:
        return b"content-length" in self.headers or b"transfer-encoding" in self.headers

    @property
    def is_stalled(self) -> bool:
        return self._connection.is_stalled

    # -------------------------------------------------------------------------------------------------- its request
    def arrive(self, piece: bytes) -> int:
        """Add a piece of the body and return how many bytes wait to be read. Raises Malformed for a body too large."""
        if self.is_answered:
            return 0
        if len(self._body) + len(piece) > MAX_REQUEST_BYTES:
            raise too_large()
        self._body += piece
        return 0 if self._arrived is not None else len(self._body)

    def wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def read(self) -> bytes:
        """Return the whole body. Raises Malformed."""
        if not self.is_whole and self.broken is None:
            self._arrived = asyncio.get_running_loop().create_future()
            self._connection.want(self)
            await self._arrived
        if self.broken is not None:
            raise self.broken
        body, self._body = bytes(self._body), bytearray()
        return body

    # --------------------------------------------------------------------------------------------------- its answer
    def answer(self, status: int, body: bytes, *, content_type: str = "application/json", more: str = "") -> None:
        """Send the whole answer, or break the connection off if an answer has already begun."""
        if self.has_begun:
            self.hang_up()
            return
        self.has_begun = self.is_answered = True
        head = self._head(status, content_type, f"Content-Length: {len(body)}\r\n{more}")
        self._connection.write(head if self.method == "HEAD" else head + body)

    def refuse(self, status: int, message: str, *, more: str = "") -> None:
        self.answer(status, json.dumps({"error": message}).encode(), more=more)

    def give(self, data: bytes, content_type: str, *, ends: bool = False) -> None:
        """Send one piece of a chunked answer. ends: it is the last one."""
        piece = b"%x\r\n%b\r\n" % (len(data), data)
        if ends:
            self.is_answered = True
            piece += b"0\r\n\r\n"
        if not self.has_begun:
            self.has_begun = True
            piece = self._head(200, content_type, "Transfer-Encoding: chunked\r\n") + piece
        self._connection.write(piece)

    def hang_up(self) -> None:
        self._connection.abort()

    def wait_for_caller(self, within_s: float) -> None:
        """Let the caller go at most `within_s` seconds without reading from now on."""
        self.may_stall_s = within_s
        self._connection.stalls_for(within_s)

    def _head(self, status: int, content_type: str, framing: str) -> bytes:
        if b"expect" in self.headers and not self.is_whole:  # its body may never come
            self.keep_alive = False
        close = "" if self.keep_alive else "Connection: close\r\n"
        line = f"HTTP/1.1 {status} {PHRASES.get(status, '')}\r\nContent-Type: {content_type}\r\n"
        return f"{line}{framing}{close}\r\n".encode("latin-1")
