"""Hold who had the GPUs of a job for how long, and what sharing them saved. The module is pure."""

from __future__ import annotations

from typing import NamedTuple

from colocated_rl_api.holders import PodHolder

HOUR_S = 3600.0


class GpuHours(NamedTuple):
    """Holds the hours of all GPUs of a job by holder, and why pods are missing in them.

    shared: those of the GPUs that rollout and training share; None: they share none now.
    """

    held: dict[str, float]
    notes: tuple[str, ...]
    shared: dict[str, float] | None

    @property
    def total(self) -> float:
        return sum(self.held.values())

    @property
    def unshared(self) -> float:
        """Return the hours of all other GPUs: of engines that have their own, beside pods that take turns."""
        return self.total - sum((self.shared or {}).values())

    @property
    def longer(self) -> float:
        """Return the shared hours of rollout or training, whichever are more; what both had counts for each."""
        held = self.shared or {}
        sides = (held.get(side, 0.0) for side in (PodHolder.ROLLOUT, PodHolder.TRAINER))
        return held.get(PodHolder.BOTH, 0.0) + max(sides)

    @property
    def separate(self) -> float | None:
        """Return the hours that rollout and training would hold on GPUs of their own, as many for each side.

        They work at the same time then, and both sides are held for as long as the longer one works. Nothing is lost to
        switches, and no weights move: it is the least that such a job can cost. GPUs that are not shared stay as they
        are. None: rollout and training share none now.
        """
        return None if self.shared is None else 2 * self.longer + self.unshared

    @property
    def saved(self) -> float | None:
        """Return the hours that sharing saved at least; if below zero, those that it cost at most."""
        return None if self.separate is None else self.separate - self.total
