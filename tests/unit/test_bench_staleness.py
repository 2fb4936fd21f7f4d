"""What pairs of runs can tell, and what they can't."""

from __future__ import annotations

import pytest

from bench.staleness import compared, verdict

DOCUMENTED = [(0.822, 0.814), (0.848, 0.816), (0.838, 0.812)]  # docs/rollout.md


def test_the_documented_pairs_are_said_as_they_are() -> None:
    found = compared(DOCUMENTED)
    assert (-0.022, 0.0072, -0.053, 0.009) == pytest.approx((found.mean, found.error, found.low, found.high), abs=5e-4)
    assert "95 %: -0.053 to +0.009, so many pairs can't tell it from none" in verdict(found)


def test_a_difference_that_every_pair_has_is_told() -> None:
    assert "which chance does not explain" in verdict(compared([(0.8, 0.7), (0.9, 0.81), (0.85, 0.74)]))


def test_one_pair_tells_nothing() -> None:
    assert "tells nothing" in verdict(compared([(0.8, 0.7)]))
