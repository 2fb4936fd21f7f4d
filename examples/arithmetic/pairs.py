"""Compute what pairs of runs that differ in one thing show, and what their number cannot show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev

from scipy.special import stdtrit


@dataclass(frozen=True)
class Compared:
    """Second less first, over the pairs. low, high: 95 % by the pairs' own spread (Student's t)."""

    pairs: int
    mean: float
    error: float
    low: float
    high: float


def compared(pairs: Sequence[tuple[float, float]]) -> Compared | None:
    """None of fewer than two pairs, which have no spread."""
    differences = [second - first for first, second in pairs]
    if len(differences) < 2:
        return None
    middle, error = mean(differences), stdev(differences) / sqrt(len(differences))
    reach = float(stdtrit(len(differences) - 1, 0.975)) * error
    return Compared(len(differences), middle, error, middle - reach, middle + reach)


def verdict(found: Compared) -> str:
    """Return a part of a sentence that claims no more than the interval does."""
    if found.low > 0:
        return f"higher, by at least {found.low:.3f}"
    if found.high < 0:
        return f"lower, by {-found.high:.3f} to {-found.low:.3f}"
    return f"no difference detected; a loss above {max(-found.low, 0.0):.3f} is excluded"
