"""Plan and status of a job whose engines and trainers both stay on the devices (`rollout.offload: []`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import (
    RESIDENT_ROLLOUT,
    absent_trainer,
    facts_at,
    make_climb,
    make_first_step,
    make_job,
    make_observation,
    pod_targets,
    rollout_facts,
    status_of,
)
from colocated_rl_api.facts import (
    EngineFacts,
    EngineState,
    EvaluationResult,
    PodFacts,
)
from colocated_rl_api.job_status import ConditionStatus, Holder, Phase
from colocated_rl_api.ladder import RESIDENT, TIME_SLICED
from colocated_rl_api.member_wire import Climbed, RolloutTarget
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from colocated_rl_operator.planner.observation import Job, Observation, in_epoch, remember
from colocated_rl_operator.planner.plan import patience_s, plan
from colocated_rl_operator.planner.reasons import Cause, ConditionType

V0, V1 = WeightVersion(0, 1), WeightVersion(1, 1)


def make_resident_job(replicas: int = 2, **spec: Any) -> Job:
    return make_job(replicas=replicas, rollout=RESIDENT_ROLLOUT, **spec)


def facts(rung: Rung, at: WeightVersion = V1) -> PodFacts:
    return facts_at(rung, at, ladder=RESIDENT)


def climbing(*pods: Rung | PodFacts, **options: Any) -> Observation:
    """A group on its way to (1, 1), epoch 1, that serves (0, 1)."""
    job = options.pop("job", None) or make_resident_job(len(pods))
    return make_first_step(job, [facts(pod) if isinstance(pod, Rung) else pod for pod in pods], **options)


def later(seen: Observation, seconds: float) -> Observation:
    return remember(replace(seen, now=seen.now + seconds))


def asked_rungs(seen: Observation) -> set[Rung]:
    return {target.rung for target in pod_targets(seen).values()}


def rollout_target(seen: Observation) -> RolloutTarget:
    return next(target for target in plan(seen).targets.values() if isinstance(target, RolloutTarget))


# ---------------------------------------------------------------------------------------------------------- the ladders
@pytest.mark.parametrize("rung", RESIDENT.rungs)
def test_builders_stand_where_they_say(rung: Rung) -> None:
    assert rung is RESIDENT.standing(facts(rung), V1)


def test_placement_follows_from_what_engines_offload() -> None:
    assert (Placement.TIME_SLICED, TIME_SLICED) == (make_job().spec.placement, make_job().ladder)
    assert (Placement.RESIDENT, RESIDENT) == (make_resident_job().spec.placement, make_resident_job().ladder)


def test_the_resident_ladder_has_no_rung_of_a_release() -> None:
    assert not {Rung.RELEASED, Rung.OFFLOADED, Rung.RESTORED} & {*RESIDENT.rungs}
    with pytest.raises(KeyError):
        RESIDENT.reaches(Rung.SEALED, Rung.RELEASED)


def test_rungs_have_no_order_of_their_own() -> None:
    """They are words: without a ladder they would be sorted by the alphabet."""
    rungs: list[Any] = [Rung.SERVING, Rung.CLOSED]
    for compare in (min, max, sorted, lambda pair: pair[0] < pair[1], lambda pair: "Sealed" < pair[0]):
        with pytest.raises(TypeError, match="ask the job's Ladder"):
            compare(rungs)


# ------------------------------------------------------------------------------------------------------------- standing
def test_pod_whose_engine_is_lost_stands_where_its_trainers_do() -> None:
    gone = EngineFacts(name="engine-0", state=EngineState.ABSENT)
    for rung in (Rung.SEALED, Rung.TRAINED):
        pod = facts(rung).model_copy(update={"engines": (gone,), "gate": facts(Rung.SETTLED).gate})
        assert rung is RESIDENT.standing(pod, V1)
    pod = facts(Rung.SETTLED).model_copy(update={"engines": (gone,)})
    assert Rung.DRAINED is RESIDENT.standing(pod, V1), "there is nothing to close, pause or drain"


def test_no_gate_closes_while_an_engine_is_on_its_way_up() -> None:
    """All would wait for it behind closed gates; and it takes the new weights when it is up."""
    starting = EngineFacts(name="engine-0", state=EngineState.STARTING, incarnation="e2", starts_on=V0)
    pod = facts(Rung.SETTLED).model_copy(update={"engines": (starting,)})
    assert Rung.TRAINED is RESIDENT.standing(pod, V1)
    assert {Rung.EXPORTED} == asked_rungs(climbing(Rung.EXPORTED, pod))


def test_engine_that_starts_on_the_new_weights_is_past_the_drain() -> None:
    starting = EngineFacts(name="engine-0", state=EngineState.STARTING, incarnation="e2", starts_on=V1)
    assert Rung.DRAINED is RESIDENT.standing(facts(Rung.SETTLED).model_copy(update={"engines": (starting,)}), V1)


# ----------------------------------------------------------------------------------------------------------------- plan
@pytest.mark.parametrize("slow", RESIDENT.rungs)
@pytest.mark.parametrize("fast", RESIDENT.rungs)
def test_the_group_may_stand_one_barrier_beyond_its_slowest_member(slow: Rung, fast: Rung) -> None:
    if RESIDENT.reaches(fast, slow):
        assert {RESIDENT.next_barrier(slow)} == asked_rungs(climbing(slow, fast))


def test_no_target_closes_a_gate_before_every_pod_has_exported() -> None:
    for slow in (Rung.SEALED, Rung.TRAINED):
        (asked,) = asked_rungs(climbing(slow, Rung.EXPORTED))
        assert not RESIDENT.reaches(asked, Rung.CLOSED)
    assert {Rung.PAUSED} == asked_rungs(climbing(Rung.EXPORTED, Rung.EXPORTED))


def test_the_store_learns_of_a_step_when_nothing_more_is_made_by_older_weights() -> None:
    """Groups that are admitted after that have their place in a batch: their tokens must not be a step older."""
    for rung in (Rung.TRAINED, Rung.EXPORTED, Rung.DRAINED):
        assert 0 == rollout_target(climbing(rung, rung)).trained_step
    for rung in (Rung.UPDATED, Rung.SERVING):
        assert 1 == rollout_target(climbing(rung, rung)).trained_step


def test_a_trainer_that_dies_in_a_climb_raises_the_lineage() -> None:
    dead = facts(Rung.SEALED).model_copy(update={"trainers": (absent_trainer(1, -9),)})
    decided = plan(climbing(dead, Rung.TRAINED))
    assert decided.climb is not None
    assert (Cause.TRAINER_DIED, 1, 2) == (decided.climb.cause, decided.climb.step, decided.climb.lineage)


@pytest.mark.parametrize("rung", [rung for rung in RESIDENT.rungs if rung is not Rung.SERVING])
def test_every_rung_has_a_deadline(rung: Rung) -> None:
    seen = climbing(rung, rung)
    patience = patience_s(RESIDENT, RESIDENT.next_barrier(rung), seen.job.spec.switch)
    assert not plan(later(seen, patience - 1)).raises
    raised = plan(later(seen, patience)).climb
    assert raised is not None
    assert Cause.RUNG_DEADLINE is raised.cause


def test_new_weights_wait_for_an_engine_that_starts_as_long_as_engines_may() -> None:
    switch = make_resident_job(switch={"trainerProgressSeconds": 1}).spec.switch
    assert patience_s(RESIDENT, Rung.EXPORTED, switch) > switch.engine_start_seconds


# ----------------------------------------------------------------------------------------------------------- evaluation
EVALUATED = make_resident_job(evaluation={"everySteps": 1, "deadlineSeconds": 60})
DONE = rollout_facts(sealed=1, evaluated=(EvaluationResult(step=0, samples=4, mean=0.5, stderr=0.1),))


def test_the_next_step_begins_beside_an_evaluation_of_the_weights_that_serve() -> None:
    seen = climbing(facts(Rung.SERVING, V0), facts(Rung.SERVING, V0), job=EVALUATED, climb=make_climb(0))
    assert 0 == rollout_target(seen).evaluate
    decided = plan(seen)
    assert decided.climb is not None
    assert (True, 1) == (decided.raises, decided.climb.step)


@pytest.mark.parametrize("rung", [Rung.SEALED, Rung.TRAINED, Rung.EXPORTED])
def test_an_evaluation_goes_on_beside_training(rung: Rung) -> None:
    assert 0 == rollout_target(climbing(rung, rung, job=EVALUATED)).evaluate
    assert rollout_target(climbing(rung, rung, job=EVALUATED, rollout=DONE)).evaluate is None


@pytest.mark.parametrize("rung", [Rung.CLOSED, Rung.PAUSED, Rung.DRAINED])
def test_nothing_is_evaluated_once_gates_close_for_new_weights(rung: Rung) -> None:
    assert rollout_target(climbing(rung, rung, job=EVALUATED)).evaluate is None


def test_the_update_waits_for_an_evaluation_until_its_deadline() -> None:
    waiting = climbing(Rung.EXPORTED, Rung.EXPORTED, job=EVALUATED)
    assert ({Rung.EXPORTED}, waiting.now + 60) == (asked_rungs(waiting), plan(waiting).wake_at)
    assert {Rung.PAUSED} == asked_rungs(climbing(Rung.EXPORTED, Rung.EXPORTED, job=EVALUATED, rollout=DONE))
    for late_s in (60, 61):
        late = later(waiting, late_s)
        assert ({Rung.PAUSED}, None) == (asked_rungs(late), rollout_target(late).evaluate)


def test_the_wait_for_an_evaluation_is_no_delay_of_a_pod() -> None:
    job = make_resident_job(evaluation={"everySteps": 1, "deadlineSeconds": 7200})
    patience = patience_s(RESIDENT, Rung.PAUSED, job.spec.switch)
    assert not plan(later(climbing(Rung.EXPORTED, Rung.EXPORTED, job=job), patience + 1)).raises


# --------------------------------------------------------------------------------------------------------------- status
@pytest.mark.parametrize(
    ("rung", "phase", "holder"),
    [
        (Rung.SEALED, Phase.TRAINING, Holder.BOTH),
        (Rung.TRAINED, Phase.TRAINING, Holder.BOTH),
        (Rung.EXPORTED, Phase.SWITCHING, Holder.SWITCHING),
        (Rung.DRAINED, Phase.SWITCHING, Holder.SWITCHING),
        (Rung.UPDATED, Phase.SWITCHING, Holder.SWITCHING),
        (Rung.SERVING, Phase.ROLLOUT, Holder.ROLLOUT),
    ],
)
def test_a_step_in_words(rung: Rung, phase: Phase, holder: Holder) -> None:
    status = status_of(climbing(rung, rung))
    assert (phase, holder, rung) == (status.phase, status.gpu_holder, status.rung)
    assert Placement.RESIDENT is status.placement


@pytest.mark.parametrize("job", [make_job(), make_resident_job()], ids=lambda job: job.ladder.placement)
def test_status_says_what_follows_from_the_placement(job: Job) -> None:
    serving = facts_at(Rung.SERVING, V1, ladder=job.ladder)
    for served, is_ready in ((None, ConditionStatus.FALSE), (V0, ConditionStatus.TRUE)):
        pods = [facts_at(Rung.SEALED, V1, ladder=job.ladder), serving]
        seen = make_observation(job, list(pods), climb=make_climb(1), rollout=rollout_facts(), served=served)
        (sharing,) = [item for item in status_of(seen).conditions if item.type == ConditionType.GPU_SHARING_READY]
        assert (is_ready, job.ladder.placement) == (sharing.status, sharing.reason)
        assert ("take turns" in sharing.message) == (not job.ladder.serves_on)


def whole(cause: Cause, *, raised: bool = True) -> Observation:
    """A step that took 300 s to Trained, 20 to Exported, 1 to Updated, and 2 until all gates were open."""
    seen = climbing(Rung.SEALED, climb=make_climb(1, cause=cause), raised=raised)
    for rung, seconds in ((Rung.TRAINED, 300.0), (Rung.EXPORTED, 20.0), (Rung.UPDATED, 1.0), (Rung.SERVING, 2.0)):
        assert rollout_target(seen).climbed is None, "not before it is whole"
        pod = facts(rung)
        ranks = tuple(rank.model_copy(update={"mismatch": 0.25}) for rank in pod.trainers)
        members = (replace(seen.members[0], facts=pod.model_copy(update={"trainers": ranks})), *seen.members[1:])
        seen = later(replace(seen, members=members), seconds)
    return seen


def test_the_rollout_controller_is_told_how_long_the_group_took_to_each_rung() -> None:
    seen = whole(Cause.NEXT_STEP)
    climbed = rollout_target(seen).climbed
    took = dict.fromkeys(RESIDENT.rungs, 0.0) | {"Trained": 300.0, "Exported": 20.0, "Closed": 1.0, "Serving": 2.0}
    assert climbed == Climbed(epoch=1, step=1, took_s=took, mismatch=0.25)
    following = replace(seen, memory=in_epoch(make_climb(2, epoch=2), seen, seen.memory, now=seen.now))
    assert climbed == following.memory.climbed, "a step that is sealed already begins in the same pass"


@pytest.mark.parametrize(("cause", "raised"), [(Cause.TRAINER_DIED, True), (Cause.NEXT_STEP, False)])
def test_of_a_climb_that_nobody_saw_from_the_top_there_are_no_times(cause: Cause, raised: bool) -> None:
    assert Climbed(epoch=1, step=1, took_s={}, mismatch=0.25) == rollout_target(whole(cause, raised=raised)).climbed


def test_the_time_of_a_switch_is_that_of_closed_gates() -> None:
    seen = whole(Cause.NEXT_STEP)
    assert seen.memory.last_switch_s is not None
    assert 3.0 == pytest.approx(seen.memory.last_switch_s)
