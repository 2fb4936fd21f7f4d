"""The limiter bounds how many have a turn at a time and how much they hold together; others wait in order."""

from __future__ import annotations

import math
from collections.abc import Callable


class Limiter:
    """The Limiter gives turns in order.

    most: turns at a time. most_held: bound of all sizes together; past it only the first goes on, or none would end.
    """

    def __init__(self, most: int, most_held: float = math.inf) -> None:
        self._most, self._most_held = most, most_held
        self._having: dict[object, Callable[[], None]] = {}
        self._waiting: dict[object, Callable[[], None]] = {}
        self._sizes: dict[object, int] = {}
        self._held = 0

    @property
    def taken(self) -> int:
        return len(self._having)

    def ask(self, who: object, go: Callable[[], None]) -> None:
        """Give `who` a turn at once, or call `go` when it gets one. Asking again changes nothing."""
        if who in self._having or who in self._waiting:
            return
        queue = self._having if len(self._having) < self._most else self._waiting
        queue[who] = go

    def hold(self, who: object, size: int) -> None:
        """Record the size that `who` holds now, if it has a turn."""
        if who in self._having:
            was_full = self._is_full
            self._held += size - self._sizes.get(who, 0)
            self._sizes[who] = size
            if was_full and not self._is_full:
                self._go_on()

    def waits(self, who: object) -> bool:
        """Return whether `who` must wait for a turn, or with a turn for room. One that has asked for none goes on."""
        is_behind = who in self._having and who is not next(iter(self._having))
        return who in self._waiting or (self._is_full and is_behind)

    def give_back(self, who: object) -> None:
        """Give back the turn of `who`, or its place among those waiting. Without either, do nothing."""
        self._waiting.pop(who, None)
        if self._having.pop(who, None) is None:
            return
        was_full = self._is_full
        self._held -= self._sizes.pop(who, 0)
        if was_full:
            self._go_on()
        self._call_next()

    @property
    def _is_full(self) -> bool:
        return self._held > self._most_held

    def _go_on(self) -> None:
        for go in list(self._having.values()):
            go()

    def _call_next(self) -> None:
        for who in self._waiting:
            go = self._having[who] = self._waiting.pop(who)
            go()
            return
