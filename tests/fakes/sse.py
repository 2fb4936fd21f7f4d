"""Server-sent events as a client of a gate or of an engine reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from colocated_rl_agent.gate.running import ServerSentEvents


async def events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each, until the connection ends."""
    reader = ServerSentEvents()
    async for piece in content.iter_any():
        for event in reader.feed(piece):
            yield event


async def json_events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield what an engine streams, but the mark of its end."""
    async for event in events(content):
        if event != b"[DONE]":
            yield json.loads(event)
