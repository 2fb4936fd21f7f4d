"""A deadline that is moved at every event of a connection, which costs next to nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def _nobody() -> None:
    """Is late."""


class Deadline:
    """Calls `late` when a time has passed that was not moved or cleared before. Its timer runs late, never early."""

    __slots__ = ("_at", "_late", "_loop", "_timer", "_timer_at")

    def __init__(self, late: Callable[[], None]) -> None:
        self._late = late
        self._loop = asyncio.get_running_loop()
        self._at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def set(self, within_s: float) -> None:
        self._at = self._loop.time() + within_s
        if self._timer is not None and self._timer_at > self._at:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._start(self._at)

    def clear(self) -> None:
        self._at = None

    def end(self) -> None:
        """Also of what it would have called, which holds it."""
        self._at, self._late = None, _nobody
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self, at: float) -> None:
        self._timer, self._timer_at = self._loop.call_at(at, self._look), at

    def _look(self) -> None:
        self._timer = None
        if self._at is None:
            return
        if self._at > self._loop.time():
            self._start(self._at)
            return
        self._at = None
        self._late()
