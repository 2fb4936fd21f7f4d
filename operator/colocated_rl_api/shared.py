"""This module makes something that costs time for all who ask at once, and not for each of them.

A page that anybody may ask for, as often as he likes, would otherwise take all of an event loop's time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SHARE = 10  # at most this part of the loop's time goes into it


class SharedResult(Generic[T]):
    """A SharedResult is made anew for whoever asks. Who asks before it may be made again gets the same one then."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._next: asyncio.Task[T] | None = None
        self._at = 0.0  # of the loop's clock; not before then

    async def get(self) -> T:
        """Return what is made after this call."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._made(), name="shared")
        return await asyncio.shield(self._next)

    async def _made(self) -> T:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._at - loop.time()))
        self._next, began = None, loop.time()
        try:
            return self._make()
        finally:
            self._at = loop.time() + (SHARE - 1) * (loop.time() - began)
