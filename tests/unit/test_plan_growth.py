"""Trainers that have gained more host memory than the job allows start again between two steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import IN_ONE_POD, facts_at, make_climb, make_job, make_observation, rollout_facts
from colocated_rl_api.facts import PodFacts
from colocated_rl_api.ladder import TIME_SLICED
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from colocated_rl_operator.planner.observation import Observation, remember
from colocated_rl_operator.planner.plan import patience_s, plan
from colocated_rl_operator.planner.reasons import Cause, Waiting
from fakes.walks import everybody_moves, make_group, settle

GIB = 1 << 30
PATIENCE_S = patience_s(TIME_SLICED, Rung.SERVING, make_job().spec.switch)


def serving(
    *, grown: int, saved: int | None, limit: str | None = "20Gi", every: int = 2, sealed: int = 3
) -> Observation:
    """A group that serves step 2 of 5; one of its two trainers has grown."""
    policy: dict[str, Any] = {"backoffSeconds": 0} | ({"maxTrainerGrowth": limit} if limit else {})
    job = make_job(steps=5, checkpoint={"everySteps": every}, failurePolicy=policy)
    climb = make_climb(2, epoch=5, cause=Cause.NEXT_STEP)
    at = facts_at(Rung.SERVING, WeightVersion(2, 1), epoch=5)

    def pod(grown_bytes: int) -> PodFacts:
        rank = at.trainers[0].model_copy(update={"grown_bytes": grown_bytes, "saved": saved})
        return at.model_copy(update={"trainers": (rank,)})

    rollout = rollout_facts(sealed=sealed, trained=2, epoch=5)
    return make_observation(job, [pod(0), pod(grown)], climb=climb, rollout=rollout, trained_step=2)


def test_trainers_that_have_grown_start_again_with_the_next_step_from_the_checkpoint_of_the_last() -> None:
    decided = plan(serving(grown=21 * GIB, saved=2))
    assert decided.raises
    assert decided.climb is not None
    assert (3, 2, Cause.TRAINERS_RECYCLED) == (decided.climb.step, decided.climb.lineage, decided.climb.cause)
    assert 0 == decided.climb.restarts
    assert (0, 0) == (decided.climb.tally.pod_restarts, decided.climb.tally.step_retries)
    assert (
        "more host memory than 20Gi in sums-gpu-1-0: the trainers start together again with step 3" in decided.message
    )


@pytest.mark.parametrize(
    ("grown", "limit"), [(20 * GIB, "20Gi"), (900 * GIB, None)], ids=["as-much-as-allowed", "without-a-limit"]
)
def test_trainers_within_their_limit_go_on(grown: int, limit: str | None) -> None:
    decided = plan(serving(grown=grown, saved=2, limit=limit))
    assert decided.climb is not None
    assert (3, 1, Cause.NEXT_STEP) == (decided.climb.step, decided.climb.lineage, decided.climb.cause)


def test_trainers_that_have_grown_go_on_until_a_step_that_has_a_checkpoint() -> None:
    decided = plan(serving(grown=21 * GIB, saved=0, every=5))
    assert decided.climb is not None
    assert (3, 1, Cause.NEXT_STEP) == (decided.climb.step, decided.climb.lineage, decided.climb.cause)


def test_the_next_step_waits_for_the_checkpoint_that_is_being_written_and_no_longer_than_one_may_take() -> None:
    seen = serving(grown=21 * GIB, saved=0)
    decided = plan(seen)
    assert not decided.raises
    assert decided.wait is not None
    assert (Waiting.CHECKPOINT, seen.now + PATIENCE_S) == (decided.wait.reason, decided.wake_at)
    for late_s in (PATIENCE_S, PATIENCE_S + 1):
        late = plan(remember(replace(seen, now=seen.now + late_s)))
        assert late.climb is not None
        assert (3, 1, Cause.NEXT_STEP) == (late.climb.step, late.climb.lineage, late.climb.cause)


def test_trainers_that_have_grown_do_not_start_again_before_there_is_a_batch_to_train() -> None:
    assert not plan(serving(grown=21 * GIB, saved=2, sealed=2)).raises


@pytest.mark.parametrize("grows_in", [1, 2], ids=["the-step-with-a-checkpoint", "a-step-without-one"])
@pytest.mark.parametrize("placement", [each for each in IN_ONE_POD if each is not Placement.ROLLOUT_ONLY])
def test_a_job_whose_trainer_grows_trains_each_step_once(placement: Placement, grows_in: int) -> None:
    """Steps 2 and 4 have checkpoints: behind one of these the trainers start again."""
    group = make_group(placement=placement, steps=5, failurePolicy={"maxTrainerGrowth": "20Gi"})
    while group.trained_step < grows_in:
        everybody_moves(group)
    assert group.trainer_grows(group.pods[1])
    settle(group)
    assert str(Cause.ALL_STEPS_DONE) == group.outcome
    assert group.climb is not None
    assert 0 == group.climb.restarts
    assert {1: [1, 2], 2: [3, 4, 5]} == group.trained_in
