"""The plan, case by case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest

from builders import (
    PLACED,
    ROLLOUT,
    absent_engine,
    absent_trainer,
    engine,
    facts_at,
    make_climb,
    make_job,
    make_member,
    make_observation,
    pod_facts,
    rollout_facts,
    trainer,
)
from colocated_rl_api.facts import (
    EngineFacts,
    EngineState,
    EvaluationResult,
    PodFacts,
    Problem,
    RejectedWeights,
)
from colocated_rl_api.failure import FailureCause
from colocated_rl_api.ladder import TIME_SLICED
from colocated_rl_api.member_wire import (
    Goal,
    PodTarget,
    RolloutTarget,
)
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from colocated_rl_api.seats import ROLLOUT_SEAT
from colocated_rl_operator.planner.actions import CreatePod, DeletePod
from colocated_rl_operator.planner.observation import (
    Climb,
    FailureTally,
    Memory,
    Observation,
    PodPhase,
    RefusedPod,
    in_epoch,
    remember,
    with_pod,
)
from colocated_rl_operator.planner.plan import (
    STOP_DEADLINE_S,
    Plan,
    patience_s,
    plan,
    stop,
)
from colocated_rl_operator.planner.reasons import Cause, Waiting
from colocated_rl_operator.planner.roster import FORCE_AFTER_S, MAX_DELAY_S, muster
from colocated_rl_operator.planner.silence import RESTARTS_S, SILENCE_S

V1 = WeightVersion(1, 1)
BLANK = pod_facts(absent_engine(), absent_trainer(), epoch=0)


def pod_targets(decided: Plan) -> list[PodTarget]:
    return [target for target in decided.targets.values() if isinstance(target, PodTarget)]


def rollout_target(decided: Plan) -> RolloutTarget:
    return next(target for target in decided.targets.values() if isinstance(target, RolloutTarget))


def climbing(*rungs: Rung, **options: Any) -> Observation:
    """A group of pods at these rungs on the way to (1, 1), epoch 1."""
    job = options.pop("job", None) or make_job(replicas=len(rungs))
    climb: Climb = options.pop("climb", None) or make_climb(1, cause=Cause.NEXT_STEP)
    facts = [facts_at(rung, climb.version, epoch=climb.epoch) for rung in rungs]
    options.setdefault("rollout", rollout_facts(sealed=1))
    return make_observation(job, list(facts), climb=climb, trained_step=options.pop("trained_step", 0), **options)


def later(seen: Observation, seconds: float) -> Observation:
    return remember(replace(seen, now=seen.now + seconds))


# ------------------------------------------------------------------------------------------------------------ building
@pytest.mark.parametrize("rung", TIME_SLICED.rungs)
def test_builders_stand_where_they_say(rung: Rung) -> None:
    assert rung is TIME_SLICED.standing(facts_at(rung, V1), V1)


# ------------------------------------------------------------------------------------------------------------- barriers
@pytest.mark.parametrize("slow", TIME_SLICED.rungs)
@pytest.mark.parametrize("fast", TIME_SLICED.rungs)
def test_the_group_may_stand_one_barrier_beyond_its_slowest_member(slow: Rung, fast: Rung) -> None:
    if not TIME_SLICED.reaches(fast, slow):
        return
    decided = plan(climbing(slow, fast))
    assert {TIME_SLICED.next_barrier(slow)} == {target.rung for target in pod_targets(decided)}
    assert not decided.raises


def test_a_pod_that_has_not_answered_under_the_epoch_holds_the_group_and_is_asked_first() -> None:
    seen = climbing(Rung.RELEASED, Rung.RELEASED)
    overtaken = facts_at(Rung.RELEASED, V1, epoch=0)
    seen = replace(seen, members=(replace(seen.members[0], facts=overtaken), *seen.members[1:]))
    decided = plan(seen)
    assert {"sums-gpu-0-0": Rung.SEALED} == {
        name: t.rung for name, t in decided.targets.items() if isinstance(t, PodTarget)
    }


def test_a_silent_pod_holds_the_group_where_it_is() -> None:
    seen = climbing(Rung.RELEASED, Rung.RELEASED)
    seen = replace(seen, members=(replace(seen.members[0], facts=None, silent_since=seen.now), *seen.members[1:]))
    decided = plan(seen)
    assert [] == pod_targets(decided)
    assert decided.wait is not None
    assert ("gpu-0",) == decided.wait.who
    assert decided.wake_at == seen.now + SILENCE_S


def test_no_group_forms_with_a_pod_that_the_server_may_have_kept_from_going() -> None:
    """It would be at fault again at once."""
    for cause, hindrance, forms in (
        (Cause.POD_REPLACED, "forbidden", False),
        (Cause.POD_REPLACED, "", True),
        (Cause.RESIZED, "forbidden", True),
    ):
        seen = climbing(Rung.SERVING, Rung.SERVING, hindrance=hindrance)
        assert seen.climb is not None
        assert forms is plan(replace(seen, climb=replace(seen.climb, cause=cause, group=""))).raises


def test_a_pod_that_is_not_made_is_waited_for_with_the_reason() -> None:
    seen = climbing(Rung.RELEASED, Rung.RELEASED)
    seen = replace(seen, members=tuple(pod for pod in seen.members if not pod.seat.startswith("gpu-")))
    wait = plan(replace(seen, refused={"gpu-1": RefusedPod(seen.now + 2, "its name is taken")})).wait
    assert wait is not None
    assert "gpu-0 (no pod), gpu-1 (no pod: its name is taken)" == wait.message


def test_a_pod_whose_gpu_container_is_down_is_waited_for() -> None:
    """Its agent answered, so the group had the 30 s of an agent: a container that was killed for memory a few times
    used up backoffLimit before kubelet had started it again."""
    seen = climbing(Rung.RELEASED, Rung.RELEASED)
    lost = Problem(reason="RunnerUnreachable", message="the GPU container's runner does not answer on its socket")
    blind = facts_at(Rung.RELEASED, V1).model_copy(update={"engines": (), "trainers": (), "problem": lost})
    killed = replace(seen.members[0], facts=blind)
    seen = remember(replace(seen, members=(killed, *seen.members[1:])))
    decided = plan(later(seen, 600))
    assert not decided.raises
    assert decided.wait is not None
    assert "gpu-0 (the GPU container's runner does not answer on its socket)" == decided.wait.message
    member = replace(killed, trouble="gpu: CrashLoopBackOff, 3 restarts, last ended with code 137 (OOMKilled)")
    wait = plan(replace(seen, members=(member, *seen.members[1:]))).wait
    assert wait is not None
    assert "OOMKilled" in wait.message


def test_targets_name_the_meeting_place_of_the_lineage_and_the_batches() -> None:
    decided = plan(climbing(*[Rung.RELEASED] * 3, job=make_job(replicas=3, gpus={"count": 2})))
    for target in pod_targets(decided):
        assert target.rendezvous is not None
        assert target.batches is not None
        assert (6, 29501) == (target.rendezvous.world_size, target.rendezvous.port)
        assert "sums-rollout-0" == target.batches.pod


@pytest.mark.parametrize("index", [0, 2])
def test_no_pod_is_told_anything_before_it_can_meet_the_others(index: int) -> None:
    """The first pod of the trainers, or the one with the batches, has no address yet."""
    seen = climbing(Rung.RELEASED, Rung.RELEASED)
    members = list(seen.members)
    members[index] = replace(members[index], address=None)
    assert {"rollout-0"} == goals(plan(replace(seen, members=tuple(members)))).keys()


def test_a_pod_is_asked_where_it_stands_while_another_is_silent() -> None:
    seen = climbing(Rung.RELEASED, Rung.RELEASED)
    silent, asked = replace(seen.members[0], facts=None), replace(seen.members[1], facts=BLANK)
    assert {"gpu-1-0", "rollout-0"} == goals(plan(replace(seen, members=(silent, asked, seen.members[2])))).keys()


def test_a_rollout_controller_that_is_silent_gets_no_target() -> None:
    seen = climbing(Rung.RELEASED, Rung.RELEASED)
    silent = replace(seen, members=(*seen.members[:2], replace(seen.members[2], facts=None)))
    assert {"gpu-0-0", "gpu-1-0"} == goals(plan(silent)).keys()


# --------------------------------------------------------------------------------------------------------- the decision
def test_a_new_job_makes_its_pods_and_decides_nothing() -> None:
    decided = plan(Observation(now=0.0, job=make_job(), members=()))
    assert {CreatePod("gpu-0", 0), CreatePod("gpu-1", 0), CreatePod(ROLLOUT_SEAT, 0)} == set(decided.pods)
    assert decided.climb is None
    assert {} == decided.targets


def test_the_first_climb_starts_when_every_member_answers() -> None:
    seen = make_observation(make_job(), [BLANK, BLANK], climb=None, rollout=rollout_facts(epoch=0))
    decided = plan(seen)
    assert decided.raises
    assert Climb(1, 0, 1, seen.group or "", Cause.FIRST_START, replicas=2) == decided.climb
    assert {Rung.SEALED} == {target.rung for target in pod_targets(decided)}


def test_a_job_that_goes_on_from_a_former_checkpoint_begins_at_its_step_and_says_so() -> None:
    job = make_job(restoreFrom={"claimName": "old", "path": "runs/a"})
    facts = rollout_facts(epoch=0, trained=42, began_at=40)  # the samples that came along are two steps ahead
    decided = plan(make_observation(job, [BLANK, BLANK], climb=None, rollout=facts))
    assert decided.climb is not None
    assert (42, 1) == decided.climb.version
    assert "every member answers, and the job continues from old/runs/a/step-00000040" in decided.message


def test_a_lost_status_is_rebuilt_from_what_members_know() -> None:
    known = [facts_at(Rung.SERVING, WeightVersion(5, 3), epoch=17) for _ in range(2)]
    seen = make_observation(make_job(), list(known), climb=None, rollout=rollout_facts(trained=4, epoch=17))
    seen = replace(seen, members=tuple(replace(member, highest_epoch=17) for member in seen.members))
    climb = plan(seen).climb
    assert climb is not None
    assert (18, 5, 4) == (climb.epoch, climb.step, climb.lineage)


@pytest.mark.parametrize("recorded", [(2, 1), (5, 1), (2, 3)], ids=["older", "older lineage", "older step"])
def test_a_status_restored_from_before_is_rebuilt_from_what_members_know(recorded: tuple[int, int]) -> None:
    """Only the epoch was rebuilt after a restore of etcd: a lineage was given a second time, to other weights."""
    known = [facts_at(Rung.SERVING, WeightVersion(5, 3), epoch=17) for _ in range(2)]
    climb = make_climb(*recorded, epoch=14, cause=Cause.NEXT_STEP)
    seen = make_observation(make_job(), list(known), climb=climb, rollout=rollout_facts(trained=5, epoch=17))
    seen = replace(seen, members=tuple(replace(member, highest_epoch=17) for member in seen.members))
    decided = plan(seen).climb
    assert decided is not None
    assert (18, 5, 4) == (decided.epoch, decided.step, decided.lineage)


def test_a_lineage_that_any_member_knows_is_not_given_again() -> None:
    """Trainers were gone with a pod that failed, and only engines held what the lineages after the restore had made."""
    held = facts_at(Rung.SERVING, WeightVersion(5, 3), epoch=17)
    known = [held.model_copy(update={"trainers": (absent_trainer(),)}) for _ in range(2)]
    climb = replace(make_climb(5, epoch=17, cause=Cause.POD_REPLACED), group="")
    seen = make_observation(make_job(), list(known), climb=climb, rollout=rollout_facts(trained=5, epoch=17))
    seen = replace(seen, climb=climb)
    decided = plan(seen).climb
    assert decided is not None
    assert (18, 4) == (decided.epoch, decided.lineage)


def test_the_next_step_begins_when_all_serve_and_its_batch_is_sealed() -> None:
    decided = plan(climbing(Rung.SERVING, Rung.SERVING, rollout=rollout_facts(sealed=2, trained=1)))
    assert decided.raises
    assert decided.climb is not None
    assert (2, 2, 1, Cause.NEXT_STEP) == (
        decided.climb.epoch,
        decided.climb.step,
        decided.climb.lineage,
        decided.climb.cause,
    )
    assert 1 == rollout_target(decided).trained_step


@pytest.mark.parametrize("sealed", [0, 1])
def test_rollout_goes_on_until_the_next_batch_is_sealed(sealed: int) -> None:
    assert not plan(climbing(Rung.SERVING, Rung.SERVING, rollout=rollout_facts(sealed=sealed, trained=1))).raises


def test_a_switch_waits_for_an_evaluation_that_is_due_and_asks_for_it() -> None:
    job = make_job(evaluation={"everySteps": 1, "deadlineSeconds": 60})
    seen = climbing(Rung.SERVING, Rung.SERVING, job=job, rollout=rollout_facts(sealed=2, trained=1))
    assert not plan(seen).raises
    assert 1 == rollout_target(plan(seen)).evaluate
    done = rollout_facts(sealed=2, trained=1, evaluated=(EvaluationResult(step=1, samples=4, mean=0.5, stderr=0.1),))
    assert plan(replace(seen, members=(*seen.members[:2], replace(seen.members[2], facts=done)))).raises
    assert plan(later(seen, 60)).raises


@pytest.mark.parametrize("rung", [Rung.SEALED, Rung.TRAINED, Rung.UPDATED])
def test_nothing_is_evaluated_in_a_switch_in_which_engines_release_their_memory(rung: Rung) -> None:
    job = make_job(evaluation={"everySteps": 1})
    assert rollout_target(plan(climbing(rung, rung, job=job, served=WeightVersion(0, 1)))).evaluate is None


def test_a_switch_waits_for_each_set_of_the_evaluation_and_for_none_that_is_gone() -> None:
    def begins(*sets: str, done: Sequence[str] = ()) -> bool:
        job = make_job(evaluation={"everySteps": 1, "sets": [{"name": name} for name in sets]})
        results = tuple(EvaluationResult(name=name, step=1, samples=4, mean=0.5, stderr=0.1) for name in done)
        facts = rollout_facts(sealed=2, trained=1, evaluated=results)
        return bool(plan(climbing(Rung.SERVING, Rung.SERVING, job=job, rollout=facts)).raises)

    assert not begins("aime", "sums", done=["aime"])
    assert begins("aime", "sums", done=["sums", "aime"])
    assert begins("aime", done=["aime"]), "sums was taken out of the spec while it was under way"
    assert not begins("aime", "new", done=["aime", "sums"])


def test_an_evaluation_is_made_on_request_once_its_period_is_one() -> None:
    """It evaluates the weights that are served when it is set, whatever their step."""
    for every, expected in ((10, None), (1, 1), (10, None)):
        job = make_job(evaluation={"everySteps": every})
        seen = climbing(Rung.SERVING, Rung.SERVING, job=job, rollout=rollout_facts(trained=1))
        assert expected == rollout_target(plan(seen)).evaluate


def test_an_evaluation_goes_on_while_an_engine_is_replaced() -> None:
    job = make_job(evaluation={"everySteps": 1})
    seen = climbing(Rung.SERVING, Rung.OFFLOADED, job=job, rollout=rollout_facts(trained=1), served=V1)
    assert 1 == rollout_target(plan(seen)).evaluate


def test_a_new_leader_raises_the_epoch_before_it_sends_anything() -> None:
    decided = plan(climbing(Rung.DRAINED, Rung.RELEASED, raised=False))
    assert decided.raises
    assert decided.climb is not None
    assert (2, 1, 1, Cause.TAKEOVER) == (
        decided.climb.epoch,
        decided.climb.step,
        decided.climb.lineage,
        decided.climb.cause,
    )
    assert {Rung.SEALED} == {target.rung for target in pod_targets(decided)}


def test_an_epoch_above_ours_is_gone_beyond() -> None:
    seen = climbing(Rung.DRAINED, Rung.RELEASED)
    seen = replace(seen, members=(replace(seen.members[0], highest_epoch=9), *seen.members[1:]))
    climb = plan(seen).climb
    assert climb is not None
    assert 10 == climb.epoch


def test_a_replaced_pod_starts_the_trainers_together_again() -> None:
    seen = climbing(Rung.SERVING, Rung.SERVING)
    fresh = make_member("gpu-1", 1, facts=BLANK)
    lost = replace(seen.members[1], phase=PodPhase.FAILED, facts=None, trouble="failed: UnexpectedAdmissionError")
    lost = replace(lost, fate=FailureCause.POD_FAILED)
    decided = plan(remember(replace(seen, members=(seen.members[0], lost, fresh, seen.members[2]))))
    assert decided.climb is not None
    assert (1, 2, Cause.POD_REPLACED, 1) == (
        decided.climb.step,
        decided.climb.lineage,
        decided.climb.cause,
        decided.climb.restarts,
    )
    assert decided.message.startswith("replaced: sums-gpu-1-0 (failed: UnexpectedAdmissionError)")


def dead(seen: Observation, index: int, *, lineage: int = 1) -> Observation:
    facts = seen.members[index].pod_facts
    assert facts is not None
    died = facts.model_copy(update={"trainers": (absent_trainer(lineage, exit_code=-9),)})
    members = list(seen.members)
    members[index] = replace(members[index], facts=died)
    return remember(replace(seen, members=tuple(members)))


def test_a_trainer_that_dies_in_a_climb_raises_the_lineage() -> None:
    climb = plan(dead(climbing(Rung.RELEASED, Rung.RELEASED), 0)).climb
    assert climb is not None
    assert (1, 2, Cause.TRAINER_DIED) == (climb.step, climb.lineage, climb.cause)


def test_a_trainer_that_dies_while_rollout_runs_disturbs_nothing_until_the_next_step() -> None:
    seen = dead(climbing(Rung.SERVING, Rung.SERVING, rollout=rollout_facts(sealed=1, trained=1)), 0)
    assert not plan(seen).raises
    ready = replace(seen.members[2], facts=rollout_facts(sealed=2, trained=1))
    climb = plan(replace(seen, members=(*seen.members[:2], ready))).climb
    assert climb is not None
    assert (2, 2, Cause.TRAINER_DIED) == (climb.step, climb.lineage, climb.cause)


def test_a_trainer_of_an_older_lineage_may_be_dead() -> None:
    seen = climbing(Rung.RELEASED, Rung.RELEASED, climb=make_climb(1, 2, cause=Cause.TRAINER_DIED))
    assert not plan(dead(seen, 0, lineage=1)).raises


def test_backoff_limit_ends_the_job() -> None:
    climb = replace(make_climb(1), tally=FailureTally(counted=(1, 1)))
    decided = plan(dead(climbing(Rung.RELEASED, Rung.RELEASED, climb=climb, job=make_job(backoffLimit=2)), 0))
    assert decided.climb is not None
    assert Cause.BACKOFF_LIMIT is decided.climb.cause
    assert {Goal.STOP} == {target.goal for target in pod_targets(decided)}


@pytest.mark.parametrize("rung", [rung for rung in TIME_SLICED.rungs if rung is not Rung.SERVING])
def test_every_rung_has_a_deadline(rung: Rung) -> None:
    seen = climbing(rung, rung)
    patience = patience_s(TIME_SLICED, TIME_SLICED.next_barrier(rung), seen.job.spec.switch)
    assert not plan(later(seen, patience - 1)).raises
    assert plan(seen).wake_at == seen.now + patience
    climb = plan(later(seen, patience)).climb
    assert climb is not None
    assert (Cause.RUNG_DEADLINE, 2) == (climb.cause, climb.lineage)


def holding(*checksums: str, rung: Rung = Rung.UPDATED, verify: str = "Weights") -> Observation:
    """Engines that hold version (1, 1), so they say, and whose weights have these checksums."""
    seen = climbing(*(rung for _ in checksums), job=make_job(replicas=len(checksums), weightSync={"verify": verify}))
    members = [
        replace(member, facts=with_checksum(member.pod_facts, checksum))
        for member, checksum in zip(seen.gpu_members, checksums, strict=True)
        if member.pod_facts
    ]
    return replace(seen, members=(*members, seen.members[-1]))


def with_checksum(facts: PodFacts, checksum: str) -> PodFacts:
    engines = [engine.model_copy(update={"checksum": checksum}) for engine in facts.engines]
    return facts.model_copy(update={"engines": tuple(engines)})


@pytest.mark.parametrize("checksums", [("a", "a"), ("a", "b", "a"), ("a", "a", "b", "a")])
def test_f52_engines_serve_what_more_than_half_of_them_hold(checksums: tuple[str, ...]) -> None:
    decided = plan(holding(*checksums))
    assert not decided.raises
    assert {(Rung.SERVING, "a")} == {(target.rung, target.checksum) for target in pod_targets(decided)}


def test_f52_one_engine_agrees_with_itself() -> None:
    """Its agent may wait for an agreement all the same: it had peers when it started."""
    assert {(Rung.SERVING, "a")} == {(target.rung, target.checksum) for target in pod_targets(plan(holding("a")))}


def of_two_engines(other: EngineFacts, *, first: EngineFacts | None = None) -> Observation:
    """Two engines of one pod. first: by default it serves version (1, 1)."""
    job = make_job(replicas=1, rollout=ROLLOUT | {"engine": {"perPod": 2}})
    seen = climbing(Rung.SERVING, job=job)
    members = []
    for member in seen.members:
        facts = member.pod_facts
        engines = (*((first,) if first else facts.engines), other) if facts else ()
        members.append(replace(member, facts=facts.model_copy(update={"engines": engines})) if facts else member)
    return replace(seen, members=tuple(members))


def test_f52_one_of_two_that_comes_back_with_another_checksum_is_the_wrong_one() -> None:
    """The other one's gate is open, so it has what was agreed on; without a majority the whole job went back."""
    back = engine(V1, name="engine-1", checksum="other", failures=1, shut=True)
    decided = plan(of_two_engines(back))
    assert not decided.raises
    assert {"of 1-1"} == {target.checksum for target in pod_targets(decided)}


def test_f52_weights_that_one_engine_rejects_and_another_of_its_pod_serves_fail_no_step() -> None:
    rejected = RejectedWeights(version=V1, message="differ by 0.1 nats")
    out = absent_engine().model_copy(update={"name": "engine-1", "failures": 2, "rejected": rejected})
    assert not plan(of_two_engines(out)).raises
    for held in (WeightVersion(0, 1), WeightVersion(2, 1)):
        assert plan(of_two_engines(out, first=engine(held))).raises, "it serves others"


@pytest.mark.parametrize("checksums", [("a" * 64, "b"), ("a", "b", "c"), ("a", "a", "b", "b")])
@pytest.mark.parametrize("rung", [Rung.UPDATED, Rung.SERVING])
def test_f52_engines_without_a_majority_do_not_serve_and_are_named(checksums: tuple[str, ...], rung: Rung) -> None:
    decided = plan(holding(*checksums, rung=rung))
    assert decided.climb is not None
    assert (Cause.WEIGHTS_DIFFER, 2, 1) == (decided.climb.cause, decided.climb.lineage, decided.climb.restarts)
    held = ", ".join(f"sums-gpu-{replica}-0 {checksum:.12}" for replica, checksum in enumerate(checksums))
    assert f"engines hold different weights 1-1 ({held}): the trainers start together again" == decided.message
    assert {Rung.SEALED} == {target.rung for target in pod_targets(decided)}
    assert {None} == {target.checksum for target in pod_targets(decided)}


def test_f52_nothing_is_agreed_on_before_every_engine_holds_the_weights() -> None:
    seen = holding("a", "a", "a")
    behind = replace(seen.members[0], facts=facts_at(Rung.OFFLOADED, V1))
    decided = plan(replace(seen, members=(behind, *seen.members[1:])))
    assert {(Rung.UPDATED, None)} == {(target.rung, target.checksum) for target in pod_targets(decided)}


def with_engines(seen: Observation, *checksums: str | None) -> Observation:
    """The first pod has several engines, of which those without a checksum have no process."""
    facts = seen.members[0].pod_facts
    assert facts is not None
    [engine] = facts.engines
    absent = {"state": EngineState.ABSENT, "version": None, "failures": 1}
    engines = tuple(
        engine.model_copy(update={"name": f"engine-{index}", "checksum": held, **({} if held else absent)})
        for index, held in enumerate(checksums)
    )
    first = replace(seen.members[0], facts=facts.model_copy(update={"engines": engines}))
    return replace(seen, members=(first, *seen.members[1:]))


def test_f52_engines_of_one_pod_are_compared_and_one_without_a_process_has_no_say() -> None:
    seen = with_engines(holding("a", "a"), "a", None, "b", "a")
    assert {(Rung.SERVING, "a")} == {(target.rung, target.checksum) for target in pod_targets(plan(seen))}
    assert make_job(replicas=1, rollout=ROLLOUT | {"engine": {"perPod": 2}}).spec.compares_engines


@pytest.mark.parametrize(
    ("state", "failures", "waits"),
    [
        (EngineState.STARTING, 1, True),
        (EngineState.STARTING, 2, True),
        (EngineState.STARTING, 3, False),
        (EngineState.ABSENT, 1, False),
        (EngineState.READY, 1, False),
    ],
)
def test_next_step_waits_for_an_engine_that_starts_again_beside_others(
    state: EngineState, failures: int, waits: bool
) -> None:
    """Each step ended it once more, where steps are shorter than its start. It is waited for twice."""
    seen = climbing(Rung.SERVING, Rung.SERVING, rollout=rollout_facts(sealed=2, trained=1))
    facts = seen.members[0].pod_facts
    assert facts is not None
    other = facts.engines[0].model_copy(
        update={"name": "engine-1", "state": state, "failures": failures, "starts_on": V1}
    )
    facts = facts.model_copy(update={"engines": (*facts.engines, other)})
    seen = replace(seen, members=(replace(seen.members[0], facts=facts), *seen.members[1:]))
    decided = plan(seen)
    assert waits is not decided.raises
    if waits:
        assert decided.wait is not None
        assert Waiting.ENGINE is decided.wait.reason
        assert "the next step waits for engine-1 of sums-gpu-0-0" in decided.wait.message
        assert seen.now + seen.job.spec.switch.engine_start_seconds == decided.wake_at


def test_trainer_that_has_died_is_not_left_alone_until_an_engine_has_started() -> None:
    """The answer waited for an engine that starts again beside others, for a quarter of an hour at most."""
    seen = dead(climbing(Rung.SERVING, Rung.SERVING, rollout=rollout_facts(sealed=2, trained=1)), 0)
    first = seen.members[0]
    facts = first.pod_facts
    assert facts is not None
    starting = facts.engines[0].model_copy(
        update={"name": "engine-1", "state": EngineState.STARTING, "failures": 1, "starts_on": V1}
    )
    facts = facts.model_copy(update={"engines": (*facts.engines, starting)})
    decided = plan(replace(seen, members=(replace(first, facts=facts), *seen.members[1:])))
    assert decided.climb is not None
    assert (Cause.TRAINER_DIED, 2, 2) == (decided.climb.cause, decided.climb.step, decided.climb.lineage)


def test_f52_engines_of_one_pod_that_differ_are_named() -> None:
    decided = plan(with_engines(holding("a", "a"), "b", "b"))
    held = "engine-0 of sums-gpu-0-0 b, engine-1 of sums-gpu-0-0 b, sums-gpu-1-0 a"
    assert {"b"} == {target.checksum for target in pod_targets(decided)}
    decided = plan(with_engines(holding("a", "a"), "b", "c"))
    assert held.replace("engine-1 of sums-gpu-0-0 b", "engine-1 of sums-gpu-0-0 c") in decided.message


def test_f52_nobody_compares_where_the_job_does_not_ask_for_it() -> None:
    decided = plan(holding("a", "b", verify="Version"))
    assert {(Rung.SERVING, None)} == {(target.rung, target.checksum) for target in pod_targets(decided)}


def rejecting(seen: Observation, *indices: int, version: WeightVersion = V1) -> Observation:
    """Pods that start no engine on a version any more."""
    members = list(seen.members)
    for index in indices:
        facts = members[index].pod_facts
        assert facts is not None
        rejected = RejectedWeights(version=version, message="differ by 0.084 nats, 0.02 is allowed: set verify")
        engine = absent_engine().model_copy(update={"rejected": rejected, "failures": 2})
        members[index] = replace(members[index], facts=facts.model_copy(update={"engines": (engine,)}))
    return replace(seen, members=tuple(members))


@pytest.mark.parametrize("verify", ["Weights", "Version"])
@pytest.mark.parametrize("others", [Rung.UPDATED, Rung.SERVING])
def test_weights_that_a_pod_rejects_fail_the_step_at_once_with_what_was_found(others: Rung, verify: str) -> None:
    """The engine was started on them again and again, until the deadline of a rung half an hour later."""
    seen = climbing(Rung.OFFLOADED, others, job=make_job(weightSync={"verify": verify}))
    decided = plan(rejecting(seen, 0))
    assert decided.climb is not None
    assert (Cause.WEIGHTS_DIFFER, 2, 1) == (decided.climb.cause, decided.climb.lineage, decided.climb.restarts)
    assert "WeightsDiffer" == decided.climb.tally.cause
    assert (
        "weights 1-1 are served by none of sums-gpu-0-0 (differ by 0.084 nats, 0.02 is allowed: set verify): "
        "the trainers start together again"
    ) == decided.message
    assert "none of sums-gpu-0-0, sums-gpu-1-0 (differ" in plan(rejecting(seen, 0, 1)).message


def test_weights_that_a_pod_rejects_again_and_again_end_the_job_with_what_was_found() -> None:
    seen = climbing(Rung.OFFLOADED, Rung.SERVING, climb=replace(make_climb(1), tally=FailureTally(counted=(1,) * 6)))
    decided = plan(rejecting(seen, 0))
    assert decided.climb is not None
    assert Cause.BACKOFF_LIMIT is decided.climb.cause
    assert "differ by 0.084 nats" in decided.message


def test_weights_of_another_climb_may_be_rejected() -> None:
    """A resident engine that was lost beside training may reject them: the next weights are under way."""
    seen = climbing(Rung.OFFLOADED, Rung.OFFLOADED)
    for version in (WeightVersion(0, 1), WeightVersion(1, 0), WeightVersion(1, 2)):
        assert not plan(rejecting(seen, 0, version=version)).raises


def test_an_engine_that_starts_again_and_again_is_no_progress() -> None:
    """Each new incarnation moved the deadline, so a job whose engine can't start stood at Offloaded for ever."""
    seen = climbing(Rung.OFFLOADED, Rung.OFFLOADED)
    patience = patience_s(TIME_SLICED, TIME_SLICED.next_barrier(Rung.OFFLOADED), seen.job.spec.switch)
    problem = Problem(reason="EngineDied", message="engine-0 ended with code 1: no such model")
    for crash in range(1, 11):
        facts = facts_at(Rung.OFFLOADED, V1)
        state = EngineState.STARTING if crash % 2 else EngineState.ABSENT
        engine = facts.engines[0].model_copy(update={"state": state, "incarnation": f"e{crash}", "starts_on": V1})
        crashed = facts.model_copy(update={"engines": (engine,), "problem": problem})
        assert not plan(seen).raises
        seen = later(replace(seen, members=(replace(seen.members[0], facts=crashed), *seen.members[1:])), patience / 10)
    decided = plan(seen)
    assert decided.climb is not None
    assert Cause.RUNG_DEADLINE is decided.climb.cause
    assert "sums-gpu-0-0 (engine-0 ended with code 1: no such model)" in decided.message


def test_progress_starts_the_deadline_again() -> None:
    seen = climbing(Rung.RELEASED, Rung.RELEASED)
    late = replace(seen, now=seen.now + 10_000)
    facts = facts_at(Rung.TRAINED, V1)
    moved = remember(replace(late, members=(replace(late.members[0], facts=facts), *late.members[1:])))
    assert not plan(moved).raises


def test_to_climb_again_to_where_a_pod_stood_before_is_progress_in_every_epoch() -> None:
    """A new epoch kept where pods had stood, and no rung of an ordinary switch moved the deadline."""
    seen = climbing(Rung.SERVING, Rung.SERVING)
    assert seen.climb is not None
    climb = replace(seen.climb, epoch=2)
    memory = in_epoch(climb, seen, seen.memory, now=seen.now)
    for rung in (Rung.CLOSED, Rung.PAUSED):
        pods = [replace(pod, facts=facts_at(rung, V1, epoch=2)) for pod in seen.members[:2]]
        moved = replace(seen, climb=climb, members=(*pods, seen.members[2]), memory=memory)
        seen = remember(replace(moved, now=seen.now + 10))
        memory = seen.memory
        assert seen.now == memory.progress_at


def test_members_that_never_answer_fail_the_job() -> None:
    seen = make_observation(make_job(podsReadyDeadlineSeconds=60), [None, None], climb=None, rollout=None)
    waiting = plan(later(seen, 59))
    assert (False, seen.now + 60) == (waiting.raises, waiting.wake_at)
    for late_s in (60, 61):
        climb = plan(later(seen, late_s)).climb
        assert climb is not None
        assert Cause.PODS_NOT_READY is climb.cause
    message = plan(later(seen, 60)).message
    words = (
        f"within 60 s: {', '.join(f'{seat} (pod Running, no connection)' for seat in ('gpu-0', 'gpu-1', 'rollout'))}"
    )
    assert message.startswith(f"not every member answered {words}: all pods go")
    hindered = replace(later(seen, 60), hindrance="quota exceeded")
    assert f"{words}; quota exceeded: all pods go" in plan(hindered).message


def cut_off(seen: Observation) -> Observation:
    """No member is heard, and their nodes say that all is well."""
    members = [replace(each, facts=None, silent_since=seen.now, is_ready=True) for each in seen.members]
    return remember(replace(seen, members=tuple(members)))


def test_an_operator_that_is_cut_off_from_a_whole_job_fails_it_neither_then_nor_when_it_is_back() -> None:
    job = make_job(podsReadyDeadlineSeconds=60)
    seen = climbing(Rung.SERVING, Rung.SERVING, job=job)
    deaf = cut_off(seen)
    for _ in range(10):
        deaf = later(deaf, 60)
        assert not plan(deaf).raises
        assert () == plan(deaf).pods
    one_back = remember(replace(deaf, members=(seen.members[0], *deaf.members[1:])))
    waits = later(one_back, SILENCE_S - 1)
    assert (False, (), waits.now + 1) == (plan(waits).raises, plan(waits).pods, plan(waits).wake_at), "others follow"
    alone = plan(later(one_back, SILENCE_S))
    assert {each.name for each in seen.members[1:]} == {each.name for each in alone.pods if isinstance(each, DeletePod)}
    assert "no answer from pod sums-gpu-1-0" in alone.message


def test_whoever_is_never_heard_after_the_operator_was_cut_off_leads_to_a_new_start() -> None:
    seen = climbing(Rung.SERVING, Rung.SERVING, job=make_job(podsReadyDeadlineSeconds=20))
    deaf = later(cut_off(seen), 600)
    one_back = remember(replace(deaf, members=(seen.members[0], *deaf.members[1:])))
    assert not plan(later(one_back, 19)).raises
    climb = plan(later(one_back, 20)).climb
    assert climb is not None
    assert Cause.PODS_NOT_READY is climb.cause


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_node_that_does_not_say_that_its_pod_is_ready_makes_silence_count(index: int) -> None:
    seen = cut_off(climbing(Rung.SERVING, Rung.SERVING, job=make_job(podsReadyDeadlineSeconds=60)))
    members = [replace(each, is_ready=place != index) for place, each in enumerate(seen.members)]
    assert plan(later(remember(replace(seen, members=tuple(members))), 60)).raises


def test_pods_that_never_answered_are_no_sign_of_a_cut_off_operator() -> None:
    seen = make_observation(make_job(podsReadyDeadlineSeconds=60), [None, None], climb=None, rollout=None)
    assert plan(later(cut_off(seen), 60)).raises


# -------------------------------------------------------------------------------------------------------------- the end
@pytest.mark.parametrize(
    ("replay_from", "expected"), [((0, 0), 0), ((0, 1), 0), ((1, 1), 1), ((None, 1), 1), ((None, None), 2)]
)
def test_batches_are_kept_for_the_oldest_checkpoint_that_may_be_gone_back_to(
    replay_from: tuple[int | None, int | None], expected: int
) -> None:
    """They went when the newest checkpoint had them: one that was damaged could not be made up for."""
    seen = climbing(Rung.SERVING, Rung.SERVING, climb=make_climb(2), rollout=rollout_facts(trained=2), trained_step=2)
    ranks = [trainer(2, 1, saved=2, replay_from=step) for step in replay_from]
    members = [
        replace(member, facts=member.pod_facts.model_copy(update={"trainers": (ranks.pop(),)}))
        if member.pod_facts
        else member
        for member in seen.members
    ]

    assert expected == rollout_target(plan(remember(replace(seen, members=tuple(members))))).saved_step


def last(saved: int | None, **options: Any) -> Observation:
    seen = climbing(Rung.SERVING, Rung.SERVING, job=make_job(steps=1), rollout=rollout_facts(trained=1), **options)
    done = trainer(1, 1, exported=V1, saved=saved)
    members = [
        replace(member, facts=member.pod_facts.model_copy(update={"trainers": (done,)})) if member.pod_facts else member
        for member in seen.members
    ]
    return remember(replace(seen, members=tuple(members)))


@pytest.mark.parametrize(("step", "steps", "expected"), [(1, 1, True), (1, 2, False), (2, 1, True)])
def test_targets_say_which_step_is_the_last_as_the_spec_says_now(step: int, steps: int, expected: bool) -> None:
    climb = make_climb(step, cause=Cause.NEXT_STEP)
    targets = plan(climbing(Rung.RELEASED, Rung.RELEASED, climb=climb, job=make_job(steps=steps))).targets.values()
    assert {expected} == {target.is_last for target in targets if isinstance(target, PodTarget)}


def test_steps_that_are_lowered_end_the_job_where_it_stands_and_raised_ones_let_it_go_on() -> None:
    seen = climbing(Rung.SERVING, Rung.SERVING, climb=make_climb(5), rollout=rollout_facts(sealed=6, trained=5))
    saved = [
        replace(member, facts=member.pod_facts.model_copy(update={"trainers": (trainer(5, 1, saved=5),)}))
        if member.pod_facts
        else member
        for member in seen.members
    ]
    for steps, cause in ((2, Cause.ALL_STEPS_DONE), (5, Cause.ALL_STEPS_DONE), (6, Cause.NEXT_STEP)):
        climb = plan(remember(replace(seen, members=tuple(saved), job=make_job(steps=steps)))).climb
        assert climb is not None
        assert cause is climb.cause
    assert not plan(replace(seen, job=make_job(steps=2))).raises, "its checkpoint is not durable yet"


def test_prompts_that_are_over_end_the_job_before_its_steps_do_and_never_after() -> None:
    known = rollout_facts(sealed=5, trained=5, last_step=5)
    for step, steps, expected in ((5, 100, True), (4, 100, False), (4, 4, True)):
        seen = climbing(Rung.RELEASED, Rung.RELEASED, climb=make_climb(step), job=make_job(steps=steps), rollout=known)
        assert {expected} == {target.is_last for target in pod_targets(plan(seen))}
    ended = last(saved=1)
    members = [
        replace(member, facts=rollout_facts(trained=1, last_step=1)) if member.rollout_facts else member
        for member in ended.members
    ]
    over = plan(remember(replace(ended, job=make_job(steps=100), members=tuple(members))))
    assert (Cause.ALL_STEPS_DONE, "all 1 steps are done") == (over.climb and over.climb.cause, over.message)


@pytest.mark.parametrize(
    ("steps", "ends"), [(1, None), (3, None), (9, 3)], ids=["cut short", "complete", "out of prompts"]
)
def test_a_job_is_evaluated_where_it_ends(steps: int, ends: int | None) -> None:
    job = make_job(steps=steps, evaluation={"everySteps": 10})
    rollout = rollout_facts(trained=3, last_step=ends)
    seen = climbing(Rung.SERVING, Rung.SERVING, climb=make_climb(3), job=job, rollout=rollout)
    assert 3 == rollout_target(plan(seen)).evaluate


def test_the_rollout_controller_is_told_what_of_the_spec_may_change_as_it_is_now() -> None:
    rollout = {"prompts": {"reasoningGym": {"name": "chain_sum"}}, "batchSize": 4, "groupSize": 2}
    job = make_job(
        steps=7,
        rollout=rollout | {"maxConcurrency": 3, "sampling": {"temperature": 0.5}},
        evaluation={"everySteps": 2, "sets": [{"name": "held-out", "samples": 9}]},
    )
    target = rollout_target(plan(climbing(Rung.SERVING, Rung.SERVING, job=job)))
    assert (7, 3, 0.5, job.spec.evaluation) == (
        *(target.last_step, target.concurrency, target.temperature, target.evaluation),
    )


def test_the_job_is_done_after_the_last_step_once_its_checkpoint_is_durable() -> None:
    assert not plan(last(saved=None)).raises
    decided = plan(last(saved=1))
    assert decided.climb is not None
    assert Cause.ALL_STEPS_DONE is decided.climb.cause
    assert {Goal.STOP} == {target.goal for target in pod_targets(decided)}


def leaving(finished: WeightVersion | None) -> Observation:
    """The last checkpoint is durable, and the trainer can leave a model."""
    seen = last(saved=1)
    members = [
        replace(
            member,
            facts=member.pod_facts.model_copy(
                update={"trainers": (trainer(1, 1, saved=1, can_finish=True, finished=finished),)}
            ),
        )
        if member.pod_facts
        else member
        for member in seen.members
    ]
    return remember(replace(seen, members=tuple(members)))


@pytest.mark.parametrize(("finished", "is_done"), [(None, False), (WeightVersion(0, 1), False), (V1, True)])
def test_the_job_is_done_once_its_model_is_left_where_its_trainer_can(
    finished: WeightVersion | None, is_done: bool
) -> None:
    decided = plan(leaving(finished))
    assert decided.climb is not None
    assert is_done == (decided.climb.cause is Cause.ALL_STEPS_DONE)


def test_a_trainer_that_dies_before_it_has_left_the_model_starts_again() -> None:
    climb = plan(dead(leaving(None), 0)).climb
    assert climb is not None
    assert (1, 2, Cause.TRAINER_DIED) == (climb.step, climb.lineage, climb.cause)


@pytest.mark.parametrize(("seen", "what"), [(last(saved=None), "checkpoint"), (leaving(None), "model")])
def test_what_is_not_durable_in_time_after_the_last_step_is_named(seen: Observation, what: str) -> None:
    patience = patience_s(TIME_SLICED, Rung.SERVING, seen.job.spec.switch)
    assert not plan(later(seen, patience - 1)).raises
    for late_s in (0, 1):
        assert f"the last {what} is not durable in time" in plan(later(seen, patience + late_s)).message


def test_a_trainer_that_dies_before_the_last_checkpoint_starts_again() -> None:
    climb = plan(dead(last(saved=None), 0)).climb
    assert climb is not None
    assert (1, 2, Cause.TRAINER_DIED) == (climb.step, climb.lineage, climb.cause)


def ending(**options: Any) -> Observation:
    seen = last(saved=1)
    return remember(
        replace(seen, climb=replace(seen.climb or make_climb(), cause=Cause.ALL_STEPS_DONE, epoch=2), **options)
    )


def test_the_end_waits_for_every_member_and_makes_no_pod() -> None:
    seen = ending()
    assert not plan(seen).is_over
    assert plan(stopped(seen, 0, 1, 2)).is_over
    assert plan(replace(seen, members=())).is_over
    assert () == plan(replace(seen, members=())).pods


def stopped(seen: Observation, *indices: int) -> Observation:
    """These members have said that they stopped."""
    members = [
        replace(member, facts=member.facts.model_copy(update={"stopped": True}))
        if member.facts and index in indices
        else member
        for index, member in enumerate(seen.members)
    ]
    return remember(replace(seen, members=tuple(members)))


def goals(decided: Plan) -> dict[str, Goal]:
    return {name.removeprefix("sums-"): target.goal for name, target in decided.targets.items()}


def deleted(decided: Plan) -> set[str]:
    return {action.name.removeprefix("sums-") for action in decided.pods if isinstance(action, DeletePod)}


def test_gpu_pods_stop_before_the_rollout_controller_that_keeps_what_they_hand_back() -> None:
    """All were told at once, and tokens that a gate handed back found nobody."""
    seen = ending()
    assert {"gpu-0-0": Goal.STOP, "gpu-1-0": Goal.STOP, "rollout-0": Goal.CLIMB} == goals(plan(seen))
    assert {"gpu-1-0": Goal.STOP, "rollout-0": Goal.CLIMB} == goals(plan(stopped(seen, 0)))
    assert {"rollout-0": Goal.STOP} == goals(plan(stopped(seen, 0, 1)))


def test_a_member_that_has_stopped_is_not_waited_for_when_its_connection_goes_before_its_pod() -> None:
    assert {"rollout-0": Goal.STOP} == goals(plan(without(without(stopped(ending(), 0, 1), 0), 1)))


def test_a_pod_that_never_ran_is_not_waited_for() -> None:
    decided = plan(without(ending(), 1, phase=PodPhase.PENDING))
    assert {"gpu-1-0"} == deleted(decided)
    assert not any(action.is_fault for action in decided.pods if isinstance(action, DeletePod))


def test_members_that_do_not_stop_lose_their_pod_after_a_minute() -> None:
    seen = ending()
    assert (set(), seen.now + 60) == (deleted(plan(seen)), plan(seen).wake_at)
    decided = plan(later(seen, 60))
    assert ({"gpu-0-0", "gpu-1-0"}, None) == (deleted(decided), decided.wake_at)
    assert all(action.is_fault for action in decided.pods if isinstance(action, DeletePod))
    assert set() == deleted(plan(later(stopped(seen, 0, 1), 60)))
    assert {"rollout-0"} == deleted(plan(later(stopped(seen, 0, 1), 121)))


def test_every_member_of_a_deleted_job_stops_in_the_present_epoch() -> None:
    seen = climbing(Rung.RELEASED, Rung.RELEASED)
    decided = stop(seen)
    assert {"gpu-0-0": Goal.STOP, "gpu-1-0": Goal.STOP, "rollout-0": Goal.STOP} == goals(decided)
    assert (False, seen.climb, {1}) == (
        *(decided.raises, decided.climb),
        {target.epoch for target in decided.targets.values()},
    )
    assert Plan(climb=None) == stop(replace(seen, climb=None))


def test_a_finished_job_is_left_alone() -> None:
    seen = replace(ending(), is_over=True)
    assert Plan(climb=seen.climb, is_over=True) == plan(seen)


@pytest.mark.parametrize("rung", [None, *TIME_SLICED.rungs])
def test_a_job_that_is_active_for_too_long_fails_wherever_it_stands(rung: Rung | None) -> None:
    job = make_job(activeDeadlineSeconds=60)
    seen = climbing(rung, rung, job=job) if rung else make_observation(job, [None, None], climb=None, rollout=None)
    seen = replace(seen, started_at=seen.now - 50)
    assert not plan(seen).raises
    wake_at = plan(seen).wake_at
    assert wake_at is not None
    assert seen.now + 10 >= wake_at
    for late_s in (10, 11):
        climb = plan(later(seen, late_s)).climb
        assert climb is not None
        assert (Cause.DEADLINE, True) == (climb.cause, climb.cause.is_failure)


def test_suspended_time_is_no_active_time() -> None:
    job = make_job(activeDeadlineSeconds=60, suspend=True)
    seen = replace(climbing(Rung.SERVING, Rung.SERVING, job=job), started_at=0.0)
    climb = plan(later(seen, 1000)).climb
    assert climb is not None
    assert Cause.SUSPENDED is climb.cause


def test_a_job_that_is_ending_is_past_its_deadline() -> None:
    seen = replace(ending(), job=make_job(activeDeadlineSeconds=60), started_at=0.0)
    assert not plan(later(seen, 1000)).raises


def test_a_finished_job_goes_when_its_time_is_over() -> None:
    seen = replace(ending(), is_over=True, finished_at=100.0, job=make_job(ttlSecondsAfterFinished=30))
    assert (False, 130.0) == (plan(seen).is_expired, plan(seen).wake_at)
    expired = plan(later(seen, 30)), plan(later(seen, 31))
    assert [(True, 100.0 + STOP_DEADLINE_S)] * 2 == [(decided.is_expired, decided.wake_at) for decided in expired]
    kept = replace(later(seen, 1_000_000), job=make_job())
    assert not plan(kept).is_expired


def test_a_pod_that_runs_on_after_its_job_has_its_time_too() -> None:
    """A container that is not ours keeps it, and with it its devices."""
    seen = replace(ending(), is_over=True, finished_at=100.0)
    over = tuple(replace(member, phase=PodPhase.SUCCEEDED) for member in seen.members[1:])
    seen = remember(replace(seen, members=(seen.members[0], *over)))
    assert ((), 100.0 + STOP_DEADLINE_S) == (plan(seen).pods, plan(seen).wake_at)
    for late_s in (STOP_DEADLINE_S, STOP_DEADLINE_S + 1):
        assert {"gpu-0-0"} == deleted(plan(later(seen, late_s)))
    assert plan(later(seen, STOP_DEADLINE_S)).wake_at is None
    ended = remember(replace(seen, members=over))
    assert Plan(climb=seen.climb, is_over=True) == plan(later(ended, STOP_DEADLINE_S))


# ----------------------------------------------------------------------------------------------------------- suspension
def suspended(seen: Observation, *, is_asked: bool = True) -> Observation:
    return remember(replace(seen, job=make_job(suspend=is_asked)))


def suspending(*, is_asked: bool = True) -> Observation:
    """A group that was at step 1 in lineage 1, told to stop in epoch 2."""
    climb = make_climb(1, epoch=2, cause=Cause.SUSPENDED)
    return suspended(climbing(Rung.SERVING, Rung.SERVING, climb=climb), is_asked=is_asked)


def resumed(**changes: Any) -> Observation:
    """Its pods are gone, and suspend is false again."""
    return remember(replace(suspending(is_asked=False), members=(), **changes))


def test_a_job_that_is_made_suspended_makes_no_pod_and_no_deadline_of_its_pods_runs() -> None:
    seen = remember(Observation(now=0.0, job=make_job(suspend=True), members=()))
    assert Plan(climb=None) == plan(later(seen, 1_000_000))
    released = remember(replace(later(seen, 1_000_000), job=make_job()))
    assert 3 == len(plan(released).pods)
    assert not plan(released).raises


@pytest.mark.parametrize("rung", TIME_SLICED.rungs)
def test_a_job_is_suspended_from_wherever_it_stands(rung: Rung) -> None:
    decided = plan(suspended(climbing(rung, rung)))
    assert decided.raises
    assert decided.climb is not None
    assert (2, 1, 1, 0, Cause.SUSPENDED) == (
        *(decided.climb.epoch, decided.climb.step, decided.climb.lineage, decided.climb.restarts),
        decided.climb.cause,
    )
    assert {Goal.STOP} == {target.goal for target in pod_targets(decided)}
    assert set() == deleted(decided)


def test_pods_of_a_suspended_job_go_when_every_member_has_stopped() -> None:
    seen = suspending()
    assert set() == deleted(plan(stopped(seen, 0, 1)))
    decided = plan(stopped(seen, 0, 1, 2))
    assert {"gpu-0-0", "gpu-1-0", "rollout-0"} == deleted(decided)
    assert not any(action.is_fault for action in decided.pods if isinstance(action, DeletePod))
    assert not decided.is_over
    gone = plan(remember(replace(seen, members=())))
    assert ((), {}, None, None, False) == (gone.pods, gone.targets, gone.wait, gone.wake_at, gone.raises)


def test_pods_without_a_climb_go_at_once_when_the_job_is_suspended() -> None:
    seen = make_observation(make_job(suspend=True), [None, None], climb=None, rollout=None)
    decided = plan(seen)
    assert {"gpu-0-0", "gpu-1-0", "rollout-0"} == deleted(decided)
    assert not any(action.is_fault for action in decided.pods if isinstance(action, DeletePod))


def test_a_suspension_before_the_first_climb_ends_before_the_job_goes_on() -> None:
    """Pods came beside those that ended, made as those were, whatever had been changed while the job was suspended."""
    seen = make_observation(make_job(suspend=True), [None, None], climb=None, rollout=None)
    decided = plan(seen)
    assert decided.raises
    assert decided.climb is not None
    assert (1, 0, "", Cause.SUSPENDED) == (
        *(decided.climb.epoch, decided.climb.lineage, decided.climb.group, decided.climb.cause),
    )
    ending = tuple(replace(member, ends_at=160.0) for member in seen.members)
    asked = remember(replace(seen, job=make_job(), climb=decided.climb, members=ending))
    asked = replace(asked, memory=replace(asked.memory, raised=True))
    assert () == plan(asked).pods, "no pod is made yet"
    assert not plan(asked).raises
    resumed = plan(remember(replace(asked, members=())))
    assert resumed.climb is not None
    assert Cause.RESUMED == resumed.climb.cause
    assert {"gpu-0", "gpu-1", ROLLOUT_SEAT} == {pod.seat for pod in resumed.pods if isinstance(pod, CreatePod)}


def test_a_suspended_pod_on_a_node_that_is_gone_is_forgotten() -> None:
    seen = without(suspending(), 0, ends_at=160.0)
    seen = remember(replace(seen, members=seen.members[:1]))
    assert seen.now + 60 + FORCE_AFTER_S == plan(seen).wake_at
    assert [0] == [a.grace_s for a in plan(later(seen, 60 + FORCE_AFTER_S)).pods if isinstance(a, DeletePod)]


def test_a_suspension_that_has_begun_ends_before_the_job_goes_on() -> None:
    seen = suspending(is_asked=False)
    assert {Goal.STOP} == {target.goal for target in pod_targets(plan(seen))}
    assert {"gpu-0-0", "gpu-1-0", "rollout-0"} == deleted(plan(stopped(seen, 0, 1, 2)))


def test_a_resumed_job_makes_its_pods_and_its_trainers_start_together_in_a_new_lineage() -> None:
    decided = plan(resumed())
    assert decided.climb is not None
    assert (3, 1, 1, "", Cause.RESUMED) == (
        *(decided.climb.epoch, decided.climb.step, decided.climb.lineage, decided.climb.group, decided.climb.cause),
    )
    waiting = resumed(climb=decided.climb)
    assert {CreatePod("gpu-0", 1), CreatePod("gpu-1", 1), CreatePod(ROLLOUT_SEAT, 1)} == set(plan(waiting).pods)
    members = [make_member(f"gpu-{index}", 1, facts=BLANK) for index in range(2)]
    partly = remember(replace(waiting, members=tuple(members)))
    assert ({}, False) == (plan(partly).targets, plan(partly).raises), "nobody starts before everybody is there"
    answering = make_member(ROLLOUT_SEAT, 1, facts=rollout_facts(sealed=1, trained=1))
    decided = plan(remember(replace(partly, members=(*members, answering))))
    assert decided.climb is not None
    assert (4, 1, 2, 0, Cause.RESUMED) == (
        *(decided.climb.epoch, decided.climb.step, decided.climb.lineage, decided.climb.restarts),
        decided.climb.cause,
    )
    assert decided.climb.group


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_job_that_is_resumed_with_more_or_fewer_pods_trains_on_all_of_them(replicas: int) -> None:
    job = make_job(replicas=replicas)
    climb = plan(resumed(job=job)).climb
    seats = [f"gpu-{replica}" for replica in range(replicas)]
    waiting = resumed(job=job, climb=climb)
    assert {*seats, ROLLOUT_SEAT} == {pod.seat for pod in plan(waiting).pods if isinstance(pod, CreatePod)}
    members = [make_member(seat, 1, facts=BLANK) for seat in seats]
    answering = make_member(ROLLOUT_SEAT, 1, facts=rollout_facts(sealed=1, trained=1))
    seen = remember(replace(waiting, members=(*members, answering)))
    decided = plan(seen)
    assert decided.climb is not None
    assert (1, 2, Cause.RESUMED) == (decided.climb.step, decided.climb.lineage, decided.climb.cause)
    targets = pod_targets(plan(remember(replace(seen, climb=decided.climb, memory=replace(seen.memory, raised=True)))))
    assert [replicas] * replicas == [target.rendezvous.world_size for target in targets if target.rendezvous]


def test_members_of_a_resumed_job_have_the_whole_deadline_to_answer() -> None:
    long_ago = later(suspending(), 1_000_000)
    seen = remember(replace(long_ago, job=make_job(podsReadyDeadlineSeconds=60), members=()))
    decided = plan(seen)
    assert decided.climb is not None
    seen = remember(replace(seen, climb=decided.climb))
    assert not plan(later(seen, 59)).raises
    climb = plan(later(seen, 60)).climb
    assert climb is not None
    assert Cause.PODS_NOT_READY is climb.cause


def test_an_operator_that_finds_a_suspended_job_raises_no_epoch_until_it_is_resumed() -> None:
    assert not plan(replace(suspending(), members=(), memory=Memory())).raises
    climb = plan(resumed(memory=Memory())).climb
    assert climb is not None
    assert (3, Cause.RESUMED) == (climb.epoch, climb.cause)


def test_an_operator_that_finds_a_resumed_job_without_its_pods_goes_on_with_it() -> None:
    climb = replace(make_climb(1, epoch=3, cause=Cause.RESUMED), group="")
    decided = plan(resumed(climb=climb, memory=Memory()))
    assert decided.climb is not None
    assert (4, "", Cause.TAKEOVER) == (decided.climb.epoch, decided.climb.group, decided.climb.cause)
    assert {} == decided.targets


def test_a_job_that_is_ending_is_not_suspended() -> None:
    assert not plan(suspended(ending())).raises


# ----------------------------------------------------------------------------------------------------------- the roster
def without(seen: Observation, index: int, **changes: Any) -> Observation:
    members = list(seen.members)
    members[index] = replace(members[index], facts=None, **changes)
    return remember(replace(seen, members=tuple(members)))


def test_a_failed_pod_is_made_anew_with_the_next_attempt() -> None:
    decided = plan(without(climbing(Rung.SERVING, Rung.SERVING), 1, phase=PodPhase.FAILED))
    assert (CreatePod("gpu-1", 1),) == decided.pods


def test_attempts_at_one_seat_are_spaced() -> None:
    seen = without(climbing(Rung.SERVING, Rung.SERVING), 1, phase=PodPhase.FAILED, created_at=100.0, attempt=4)
    assert () == plan(seen).pods
    assert 116.0 == plan(seen).wake_at
    for late_s in (16, 17):
        assert (CreatePod("gpu-1", 5),) == plan(later(seen, late_s)).pods


def test_attempts_at_a_seat_whose_pods_go_at_once_are_spaced_too() -> None:
    """Somebody deletes them as they come: they were made again as fast as the API server could."""
    seen = without(climbing(Rung.SERVING, Rung.SERVING), 1, created_at=100.0, attempt=4)
    gone = remember(replace(seen, members=tuple(member for member in seen.members if member.seat != "gpu-1")))
    assert () == plan(gone).pods
    assert 116.0 == plan(gone).wake_at
    assert (CreatePod("gpu-1", 5),) == plan(later(gone, 16)).pods
    unseen = replace(gone, memory=with_pod(gone.memory, "gpu-1", 5, at=95.0))
    assert 127.0 == plan(unseen).wake_at
    assert (CreatePod("gpu-1", 6),) == plan(later(unseen, 27)).pods
    assert {"gpu-1": 5} == with_pod(with_pod(Memory(), "gpu-1", 5, at=0.0), "gpu-1", 0, at=1.0).attempts


def test_a_silent_member_loses_its_pod_and_gets_another() -> None:
    seen = without(climbing(Rung.SERVING, Rung.SERVING), 1, silent_since=100.0)
    decided = plan(later(seen, SILENCE_S))
    assert [("sums-gpu-1-0", None)] == [(a.name, a.grace_s) for a in decided.pods if isinstance(a, DeletePod)]


def test_a_member_that_kubelet_starts_again_and_again_keeps_its_pod_for_longer() -> None:
    """Its pod went every 30 s, and with it the log that said why."""
    why = "agent: CrashLoopBackOff, 4 restarts, last ended with code 1: no space left"
    seen = without(climbing(Rung.SERVING, Rung.SERVING), 1, silent_since=100.0, trouble=why)
    assert () == plan(later(seen, RESTARTS_S - 1)).pods
    [deletion] = plan(later(seen, RESTARTS_S)).pods
    assert isinstance(deletion, DeletePod)
    assert f"no answer from pod sums-gpu-1-0 for 300 s: it is replaced; {why}" == deletion.why


def test_a_member_that_starts_slowly_keeps_its_pod_for_as_long_as_its_startup_probe() -> None:
    """On a busy node its pod was replaced every 30 s, and the next one had no more time."""
    seen = without(climbing(Rung.SERVING, Rung.SERVING), 1, silent_since=100.0, is_starting=True)
    assert () == plan(later(seen, RESTARTS_S - 1)).pods
    assert [DeletePod] == [type(action) for action in plan(later(seen, RESTARTS_S)).pods]


@pytest.mark.parametrize(
    ("pod", "deleted_s"),
    [({"silent_since": 100.0}, 30), ({"silent_since": 100.0, "trouble": "it crashes"}, 300), ({"ends_at": 100.0}, 30)],
    ids=["silent", "in trouble", "ending"],
)
def test_a_pod_is_given_up_at_a_moment_that_the_operator_wakes_up_for(pod: dict[str, Any], deleted_s: float) -> None:
    seen = without(climbing(Rung.SERVING, Rung.SERVING), 1, **pod)
    for after_s, is_deleted in ((0, False), (deleted_s - 0.5, False), (deleted_s, True), (deleted_s + 0.5, True)):
        actions, wake_at = muster(later(seen, after_s))
        assert is_deleted is any(isinstance(action, DeletePod) for action in actions)
        assert (None if is_deleted else 100.0 + deleted_s) == wake_at


@pytest.mark.parametrize(("attempt", "delay_s"), [(0, 1), (1, 2), (5, 32), (6, 60), (7, 60), (5000, 60)])
def test_the_next_attempt_at_a_seat_comes_after_twice_the_time_up_to_a_minute(attempt: int, delay_s: float) -> None:
    failed = {"phase": PodPhase.FAILED, "created_at": 100.0, "attempt": attempt}
    assert ((), 100.0 + delay_s) == muster(without(climbing(Rung.SERVING, Rung.SERVING), 1, **failed))


def test_a_trainers_seat_is_filled_while_its_last_pod_ends() -> None:
    """No volume holds it, as it holds the seat of the rollout controller."""
    job = make_job(**PLACED[Placement.DISAGGREGATED])
    seat = job.gpu_seats.index("trainer-0")
    seen = without(make_observation(job, [None] * len(job.gpu_seats), climb=None, rollout=None), seat, ends_at=110.0)
    assert (CreatePod("trainer-0", 1),) == muster(seen)[0]
    assert {CreatePod, DeletePod} == {type(action) for action in muster(later(seen, 10 + 30))[0]}, "it did not end"


def test_attempts_at_one_seat_never_end() -> None:
    seen = without(climbing(Rung.SERVING, Rung.SERVING), 1, phase=PodPhase.FAILED, created_at=100.0, attempt=5000)
    assert (CreatePod("gpu-1", 5001),) == plan(later(seen, MAX_DELAY_S)).pods


@pytest.mark.parametrize(("last", "follows"), [(10**9 - 2, 10**9 - 1), (10**9 - 1, 0)])
def test_an_attempt_of_somebody_else_with_the_highest_number_is_followed_by_one_that_is_ours(
    last: int, follows: int
) -> None:
    """The next number had a digit more than the operator reads: it made such a pod again and again."""
    seen = without(climbing(Rung.SERVING, Rung.SERVING), 1, phase=PodPhase.FAILED, created_at=100.0, attempt=last)
    assert (CreatePod("gpu-1", follows),) == plan(later(seen, MAX_DELAY_S)).pods


def test_silence_of_everybody_replaces_nobody() -> None:
    seen = climbing(Rung.SERVING, Rung.SERVING)
    for index in range(3):
        seen = without(seen, index, silent_since=100.0)
    assert () == plan(later(seen, 10 * SILENCE_S)).pods


def test_a_pod_that_does_not_end_is_forgotten_after_its_grace_and_replaced_before() -> None:
    seen = without(climbing(Rung.SERVING, Rung.SERVING), 1, ends_at=160.0)
    assert (CreatePod("gpu-1", 1),) == plan(seen).pods
    stuck = plan(later(seen, 60 + FORCE_AFTER_S)).pods
    assert [0] == [action.grace_s for action in stuck if isinstance(action, DeletePod)]


@pytest.mark.parametrize(
    ("after_s", "phase", "is_filled"),
    [
        (0, PodPhase.RUNNING, False),
        (0, PodPhase.SUCCEEDED, False),
        (0, PodPhase.FAILED, True),
        (60 + FORCE_AFTER_S - 1, PodPhase.RUNNING, False),
        (60 + FORCE_AFTER_S, PodPhase.RUNNING, True),
        (60 + FORCE_AFTER_S + 1, PodPhase.RUNNING, True),
    ],
)
def test_a_seat_in_a_queues_group_waits_for_the_pod_that_ends(after_s: float, phase: PodPhase, is_filled: bool) -> None:
    """The queue counts a pod until it has failed, and deletes the newest of those that are too many.

    The operator looked again without a pause once the wait was over, until it could make the next attempt.
    """
    job = replace(make_job(), queue_labels={"kueue.x-k8s.io/queue-name": "research"})
    seen = without(climbing(Rung.SERVING, Rung.SERVING, job=job), 1, ends_at=160.0, phase=phase)
    actions, wake_at = muster(later(seen, after_s))
    assert is_filled == (CreatePod("gpu-1", 1) in actions)
    assert (160 + FORCE_AFTER_S if after_s < 60 + FORCE_AFTER_S else None) == wake_at


def test_pods_that_a_queue_holds_back_are_waited_for_as_long_as_it_takes() -> None:
    """The job would lose its place in the queue, for pods that were never allowed to start."""
    job = make_job(podsReadyDeadlineSeconds=60)
    seen = make_observation(job, [None, None], climb=None, rollout=None)
    gated = [replace(each, is_gated=each.seat != ROLLOUT_SEAT) for each in seen.members]
    seen = later(remember(replace(seen, members=tuple(gated))), 100_000)
    assert not plan(seen).raises
    admitted = remember(replace(seen, members=tuple(replace(each, is_gated=False) for each in gated)))
    assert not plan(later(admitted, 59)).raises
    assert plan(later(admitted, 60)).raises


def test_a_gang_is_waited_for_until_one_of_its_pods_has_a_node() -> None:
    """It holds no device before; afterwards a pod that is made again may not keep those of the others for ever."""
    seen = make_observation(make_job(podsReadyDeadlineSeconds=60), [None, None], climb=None, rollout=None)
    gang = [replace(each, is_in_gang=each.seat != ROLLOUT_SEAT, node=None) for each in seen.members]
    waiting = later(remember(replace(seen, members=tuple(gang))), 100_000)
    assert not plan(waiting).raises
    placed = remember(replace(waiting, members=(replace(gang[0], node="node-1"), *gang[1:])))
    assert not plan(later(placed, 59)).raises
    assert plan(later(placed, 60)).raises


def test_the_pod_of_the_store_is_never_forced_and_its_seat_stays_empty_until_it_is_gone() -> None:
    seen = without(climbing(Rung.SERVING, Rung.SERVING), 2, ends_at=160.0, node="node-1")
    assert () == plan(later(seen, 1000)).pods
    gone = remember(replace(seen, members=seen.members[:2]))
    assert (CreatePod(ROLLOUT_SEAT, 1),) == plan(gone).pods


@pytest.mark.parametrize(
    ("node", "phase", "is_filled"),
    [
        ("node-1", PodPhase.RUNNING, False),
        ("node-1", PodPhase.PENDING, False),
        ("node-1", PodPhase.FAILED, True),
        (None, PodPhase.PENDING, True),
    ],
)
def test_the_seat_of_the_store_is_filled_once_nothing_of_its_pod_can_run(
    node: str | None, phase: PodPhase, is_filled: bool
) -> None:
    """A queue keeps the pod that it preempts until there is another in its place: both would wait for ever."""
    seen = without(climbing(Rung.SERVING, Rung.SERVING), 2, ends_at=160.0, node=node, phase=phase)
    assert is_filled == (CreatePod(ROLLOUT_SEAT, 1) in plan(later(seen, 1)).pods)


def test_what_is_derived_of_the_members_does_not_depend_on_the_memory() -> None:
    """`remember` hands it on, because a thousand members are a long look."""
    pods = [facts_at(Rung.PAUSED, WeightVersion(1, 1)), facts_at(Rung.DRAINED, WeightVersion(1, 1))]
    seen = make_observation(make_job(), [*pods], climb=make_climb(1), rollout=rollout_facts(sealed=1))
    derived = [name for name, value in vars(Observation).items() if isinstance(value, cached_property)]
    fresh = replace(seen)
    forgetful = replace(seen, memory=Memory())
    assert {name: getattr(fresh, name) for name in derived} == {name: getattr(forgetful, name) for name in derived}
