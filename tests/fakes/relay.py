"""A relay before a port, whose connections a test can leave half open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager


@asynccontextmanager
async def relayed(port: int, to: int, frozen: asyncio.Event) -> AsyncIterator[int]:
    """Passes bytes on, until frozen: then the connection stays open and nothing passes. Yields its port: 0 is any."""
    serving: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if frozen.is_set():
                continue
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with ExitStack() as ends:
            ends.callback(writer.transport.abort)
            there, back = await asyncio.open_connection("127.0.0.1", to)
            ends.callback(back.transport.abort)
            async with asyncio.TaskGroup() as group:
                group.create_task(pump(reader, back))
                group.create_task(pump(there, writer))

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.create_task(serve(reader, writer)))

    async with await asyncio.start_server(begin, "127.0.0.1", port) as server:
        yield server.sockets[0].getsockname()[1]
        for each in serving:
            each.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
