"""Order things anew in each pass over them, and in the same way after a restart."""

from __future__ import annotations

import random
from collections.abc import Sequence


class Passes:
    """`passes[number]` is the order of one pass, which depends on the seed and the number alone. The newest is kept."""

    def __init__(self, things: Sequence[int], *, seed: int) -> None:
        self._things = things
        self._seed = seed
        self._number = -1
        self._order: list[int] = []

    def __len__(self) -> int:
        """Return how many things a pass has."""
        return len(self._things)

    def __getitem__(self, number: int) -> list[int]:
        if number != self._number:
            order = list(self._things)
            random.Random(f"{self._seed}/{number}").shuffle(order)
            self._number, self._order = number, order
        return self._order
