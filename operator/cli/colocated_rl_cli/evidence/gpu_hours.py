"""Hold who had the GPUs of a job for how long, and what sharing them saved. The module is pure."""

from __future__ import annotations

from typing import NamedTuple

from colocated_rl_api.holders import PodHolder

HOUR_S = 3600.0


class GpuHours(NamedTuple):
    """Holds the hours of all GPUs of a job by holder, and why pods are missing in them.

    is_colocated: rollout and training share the GPUs.
    """

    held: dict[str, float]
    notes: tuple[str, ...]
    is_colocated: bool

    @property
    def total(self) -> float:
        return sum(self.held.values())

    @property
    def longer(self) -> float:
        """Return the hours of rollout or those of training, whichever are more; what both had counts for each."""
        both = self.held.get(PodHolder.BOTH, 0.0)
        return both + max(self.held.get(side, 0.0) for side in (PodHolder.ROLLOUT, PodHolder.TRAINER))

    @property
    def separate(self) -> float | None:
        """Return the hours that rollout and training would hold on GPUs of their own, as many for each side.

        They work at the same time then, and both sides are held for as long as the longer one works. Nothing is lost to
        switches, and no weights move: it is the least that such a job can cost. None: they share none now.
        """
        return 2 * self.longer if self.is_colocated else None

    @property
    def saved(self) -> float | None:
        """Return the hours that sharing saved at least; if below zero, those that it cost at most."""
        return None if self.separate is None else self.separate - self.total
