"""These tables of groups show what filters keep from training."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from colocated_rl_api.job import Filter
from colocated_rl_api.names import PromptPosition
from colocated_rl_rollout.rules.filters import judge
from colocated_rl_rollout.rules.samples import (
    Finish,
    Group,
    GroupId,
    Prompt,
    Sample,
    SampleId,
    SampleState,
)

EQUAL, TRUNCATED = Filter.EQUAL_REWARDS, Filter.TRUNCATED


def group_of(*samples: tuple[float, Finish]) -> Group:
    group = Group(GroupId(1), Prompt(PromptPosition(0), 0, (1,)))
    group.samples = [
        Sample(SampleId(number), group, SampleState.COMPLETED, reward=reward, finish=finish)
        for number, (reward, finish) in enumerate(samples)
    ]
    return group


STOP, LENGTH = Finish.STOP, Finish.LENGTH


@pytest.mark.parametrize(
    ("filters", "samples", "whole", "left_out"),
    [
        ([], [(1, STOP), (1, LENGTH)], None, []),
        ([EQUAL], [(1, STOP), (0, STOP)], None, []),
        ([EQUAL], [(1, STOP), (1, STOP)], EQUAL, []),
        ([EQUAL], [(0.1, STOP), (0.1 + 1e-9, STOP)], EQUAL, []),  # rounding is no signal
        ([EQUAL], [(0, STOP), (1e-9, STOP)], EQUAL, []),
        ([EQUAL], [(0, STOP), (1e-6, STOP)], EQUAL, []),
        ([EQUAL], [(0, STOP), (1.1e-6, STOP)], None, []),
        ([TRUNCATED], [(1, STOP), (1, STOP), (0, STOP), (0, LENGTH)], None, [3]),
        ([EQUAL], [(1, STOP), (0, LENGTH)], None, []),  # that the limit was hit is one
        ([TRUNCATED], [(1, STOP), (1, STOP), (0, LENGTH)], None, [2]),
        ([TRUNCATED], [(1, STOP), (0, LENGTH)], TRUNCATED, []),
        ([TRUNCATED], [(0, LENGTH), (0, LENGTH)], TRUNCATED, []),
        ([EQUAL, TRUNCATED], [(1, STOP), (1, STOP), (0, LENGTH)], EQUAL, []),  # what is left has no spread
        ([EQUAL, TRUNCATED], [(1, STOP), (0, STOP), (0, LENGTH)], None, [2]),
    ],
)
def test_a_group_is_judged_by_what_would_be_trained_of_it(
    filters: Sequence[Filter], samples: list[tuple[float, Finish]], whole: Filter | None, left_out: list[int]
) -> None:
    verdict = judge(group_of(*samples), filters)
    assert (whole, left_out) == (verdict.whole, [sample.id for sample in verdict.samples])
