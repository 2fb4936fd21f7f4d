"""An engine over two pods: whole jobs by the real plan and the real table, in any order, with parts that end."""

from __future__ import annotations

from dataclasses import replace

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
from fakes.spanning import SpanningJob

IN_ONE_POD = (Placement.TIME_SLICED, Placement.RESIDENT, Placement.ROLLOUT_ONLY)
SEEDS = st.integers(min_value=0, max_value=10**6)


def run_some(placement: Placement, *, deaths: int = 0) -> None:
    for seed in range(40):
        SpanningJob(seed, **PLACED[placement]).runs_to_its_end(deaths=deaths)


@pytest.mark.parametrize("placement", IN_ONE_POD)
@given(seed=SEEDS)
@settings(max_examples=5)
def test_job_with_one_engine_over_two_pods_ends(placement: Placement, seed: int) -> None:
    job = SpanningJob(seed, **PLACED[placement])
    job.runs_to_its_end()
    assert 2 == job.starts, "each part starts once"


@pytest.mark.parametrize("placement", IN_ONE_POD)
@given(seed=SEEDS, deaths=st.integers(min_value=1, max_value=4))
@settings(max_examples=12)
def test_job_whose_parts_end_starts_the_engine_again_and_ends(placement: Placement, seed: int, deaths: int) -> None:
    SpanningJob(seed, **PLACED[placement]).runs_to_its_end(deaths=deaths)


def test_engine_whose_memory_comes_back_before_all_trainers_have_left_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ladder, "_over_pods", lambda ladder: ladder)
    with pytest.raises(InvariantBroken, match="memory comes back beside a trainer"):
        run_some(Placement.TIME_SLICED)


def test_pod_that_calls_another_pods_engine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_actions, "shares_of", lambda actions, *_: actions)
    with pytest.raises(InvariantBroken, match="in a pod without a gate"):
        run_some(Placement.TIME_SLICED)


def test_engine_that_outlives_a_part_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first part would wait for ever, behind an open gate."""
    monkeypatch.setattr("fakes.spanning.lost", lambda *_: "")
    with pytest.raises(AssertionError, match=r"no end|nobody moves"):
        run_some(Placement.RESIDENT, deaths=2)


def test_part_of_a_pod_that_ends_waits_for_no_request_of_another() -> None:
    job = SpanningJob(1, **PLACED[Placement.TIME_SLICED])
    while not job.pods[0].view.gate_open:
        job.move()
    job.operator_looks()
    part = job.pods[1]
    target = part.target
    assert target is not None
    assert part.seen.gate_open
    ends: PodView = replace(part.view, terminating=True)
    assert not spans.as_part(ends, target.span, pods=2).gate_open


def test_no_part_joins_an_engine_that_lacks_a_pod() -> None:
    """Its rank is its place among the pods that are there."""
    job = SpanningJob(1, **PLACED[Placement.TIME_SLICED])
    while job.pods[1].seen.joins_on is None:
        job.move()
    part = job.pods[1]
    assert part.target is not None
    assert spans.as_part(part.view, part.target.span, pods=3).joins_on is None


@pytest.mark.parametrize("pods", [("uid-gpu-0-0",), ("uid-gpu-0-0", "another"), ("uid-gpu-1-0", "uid-gpu-0-0")])
def test_engine_is_lost_with_a_pod_of_it(pods: tuple[str, ...]) -> None:
    job = SpanningJob(1, **PLACED[Placement.TIME_SLICED])
    while not job.pods[0].view.gate_open:
        job.move()
    first = job.pods[0]
    assert first.target is not None
    span = first.target.span
    assert span is not None
    assert "" == spans.lost(first.view.engine, span, first.pods)
    other = EngineSpan.model_validate({"pods": pods, "address": span.address})
    assert "gone or was made again" in spans.lost(first.view.engine, other, first.pods)
