"""The data port serves as much of HTTP/1.1 as the pod's callers need, on a strict parser without a framework.

A framework costs more than all of a gate's own work. The port owns connections: who may ask, in what order answers go
out, how many bytes of a caller are held, and how long a caller may take to send or read. The handler owns the meaning
of requests and answers.

* The port checks the token before anything else; a request without it is answered before its body is read.
* A request has one framing, by the parser's strict rules: not both Content-Length and Transfer-Encoding, no folded
  lines, no malformed chunk, no trailer. A violation gets a 4xx and ends its connection. Heads are not forwarded.
* Connections, heads, bodies, requests waiting behind another, bytes unread or unsent, and every wait are bounded.
* A caller that leaves, or does not read, has its handler cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

from colocated_rl_agent.gate.call import Call, Malformed, too_large
from colocated_rl_agent.gate.deadline import Deadline
from colocated_rl_api import descriptors
from colocated_rl_api.columns import HEADER_READ
from colocated_rl_api.gate_wire import MAX_REQUEST_BYTES
from colocated_rl_api.listening import listen
from colocated_rl_api.logs import failure_of, log
from colocated_rl_member.accepting import accepting
from colocated_rl_member.data import DATA_IDLE_S
from colocated_rl_member.peers import ByPeer, peer_of
from colocated_rl_member.room import LINGER_S, RoomFor
from colocated_rl_member.server import MAX_HEADER_BYTES, MAX_HEADERS, SHUTDOWN_S

LOG = logging.getLogger(__name__)

CALLER_S = 20.0  # for a caller to send a head or a body, or to read what was written
HANDSHAKE_S = 10.0
MAX_HEAD_BYTES = 4 * MAX_HEADER_BYTES
MAX_CONNECTIONS = 12_288  # each with buffers of its own
MAX_STRANGERS = 4096  # connections that have not shown the token: with TLS 140 MB
MAX_WAITING = 8  # requests sent on a connection before the one in front of them is answered
UNREAD_BYTES = 64 * 1024  # of a body that no handler reads yet
UNSENT_BYTES = 64 * 1024  # beyond it, a caller has to read before it gets more
NOTED = {
    *(b"authorization", b"content-encoding", b"content-length", b"expect", b"host", b"transfer-encoding"),
    HEADER_READ,
}
ONLY = {b"content-encoding": "identity", b"expect": "100-continue", b"transfer-encoding": "chunked"}


class CallerConnection(asyncio.Protocol):
    """A CallerConnection answers one caller's requests one after the other, in the order of their arrival."""

    __slots__ = (
        "_arrived_bytes", "_arriving", "_begins", "_calls", "_deadline", "_is_deaf", "_is_paused", "_lines",
        "_parser", "_port", "_task", "_transport", "caller_s", "is_stalled",
    )  # fmt: skip

    def __init__(self, port: DataPort) -> None:
        self._port = port
        self.caller_s = port.caller_s
        self._calls: deque[Call] = deque()  # the first is being answered
        self._arriving: Call | None = None
        self._arrived_bytes = self._lines = 0  # of the arriving request, after its first piece
        self._begins = False
        self._is_deaf = False  # further data is ignored
        self._is_paused = False
        self._task: asyncio.Task[None] | None = None
        self.is_stalled = False

    # ----------------------------------------------------------------------------------------------- for asyncio
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self._parser = HttpRequestParser(self)
        self._deadline = Deadline(self.abort)
        self._deadline.set(self.caller_s)
        self._port.connection_opened(self, peer_of(transport.get_extra_info("peername")))

    def connection_lost(self, error: Exception | None) -> None:
        self._port.connection_closed(self)
        self._deadline.end()
        del self._parser  # it holds this connection
        self._calls.clear()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        try:
            self._begins = False
            self._parser.feed_data(data)
            if not self._begins:
                self._arrived_bytes += len(data)
            if self._arriving is not None and not self._arriving.method and self._arrived_bytes > MAX_HEAD_BYTES:
                raise Malformed(431, f"a head has at most {MAX_HEAD_BYTES} bytes")
            if self._arrived_bytes > MAX_HEAD_BYTES + 2 * MAX_REQUEST_BYTES:
                raise Malformed(413, "framing that is larger than the body")
        except Malformed as error:
            self._break(error)
        except HttpParserUpgrade:
            self._break(Malformed(400, "another protocol is not spoken here"))
        except HttpParserCallbackError as error:
            if not isinstance(error.__context__, Malformed):
                raise
            self._break(error.__context__)
        except HttpParserError as error:
            self._break(Malformed(400, f"no request of HTTP/1.1: {error}"))

    def pause_writing(self) -> None:
        self.is_stalled = True
        call = self._calls[0] if self._calls else None
        self._deadline.set(call.may_stall_s if call else self.caller_s)
        if call is not None and call.flows is not None:
            call.flows()

    def resume_writing(self) -> None:
        self.is_stalled = False
        self._deadline.clear()
        call = self._calls[0] if self._calls else None
        if call is not None and call.flows is not None:
            call.flows()
        self._advance()

    # -------------------------------------------------------------------------------------------- for the parser
    def on_message_begin(self) -> None:
        if len(self._calls) > MAX_WAITING:
            raise Malformed(429, f"{MAX_WAITING} requests wait on this connection")
        self._arriving = Call(self)
        self._arrived_bytes = self._lines = 0
        self._begins = True
        if not self._calls:
            self._deadline.set(self.caller_s)

    def on_url(self, piece: bytes) -> None:
        assert self._arriving is not None
        self._arriving.target += piece
        if len(self._arriving.target) > MAX_HEADER_BYTES:
            raise Malformed(414, f"a path has at most {MAX_HEADER_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        call = self._arriving
        assert call is not None
        if call.method:
            raise Malformed(400, "a trailer is not taken")
        self._lines += 1
        if self._lines > MAX_HEADERS or len(name) + len(value) > MAX_HEADER_BYTES:
            raise Malformed(431, f"a head has at most {MAX_HEADERS} lines of {MAX_HEADER_BYTES} bytes")
        name = name.lower()
        if name in NOTED:
            if name in call.headers:
                raise Malformed(400, f"{name.decode()} comes twice")
            call.headers[name] = value.decode("latin-1").strip(" \t")

    def on_headers_complete(self) -> None:
        call = self._arriving
        assert call is not None
        call.method = self._parser.get_method().decode()
        call.keep_alive = self._parser.should_keep_alive()
        if self._parser.get_http_version() != "1.1" or self._parser.should_upgrade():
            raise Malformed(400, "HTTP/1.1 is spoken here, and nothing else")
        for name, only in ONLY.items():
            if call.headers.get(name, only).lower() != only:
                raise Malformed(417 if name == b"expect" else 415, f"{name.decode()} can only be {only}")
        if int(call.headers.get(b"content-length", 0)) > MAX_REQUEST_BYTES:
            raise too_large()
        self._take(call)

    def on_body(self, piece: bytes) -> None:
        call = self._arriving
        assert call is not None
        if call.arrive(piece) > UNREAD_BYTES and not self._is_paused:
            if call is not self._calls[0]:  # pausing would hide that the caller left while the one in front runs
                raise Malformed(429, f"a body of over {UNREAD_BYTES} bytes does not wait behind another request")
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        call, self._arriving = self._arriving, None
        assert call is not None
        call.is_whole = True
        call.wake()
        self._advance()

    # -------------------------------------------------------------------------------------------- for its calls
    def want(self, call: Call) -> None:
        """Read the body of this call, for which its handler waits."""
        if call.headers.pop(b"expect", None):
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._listen_again()

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def abort(self) -> None:
        self._transport.abort()

    def stalls_for(self, within_s: float) -> None:
        if self.is_stalled:
            self._deadline.set(within_s)

    def finish(self) -> None:
        """Make the answer in progress the last one."""
        if not self._calls:
            self._transport.close()
        for call in self._calls:
            call.keep_alive = False
        self._advance()

    # ----------------------------------------------------------------------------------------------------- in turn
    def _take(self, call: Call) -> None:
        self._calls.append(call)
        if len(self._calls) == 1:
            self._start(call)

    def _start(self, call: Call) -> None:
        self._deadline.clear()
        if call.broken is not None:
            call.refuse(call.broken.status, str(call.broken))
            self._advance()
        elif not self._port.admits(call.headers.get(b"authorization")):
            call.keep_alive = False  # a caller without the token keeps no connection
            more = "WWW-Authenticate: Bearer\r\n"
            call.refuse(401, "the data token of the job is needed: Authorization: Bearer TOKEN", more=more)
            self._advance()
        else:
            self._port.strangers.discard(self)
            self._task = asyncio.get_running_loop().create_task(self._port.handle(call))
            self._port.tasks.add(self._task)
            self._task.add_done_callback(self._handled)

    def _handled(self, task: asyncio.Task[None]) -> None:
        self._port.tasks.discard(task)
        self._task = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log(LOG, "request failed", logging.ERROR, reason=failure_of(error))
        if self._calls and self._calls[0].is_answered:
            self._advance()
        else:
            self.abort()

    def _advance(self) -> None:
        """Go on to the next request once the one in front was answered, has arrived and its answer was read."""
        while self._calls and self._calls[0].is_answered and self._task is None:
            call = self._calls[0]
            if self.is_stalled:
                return
            if not call.keep_alive:
                self._close(call)
                return
            if not call.is_whole:  # the rest of its body is read and dropped: breaking the connection loses the answer
                self._listen_again()
                self._deadline.set(self.caller_s)
                return
            self._calls.popleft()
            if self._calls:
                self._start(self._calls[0])
            else:
                self._listen_again()
                self._deadline.set(self.caller_s if self._arriving else self._port.idle_s)

    def _close(self, call: Call) -> None:
        """Close once all is sent. A caller still sending gets time to see its answer, which a reset would hide."""
        self._is_deaf = True
        if call.has_body and not call.is_whole:
            self._listen_again()
            self._deadline.set(min(LINGER_S, self.caller_s))
        else:
            self._deadline.set(self.caller_s)
            self._transport.close()

    def _break(self, error: Malformed) -> None:
        """Answer a malformed request with the error and ignore all further data of its connection."""
        self._is_deaf = True
        call = self._arriving or Call(self)
        call.keep_alive, call.broken = False, error
        self._arriving = None
        if call not in self._calls:
            self._take(call)
        call.wake()
        self._advance()

    def _listen_again(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()


@dataclass(frozen=True)
class Capacity:
    """A Capacity bounds descriptors in use: by connections that begin, by connections, by requests at the engine."""

    beginning: int
    connections: int
    requests: int

    @classmethod
    def of(cls, limit: int) -> Capacity:
        """Divide a process's descriptors. An admitted request takes two: its caller's and the engine's."""
        left = descriptors.for_sockets(limit)
        beginning = min(MAX_STRANGERS, left // 4)
        requests = min(MAX_CONNECTIONS - MAX_STRANGERS, (left - beginning) // 2)
        return cls(beginning, min(MAX_CONNECTIONS, left - beginning - requests), requests)


class DataPort:
    """A DataPort accepts connections and passes their calls to a handler.

    handle: answers a call. admits: returns whether an Authorization header is valid. caller_s: time to send a head, or
    to read. idle_s: time between two requests. max_connections: bound of those that have shown the token, by default as
    many as descriptors allow; further ones are turned away. max_strangers: bound of those that have not shown it yet,
    one of which makes room for a further one.
    """

    def __init__(
        self,
        handle: Callable[[Call], Coroutine[Any, Any, None]],
        *,
        admits: Callable[[str | None], bool] = lambda authorization: True,
        caller_s: float = CALLER_S,
        idle_s: float = DATA_IDLE_S,
        max_connections: int | None = None,
        max_strangers: int | None = None,
    ) -> None:
        self.handle = handle
        self.admits = admits
        self.caller_s, self.idle_s = caller_s, idle_s
        capacity = Capacity.of(descriptors.limit())
        self.max_strangers = max_strangers or min(MAX_STRANGERS, max(1, capacity.connections // 3))
        self.max_connections = max_connections or max(1, capacity.connections - self.max_strangers)
        self._beginning = capacity.beginning
        self.connections: set[CallerConnection] = set()
        self.strangers = ByPeer[CallerConnection]()
        self.tasks: set[asyncio.Task[None]] = set()
        self._all_gone = asyncio.Event()

    def connection_opened(self, connection: CallerConnection, peer: str) -> None:
        self.connections.add(connection)
        self.strangers.add(connection, peer)
        if len(self.strangers) > self.max_strangers:
            one = self.strangers.first_to_go()
            self.strangers.discard(one)
            one.abort()
        self._all_gone.clear()

    def connection_closed(self, connection: CallerConnection) -> None:
        self.connections.discard(connection)
        self.strangers.discard(connection)
        if not self.connections:
            self._all_gone.set()

    @asynccontextmanager
    async def listening(
        self, host: str, port: int, context: Callable[[], ssl.SSLContext] | None = None
    ) -> AsyncIterator[int]:
        """Listen, and yield the port number. At the end, answers in progress have SHUTDOWN_S.

        context: returns that of the next handshake.
        """
        self._all_gone.set()
        room = RoomFor(
            self.max_connections,
            lambda: len(self.connections) - len(self.strangers),
            lambda _: CallerConnection(self),
        )
        listener = listen(host, port)
        try:
            async with accepting(
                listener, room, at_a_time=self._beginning, context=context, handshake_s=HANDSHAKE_S
            ) as number:
                yield number
        finally:
            try:
                await self._finish()
            finally:
                for connection in list(self.connections):
                    connection.abort()
        if self.tasks:  # cancelled handlers still abort their requests at the engine
            await asyncio.wait(self.tasks, timeout=SHUTDOWN_S)

    async def _finish(self) -> None:
        for connection in list(self.connections):
            connection.finish()
        with suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S):
                await self._all_gone.wait()
