"""More that may fail on the way of a pod than the fast layer has time for (`tests/unit/test_agent_facts.py`)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from colocated_rl_api.ladder import Ladder
from fakes.unruly_pod import CHANCES, KINDS, Chance, must_arrive


@settings(max_examples=120)
@pytest.mark.parametrize(("ladder", "keeps"), KINDS)
@given(**CHANCES)
def test_pod_keeps_every_promise_and_arrives_whatever_fails_on_the_way(
    ladder: Ladder, keeps: tuple[str, ...], chances: dict[int, Chance], steps: int
) -> None:
    must_arrive(ladder, keeps, chances=chances, steps=steps)
