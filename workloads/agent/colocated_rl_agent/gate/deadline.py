"""A deadline can be moved at every event of a connection at almost no cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def _nobody() -> None:
    """Do nothing when an ended deadline would be late."""


class Deadline:
    """A Deadline calls `late` once its time has passed, unless it was moved or cleared. It fires late, never early."""

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
        """Clear the deadline and drop its callback, which refers back to it."""
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
