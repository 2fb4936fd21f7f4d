"""This module records the pod's rung in its target's epoch, how long each rung took, and how long the pod waited.

All of it is for people. None of it is a cursor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from colocated_rl_api.facts import EPOCHS_OF_WAITS
from colocated_rl_api.ladder import Ladder
from colocated_rl_api.rungs import Rung


class RungTimes:
    """RungTimes measures the time that each rung took.

    reached: called with (rung, seconds since the rung before) for each rung that the pod reaches.
    waited: called with the seconds of each wait for the rest of the group, when it ends.
    """

    def __init__(
        self, ladder: Ladder, *, reached: Callable[[Rung, float], None], waited: Callable[[float], None]
    ) -> None:
        self._ladder = ladder
        self._reached = reached
        self._waited = waited
        self._waits_since: float | None = None
        self._epoch: int | None = None
        self._since = 0.0
        self.rung = Rung.UNKNOWN
        self.took_s: dict[Rung, float] = {}
        self._waits = deque([0.0], maxlen=EPOCHS_OF_WAITS)  # seconds by epoch, the newest last

    @property
    def waited_s(self) -> float:
        """Return the seconds of all waits of the newest epochs that have ended."""
        return round(sum(self._waits), 4)

    @property
    def since(self) -> float | None:
        """Return when the pod reached its rung or the epoch began; None before the first observation."""
        return None if self._epoch is None else self._since

    def stands(self, rung: Rung, *, epoch: int, now: float, waits: bool) -> None:
        """Record the pod's rung now. A rung that the pod skips between two calls has no time of its own.

        waits: the pod has done all that its target asks for, and the target is not the top yet.
        """
        if self._waits_since is not None and (epoch != self._epoch or not waits):
            self._end_wait(now - self._waits_since)
        if waits and self._waits_since is None:
            self._waits_since = now
        if epoch != self._epoch:
            self._epoch, self._since = epoch, now
            self.rung, self.took_s = rung, {}
            self._waits.append(0.0)
        if not self._ladder.reaches(self.rung, rung):
            self.took_s[rung] = took_s = round(now - self._since, 4)
            self._reached(rung, took_s)
        if rung != self.rung:
            self.rung, self._since = rung, now

    def _end_wait(self, seconds: float) -> None:
        self._waits_since = None
        self._waits[-1] += seconds
        self._waited(seconds)
