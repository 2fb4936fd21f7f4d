"""Filters of one's own: which groups are trained. `filterFunctions` of a job names them, as MODULE:FUNCTION.

Each is called with the samples of a complete group and the row of their prompt, and returns True to keep the group.
"""

from __future__ import annotations

from typing import Any

LEAST, MOST = 0.2, 0.8  # mean reward; rewards of `rewards.py` are 0 to 1


def medium(samples: list[dict[str, Any]], _row: dict[str, Any] | None) -> bool:
    """Keep a group that is neither too hard nor too easy for the present policy."""
    mean: float = sum(sample["reward"] for sample in samples) / len(samples)
    return LEAST <= mean <= MOST


def rewards_differ(samples: list[dict[str, Any]], _row: dict[str, Any] | None) -> bool:
    """Keep a group that has something to learn from, as filter EqualRewards does (DAPO's dynamic sampling)."""
    return len({sample["reward"] for sample in samples}) > 1


def several_answers(samples: list[dict[str, Any]], _row: dict[str, Any] | None) -> bool:
    """Keep a group whose whole responses are not all the same text."""
    return len({sample["response"] for sample in samples if not sample["truncated"]}) > 1
