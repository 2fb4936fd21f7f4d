"""The event loop of the tests ends after its connections, and fails where one is left."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading

import loops
import pytest
from loops import ConnectionsLeft, TidyLoop

SIZE = 4 << 20  # more than the kernel takes before somebody reads


def connected(loop: TidyLoop) -> tuple[asyncio.Transport, socket.socket]:
    """Return a connection of the loop, and its other end."""
    ours, other = socket.socketpair()
    transport, _ = loop.run_until_complete(loop.create_connection(asyncio.Protocol, sock=ours))
    return transport, other


def test_a_connection_that_nobody_closes_fails_the_loop_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "ENDING_S", 0.05)
    loop = TidyLoop()
    _, other = connected(loop)
    with other, pytest.raises(ConnectionsLeft, match="close what the test opened: <_SelectorSocket"):
        loop.close()
    assert loop.is_closed()


def test_what_is_closed_in_order_is_waited_for() -> None:
    loop, received = TidyLoop(), bytearray()
    transport, other = connected(loop)

    def read() -> None:
        while some := other.recv(1 << 16):
            received.extend(some)

    with other:
        transport.write(bytes(SIZE))
        transport.close()
        reader = threading.Thread(target=read)
        reader.start()
        loop.close()
        reader.join(timeout=30)
    assert SIZE == len(received)


def test_what_is_accepted_while_its_server_closes_is_closed() -> None:
    """Hundreds of such connections failed whichever test ran when they were collected."""

    async def close_between_accepting_and_making() -> list[socket.socket]:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
        callers = [socket.create_connection(server.sockets[0].getsockname()) for _ in range(3)]
        await asyncio.sleep(0)  # the loop hears of them, and will accept in the rest of its turn
        await asyncio.sleep(0)
        server.close()
        await server.wait_closed()
        return callers

    loop = TidyLoop()
    callers = loop.run_until_complete(close_between_accepting_and_making())
    loop.run_until_complete(asyncio.sleep(0))
    gc.collect()
    for caller in callers:
        with caller:
            caller.settimeout(30)
            assert b"" == caller.recv(1)
    loop.close()
