"""Speak to one member: the part of WebSocket (RFC 6455) over TLS that the members' server uses with its operator.

It is written by hand because it is the operator's whole cost of a switch: a message is one call of `hear`, without a
task, a queue or a turn of the event loop between the socket and the decision, and a frame for a thousand members is
made once. A text frame is one message; fragments, compression and binary frames were never offered and end the
connection.

Memory is bounded: no message above MAX_MESSAGE_BYTES is read, and little of one at once. Of the frames that a slow
member has not taken, only the newest is kept: frames carry targets, and a newer one replaces an older one. A member
that takes nothing for SEND_DEADLINE_S, or sends nothing between two pings, is lost.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import socket
import ssl
from collections.abc import Callable
from typing import NamedTuple, NoReturn, cast

from colocated_rl_api.member_wire import MAX_MESSAGE_BYTES
from colocated_rl_operator.clients.errors import ContractBroken

SEND_DEADLINE_S = 10.0
CLOSE_S = 1.0
MAX_HEAD_BYTES = 8 * 1024
MAX_UNREAD_BYTES = 32 * 1024  # in the kernel: TLS keeps room, several times over, for as much as ever came at once
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
TEXT, CLOSE, PING, PONG = 0x1, 0x8, 0x9, 0xA
FINAL, MASKED = 0x80, 0x80
SHORT, LONG = 126, 127  # lengths in 2 and in 8 bytes follow
GOING_AWAY = (1001).to_bytes(2)


class Frame(NamedTuple):
    kind: int
    payload: bytes
    end: int  # where the next one begins


def make_frame(kind: int, payload: bytes) -> bytes:
    """Return a client's frame. It may go to many members: masks are for proxies, which see nothing inside TLS."""
    size = len(payload)
    if size < SHORT:
        length = bytes([MASKED | size])
    elif size < 1 << 16:
        length = bytes([MASKED | SHORT]) + size.to_bytes(2)
    else:
        length = bytes([MASKED | LONG]) + size.to_bytes(8)
    mask = os.urandom(4)
    whole = (mask * (size // 4 + 1))[:size]
    masked = (int.from_bytes(payload) ^ int.from_bytes(whole)).to_bytes(size)
    return bytes([FINAL | kind]) + length + mask + masked


def read_frame(data: bytes, at: int) -> Frame | None:
    """Return the server's frame that begins at `at`; None while it is incomplete. Raises ContractBroken."""
    if len(data) < at + 2:
        return None
    kind, size, start = data[at] & 0x0F, data[at + 1], at + 2
    if data[at] != FINAL | kind or kind not in (TEXT, CLOSE, PING, PONG):
        raise ContractBroken(f"a frame that begins with {data[at]:#04x} instead of JSON text: the connection ends")
    if size & MASKED:
        raise ContractBroken("a masked frame from a server: the connection ends")
    if size >= SHORT:
        start += 2 if size == SHORT else 8
        if len(data) < start:
            return None
        size = int.from_bytes(data[at + 2 : start])
    if size > MAX_MESSAGE_BYTES:
        raise ContractBroken(f"a message of {size} bytes, more than {MAX_MESSAGE_BYTES}: the connection ends")
    end = start + size
    return None if len(data) < end else Frame(kind, data[start:end], end)


Hear = Callable[["Link", bytes], None]
"""Called with each message. A ContractBroken that it raises ends the connection."""


_INBOX = memoryview(bytearray(64 * 1024))
"""The newest bytes, of whichever connection: they are taken out before the event loop turns to another one."""


class Link(asyncio.BufferedProtocol):
    """A link is the operator's end. It reads into a buffer: else uvloop's TLS allocates 256 KiB for each read."""

    def __init__(self, *, host: str, ping_s: float, hear: Hear, clock: Callable[[], float]) -> None:
        self._loop = asyncio.get_running_loop()
        self._host = host
        self._ping_s = ping_s
        self._hear = hear
        self._clock = clock
        self._key = base64.b64encode(os.urandom(16))
        self._is_open = False
        self._rest = b""  # bytes of a frame that is still incomplete
        self._late: bytes | None = None  # the newest frame for a member that reads slowly
        self._paused_at: float | None = None  # since when it reads slowly
        self._is_alive = True  # something came since the last ping
        self._heard_at = clock()
        self._beat: asyncio.TimerHandle | None = None
        self._reason: Exception | None = None  # why the link ended
        self._spoke = asyncio.Event()  # the first message was heard, or the link has ended
        self._over = asyncio.Event()
        self._lost = self._loop.create_future()

    # ---------------------------------------------------------------------------------------------- used by its owner
    async def first_message(self) -> None:
        """Return when the first message was heard. Raises the reason if there is none."""
        await self._spoke.wait()
        if self._reason is not None:
            raise self._reason

    async def ended(self) -> NoReturn:
        """Wait until the connection ends; raise the reason."""
        await self._over.wait()
        assert self._reason is not None
        raise self._reason

    @property
    def is_slow(self) -> bool:
        """Return whether the member has not taken what was sent before."""
        return self._paused_at is not None

    @property
    def silent_since(self) -> float:
        """Return when anything came last, pongs too, by the clock.

        At most two pings ago: a link lasts no longer without a word, unless this process itself stood still.
        """
        return max(self._heard_at, self._clock() - 2 * self._ping_s)

    def send(self, frame: bytes) -> None:
        """Send a whole frame; if the member reads slowly, only the newest is kept."""
        if self._reason is not None:
            return
        if self._paused_at is None:
            self._transport.write(frame)
        else:
            self._late = frame

    async def close(self) -> None:
        """Send a close frame, and wait briefly for the end of the connection. No further message is heard."""
        self._control(CLOSE, GOING_AWAY)
        self._end(ConnectionAbortedError("closed by the operator"))
        await asyncio.wait((self._lost,), timeout=CLOSE_S)
        self._transport.abort()

    # ----------------------------------------------------------------------------------------- called by the event loop
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if (unread := self._transport.get_extra_info("socket")) is not None:
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MAX_UNREAD_BYTES)
        head = (
            f"GET /v1/link HTTP/1.1\r\nHost: {self._host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {self._key.decode()}\r\n\r\n"
        )
        self._transport.write(head.encode())
        self._beat = self._loop.call_later(self._ping_s, self._ping)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _INBOX

    def buffer_updated(self, nbytes: int) -> None:
        if self._reason is not None:
            return
        self._is_alive, self._heard_at = True, self._clock()
        data = bytes(_INBOX[:nbytes])
        try:
            self._rest = self._read(self._rest + data if self._rest else data)
        except (ContractBroken, ConnectionError) as error:
            self._end(error)

    def pause_writing(self) -> None:
        self._paused_at = self._clock()

    def resume_writing(self) -> None:
        self._paused_at = None
        if self._late is not None and self._reason is None:
            frame, self._late = self._late, None
            self._transport.write(frame)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or ConnectionResetError("the member closed the connection"))
        self._lost.set_result(None)

    # ---------------------------------------------------------------------------------------------------------- within
    def _read(self, data: bytes) -> bytes:
        """Dispatch every whole message; return the rest."""
        at = 0
        if not self._is_open:
            at = data.find(b"\r\n\r\n") + 4
            if not 4 <= at <= MAX_HEAD_BYTES:
                if len(data) > MAX_HEAD_BYTES:
                    raise ConnectionError(f"the head of the answer is longer than {MAX_HEAD_BYTES} bytes")
                return data
            _check_upgrade(data[:at], self._key)
            self._is_open = True
        while self._reason is None and (frame := read_frame(data, at)) is not None:
            at = frame.end
            if frame.kind == TEXT:
                self._hear(self, frame.payload)
                self._spoke.set()
            elif frame.kind == PING:
                self._control(PONG, frame.payload)
            elif frame.kind == CLOSE:
                raise ConnectionResetError("the member closed the connection")
        return data[at:]

    def _ping(self) -> None:
        paused_s = 0.0 if self._paused_at is None else self._clock() - self._paused_at
        if not self._is_alive:
            self._end(TimeoutError(f"nothing came within {self._ping_s:.1f} s of a ping"))
        elif paused_s > SEND_DEADLINE_S:
            self._end(TimeoutError(f"nothing was taken for {paused_s:.0f} s"))
        else:
            self._is_alive = False
            self._control(PING)
            self._beat = self._loop.call_later(self._ping_s, self._ping)

    def _control(self, kind: int, payload: bytes = b"") -> None:
        if self._reason is None and self._paused_at is None:
            self._transport.write(make_frame(kind, payload))

    def _end(self, reason: Exception) -> None:
        """End the link: nothing more is read or sent, and the first reason stays."""
        if self._reason is not None:
            return
        self._reason = reason
        if self._beat is not None:
            self._beat.cancel()
        self._rest, self._late = b"", None
        self._transport.close()
        self._spoke.set()
        self._over.set()


async def reach(host: str, port: int) -> socket.socket:
    """Open a TCP connection. Raises OSError; the caller sets the deadline."""
    reached = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reached.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(reached, (host, port))
    except BaseException:
        reached.close()
        raise
    return reached


async def connect(
    reached: socket.socket,
    *,
    tls: ssl.SSLContext,
    server_name: str,
    ping_s: float,
    hear: Hear,
    clock: Callable[[], float],
) -> Link:
    """Return a link once its first message was heard. Raises OSError or ContractBroken; the caller sets the deadline.

    reached: the TCP connection, which is closed with the link, or if no link is made.
    """
    _, link = await asyncio.get_running_loop().create_connection(
        lambda: Link(host=server_name, ping_s=ping_s, hear=hear, clock=clock),
        sock=reached,
        ssl=tls,
        server_hostname=server_name,
        ssl_shutdown_timeout=CLOSE_S,
    )
    try:
        await link.first_message()
    except asyncio.CancelledError:
        await link.close()
        raise
    return link


def _check_upgrade(head: bytes, key: bytes) -> None:
    status, *lines = head.split(b"\r\n")
    if not status.startswith(b"HTTP/1.1 101 "):
        raise ConnectionError(f"no WebSocket there: {status[:100].decode(errors='replace')}")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    expected = base64.b64encode(hashlib.sha1(key + GUID, usedforsecurity=False).digest())
    if fields.get(b"sec-websocket-accept") != expected:
        raise ConnectionError("it did not accept this very connection: something in between answered")
