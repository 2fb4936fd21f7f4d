"""These tests show which failures end a job, and how a job that has failed goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import absent_trainer, facts_at, make_climb, make_job, make_observation, rollout_facts
from colocated_rl_api.facts import PodFacts
from colocated_rl_api.member_wire import Goal
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_operator.planner.actions import CreatePod, DeletePod
from colocated_rl_operator.planner.observation import Climb, FailureTally, Observation, remember
from colocated_rl_operator.planner.plan import plan
from colocated_rl_operator.planner.reasons import Cause

NONE = FailureTally()


def died_at(step: int, tally: FailureTally = NONE, **spec: Any) -> Climb:
    """Return what is decided when a trainer dies in that step."""
    facts = facts_at(Rung.RELEASED, WeightVersion(step, 1), epoch=5)
    dead = facts.model_copy(update={"trainers": (absent_trainer(1, exit_code=1),)})
    climb = replace(make_climb(step, epoch=5, cause=Cause.NEXT_STEP), tally=tally)
    rollout = rollout_facts(sealed=step, trained=step - 1)
    seen = make_observation(make_job(**{"replicas": 1, "steps": 10_000} | spec), [dead], climb=climb, rollout=rollout)
    decided = plan(remember(seen))
    assert decided.raises
    assert decided.climb is not None
    return decided.climb


def outcome_of(steps: list[int], **spec: Any) -> list[Cause]:
    """The answer to a death in each of these steps, one after the other, up to the job's end."""
    tally, found = FailureTally(), list[Cause]()
    for step in steps:
        climb = died_at(step, tally, **spec)
        found.append(climb.cause)
        if climb.cause.is_failure:
            break
        tally = climb.tally
    return found


# ---------------------------------------------------------------------------------------------------- what ends a job
@given(
    limit=st.integers(0, 4), window=st.integers(1, 12), first=st.integers(1, 9),
    gaps=st.lists(st.integers(0, 9), max_size=12),
)  # fmt: skip
def test_a_job_fails_with_the_first_failure_that_backoff_limit_others_came_before_within_the_window(
    limit: int, window: int, first: int, gaps: list[int]
) -> None:
    steps = [first + sum(gaps[:number]) for number in range(len(gaps) + 1)]
    expected = list[Cause]()
    for number, step in enumerate(steps):
        before = sum(step - other < window for other in steps[:number])
        expected.append(Cause.BACKOFF_LIMIT if before >= limit else Cause.TRAINER_DIED)
        if before >= limit:
            break
    assert expected == outcome_of(steps, backoffLimit=limit, backoffWindowSteps=window)


@given(limit=st.integers(1, 6), window=st.integers(1, 20), more=st.integers(0, 5))
def test_failures_spread_wider_than_the_window_never_end_a_job(limit: int, window: int, more: int) -> None:
    steps = [1 + number * (window + more) for number in range(20)]
    assert [Cause.TRAINER_DIED] * 20 == outcome_of(steps, backoffLimit=limit, backoffWindowSteps=window)


@given(limit=st.integers(0, 6), window=st.integers(1, 20), step=st.integers(1, 100))
def test_a_crash_loop_is_ended_after_backoff_limit_restarts(limit: int, window: int, step: int) -> None:
    found = outcome_of([step] * 50, backoffLimit=limit, backoffWindowSteps=window)
    assert [Cause.TRAINER_DIED] * limit + [Cause.BACKOFF_LIMIT] == found


def test_the_next_step_forgives_what_is_older_than_the_window() -> None:
    climb = replace(make_climb(11, epoch=5, cause=Cause.NEXT_STEP), tally=FailureTally(counted=(1, 2, 3, 11)))
    pods: list[PodFacts | None] = [facts_at(Rung.SERVING, WeightVersion(11, 1), epoch=5)]
    job = make_job(replicas=1, steps=20)
    seen = make_observation(job, pods, climb=climb, rollout=rollout_facts(sealed=12, trained=11), trained_step=11)
    decided = plan(remember(seen))
    assert decided.climb is not None
    assert (Cause.NEXT_STEP, 12, (3, 11)) == (decided.climb.cause, decided.climb.step, decided.climb.tally.counted)


# --------------------------------------------------------------------------------------------- how a failed job goes on
def failed(cause: Cause = Cause.BACKOFF_LIMIT, *, is_over: bool = True, retried: int = 0, **spec: Any) -> Observation:
    """A job that failed in step 4; its pods are there, and have stopped."""
    tally = FailureTally(step_retries=2, step=4, tries=2, cause="TrainerDied", action="RetryStep", counted=(4, 4))
    climb = replace(make_climb(4, 3, epoch=9, cause=cause), tally=tally, retries=retried)
    stopped = facts_at(Rung.RELEASED, WeightVersion(4, 3), epoch=9).model_copy(update={"stopped": True})
    rollout = rollout_facts(sealed=4, trained=3, epoch=9).model_copy(update={"stopped": True})
    job = make_job(**{"replicas": 1, "steps": 10, "backoffLimit": 2} | spec)
    seen = make_observation(job, [stopped], climb=climb, rollout=rollout, trained_step=3)
    return remember(replace(seen, is_over=is_over, finished_at=seen.now if is_over else None))


def without_pods(seen: Observation, climb: Climb) -> Observation:
    return remember(replace(seen, members=(), climb=climb, is_over=False))


FAILURES = [cause for cause in Cause if cause.is_failure]


@pytest.mark.parametrize("cause", FAILURES)
def test_a_failed_job_stays_as_it_is(cause: Cause) -> None:
    decided = plan(failed(cause))
    assert (True, False, ()) == (decided.is_over, decided.raises, decided.pods)


@pytest.mark.parametrize("is_over", [True, False], ids=["over", "still-stopping"])
@pytest.mark.parametrize("cause", FAILURES)
def test_a_failed_job_that_is_told_to_go_on_loses_its_pods_and_is_resumed(cause: Cause, is_over: bool) -> None:
    seen = failed(cause, is_over=is_over, retries=1)
    decided = plan(seen)
    climb = decided.climb
    assert climb is not None
    assert (Cause.RETRIED, 10, 4, 3, 1) == (climb.cause, climb.epoch, climb.step, climb.lineage, climb.retries)
    assert (Goal.STOP, (), 0, False) == (climb.cause.goal, climb.tally.counted, climb.tally.tries, decided.is_over)
    clearing = plan(remember(replace(seen, climb=climb, is_over=False)))
    assert {"sums-gpu-0-0", "sums-rollout-0"} == {each.name for each in clearing.pods if isinstance(each, DeletePod)}
    resumed = plan(without_pods(seen, climb))
    assert resumed.climb is not None
    assert (Cause.RESUMED, 11, "") == (resumed.climb.cause, resumed.climb.epoch, resumed.climb.group)
    fresh = plan(without_pods(seen, resumed.climb))
    assert {"gpu-0", "rollout"} == {each.seat for each in fresh.pods if isinstance(each, CreatePod)}


def test_a_job_that_failed_for_its_backoff_limit_goes_on_once_that_is_higher_and_has_used_one_more() -> None:
    climb = plan(failed(backoffLimit=3)).climb
    assert climb is not None
    assert (Cause.RETRIED, (4, 4, 4)) == (climb.cause, climb.tally.counted)


@pytest.mark.parametrize("limit", [1, 2])
def test_a_limit_that_is_not_above_what_is_used_lets_nothing_go_on(limit: int) -> None:
    assert plan(failed(backoffLimit=limit)).is_over


@pytest.mark.parametrize("cause", [cause for cause in FAILURES if cause is not Cause.BACKOFF_LIMIT])
def test_a_higher_backoff_limit_is_no_word_about_another_failure(cause: Cause) -> None:
    assert plan(failed(cause, backoffLimit=9)).is_over


def test_a_job_that_is_complete_is_not_retried() -> None:
    assert plan(failed(Cause.ALL_STEPS_DONE, retries=1, backoffLimit=9)).is_over


def test_a_retry_is_acted_on_once() -> None:
    assert plan(failed(retried=1, retries=1)).is_over
    assert not plan(failed(retried=1, retries=2)).is_over
    assert plan(failed(retried=2, retries=1)).is_over, "a manifest that is applied again asks for nothing new"


def test_a_retry_asked_of_a_running_job_does_not_outlive_its_next_epoch() -> None:
    """It would be acted on at the moment of a failure that nobody has looked at."""
    climb = died_at(3, retries=4, backoffLimit=0)
    assert (Cause.BACKOFF_LIMIT, 4) == (climb.cause, climb.retries)


def test_an_end_that_is_reported_again_by_another_operator_answers_no_retry() -> None:
    climb = plan(replace(failed(is_over=False), memory=replace(failed().memory, raised=False))).climb
    assert climb is not None
    assert (Cause.BACKOFF_LIMIT, 0) == (climb.cause, climb.retries)


def test_a_suspended_job_that_is_retried_stays_without_pods() -> None:
    seen = failed(retries=1, suspend=True)
    retried = plan(seen).climb
    assert retried is not None
    at_rest = plan(without_pods(seen, retried)).climb
    assert at_rest is not None
    assert Cause.SUSPENDED is at_rest.cause
    assert not plan(without_pods(seen, at_rest)).raises
