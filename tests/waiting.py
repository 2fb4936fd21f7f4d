"""Wait for a condition in an event loop, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

DEADLINE_S = 300.0  # the libraries of a task process take seconds of a processor, at a priority below that of others


async def until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Returns when the condition holds; TimeoutError past the deadline."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - a condition over several objects has no event
            await asyncio.sleep(0.002)
