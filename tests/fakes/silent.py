"""Connections that say nothing, or a word: `python -m fakes.silent PORT COUNT PEERS WORD`.

Processes of their own hold them. They come from PEERS addresses of the loopback. A process says once that all have
begun, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PEERS = 200
CONNECTED_MS = 1000
EACH = 10_000  # of a process, which may have twice as many files open as that
IP_BIND_ADDRESS_NO_PORT = 24  # linux/in.h: each address has all ports to choose from


@asynccontextmanager
async def silence(port: int, count: int, *, peers: int = PEERS, word: bytes = b"") -> AsyncIterator[None]:
    """Open so many connections, which say no more than this word for as long as the context lasts."""
    async with contextlib.AsyncExitStack() as stack:
        shares = [min(EACH, count - begun) for begun in range(0, count, EACH)]
        holders = [await stack.enter_async_context(_holder(port, share, peers, word)) for share in shares]
        for holder in holders:
            assert holder.stdout is not None
            assert await holder.stdout.readline()
        yield


@asynccontextmanager
async def _holder(port: int, count: int, peers: int, word: bytes) -> AsyncIterator[asyncio.subprocess.Process]:
    words = (sys.executable, __file__, str(port), str(count), str(peers), word.hex())
    process = await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE)
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


def main() -> None:
    port, count, peers = map(int, sys.argv[1:4])
    word = bytes.fromhex(sys.argv[4])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = [socket.socket() for _ in range(count)]
    for number, each in enumerate(held):
        each.setblocking(False)
        each.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        each.bind((f"127.0.1.{1 + number % peers}", 0))
        with contextlib.suppress(BlockingIOError):
            each.connect(("127.0.0.1", port))
    for each in held if word else ():
        with contextlib.suppress(OSError):  # it was turned away
            waiting = select.poll()
            waiting.register(each, select.POLLOUT)
            waiting.poll(CONNECTED_MS)
            each.send(word)
    os.write(1, b"begun\n")
    sys.stdin.read()


if __name__ == "__main__":
    main()
