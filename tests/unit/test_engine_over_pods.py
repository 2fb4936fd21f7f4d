"""An engine over two pods: whole jobs by the real plan and the real table, in any order, with parts that end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import PLACED
from colocated_rl_agent.planner import next_actions, spans
from colocated_rl_agent.planner.views import PodView
from colocated_rl_api import ladder
from colocated_rl_api.member_wire import EngineSpan
from colocated_rl_api.rungs import Placement
from fakes.model_pod import InvariantBroken
from fakes.spanning import SpanningJob, SpanState

WITH_ENGINES = tuple(each for each in Placement if each not in (Placement.TRAIN_ONLY, Placement.MIXED))
SEEDS = st.integers(min_value=0, max_value=10**6)


@cache
def job_of_two_steps(placement: Placement) -> SpanningJob:
    return SpanningJob(steps=2, **PLACED[placement])


def walk_some(placement: Placement, *, deaths: int = 0) -> None:
    job = SpanningJob(**PLACED[placement])
    for seed in range(40):
        [*job.walk(seed, deaths=deaths)]


def first_state(placement: Placement, is_wanted: Callable[[SpanState], bool]) -> SpanState:
    return next(filter(is_wanted, job_of_two_steps(placement).walk(1)))


@pytest.mark.parametrize("placement", WITH_ENGINES)
@given(seed=SEEDS)
@settings(max_examples=5)
def test_job_with_one_engine_over_two_pods_ends(placement: Placement, seed: int) -> None:
    *_, end = job_of_two_steps(placement).walk(seed)
    assert [1, 1] == [pod.starts for pod in end.pods if pod.place is not None], "each part starts once"


@pytest.mark.parametrize("placement", WITH_ENGINES)
@given(seed=SEEDS, deaths=st.integers(min_value=1, max_value=4))
@settings(max_examples=12)
def test_job_whose_parts_end_starts_the_engine_again_and_ends(placement: Placement, seed: int, deaths: int) -> None:
    [*job_of_two_steps(placement).walk(seed, deaths=deaths)]


def test_engine_whose_memory_comes_back_before_all_trainers_have_left_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ladder, "_over_pods", lambda ladder: ladder)
    with pytest.raises(InvariantBroken, match="memory comes back beside a trainer"):
        walk_some(Placement.TIME_SLICED)


def test_pod_that_calls_another_pods_engine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_actions, "shares_of", lambda actions, *_: actions)
    with pytest.raises(InvariantBroken, match="in a pod without a gate"):
        walk_some(Placement.TIME_SLICED)


def test_engine_that_outlives_a_part_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first part would wait for ever, behind an open gate."""
    monkeypatch.setattr("fakes.spanning.lost", lambda *_: "")
    with pytest.raises(InvariantBroken, match="no end"):
        walk_some(Placement.RESIDENT, deaths=2)


def test_part_of_a_pod_that_ends_waits_for_no_request_of_another() -> None:
    state = first_state(Placement.TIME_SLICED, lambda state: state.pods[1].seen.gate_open)
    part = state.pods[1]
    assert part.target is not None
    ends: PodView = replace(part.view, terminating=True)
    assert not spans.as_part(ends, part.target.span, pods=2).gate_open


def test_no_part_joins_an_engine_that_lacks_a_pod() -> None:
    """Its rank is its place among the pods that are there."""
    part = first_state(Placement.TIME_SLICED, lambda state: state.pods[1].seen.joins_on is not None).pods[1]
    assert part.target is not None
    assert spans.as_part(part.view, part.target.span, pods=3).joins_on is None


@pytest.mark.parametrize("pods", [("uid-gpu-0-0",), ("uid-gpu-0-0", "another"), ("uid-gpu-1-0", "uid-gpu-0-0")])
def test_engine_is_lost_with_a_pod_of_it(pods: tuple[str, ...]) -> None:
    first = first_state(Placement.TIME_SLICED, lambda state: state.pods[0].view.gate_open).pods[0]
    assert first.target is not None
    span = first.target.span
    assert span is not None
    assert "" == spans.lost(first.view.engine, span, first.pods)
    other = EngineSpan.model_validate({"pods": pods, "address": span.address})
    assert "gone or was recreated" in spans.lost(first.view.engine, other, first.pods)
