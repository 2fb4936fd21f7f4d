"""So many at a time: the others wait, and the first of them is next."""

from __future__ import annotations

from collections.abc import Callable


class Turns:
    def __init__(self, most: int) -> None:
        self._most = most
        self._having: set[object] = set()
        self._waiting: dict[object, Callable[[], None]] = {}

    @property
    def taken(self) -> int:
        return len(self._having)

    def ask(self, who: object, go: Callable[[], None]) -> None:
        """It has a turn at once, or `go` is called when it has one. Asking again changes nothing."""
        if who in self._having or who in self._waiting:
            return
        if len(self._having) < self._most:
            self._having.add(who)
        else:
            self._waiting[who] = go

    def waits(self, who: object) -> bool:
        return who in self._waiting

    def give_back(self, who: object) -> None:
        """Also that of one that has none, or waits for one."""
        self._waiting.pop(who, None)
        if who in self._having:
            self._having.remove(who)
            self._call_next()

    def _call_next(self) -> None:
        for who in self._waiting:
            go = self._waiting.pop(who)
            self._having.add(who)
            go()
            return
