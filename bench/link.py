"""`make bench-link`: what a switch's messages cost the operator by its own WebSocket client, and by aiohttp's.

Members are one other process, which serves aiohttp's WebSocket over TLS and answers each target with its facts at
once. Every barrier sends one target to all members and waits for all of their facts. Only the processor time and the
memory of the side that is measured count; each is a process of its own. Nothing here parses a message.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import uvloop
from aiohttp import web

from builders import absent_engine, absent_trainer, pod_facts
from colocated_rl_api import names
from colocated_rl_api.descriptors import raise_limit
from colocated_rl_operator.clients.link import TEXT, Link, connect, make_frame, reach
from fakes.authority import FakeAuthority

SERVER_NAME = "members.bench"
TARGET = json.dumps({"type": "pod", "epoch": 7, "padding": "x" * 400})  # as long as a real one; nothing reads it
FACTS = pod_facts(absent_engine(), absent_trainer(), epoch=7).model_dump_json(by_alias=True)
PING_S = 600.0
T = TypeVar("T")
Broadcast = Callable[[], Awaitable[None]]


class AnswerBarrier:
    """It is over once every member has answered."""

    def __init__(self, members: int) -> None:
        self._members, self._heard = members, 0
        self._over = asyncio.Event()

    def hear(self, *_: object) -> None:
        self._heard += 1
        if self._heard == self._members:
            self._heard = 0
            self._over.set()

    async def wait(self) -> None:
        await self._over.wait()
        self._over.clear()


async def serve(directory: Path) -> None:
    async def link(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(compress=False)
        await socket.prepare(request)
        await socket.send_str(FACTS)
        async for _ in socket:
            await socket.send_str(FACTS)
        return socket

    raise_limit()
    app = web.Application()
    app.router.add_get("/v1/link", link)
    runner = web.AppRunner(app)
    await runner.setup()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(directory / names.CERT_FILE, directory / names.KEY_FILE)
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context, backlog=4096)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


async def by_link(
    port: int, members: int, tls: ssl.SSLContext, barrier: AnswerBarrier, open_: AsyncExitStack
) -> Broadcast:
    async def one() -> Link:
        reached, clock = await reach("127.0.0.1", port), time.monotonic
        return await connect(reached, tls=tls, server_name=SERVER_NAME, ping_s=PING_S, hear=barrier.hear, clock=clock)

    links = await connected(one, members)
    for link in links:
        open_.push_async_callback(link.close)

    async def broadcast() -> None:
        frame = make_frame(TEXT, TARGET.encode())
        for link in links:
            link.send(frame)

    return broadcast


async def by_aiohttp(
    port: int, members: int, tls: ssl.SSLContext, barrier: AnswerBarrier, open_: AsyncExitStack
) -> Broadcast:
    session = await open_.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
    tasks: set[asyncio.Task[None]] = set()

    async def hear(socket: aiohttp.ClientWebSocketResponse) -> None:
        async for _ in socket:
            barrier.hear()

    async def one() -> aiohttp.ClientWebSocketResponse:
        url = f"https://127.0.0.1:{port}/v1/link"
        return await session.ws_connect(url, ssl=tls, server_hostname=SERVER_NAME, compress=0)

    sockets = await connected(one, members)
    tasks.update(asyncio.create_task(hear(socket)) for socket in sockets)

    async def broadcast() -> None:
        assert not any(task.done() for task in tasks), "a connection was lost"
        for socket in sockets:
            await socket.send_str(TARGET)

    return broadcast


async def connected(one: Callable[[], Awaitable[T]], members: int) -> list[T]:
    return [await one() for _ in range(members)]


async def measure(kind: str, port: int, directory: Path, *, members: int, barriers: int) -> None:
    raise_limit()
    tls = ssl.create_default_context(cafile=str(directory / names.CA_FILE))
    barrier, before = AnswerBarrier(members), memory_kib()
    async with AsyncExitStack() as open_:
        by = by_link if kind == "link" else by_aiohttp
        broadcast = await by(port, members, tls, barrier, open_)
        await barrier.wait()
        taken, began = memory_kib() - before, time.process_time()
        for _ in range(barriers):
            await broadcast()
            await barrier.wait()
        cpu_s = time.process_time() - began
    print(json.dumps({"us_per_member": cpu_s / barriers / members * 1e6, "kib_per_member": taken / members}))


def memory_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--members", type=int, default=512)
    parser.add_argument("--barriers", type=int, default=40)
    parser.add_argument("--as", dest="part", choices=("members", "link", "aiohttp"), help=argparse.SUPPRESS)
    parser.add_argument("--files", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "members":
        uvloop.run(serve(args.files))
    elif args.part:
        uvloop.run(measure(args.part, args.port, args.files, members=args.members, barriers=args.barriers))
    else:
        compare(args.members, args.barriers)
    return 0


def compare(members: int, barriers: int) -> None:
    sizes = ["--members", str(members), "--barriers", str(barriers)]
    with tempfile.TemporaryDirectory() as directory:
        FakeAuthority().server_context(Path(directory), server_name=SERVER_NAME)
        me = [sys.executable, "-m", "bench.link", *sizes, "--files", directory]
        with subprocess.Popen([*me, "--as", "members"], stdout=subprocess.PIPE, text=True) as served:
            assert served.stdout is not None
            port = served.stdout.readline().strip()
            found: dict[str, Any] = {}
            try:
                for kind in ("link", "aiohttp"):
                    ran = subprocess.run([*me, "--as", kind, "--port", port], stdout=subprocess.PIPE, check=True)
                    found[kind] = json.loads(ran.stdout)
            finally:
                served.terminate()
    print(f"{members} members, {barriers} barriers: of the operator, for each member")
    for figure, unit in (("us_per_member", "µs of processor time a barrier"), ("kib_per_member", "KiB of memory")):
        own, library = found["link"][figure], found["aiohttp"][figure]
        print(f"  {unit:32} link.py {own:8.1f}   aiohttp {library:8.1f}   ratio {library / own:5.1f}")


if __name__ == "__main__":
    raise SystemExit(main())
