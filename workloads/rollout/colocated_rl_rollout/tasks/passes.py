"""The order in which things come, another one in each pass over them, and the same again after a restart."""

from __future__ import annotations

import random
from collections.abc import Sequence


class Passes:
    """`passes[number]` is the order of one pass: it depends on the seed and the number alone. Keeps the newest."""

    def __init__(self, things: Sequence[int], *, seed: int) -> None:
        self._things = things
        self._seed = seed
        self._number = -1
        self._order: list[int] = []

    def __len__(self) -> int:
        """Things in a pass."""
        return len(self._things)

    def __getitem__(self, number: int) -> list[int]:
        if number != self._number:
            order = list(self._things)
            random.Random(f"{self._seed}/{number}").shuffle(order)
            self._number, self._order = number, order
        return self._order
