"""Accepts the connections of a port: no more at a time than it may, and none while there is no descriptor for it.

An event loop's own server takes whatever comes. Handshakes are then bounded by their deadline alone, so a thousand
connections that say nothing take every descriptor of the process; a thousand that come at once share its time, and none
is done in time; and what failed for want of a descriptor is tried again at once, with a line in the log each time. Here
what waits is left to the kernel until there is room, few handshakes go on at a time, and a connection that sends
nothing has no part in them. Peers share handshakes: the next is one of the peer that has fewest, and a handshake that
does not get on gives its turn up, soon to a peer that has fewer and later to any. Once connections that say nothing or
wait are more than half of all, one of them makes room at once for one that comes (`peers`). That harms no member,
because each begins few connections at a time (`GateConnector`, the operator's `Members`), and so speaks on each long
before it is the oldest of so many.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from colocated_rl_api.descriptors import Seldom
from colocated_rl_api.logs import in_words
from colocated_rl_member.peers import ByPeer, peer_of
from colocated_rl_member.room import RoomFor

LOG = logging.getLogger(__name__)

HANDSHAKES = 64  # at a time
PATIENCE_S = 5.0  # with a handshake that does not get on, once others wait
GRACE_S = 0.5  # before it may make room for a peer that has fewer
AGAIN_S = 0.1  # after an accept that failed
AT_ONCE = 64  # connections, before others of the process have their turn


@asynccontextmanager
async def accepting(
    listener: socket.socket,
    room: RoomFor,
    *,
    at_a_time: int,
    context: Callable[[], ssl.SSLContext] | None = None,
    handshake_s: float = 0.0,
) -> AsyncIterator[int]:
    """Yield the port. Nothing is accepted after the block; connections go on.

    at_a_time: connections that are before the end of their handshake, or are turned away, and one more. Several times
    as many as members begin together.
    context: returns that of the next handshake.
    handshake_s: for a caller's first word, and from there to the end of its handshake.
    """
    acceptor = _Acceptor(listener, room, max(1, at_a_time), context, handshake_s)
    running = asyncio.create_task(acceptor.run(), name=f"accept/{listener.getsockname()[1]}")
    try:
        yield int(listener.getsockname()[1])
    finally:
        running.cancel()
        await asyncio.wait([running])
        listener.close()
        await acceptor.end()


class _Acceptor:
    """A connection is silent, then it waits for its turn, then it begins; then it is the port's own, or turned away."""

    def __init__(
        self,
        listener: socket.socket,
        room: RoomFor,
        at_a_time: int,
        context: Callable[[], ssl.SSLContext] | None,
        handshake_s: float,
    ) -> None:
        listener.setblocking(False)
        self._listener, self._room, self._at_a_time = listener, room, at_a_time
        self._handshake_s = handshake_s
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._timers: dict[socket.socket, asyncio.TimerHandle] = {}  # each silent one is hung up on by its own
        self._silent, self._waiting, self._beginning = (
            ByPeer[socket.socket](),
            ByPeer[socket.socket](),
            ByPeer[socket.socket](),
        )
        self._began: dict[socket.socket, float] = {}  # when each of the last
        self._look_again: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._troubled, self._crowded = Seldom(), Seldom()

    async def run(self) -> None:
        for turn in count(1):
            if turn % AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                connection, address = await self._accept()
            except ConnectionError:  # it has gone again
                continue
            except OSError as error:
                self._troubled.log(LOG, "connections refused", reason=in_words(error))
                await asyncio.sleep(AGAIN_S)
                continue
            connection.setblocking(False)
            peer = peer_of(address)
            if self._context is not None:
                self._silent.add(connection, peer)
                self._timers[connection] = self._loop.call_later(self._handshake_s, self._hang_up, connection)
                self._loop.add_reader(connection, self._take, connection)
            else:
                self._begin(connection, peer)
            await self._until_another_may_come()

    async def _accept(self) -> tuple[socket.socket, object]:
        """Accept a connection, and return it with where it comes from. Raises OSError.

        Cancellation never loses one, as with the event loop's `sock_accept`.
        """
        while True:
            try:
                return self._listener.accept()
            except BlockingIOError:
                readable = self._loop.create_future()
                self._loop.add_reader(self._listener, _wake, readable)
                try:
                    await readable
                finally:
                    self._loop.remove_reader(self._listener)

    async def end(self) -> None:
        for connection in [*self._silent, *self._waiting]:
            self._hang_up(connection)
        if self._look_again is not None:
            self._look_again.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for connection in self._beginning:  # of tasks that were cancelled before they began
            connection.close()

    async def _until_another_may_come(self) -> None:
        """Return once there is room for those that came; without it, one that makes no progress is closed."""
        while self._count() > self._at_a_time:
            self._room.freed.clear()
            if len(self._silent) + len(self._waiting) > self._at_a_time // 2:
                self._end_oldest()
            elif ended := self._end_slow():
                self._crowded.log(LOG, "stalled connections closed", connections=ended)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PATIENCE_S / 8):
                        await self._room.freed.wait()

    def _count(self) -> int:
        return len(self._silent) + len(self._waiting) + len(self._beginning) + len(self._room.refused)

    def _end_oldest(self) -> None:
        """End the connection that has been silent or has waited for longest, whichever are more.

        One whose first word came and was not noticed yet waits from now on.
        """
        crowd = max(self._silent, self._waiting, key=len)
        oldest = crowd.first_to_go()
        if crowd is self._silent and _has_spoken(oldest):
            self._take(oldest)
        else:
            self._hang_up(oldest)
            self._crowded.log(LOG, "stalled connections closed", connections=1)

    def _end_slow(self) -> int:
        late = [each for each, began in self._began.items() if self._loop.time() >= began + PATIENCE_S]
        for connection in late:
            self._break_off(connection)
        return len(late)

    def _break_off(self, connection: socket.socket) -> None:
        """Give up a handshake. Its place is free at once."""
        self._beginning.discard(connection)
        del self._began[connection]
        with contextlib.suppress(OSError):  # it has gone
            connection.shutdown(socket.SHUT_RDWR)  # its handshake fails of that

    def _hang_up(self, connection: socket.socket) -> None:
        if (timer := self._timers.pop(connection, None)) is not None:
            timer.cancel()
            self._loop.remove_reader(connection)
        self._silent.discard(connection)
        self._waiting.discard(connection)
        connection.close()
        self._room.freed.set()

    def _take(self, connection: socket.socket) -> None:
        """Let a connection that has spoken wait for its turn."""
        self._loop.remove_reader(connection)
        self._timers.pop(connection).cancel()
        self._waiting.add(connection, self._silent.peer_of(connection))
        self._silent.discard(connection)
        self._next()

    def _next(self) -> None:
        """Begin what may begin, each time of the peer that has fewest handshakes."""
        while self._waiting:
            connection = self._waiting.oldest_of_least(self._beginning.count)
            peer = self._waiting.peer_of(connection)
            if len(self._beginning) >= HANDSHAKES and not self._gives_way(to=peer):
                return
            self._waiting.discard(connection)
            self._begin(connection, peer)

    def _gives_way(self, *, to: str) -> bool:
        """Return whether a handshake that does not get on has been given up. If one may be soon, look again then."""
        slowest, patience_s = self._beginning.oldest_of_most(), GRACE_S
        if self._beginning.count(self._beginning.peer_of(slowest)) < self._beginning.count(to) + 2:
            slowest, patience_s = next(iter(self._beginning)), PATIENCE_S
        left_s = self._began[slowest] + patience_s - self._loop.time()
        if left_s <= 0:
            self._break_off(slowest)
            self._crowded.log(LOG, "stalled connections closed", connections=1)
            return True
        if self._look_again is not None:
            self._look_again.cancel()
        self._look_again = self._loop.call_later(left_s, self._next)
        return False

    def _begin(self, connection: socket.socket, peer: str) -> None:
        self._beginning.add(connection, peer)
        self._began[connection] = self._loop.time()
        task = self._loop.create_task(self._receive(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _receive(self, connection: socket.socket) -> None:
        """Handle the TLS handshake until it is done."""
        try:
            tls: dict[str, Any] = {}
            if self._context is not None:
                tls = {"ssl": self._context(), "ssl_handshake_timeout": self._handshake_s}
            await self._loop.connect_accepted_socket(lambda: _Arrival(self._room), connection, **tls)
        except OSError:  # no handshake, or none in time: its transport closes it
            pass
        finally:
            self._beginning.discard(connection)
            self._began.pop(connection, None)
            self._next()
            self._room.freed.set()


def _has_spoken(connection: socket.socket) -> bool:
    """Return whether a word of the caller, or its end, can be read."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass  # it broke, as its handshake will find
    return True


def _wake(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


class _Arrival(asyncio.Protocol):
    """Wait until a connection is there: only then is it known whether there is room for it."""

    def __init__(self, room: RoomFor) -> None:
        self._room = room

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        protocol = self._room(peer_of(transport.get_extra_info("peername")))
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
