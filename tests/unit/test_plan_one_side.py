"""Plan, action table and status of a job that has one side alone: RolloutOnly, or TrainOnly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from builders import (
    CREATED,
    OWN_ROLLOUT,
    PLACED,
    ROLLOUT,
    absent_engine,
    absent_trainer,
    engine,
    make_climb,
    make_job,
    make_manifest,
    make_observation,
    pod_facts,
    rollout_facts,
    trainer,
)
from colocated_rl_agent.planner.next_actions import Rules
from colocated_rl_agent.settings import rules_for
from colocated_rl_api.facts import (
    EngineState,
    EvaluationResult,
    PodFacts,
    TrainerState,
)
from colocated_rl_api.failure import FailureCause
from colocated_rl_api.job import ColocatedRLJob
from colocated_rl_api.job_status import ColocatedRLJobStatus, Holder, Phase
from colocated_rl_api.ladder import ROLLOUT_ONLY, TRAIN_ONLY
from colocated_rl_api.member_wire import PodTarget, RolloutTarget
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from colocated_rl_operator.planner.failure_policy import (
    Hold,
    after_absence,
    after_replacement,
    after_standstill,
    raise_epoch,
)
from colocated_rl_operator.planner.observation import (
    Climb,
    FailureTally,
    Job,
    Observation,
    PodPhase,
    remember,
)
from colocated_rl_operator.planner.plan import patience_s, plan
from colocated_rl_operator.planner.reasons import Cause, ConditionType
from colocated_rl_operator.planner.status import report

V0, V1 = WeightVersion(0, 1), WeightVersion(1, 1)


def job(placement: Placement, **spec: Any) -> Job:
    return make_job(**{"replicas": 1, **PLACED[placement], **spec})


def rules_of(job: Job) -> Rules:
    """Return the rules of the job's agents."""
    return rules_for(job.spec)


def serving(at: WeightVersion = V0) -> PodFacts:
    return pod_facts(engine(at), absent_trainer(), epoch=1, is_open=True)


def silent() -> PodFacts:
    return pod_facts(absent_engine(), absent_trainer(), epoch=1)


def training(step: int, exported: int | None) -> PodFacts:
    """Return a pod whose trainer has finished a step; exported: the step of the newest weights that it has written."""
    version = None if exported is None else WeightVersion(exported, 1)
    return pod_facts(absent_engine(), trainer(step, 1, state=TrainerState.ONLOADED, exported=version), epoch=1)


def seen_of(of: Job, *pods: PodFacts, step: int = 0, **options: Any) -> Observation:
    cause = Cause.NEXT_STEP if step else Cause.FIRST_START
    return make_observation(of, list(pods), climb=make_climb(step, cause=cause), **options)


def targets(seen: Observation) -> tuple[PodTarget, RolloutTarget]:
    found = plan(seen).targets.values()
    pod = next(target for target in found if isinstance(target, PodTarget))
    return pod, next(target for target in found if isinstance(target, RolloutTarget))


def status(seen: Observation) -> ColocatedRLJobStatus:
    return report(seen, plan(seen), before=ColocatedRLJobStatus(), at=CREATED)


# ------------------------------------------------------------------------------------------------------------- the spec
@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"mode": "TrainOnly"}, "recorded names the batches that a TrainOnly job trains"),
        ({"recorded": {"claimName": "store"}}, "and nowhere else"),
        ({"mode": "RolloutOnly", "recorded": {"claimName": "store"}}, "and nowhere else"),
        ({**PLACED[Placement.TRAIN_ONLY], "evaluation": {}}, "a TrainOnly job has none: leave it out"),
    ],
)
def test_what_one_side_alone_can_not_do_is_refused(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ColocatedRLJob.read(make_manifest(**spec))


def test_where_nothing_is_trained_nothing_is_ever_too_old_and_nobody_says_what_is_right() -> None:
    only = job(Placement.ROLLOUT_ONLY)
    assert only.spec.max_staleness >= only.spec.steps
    assert 1 == job(Placement.TIME_SLICED).spec.max_staleness
    for placement in (Placement.ROLLOUT_ONLY, Placement.TRAIN_ONLY):
        rules = rules_of(job(placement, weightSync={"verify": "Weights"}))
        assert (False, False) == (rules.compares, rules.probes)


@pytest.mark.parametrize(
    ("spec", "compares", "probes"),
    [
        ({"replicas": 2}, True, True),
        ({"replicas": 1}, False, True),
        ({"replicas": 1, "rollout": ROLLOUT | {"engine": {"perPod": 2}}}, True, True),
        ({"replicas": 1, "rollout": OWN_ROLLOUT | {"replicas": 2}}, True, True),
        ({"replicas": 2, "rollout": OWN_ROLLOUT}, False, True),
        ({"replicas": 2, "weightSync": {"verify": "Version"}}, False, False),
    ],
)
def test_engines_are_compared_where_there_are_several_and_each_is_probed(
    spec: dict[str, Any], compares: bool, probes: bool
) -> None:
    rules = rules_of(make_job(**spec))
    assert (compares, probes) == (rules.compares, rules.probes)


# ---------------------------------------------------------------------------------------------------------- RolloutOnly
def test_engines_stand_at_serving_on_any_lineage_of_the_weights_that_never_change() -> None:
    assert Rung.SERVING is ROLLOUT_ONLY.standing(serving(), WeightVersion(0, 2))
    assert Rung.RELEASED is ROLLOUT_ONLY.standing(silent(), V0)
    starting = engine(None, state=EngineState.STARTING, starts_on=V0)
    assert Rung.RELEASED is ROLLOUT_ONLY.standing(pod_facts(starting, absent_trainer(), epoch=1), V0)


@pytest.mark.parametrize(
    ("placement", "step", "counts"), [(Placement.ROLLOUT_ONLY, 0, (3,)), (Placement.TRAIN_ONLY, 11, (2, 3))]
)
def test_failures_are_forgiven_by_batches_where_no_step_follows(
    placement: Placement, step: int, counts: tuple[int, ...]
) -> None:
    """The window is of ten, and twelve batches are there; where they are trained, the twelfth step is not begun."""
    of = job(placement, backoffWindowSteps=10, steps=20)
    seen = seen_of(of, silent(), step=step, rollout=rollout_facts(sealed=12))
    assert seen.climb is not None
    failing = replace(seen.climb, tally=FailureTally(counted=(1, 2, 3)))
    assert counts == raise_epoch(seen, failing, Cause.TAKEOVER, "").climb.tally.counted


def recorded_and_lost(batch: int, tally: FailureTally) -> Climb:
    """Return what follows when a pod fails after so many batches, and the rule for it has `maxTries: 1`."""
    rules = [{"onCauses": ["PodFailed"], "maxTries": 1, "action": "RestartPod"}]
    rules.append({"onCauses": ["PodFailed"], "action": "FailJob"})
    of = job(Placement.ROLLOUT_ONLY, steps=100, failurePolicy={"rules": rules})
    seen = seen_of(of, serving(), rollout=rollout_facts(sealed=batch))
    lost: dict[str, Any] = {"phase": PodPhase.FAILED, "fate": FailureCause.POD_FAILED, "facts": None}
    pods = (replace(pod, **lost) if pod.seat == "gpu-0" else pod for pod in seen.members)
    assert seen.climb is not None
    decided = plan(replace(seen, members=tuple(pods), climb=replace(seen.climb, tally=tally))).climb
    assert decided is not None
    return decided


def test_failures_of_a_recording_are_in_a_row_only_without_a_batch_between_them() -> None:
    """Its step never rises: a rule's maxTries was used up for good, and each back-off was longer than the last."""
    first = recorded_and_lost(10, FailureTally())
    assert (Cause.POD_REPLACED, 10, 1) == (first.cause, first.tally.step, first.tally.tries)
    second = recorded_and_lost(11, first.tally)
    assert (Cause.POD_REPLACED, 11, 1) == (second.cause, second.tally.step, second.tally.tries)
    assert Cause.FAILURE_POLICY is recorded_and_lost(11, second.tally).cause


def test_a_recording_queues_no_longer_for_what_was_before_its_newest_batch() -> None:
    of = job(Placement.ROLLOUT_ONLY, steps=100)
    for batch, tries in ((10, 4), (11, 1)):
        seen = seen_of(of, serving(), rollout=rollout_facts(sealed=batch))
        assert seen.climb is not None
        queued = after_absence(seen, replace(seen.climb, tally=FailureTally(step=10, tries=3)), "").climb
        assert (batch, tries) == (queued.tally.step, queued.tally.tries)


def test_a_recording_that_stands_still_after_another_batch_waits_for_its_first_back_off() -> None:
    of = job(Placement.ROLLOUT_ONLY, steps=100, failurePolicy={"backoffSeconds": 10})
    for batch, back_off_s in ((10, 20), (11, 10)):
        seen = seen_of(of, silent(), rollout=rollout_facts(sealed=batch))
        assert seen.climb is not None
        found = after_standstill(seen, replace(seen.climb, tally=FailureTally(step=10, tries=1)), seen.now, "")
        assert isinstance(found, Hold)
        assert seen.now + back_off_s == found.until


def test_a_pod_of_a_recording_that_failed_by_itself_is_the_first_one_after_another_batch() -> None:
    of = job(Placement.ROLLOUT_ONLY, steps=100)
    for batch, tries in ((10, 2), (11, 1)):
        seen = seen_of(of, serving(), rollout=rollout_facts(sealed=batch))
        seen = replace(seen, memory=replace(seen.memory, losses={"uid": FailureCause.POD_FAILED}))
        assert seen.climb is not None
        again = after_replacement(seen, replace(seen.climb, tally=FailureTally(step=10, tries=1))).climb
        assert (batch, tries) == (again.tally.step, again.tally.tries)


def test_a_sealed_batch_changes_nothing_until_the_last_is_there() -> None:
    only = job(Placement.ROLLOUT_ONLY, steps=3)
    for sealed in (0, 1, 2):
        seen = seen_of(only, serving(), rollout=rollout_facts(sealed=sealed))
        assert not plan(seen).raises
        pod, rollout = targets(seen)
        assert (0, Rung.SERVING, 0) == (pod.step, pod.rung, rollout.trained_step)
    for sealed in (3, 4):  # more where steps was lowered
        decided = plan(seen_of(only, serving(), rollout=rollout_facts(sealed=sealed)))
        assert decided.climb is not None
        assert (Cause.ALL_STEPS_DONE, "all 3 batches are recorded") == (decided.climb.cause, decided.message)


def test_a_recording_waits_for_the_evaluation_of_its_weights() -> None:
    only = job(Placement.ROLLOUT_ONLY, steps=3, evaluation={})
    seen = seen_of(only, serving(), rollout=rollout_facts(sealed=3))
    assert (False, 0) == (plan(seen).raises, targets(seen)[1].evaluate)
    done = EvaluationResult(step=0, samples=1, mean=0.5, stderr=0.0)
    assert plan(seen_of(only, serving(), rollout=rollout_facts(sealed=3, evaluated=(done,)))).raises


def test_status_of_a_recording_says_who_has_the_devices_and_which_batch_is_the_newest() -> None:
    reported = status(seen_of(job(Placement.ROLLOUT_ONLY), serving(), rollout=rollout_facts(sealed=2)))
    assert (Placement.ROLLOUT_ONLY, Phase.ROLLOUT, Holder.ROLLOUT) == (
        reported.placement,
        reported.phase,
        reported.gpu_holder,
    )
    assert (2, "0-1", "Serving") == (reported.step, reported.weight_version, reported.rung)
    sharing = next(item for item in reported.conditions if item.type == ConditionType.GPU_SHARING_READY)
    assert ("True", "RolloutOnly") == (sharing.status, sharing.reason)


def test_an_engine_that_does_not_come_up_has_a_deadline() -> None:
    seen = remember(seen_of(job(Placement.ROLLOUT_ONLY), silent(), rollout=rollout_facts()))
    patience = patience_s(ROLLOUT_ONLY, Rung.SERVING, seen.job.spec.switch)
    assert not plan(remember(replace(seen, now=seen.now + patience - 1))).raises
    late = plan(remember(replace(seen, now=seen.now + patience + 1)))
    assert late.climb is not None
    assert Cause.RUNG_DEADLINE is late.climb.cause


# ------------------------------------------------------------------------------------------------------------ TrainOnly
def test_each_rung_of_training_alone_has_its_facts() -> None:
    pods = {Rung.SEALED: training(0, 0), Rung.TRAINED: training(1, 0), Rung.EXPORTED: training(1, 1)}
    assert list(TRAIN_ONLY.rungs) == list(pods)
    for rung, pod in pods.items():
        assert rung is TRAIN_ONLY.standing(pod, V1)


def test_steps_follow_one_another_as_batches_are_there_and_no_engine_is_asked_for() -> None:
    only = job(Placement.TRAIN_ONLY)
    waiting = seen_of(only, training(1, 1), step=1, rollout=rollout_facts(sealed=1, trained=1))
    assert not plan(waiting).raises
    assert ((), 1) == (targets(waiting)[1].engines, targets(waiting)[1].trained_step)
    decided = plan(seen_of(only, training(1, 1), step=1, rollout=rollout_facts(sealed=2, trained=1)))
    assert decided.climb is not None
    assert (Cause.NEXT_STEP, 2) == (decided.climb.cause, decided.climb.step)


def test_nothing_is_saved_before_every_rank_has_trained() -> None:
    """A checkpoint is of all ranks; the export is what the group waits for before."""
    of = job(Placement.TRAIN_ONLY, replicas=2)
    assert (
        Rung.TRAINED
        is targets(seen_of(of, training(1, 0), training(0, 0), step=1, rollout=rollout_facts(sealed=1)))[0].rung
    )
    assert (
        Rung.EXPORTED
        is targets(seen_of(of, training(1, 0), training(1, 0), step=1, rollout=rollout_facts(sealed=1)))[0].rung
    )


def test_a_job_that_only_trains_is_complete_when_its_last_step_is_saved() -> None:
    only = job(Placement.TRAIN_ONLY, steps=1)
    seen = seen_of(only, training(1, 1), step=1, rollout=rollout_facts(sealed=1, trained=1))
    assert not plan(seen).raises
    (rank,) = training(1, 1).trainers
    saved = training(1, 1).model_copy(update={"trainers": (rank.model_copy(update={"saved": 1}),)})
    decided = plan(seen_of(only, saved, step=1, rollout=rollout_facts(sealed=1, trained=1)))
    assert decided.climb is not None
    assert Cause.ALL_STEPS_DONE is decided.climb.cause


def test_status_of_training_alone_says_that_the_trainer_has_the_devices_between_steps_too() -> None:
    for pod in (training(0, 0), training(1, 0), training(1, 1)):
        seen = seen_of(job(Placement.TRAIN_ONLY), pod, step=1, rollout=rollout_facts(sealed=1), served=V0)
        reported = status(seen)
        assert (Placement.TRAIN_ONLY, Phase.TRAINING, Holder.TRAINER) == (
            reported.placement,
            reported.phase,
            reported.gpu_holder,
        )
        ready = next(item for item in reported.conditions if item.type == ConditionType.READY)
        assert ("True", "Training") == (ready.status, ready.reason), "nothing serves"
    assert (1, "1-1") == (reported.step, reported.weight_version)
