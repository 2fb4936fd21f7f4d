"""This module records the pod's rung in its target's epoch and how long each rung took: for people, not a cursor."""

from __future__ import annotations

from collections.abc import Callable

from colocated_rl_api.ladder import Ladder
from colocated_rl_api.rungs import Rung


class RungTimes:
    """RungTimes measures the time that each rung took.

    reached: called with (rung, seconds since the rung before) for each rung that the pod reaches.
    """

    def __init__(self, ladder: Ladder, reached: Callable[[Rung, float], None]) -> None:
        self._ladder = ladder
        self._reached = reached
        self._epoch: int | None = None
        self._since = 0.0
        self.rung = Rung.UNKNOWN
        self.took_s: dict[Rung, float] = {}

    @property
    def since(self) -> float | None:
        """Return when the pod reached its rung or the epoch began; None before the first observation."""
        return None if self._epoch is None else self._since

    def stands(self, rung: Rung, *, epoch: int, now: float) -> None:
        """Record the pod's rung now. A rung that the pod skips between two calls has no time of its own."""
        if epoch != self._epoch:
            self._epoch, self._since = epoch, now
            self.rung, self.took_s = rung, {}
        if not self._ladder.reaches(self.rung, rung):
            self.took_s[rung] = took_s = round(now - self._since, 4)
            self._reached(rung, took_s)
        if rung != self.rung:
            self.rung, self._since = rung, now
