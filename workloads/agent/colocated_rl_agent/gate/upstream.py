"""This module connects to the pod's engine: requests go out whole, answers come back piece by piece.

It owns the loopback connections, reused while the engine keeps them, and the time that an engine may be silent. Nothing
is sent twice. An answer that ends before its framing does raises `UpstreamLost`, however much of it came.

Pieces of many answers come in one turn of the event loop. All are read first, then handled one after the other: with a
system call before each, the same code takes longer. For the same reason every class that a piece touches has slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

from colocated_rl_agent.drivers.sglang import IDLE_CONNECTION_S
from colocated_rl_agent.gate.deadline import Deadline
from colocated_rl_api.logs import failure_of

SILENCE_S = 600.0  # allowed between two events, up to twice as long: a request may queue in a busy engine
CONNECT_S = 5.0
MAX_HEAD_BYTES = 64 * 1024
MAX_HEARD_BYTES = 1024 * 1024  # read and not handled yet, of all answers

Take = Callable[[int, list[bytes]], bool]
"""Gets the status of an answer and the pieces of its body that came at once, and returns whether the answer got on by
them. What it raises ends the exchange."""


class UpstreamLost(OSError):
    """The connection broke, or the engine sent no valid answer."""


class Upstream:
    """An Upstream holds the connections to one engine, by its URL."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._head = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: ".encode()
        self._idle: dict[UpstreamConnection, None] = {}  # the newest is used first
        self._is_closed = False
        self._heard: list[tuple[UpstreamConnection, bytes]] = []
        self._heard_bytes = 0

    async def connect(self) -> UpstreamConnection:
        """Return a connection for one exchange. Raises OSError."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.is_open:
                return connection
        async with asyncio.timeout(CONNECT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: UpstreamConnection(self), self._host, self._port
            )
        return connection

    def request(self, path: str, body: bytes) -> bytes:
        return b"POST %b HTTP/1.1\r\n%b%d\r\n\r\n%b" % (path.encode(), self._head, len(body), body)

    def keep(self, connection: UpstreamConnection) -> bool:
        """Keep the connection for the next exchange, unless closed, and return whether it is kept."""
        if not self._is_closed:
            self._idle[connection] = None
        return not self._is_closed

    def hear(self, connection: UpstreamConnection, data: bytes) -> None:
        """Queue data to be handled before the event loop polls for more."""
        if not self._heard:
            asyncio.get_running_loop().call_soon(self._handle)
        self._heard.append((connection, data))
        self._heard_bytes += len(data)
        if self._heard_bytes > MAX_HEARD_BYTES:
            self._handle()

    def _handle(self) -> None:
        heard, self._heard, self._heard_bytes = self._heard, [], 0
        for connection, data in heard:
            connection.handle(data)

    def forget(self, connection: UpstreamConnection) -> None:
        self._idle.pop(connection, None)

    def close(self) -> None:
        """Close idle connections. Exchanges in progress go on to their end."""
        self._is_closed = True
        for connection in self._idle:
            connection.abort()
        self._idle.clear()


class UpstreamConnection(asyncio.Protocol):
    """An UpstreamConnection carries one exchange at a time."""

    __slots__ = (
        "_deadline", "_ended", "_head_bytes", "_is_kept", "_is_paused", "_is_silent", "_is_whole", "_parser",
        "_pieces", "_status", "_take", "_transport", "_upstream", "on_body",
    )  # fmt: skip

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._take: Take | None = None
        self._ended: asyncio.Future[int] | None = None
        self._status = self._head_bytes = 0
        self._pieces: list[bytes] = []  # pieces of a body that came together
        self.on_body = self._pieces.append  # for the parser
        self._is_whole = False  # the answer is complete
        self._is_kept = False
        self._is_paused = False
        self._is_silent = False  # the answer did not get on since the deadline was set

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    async def exchange(self, request: bytes, take: Take) -> int:
        """Send a request; return the status once `take` got the whole answer. Raises OSError, and errors of `take`."""
        if not self.is_open:
            raise UpstreamLost("the connection broke before it was used")
        self._take = take
        self._ended = asyncio.get_running_loop().create_future()
        self._head_bytes = 0
        self._is_whole = self._is_kept = self._is_silent = False
        self._transport.write(request)
        del request  # the engine has it: do not hold it until the answer is complete
        self._deadline.set(SILENCE_S)
        try:
            status = await self._ended
        except BaseException:
            self.abort()
            raise
        finally:
            self._take = self._ended = None
        self.resume()
        if self._is_kept and not self._transport.is_closing() and self._upstream.keep(self):
            self._deadline.set(IDLE_CONNECTION_S)
        else:
            self._transport.close()
        return status

    def pause(self) -> None:
        """Stop reading for now: further pieces stay at the engine."""
        if not self._is_paused and self.is_open:
            self._is_paused = True
            self._deadline.clear()
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and self.is_open:
            self._is_paused = False
            self._deadline.set(SILENCE_S)
            self._transport.resume_reading()

    def abort(self) -> None:
        self._transport.abort()

    # ----------------------------------------------------------------------------------------------- for asyncio
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._parser = HttpResponseParser(self)
        self._deadline = Deadline(self._late)

    def data_received(self, data: bytes) -> None:
        if self._ended is None or self._ended.done():  # no exchange is in progress
            self.abort()
        else:
            self._upstream.hear(self, data)

    def handle(self, data: bytes) -> None:
        """Parse queued data and pass its body to `take`; end the exchange if it is complete or failed."""
        if self._ended is None or self._ended.done():
            self.abort()
            return
        lost: Exception | None = self._parse(data)
        try:
            if self._pieces and self._take is not None and self._take(self._status, self._pieces):
                self._is_silent = False
        except Exception as error:  # noqa: BLE001 - no error of one answer is another's
            lost = error
        self._pieces.clear()
        if lost is not None:
            self._fail(lost)
        elif self._is_whole:
            self._deadline.clear()
            self._ended.set_result(self._status)

    def _parse(self, data: bytes) -> UpstreamLost | None:
        """Parse data, and return the error that ends the answer, if any."""
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._is_kept = False
            if not self._is_whole:
                return UpstreamLost(f"no answer of HTTP: {error}")
        if self._head_bytes >= 0:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                return UpstreamLost(f"a head of more than {MAX_HEAD_BYTES} bytes")
        return None

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.end()
        del self._parser  # it holds this connection
        self._upstream.forget(self)
        self._fail(UpstreamLost(f"the connection {f'broke: {failure_of(error)}' if error else 'was closed'}"))

    def _late(self) -> None:
        if self._ended is None:
            self.abort()
        elif self._is_silent:
            self._fail(UpstreamLost(f"silent for {SILENCE_S:.0f} s"))
        else:
            self._is_silent = True
            self._deadline.set(SILENCE_S)

    def _fail(self, error: Exception) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    # -------------------------------------------------------------------------------------------- for the parser
    def on_message_begin(self) -> None:
        if self._is_whole:
            raise UpstreamLost("an answer that nobody asked for")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._status < 100 or self._status == 101:  # nobody asked for another protocol
            raise UpstreamLost(f"an answer of status {self._status}")
        if self._status >= 200:
            self._head_bytes = -1  # the head is complete: count no further

    def on_message_complete(self) -> None:
        if self._status >= 200:
            self._is_whole = True
            # after an error of its own uvicorn hangs up without announcing it: a request sent meanwhile would be lost
            self._is_kept = self._status < 500 and self._parser.should_keep_alive()
