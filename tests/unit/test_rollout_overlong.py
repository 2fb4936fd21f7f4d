"""Long responses lose a part of their reward."""

from __future__ import annotations

import pytest

from colocated_rl_api.job import OverlongPenalty
from colocated_rl_rollout.rules.overlong import overlong_penalty


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (20, 0.0), (21, 0.05), (25, 0.25), (30, 0.5), (31, 0.5)])
def test_penalty_rises_evenly_over_the_buffer_up_to_its_factor(length: int, penalty: float) -> None:
    rule = OverlongPenalty(buffer_tokens=10, factor=0.5)

    assert penalty == pytest.approx(overlong_penalty(length, limit=30, rule=rule))
