"""Ladders, plan and status of a job with a reference: each batch is scored before it is trained, on either ladder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import (
    CREATED,
    RESIDENT_ROLLOUT,
    ROLLOUT,
    absent_trainer,
    facts_at,
    make_climb,
    make_first_step,
    make_job,
    pod_targets,
    rollout_facts,
    trainer,
)
from colocated_rl_api.facts import PodFacts
from colocated_rl_api.job_status import ColocatedRLJobStatus, Holder, Phase
from colocated_rl_api.ladder import (
    DISAGGREGATED,
    LADDERS,
    MIXED,
    RESIDENT,
    ROLLOUT_ONLY,
    SCORED_RESIDENT,
    SCORED_TIME_SLICED,
    TIME_SLICED,
    TRAIN_ONLY,
    Ladder,
    ladder_for,
)
from colocated_rl_api.member_wire import RolloutTarget
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from colocated_rl_operator.planner.observation import Job, Observation, remember
from colocated_rl_operator.planner.plan import patience_s, plan
from colocated_rl_operator.planner.reasons import Cause
from colocated_rl_operator.planner.status import report

V0, V1 = WeightVersion(0, 1), WeightVersion(1, 1)
BELOW = {SCORED_TIME_SLICED: Rung.RELEASED, SCORED_RESIDENT: Rung.SEALED}
on_both_ladders = pytest.mark.parametrize("ladder", BELOW, ids=lambda ladder: ladder.placement)


def make_scored_job(ladder: Ladder, replicas: int = 2, **spec: Any) -> Job:
    rollout = RESIDENT_ROLLOUT if ladder.serves_on else ROLLOUT
    return make_job(replicas=replicas, rollout=rollout, reference={}, **spec)


def climbing(ladder: Ladder, *pods: Rung | PodFacts, **options: Any) -> Observation:
    """A group on its way to (1, 1), epoch 1, that serves (0, 1)."""
    facts = [facts_at(pod, V1, ladder=ladder) if isinstance(pod, Rung) else pod for pod in pods]
    return make_first_step(make_scored_job(ladder, len(pods)), list(facts), **options)


def later(seen: Observation, seconds: float) -> Observation:
    return remember(replace(seen, now=seen.now + seconds))


def asked_rungs(seen: Observation) -> set[Rung]:
    return {target.rung for target in pod_targets(seen).values()}


# ---------------------------------------------------------------------------------------------------------- the ladders
@pytest.mark.parametrize("ladder", LADDERS, ids=lambda ladder: f"{ladder.placement}-{ladder.scores}")
def test_every_ladder_ends_where_its_group_rests_and_its_barriers_lie_on_it(ladder: Ladder) -> None:
    assert ladder is ladder_for(ladder.placement, scores=ladder.scores)
    assert (Rung.SERVING if ladder.serves else Rung.EXPORTED) is ladder.rungs[-1] is ladder.top
    assert (Rung.SEALED if ladder.trains else Rung.RELEASED) is ladder.rungs[0]
    assert ladder.barriers <= {*ladder.rungs}
    assert {ladder.next_barrier(rung) for rung in (Rung.UNKNOWN, *ladder.rungs)} == ladder.barriers
    assert ladder.top is ladder.next_barrier(ladder.top)


@on_both_ladders
def test_a_reference_adds_a_barrier_below_trained_and_nothing_else(ladder: Ladder) -> None:
    plain = ladder_for(ladder.placement, scores=False)
    place = ladder.rungs.index(Rung.SCORED)
    assert (BELOW[ladder], Rung.TRAINED) == (ladder.rungs[place - 1], ladder.rungs[place + 1])
    assert plain.rungs == tuple(rung for rung in ladder.rungs if rung is not Rung.SCORED)
    assert {Rung.SCORED} == ladder.barriers - plain.barriers == ladder.training - plain.training
    assert make_scored_job(ladder).ladder is ladder


def test_nothing_is_scored_in_a_job_without_a_reference() -> None:
    plain = (TIME_SLICED, RESIDENT, DISAGGREGATED, MIXED, ROLLOUT_ONLY, TRAIN_ONLY)
    assert plain == tuple(ladder_for(placement, scores=False) for placement in Placement)
    assert ROLLOUT_ONLY is ladder_for(Placement.ROLLOUT_ONLY, scores=True), "nothing is trained, so nothing is scored"
    for ladder in plain:
        assert Rung.SCORED not in ladder.rungs
        with pytest.raises(KeyError):
            ladder.reaches(Rung.SEALED, Rung.SCORED)


@pytest.mark.parametrize(
    ("ladder", "rung"), [(ladder, rung) for ladder in BELOW for rung in ladder.rungs], ids=lambda value: str(value)[:12]
)
def test_builders_stand_where_they_say(ladder: Ladder, rung: Rung) -> None:
    assert rung is ladder.standing(facts_at(rung, V1, ladder=ladder), V1)


# ------------------------------------------------------------------------------------------------------------- standing
@on_both_ladders
@pytest.mark.parametrize(
    "rank",
    [trainer(0, 1, scored=0), trainer(0, 2, scored=1), absent_trainer(1, -9).model_copy(update={"scored": 1})],
    ids=["another batch", "another lineage", "gone"],
)
def test_scores_of_another_batch_or_of_other_trainers_are_none(ladder: Ladder, rank: Any) -> None:
    pod = facts_at(Rung.SCORED, V1, ladder=ladder).model_copy(update={"trainers": (rank,)})
    assert BELOW[ladder] is ladder.standing(pod, V1)


@on_both_ladders
def test_every_rank_of_a_pod_has_scored(ladder: Ladder) -> None:
    pod = facts_at(Rung.SCORED, V1, ladder=ladder)
    half = pod.model_copy(update={"trainers": (*pod.trainers, trainer(0, 1))})
    assert BELOW[ladder] is ladder.standing(half, V1)


@on_both_ladders
def test_a_step_that_need_not_be_trained_need_not_be_scored(ladder: Ladder) -> None:
    """Trainers that start on a checkpoint of the very step."""
    assert Rung.TRAINED is ladder.standing(facts_at(Rung.TRAINED, V1, ladder=ladder), V1)


# ----------------------------------------------------------------------------------------------------------------- plan
@on_both_ladders
def test_nobody_trains_before_every_reference_has_scored(ladder: Ladder) -> None:
    below = BELOW[ladder]
    assert {Rung.SCORED} == asked_rungs(climbing(ladder, below, below))
    assert {Rung.SCORED} == asked_rungs(climbing(ladder, Rung.SCORED, below))
    assert {Rung.TRAINED} == asked_rungs(climbing(ladder, Rung.SCORED, Rung.SCORED))


def test_tunix_on_devices_that_are_taken_in_turns_nothing_is_scored_before_the_batch_is_there() -> None:
    """tunix's published stage works so with offload: nothing comes out until the barrier, then the batch."""
    must_score_after_the_seal(SCORED_TIME_SLICED)


def test_resident_trainers_score_a_batch_once_it_is_sealed() -> None:
    """This follows from `WithTrainer`, whose reference is in host memory. `WithRollout` keeps it on the device, where
    it scores samples as they come, as tunix's published stage does groups: see test_plan_reference_beside.py.
    """
    must_score_after_the_seal(SCORED_RESIDENT)


def must_score_after_the_seal(ladder: Ladder) -> None:
    pods = [facts_at(Rung.SERVING, V0, ladder=ladder)] * 2
    collecting, sealed = (
        climbing(ladder, *pods, climb=make_climb(0), rollout=rollout_facts(sealed=step)) for step in (0, 1)
    )
    assert (False, {Rung.SERVING}) == (bool(plan(collecting).raises), asked_rungs(collecting))
    climb = plan(sealed).climb
    assert climb is not None
    assert V1 == climb.version
    assert {Rung.SCORED} == asked_rungs(climbing(ladder, BELOW[ladder], BELOW[ladder]))


@on_both_ladders
def test_a_batch_that_is_scored_is_not_trained_for_the_store(ladder: Ladder) -> None:
    decided = plan(climbing(ladder, Rung.SCORED, Rung.SCORED))
    (target,) = [target for target in decided.targets.values() if isinstance(target, RolloutTarget)]
    assert 0 == target.trained_step


@on_both_ladders
@pytest.mark.parametrize("below", [True, False])
def test_scoring_and_what_follows_it_have_deadlines(ladder: Ladder, below: bool) -> None:
    rung = BELOW[ladder] if below else Rung.SCORED
    seen = climbing(ladder, rung, rung)
    patience = patience_s(ladder, ladder.next_barrier(rung), seen.job.spec.switch)
    assert patience > seen.job.spec.switch.trainer_progress_seconds
    assert not plan(later(seen, patience - 1)).raises
    raised = plan(later(seen, patience)).climb
    assert raised is not None
    assert Cause.RUNG_DEADLINE is raised.cause


@on_both_ladders
def test_each_batch_that_is_scored_again_after_a_reload_is_progress(ladder: Ladder) -> None:
    """The climb is for step 3; trainers loaded step 0, and have each batch scored and trained on the way."""
    climb = make_climb(3, 2, cause=Cause.TRAINER_DIED)
    at = climb.version
    pod = facts_at(BELOW[ladder], at, ladder=ladder)
    seen = climbing(ladder, pod, pod, climb=climb, rollout=rollout_facts(sealed=3))
    patience = patience_s(ladder, Rung.SCORED, seen.job.spec.switch)
    waited = later(seen, patience - 1)
    moved = pod.model_copy(update={"trainers": (trainer(0, 2, scored=1),)})
    members = tuple(replace(member, facts=moved) if member.pod_facts else member for member in waited.members)
    seen = remember(replace(waited, members=members))
    assert BELOW[ladder] is seen.slowest
    assert not plan(later(seen, patience - 1)).raises


# --------------------------------------------------------------------------------------------------------------- status
@on_both_ladders
def test_status_counts_pods_at_scored_and_calls_it_training(ladder: Ladder) -> None:
    seen = climbing(ladder, Rung.SCORED, BELOW[ladder])
    status = report(seen, plan(seen), before=ColocatedRLJobStatus(), at=CREATED)
    assert {"Scored": 1, BELOW[ladder]: 1} == status.pods_by_rung
    assert BELOW[ladder] == status.rung
    assert (Phase.TRAINING, Holder.BOTH if ladder.serves_on else Holder.TRAINER) == (status.phase, status.gpu_holder)


@on_both_ladders
def test_a_switch_is_measured_without_the_time_of_the_reference(ladder: Ladder) -> None:
    seen = climbing(ladder, Rung.SEALED, Rung.SEALED)
    for rung in ladder.rungs:
        facts = facts_at(rung, V1, ladder=ladder)
        members = tuple(replace(member, facts=facts) if member.pod_facts else member for member in seen.members)
        seconds = 50.0 if rung in (Rung.SCORED, Rung.TRAINED) else 1.0
        seen = later(replace(seen, members=members), seconds)
    trainers = {Rung.SCORED, Rung.TRAINED} | ({Rung.SEALED, Rung.EXPORTED} if ladder.serves_on else set())
    expected = len([rung for rung in ladder.rungs if rung not in trainers])
    assert expected == seen.memory.last_switch_s
