"""The job's filters decide which finished samples are kept from training. Pure.

A group without spread in its rewards has no gradient: training on others in its place is what DAPO calls dynamic
sampling (Yu et al. 2025). A group of one has none either, so it is dropped with the sample that left it alone.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from colocated_rl_api.job import Filter
from colocated_rl_rollout.rules.samples import Finish, Group, Sample

SAME_REWARD = 1e-6  # a spread below this is rounding


class FilterResult(NamedTuple):
    """`whole` names the filter that drops the whole group, or is None; then `samples` are left out of the group."""

    whole: Filter | None
    samples: list[Sample]


def judge(group: Group, filters: Collection[Filter]) -> FilterResult:
    """Apply the filters to a complete group."""
    cut = [sample for sample in group.kept if sample.finish is Finish.LENGTH] if Filter.TRUNCATED in filters else []
    left = [sample.reward or 0.0 for sample in group.kept if sample not in cut]
    if cut and len(left) < 2:
        return FilterResult(Filter.TRUNCATED, [])
    if Filter.EQUAL_REWARDS in filters and max(left) - min(left) <= SAME_REWARD:
        return FilterResult(Filter.EQUAL_REWARDS, [])
    return FilterResult(None, cut)
