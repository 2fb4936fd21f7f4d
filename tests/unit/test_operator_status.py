"""The job's status: one word for people, conditions for programs, and when it is worth a write."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from builders import (
    BLANK,
    CREATED,
    engine,
    facts_at,
    make_climb,
    make_job,
    make_observation,
    rollout_facts,
    status_of,
    trainer,
)
from colocated_rl_api.facts import BestOf, EngineState, EvaluationResult, PodFacts, Problem
from colocated_rl_api.job_status import (
    CheckpointStatus,
    ColocatedRLJobStatus,
    ConditionStatus,
    Holder,
    Phase,
    WeightSyncStatus,
)
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_operator.planner.observation import (
    Climb,
    Observation,
    PodPhase,
    remember,
)
from colocated_rl_operator.planner.plan import plan
from colocated_rl_operator.planner.reasons import Cause, ConditionType, Reason
from colocated_rl_operator.planner.status import (
    BRIEF_OUTAGE_S,
    Stall,
    invalid,
    is_urgent,
    leaving,
    report,
)

V0, V1 = WeightVersion(0, 1), WeightVersion(1, 1)
SWITCH = make_climb(1, cause=Cause.NEXT_STEP)


def seen_at(*rungs: Rung, climb: Climb = SWITCH, served: WeightVersion | None = V0, raised: bool = True) -> Observation:
    facts = [facts_at(rung, climb.version, epoch=climb.epoch) for rung in rungs]
    rollout = rollout_facts(sealed=1)
    return make_observation(
        make_job(replicas=len(rungs)), list(facts), climb=climb, rollout=rollout, served=served, raised=raised
    )


def conditions(status: ColocatedRLJobStatus) -> dict[str, tuple[bool, str]]:
    return {item.type: (item.status is ConditionStatus.TRUE, item.reason) for item in status.conditions}


# --------------------------------------------------------------------------------------------------------------- phases
@pytest.mark.parametrize(
    ("rung", "phase", "holder"),
    [
        (Rung.SEALED, Phase.SWITCHING, Holder.SWITCHING),
        (Rung.DRAINED, Phase.SWITCHING, Holder.SWITCHING),
        (Rung.RELEASED, Phase.TRAINING, Holder.TRAINER),
        (Rung.TRAINED, Phase.SWITCHING, Holder.SWITCHING),
        (Rung.UPDATED, Phase.SWITCHING, Holder.SWITCHING),
        (Rung.SERVING, Phase.ROLLOUT, Holder.ROLLOUT),
    ],
)
def test_a_switch_in_words(rung: Rung, phase: Phase, holder: Holder) -> None:
    status = status_of(seen_at(rung, rung))
    assert (phase, holder, rung) == (status.phase, status.gpu_holder, status.rung)
    assert (True, Reason.SERVING) == conditions(status)["Ready"]  # an ordinary switch is no trouble


def test_the_first_climb_is_starting_and_not_ready() -> None:
    climb = make_climb(0, cause=Cause.FIRST_START)
    status = status_of(seen_at(Rung.RELEASED, Rung.RELEASED, climb=climb, served=None))
    assert Phase.STARTING is status.phase
    assert (False, Reason.CLIMBING) == conditions(status)["Ready"]
    assert (True, Reason.CLIMBING) == conditions(status)["Reconciling"]


def test_what_was_served_is_reported_also_when_the_next_step_begins_in_the_same_pass() -> None:
    """A job whose batches were always there before its engines served was Starting and not Ready until its end."""
    seen = seen_at(Rung.SERVING, Rung.SERVING)
    ready = replace(seen.members[2], facts=rollout_facts(sealed=2, trained=1))
    seen = replace(seen, members=(*seen.members[:2], ready))
    assert plan(seen).raises
    status = status_of(seen)
    assert ("1-1", 1, 2, Phase.SWITCHING) == (status.weight_version, status.step, status.target_step, status.phase)
    assert (True, Reason.SERVING) == conditions(status)["Ready"]


def test_a_new_lineage_is_recovering_until_it_is_served() -> None:
    climb = make_climb(1, 2, cause=Cause.POD_REPLACED)
    status = status_of(seen_at(Rung.RELEASED, Rung.RELEASED, climb=climb, served=V1))
    assert Phase.RECOVERING is status.phase
    assert (False, "PodReplaced") == conditions(status)["Ready"]
    assert Phase.ROLLOUT is status_of(seen_at(Rung.SERVING, Rung.SERVING, climb=climb, served=V1)).phase


def test_an_engine_that_is_replaced_is_recovering() -> None:
    assert Phase.RECOVERING is status_of(seen_at(Rung.SERVING, Rung.OFFLOADED, served=V1)).phase


def test_a_takeover_changes_no_word_until_the_members_have_answered() -> None:
    before = status_of(seen_at(Rung.RELEASED, Rung.RELEASED))
    status = status_of(seen_at(Rung.RELEASED, Rung.RELEASED, raised=False), before)
    assert (Phase.TRAINING, 2, Cause.TAKEOVER) == (status.phase, status.epoch, status.cause)
    assert conditions(before) == conditions(status)


def test_a_silent_member_is_named() -> None:
    seen = seen_at(Rung.SERVING, Rung.SERVING, served=V1)
    before = status_of(seen)
    silent = replace(seen.members[1], facts=None, trouble="agent: CrashLoopBackOff: back-off 10s")
    blinking = remember(replace(seen, members=(seen.members[0], silent, seen.members[2])))
    assert not is_urgent(before, status_of(blinking, before))  # a moment's absence is no news
    status = status_of(replace(blinking, now=blinking.now + BRIEF_OUTAGE_S), before)
    assert is_urgent(before, status)
    assert (1, (False, Reason.PODS_STARTING)) == (status.ready_replicas, conditions(status)["PodsReady"])
    message = next(item.message for item in status.conditions if item.type == "PodsReady")
    assert "gpu-1 (agent: CrashLoopBackOff" in message
    assert ["sums-gpu-1-0"] == [pod.name for pod in status.out_of_line]


def test_an_operator_that_is_cut_off_says_so() -> None:
    seen = seen_at(Rung.SERVING, Rung.SERVING, served=V1)
    members = tuple(replace(member, facts=None, is_ready=True) for member in seen.members)
    status = status_of(replace(seen, members=members))
    assert (False, Reason.OPERATOR_CUT_OFF) == conditions(status)["PodsReady"]


# ----------------------------------------------------------------------------------------------------------------- ends
def ended(cause: Cause, *, is_over: bool) -> ColocatedRLJobStatus:
    seen = seen_at(Rung.SERVING, Rung.SERVING, climb=make_climb(1, cause=cause), served=V1)
    return status_of(replace(seen, members=(), is_over=False) if is_over else seen)


def test_completion_satisfies_kubectl_wait_and_helm() -> None:
    assert (False, Reason.STEPS_REMAIN) == conditions(ended(Cause.ALL_STEPS_DONE, is_over=False))["Complete"]
    status = ended(Cause.ALL_STEPS_DONE, is_over=True)
    found = conditions(status)
    assert Phase.COMPLETE is status.phase
    assert {"Complete", "Ready"} == {kind for kind, (is_true, _) in found.items() if is_true}
    assert CREATED == status.completion_time == status.ended_at


def test_the_model_that_a_job_leaves_is_named_and_stays_named() -> None:
    seen = seen_at(Rung.SERVING, climb=make_climb(1), served=V1)
    rank = trainer(1, 1, saved=1, can_finish=True, finished=V1)
    members = [
        replace(member, facts=member.pod_facts.model_copy(update={"trainers": (rank,)})) if member.pod_facts else member
        for member in seen.members
    ]
    status = status_of(replace(seen, members=tuple(members)))
    assert f"{seen.job.claim_name('checkpoints')}/model-00000001" == status.model

    over = seen_at(Rung.SERVING, climb=make_climb(1, cause=Cause.ALL_STEPS_DONE), served=V1)
    status = status_of(replace(over, members=()), before=status)
    (done,) = (condition.message for condition in status.conditions if condition.type == ConditionType.COMPLETE)
    assert (Phase.COMPLETE, f"all 1 steps are done; the model is in {status.model}") == (status.phase, done)


def test_the_newest_durable_checkpoint_is_reported_with_when_it_was_first_seen() -> None:
    def saved(step: int | None, before: ColocatedRLJobStatus, at: datetime) -> ColocatedRLJobStatus:
        seen = seen_at(Rung.SERVING)
        pod = seen.members[0].pod_facts
        assert pod is not None
        facts = pod.model_copy(update={"trainers": (trainer(1, 1, saved=step),)})
        seen = replace(seen, members=(replace(seen.members[0], facts=facts), *seen.members[1:]))
        return report(seen, plan(seen), before=before, at=at)

    later = CREATED + timedelta(hours=5)
    assert None is saved(None, BLANK, CREATED).checkpoint
    first = saved(10, BLANK, CREATED)
    assert CheckpointStatus(step=10, time=CREATED) == first.checkpoint
    assert first.checkpoint == saved(10, first, later).checkpoint
    assert first.checkpoint == saved(None, first, later).checkpoint  # trainers that start know of none yet
    assert CheckpointStatus(step=20, time=later) == saved(20, first, later).checkpoint


@pytest.mark.parametrize(("mirrored", "expected"), [((3, 3), 3), ((3, 2), 2), ((3, None), None)])
def test_the_step_that_memory_has_is_the_one_that_every_rank_has_kept(
    mirrored: tuple[int | None, int | None], expected: int | None
) -> None:
    seen = seen_at(Rung.SERVING)
    pod = seen.members[0].pod_facts
    assert pod is not None
    ranks = tuple(trainer(1, 1, mirrored=step) for step in mirrored)
    members = (replace(seen.members[0], facts=pod.model_copy(update={"trainers": ranks})), *seen.members[1:])
    assert expected == status_of(replace(seen, members=members)).mirrored_step


def test_how_far_the_furthest_engine_is_from_the_trainer_is_reported_with_what_is_accepted_next() -> None:
    def probed(*noise: float | None, before: ColocatedRLJobStatus = BLANK, **spec: Any) -> ColocatedRLJobStatus:
        seen = seen_at(Rung.SERVING, Rung.SERVING)
        seen = replace(seen, job=make_job(replicas=2, **spec))
        members = [
            replace(member, facts=member.facts.model_copy(update={"engines": (engine(V1, noise_nats=nats),)}))
            for member, nats in zip(seen.gpu_members, noise, strict=True)
            if isinstance(member.facts, PodFacts)
        ]
        return status_of(replace(seen, members=(*members, *seen.members[2:])), before=before)

    assert None is probed(None, None).weight_sync
    first = probed(0.08123, 0.0412)
    assert WeightSyncStatus(difference_nats=0.081, limit_nats=0.24) == first.weight_sync
    assert first.weight_sync == probed(None, None, before=first).weight_sync, "engines that start know of none yet"
    assert WeightSyncStatus(difference_nats=2.1e-7, limit_nats=1e-3) == probed(2.123e-7, None).weight_sync
    assert None is probed(0.08, 0.08, before=first, weightSync={"verify": "Version"}).weight_sync


def test_the_checkpoint_that_a_job_began_from_is_named_and_stays_named() -> None:
    seen = replace(seen_at(Rung.SERVING), job=make_job(replicas=1, restoreFrom={"claimName": "old"}))
    (rollout,) = (member for member in seen.members if member.rollout_facts)
    others = tuple(member for member in seen.members if member is not rollout)
    knows = replace(rollout, facts=rollout_facts(trained=1, began_at=40))

    first = status_of(replace(seen, members=(*others, knows)))
    later = status_of(replace(seen, members=others), before=first)

    assert "old/step-00000040" == first.restored_from == later.restored_from
    assert None is status_of(seen_at(Rung.SERVING)).restored_from


def test_failure_stalls_at_once_and_names_its_cause() -> None:
    status = ended(Cause.BACKOFF_LIMIT, is_over=False)
    found = conditions(status)
    assert (Phase.FAILED, None) == (status.phase, status.ended_at)
    assert {"Stalled", "PodsReady", "GPUSharingReady"} == {kind for kind, (is_true, _) in found.items() if is_true}
    assert (False, "BackoffLimitExceeded") == found["Failed"]


def test_a_job_has_failed_when_every_member_has_stopped_and_says_when_in_its_condition() -> None:
    later = CREATED + timedelta(seconds=9)
    failing = seen_at(Rung.SERVING, Rung.SERVING, climb=make_climb(1, cause=Cause.BACKOFF_LIMIT), served=V1)
    decided = replace(plan(failing), message="it was the seventh time")
    status = report(failing, decided, before=BLANK, at=CREATED)
    stopped = replace(failing, members=())
    status = report(stopped, plan(stopped), before=status, at=later)
    [failed] = [each for each in status.conditions if each.type == ConditionType.FAILED]
    assert (Phase.FAILED, None, later) == (status.phase, status.completion_time, status.ended_at)
    assert (later, "it was the seventh time") == (failed.last_transition_time, failed.message)
    again = report(stopped, plan(stopped), before=status, at=later + timedelta(hours=1))
    assert later == again.ended_at


def test_a_retried_job_has_not_failed_and_its_time_begins_anew() -> None:
    failed = ended(Cause.DEADLINE, is_over=True)
    assert (Phase.FAILED, True) == (failed.phase, failed.ended_at is not None)
    climb = make_climb(1, cause=Cause.RETRIED)
    status = status_of(seen_at(Rung.SERVING, Rung.SERVING, climb=climb, served=V1), failed)
    assert (Phase.PENDING, None, None) == (status.phase, status.start_time, status.ended_at)
    assert [(False, Reason.NOT_FAILED), (False, Reason.NOT_STALLED)] == [
        conditions(status)[kind] for kind in ("Failed", "Stalled")
    ]


@pytest.mark.parametrize("raised", [True, False], ids=["the next pass", "the next operator"])
def test_the_words_of_a_failure_stay_after_the_pass_that_found_them(raised: bool) -> None:
    """After a take-over it said "the end is told again", and no longer why."""
    seen = seen_at(Rung.SERVING, Rung.SERVING, climb=make_climb(1, cause=Cause.BACKOFF_LIMIT), raised=raised)
    decided = plan(seen)
    assert decided.raises is not raised
    first = report(seen, replace(decided, message="a trainer died"), before=BLANK, at=CREATED)
    second = report(seen, decided, before=first, at=CREATED)
    assert {"Failed": "a trainer died", "Stalled": "a trainer died"} == words(second, "Failed", "Stalled")


def test_what_stalls_a_failed_job_is_reported_beside_its_failure() -> None:
    """Only events reported a failed job whose deletion was refused, and they are gone after an hour."""
    seen = seen_at(Rung.SERVING, Rung.SERVING, climb=make_climb(1, cause=Cause.BACKOFF_LIMIT))
    first = report(seen, replace(plan(seen), message="a trainer died"), before=BLANK, at=CREATED)
    second = report(seen, plan(seen), before=first, at=CREATED, stall=Stall(Reason.OBJECT_REFUSED, "a webhook"))
    assert (True, Reason.OBJECT_REFUSED) == conditions(second)["Stalled"]
    assert {"Failed": "a trainer died", "Stalled": "a webhook"} == words(second, "Failed", "Stalled")
    third = report(seen, plan(seen), before=second, at=CREATED)
    assert words(first, "Failed", "Stalled") == words(third, "Failed", "Stalled")


def words(status: ColocatedRLJobStatus, *kinds: str) -> dict[str, str]:
    return {item.type: item.message for item in status.conditions if item.type in kinds}


# ----------------------------------------------------------------------------------------------------------- suspension
def suspending(**changes: Any) -> Observation:
    climb = make_climb(1, epoch=2, cause=Cause.SUSPENDED)
    seen = seen_at(Rung.SERVING, Rung.SERVING, climb=climb, served=V1)
    return replace(seen, job=make_job(suspend=True), **changes)


def test_a_suspended_job_says_so_when_its_pods_are_gone() -> None:
    status = status_of(suspending())
    assert (Phase.SUSPENDING, Holder.SWITCHING, None) == (status.phase, status.gpu_holder, status.start_time)
    found = conditions(status)
    assert {"Reconciling"} == {kind for kind, (is_true, _) in found.items() if is_true}
    assert (False, Reason.SUSPENDING) == found["Suspended"]
    rest = status_of(suspending(members=()), status)
    assert (Phase.SUSPENDED, Holder.NOBODY, 0, 2) == (rest.phase, rest.gpu_holder, rest.ready_replicas, rest.replicas)
    assert (None, None, None) == (rest.start_time, rest.weight_version, rest.rung)
    found = conditions(rest)
    assert {"Suspended"} == {kind for kind, (is_true, _) in found.items() if is_true}
    assert (False, Cause.SUSPENDED) == found["Ready"]


def test_a_job_that_is_made_suspended_says_so_at_once_and_has_not_started() -> None:
    seen = Observation(now=0.0, job=make_job(suspend=True), members=())
    status = status_of(seen)
    assert (Phase.SUSPENDED, None) == (status.phase, status.start_time)
    assert (True, Cause.SUSPENDED) == conditions(status)["Suspended"]


def test_a_resumed_job_starts_again_by_the_clock_and_in_words() -> None:
    rest = status_of(suspending(members=()))
    climb = replace(make_climb(1, epoch=3, cause=Cause.RESUMED), group="")
    seen = replace(suspending(members=()), job=make_job(), climb=climb, served=None)
    later = CREATED + timedelta(hours=1)
    status = report(seen, plan(seen), before=rest, at=later)
    assert (Phase.PENDING, later) == (status.phase, status.start_time)
    assert (False, Reason.NOT_SUSPENDED) == conditions(status)["Suspended"]
    climbing = seen_at(Rung.RELEASED, Rung.RELEASED, climb=make_climb(1, 2, cause=Cause.RESUMED), served=None)
    status = report(climbing, plan(climbing), before=status, at=later + timedelta(hours=1))
    assert (Phase.STARTING, later) == (status.phase, status.start_time)


# -------------------------------------------------------------------------------------------------------------- kstatus
def kstatus(status: ColocatedRLJobStatus, *, generation: int) -> str:
    """Return what Flux and `helm --wait` read: sigs.k8s.io/cli-utils, pkg/kstatus/status, for an unknown kind."""
    found = conditions(status)
    if status.observed_generation != generation:
        return "InProgress"
    if found.get("Reconciling", (False, ""))[0]:
        return "InProgress"
    if found.get("Stalled", (False, ""))[0]:
        return "Failed"
    if "Ready" in found:
        return "Current" if found["Ready"][0] else "InProgress"
    return "Current"


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (Observation(now=0.0, job=make_job(), members=()), "InProgress"),
        (seen_at(Rung.RELEASED, Rung.RELEASED, climb=make_climb(0), served=None), "InProgress"),
        (seen_at(Rung.SERVING, Rung.SERVING), "Current"),
        (seen_at(Rung.RELEASED, Rung.RELEASED), "Current"),
        (seen_at(Rung.RELEASED, Rung.RELEASED, climb=make_climb(1, 2, cause=Cause.TRAINER_DIED)), "InProgress"),
        (seen_at(Rung.SERVING, Rung.SERVING, climb=make_climb(1, cause=Cause.DEADLINE)), "Failed"),
        (suspending(), "InProgress"),
        (suspending(members=()), "InProgress"),
    ],
    ids=["pending", "starting", "rollout", "training", "recovering", "failed", "suspending", "suspended"],
)
def test_kstatus_reads_what_people_expect(seen: Observation, expected: str) -> None:
    status = status_of(seen)
    assert expected == kstatus(status, generation=1)
    assert "InProgress" == kstatus(status, generation=2), "the spec has changed since"


def test_kstatus_reads_an_invalid_spec_as_failed_and_a_complete_job_as_current() -> None:
    broken = invalid("spec.steps is 0", generation=2, before=status_of(seen_at(Rung.SERVING)), at=CREATED)
    assert "Failed" == kstatus(broken, generation=2)
    assert "Current" == kstatus(ended(Cause.ALL_STEPS_DONE, is_over=True), generation=1)


# ----------------------------------------------------------------------------------------------------------- conditions
def test_the_time_of_a_condition_moves_only_with_its_status() -> None:
    seen = seen_at(Rung.SERVING, Rung.SERVING)
    first = report(seen, plan(seen), before=BLANK, at=CREATED)
    later = CREATED + timedelta(hours=1)
    second = report(seen, plan(seen), before=first, at=later)
    assert {CREATED} == {item.last_transition_time for item in second.conditions}
    broken = Stall(Reason.OBJECT_REFUSED, "quota")
    third = report(seen, plan(seen), before=second, at=later, stall=broken)
    assert {"Stalled": later} == {
        item.type: item.last_transition_time for item in third.conditions if item.last_transition_time != CREATED
    }


def test_an_invalid_spec_keeps_what_is_known() -> None:
    before = status_of(seen_at(Rung.SERVING, Rung.SERVING))
    status = invalid("spec.steps is 0", generation=2, before=before, at=CREATED)
    assert (True, Reason.INVALID_SPEC) == conditions(status)["Stalled"]
    assert (2, before.epoch, before.phase) == (status.observed_generation, status.epoch, status.phase)
    assert len(status.conditions) == len(before.conditions)


def test_a_job_on_its_way_out_is_not_ready() -> None:
    status = leaving(before=status_of(seen_at(Rung.SERVING, Rung.SERVING)), at=CREATED)
    assert (False, Reason.DELETED) == conditions(status)["Ready"]


# -------------------------------------------------------------------------------------------------------------- figures
def test_the_step_is_finished_when_every_pod_has_trained_it() -> None:
    assert status_of(seen_at(Rung.RELEASED, Rung.TRAINED)).step is None
    assert 1 == status_of(seen_at(Rung.TRAINED, Rung.SERVING)).step


def test_an_engine_for_which_the_next_step_waits_is_named_while_the_job_serves() -> None:
    seen = seen_at(Rung.SERVING, Rung.SERVING, served=V1)
    facts = seen.members[0].pod_facts
    assert facts is not None
    changes = {"name": "engine-1", "state": EngineState.STARTING, "starts_on": V1, "failures": 1}
    facts = facts.model_copy(update={"engines": (*facts.engines, facts.engines[0].model_copy(update=changes))})
    members = (replace(seen.members[0], facts=facts), *seen.members[1:-1])
    seen = replace(seen, members=(*members, replace(seen.members[-1], facts=rollout_facts(sealed=2, trained=1))))
    status = status_of(seen)
    assert Phase.ROLLOUT is status.phase
    (ready,) = [each for each in status.conditions if each.type == ConditionType.READY]
    assert (ConditionStatus.TRUE, Reason.SERVING) == (ready.status, ready.reason)
    assert "the next step waits for engine-1 of sums-gpu-0-0, which failed and starts again" == ready.message


def test_counts_and_pods_out_of_line() -> None:
    seen = seen_at(Rung.PAUSED, Rung.PAUSED, Rung.SETTLED)
    stuck = seen.members[2].pod_facts
    assert stuck is not None
    facts = stuck.model_copy(update={"problem": Problem(reason="Unsettled", message="1 request in flight")})
    members = (*seen.members[:2], replace(seen.members[2], facts=facts), seen.members[3])
    status = status_of(replace(seen, members=members))
    assert {"Paused": 2, "Settled": 1} == status.pods_by_rung
    assert [("sums-gpu-2-0", "Settled", "Unsettled")] == [
        (pod.name, pod.rung, pod.reason) for pod in status.out_of_line
    ]


def test_f34_what_keeps_a_job_from_starting_is_in_its_conditions() -> None:
    """An engine of an unknown version was named beside pods alone, and Ready was false without a word."""
    too_old = Problem(reason="EngineLost", message="SGLang 0.5.6 is not known: use 0.5.23")
    seen = seen_at(Rung.OFFLOADED, Rung.OFFLOADED, climb=make_climb(0, cause=Cause.FIRST_START), served=None)
    facts = seen.members[1].pod_facts
    assert facts is not None
    broken = replace(seen.members[1], facts=facts.model_copy(update={"problem": too_old}))
    status = status_of(replace(seen, members=(seen.members[0], broken, seen.members[2])))
    said = {item.type: (item.status, item.message) for item in status.conditions}
    words = "sums-gpu-1-0: SGLang 0.5.6 is not known: use 0.5.23"
    assert (("False", words), ("True", words)) == (said["Ready"], said["Reconciling"])


def test_a_problem_of_the_rollout_controller_is_shown_beside_those_of_gpu_pods() -> None:
    """Its words reached no status at all."""
    seen = seen_at(Rung.SERVING, Rung.SERVING)
    problem = Problem(reason="NoLearningSignal", message="every group of the batch has one reward")
    facts = rollout_facts(sealed=1, problem=problem)
    status = status_of(replace(seen, members=(*seen.members[:2], replace(seen.members[2], facts=facts))))
    assert [("sums-rollout-0", None, "NoLearningSignal")] == [
        (pod.name, pod.rung, pod.reason) for pod in status.out_of_line
    ]


def test_a_pod_that_can_not_start_is_shown_before_anybody_has_answered() -> None:
    job, why = make_job(), "not scheduled: persistentvolumeclaim model not found"
    seen = make_observation(job, [None, None], climb=None, rollout=None)
    waiting = replace(seen.members[0], phase=PodPhase.PENDING, trouble=why)
    status = status_of(replace(seen, members=(waiting, *seen.members[1:])))
    assert [("sums-gpu-0-0", why)] == [(pod.name, pod.message) for pod in status.out_of_line]
    message = next(item.message for item in status.conditions if item.type == "PodsReady")
    assert f"gpu-0 ({why})" in message


def test_unmeasured_figures_are_absent() -> None:
    status = status_of(seen_at(Rung.SERVING, Rung.SERVING))
    assert status.rollout is not None
    assert (None, [], None) == (status.rollout.reward, status.evaluations, status.last_switch_seconds)


def test_figures_alone_are_not_urgent_and_phases_are() -> None:
    seen = seen_at(Rung.SERVING, Rung.SERVING)
    before = status_of(seen)
    result = EvaluationResult(
        step=0, samples=4, mean=0.5, stderr=0.1, best=0.75, best_of=(BestOf(answers=2, mean=0.6),)
    )
    facts = rollout_facts(sealed=1, reward_mean=0.3, evaluated=(result,), samples={"running": 3})
    moved = status_of(replace(seen, members=(*seen.members[:2], replace(seen.members[2], facts=facts))), before)
    assert before != moved
    [shown] = moved.evaluations
    assert ("held-out", 0.5, 0.75) == (shown.name, shown.mean, shown.best)
    assert [(2, 0.6)] == [(each.answers, each.mean) for each in shown.best_of or ()]
    assert not is_urgent(before, moved)
    assert is_urgent(before, status_of(seen_at(Rung.SERVING, Rung.OFFLOADED, served=V1), before))
