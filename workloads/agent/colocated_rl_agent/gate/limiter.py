"""So many at a time, and so much: the others wait, and the first of them is next."""

from __future__ import annotations

import math
from collections.abc import Callable


class Limiter:
    """most: at a time. most_held: of them together; past it the first one goes on alone, or none would end."""

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
        """It has a turn at once, or `go` is called when it has one. Asking again changes nothing."""
        if who in self._having or who in self._waiting:
            return
        queue = self._having if len(self._having) < self._most else self._waiting
        queue[who] = go

    def hold(self, who: object, size: int) -> None:
        """What one that has a turn holds by now."""
        if who in self._having:
            self._held += size - self._sizes.get(who, 0)
            self._sizes[who] = size

    def waits(self, who: object) -> bool:
        return who in self._waiting or (self._is_full and who is not next(iter(self._having), who))

    def give_back(self, who: object) -> None:
        """Also that of one that has none, or waits for one."""
        self._waiting.pop(who, None)
        if self._having.pop(who, None) is None:
            return
        held_up = list(self._having.values()) if self._is_full else []
        self._held -= self._sizes.pop(who, 0)
        for go in held_up:
            go()
        self._call_next()

    @property
    def _is_full(self) -> bool:
        return self._held > self._most_held

    def _call_next(self) -> None:
        for who in self._waiting:
            go = self._having[who] = self._waiting.pop(who)
            go()
            return
