"""A group goes on with another number of replicas: fewer where there is no room, or as many as are asked for.

Spares hold room for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from builders import (
    CREATED,
    OWN_ROLLOUT,
    PLACED,
    TOGETHER,
    absent_engine,
    absent_trainer,
    facts_at,
    make_climb,
    make_job,
    make_member,
    make_observation,
    pod_facts,
    rollout_facts,
    trainers_at,
)
from colocated_rl_api.facts import PodFacts
from colocated_rl_api.failure import FailureCause
from colocated_rl_api.job_status import ColocatedRLJobStatus
from colocated_rl_api.member_wire import PodTarget
from colocated_rl_api.names import PodUid
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from colocated_rl_operator.manifests.belongings import claims, config, disruption_budget
from colocated_rl_operator.manifests.resources import PodImages, pod
from colocated_rl_operator.planner.actions import CreatePod, DeletePod
from colocated_rl_operator.planner.notices import Notice
from colocated_rl_operator.planner.observation import Climb, Member, Observation, PodPhase, RefusedPod, remember
from colocated_rl_operator.planner.plan import Plan, plan
from colocated_rl_operator.planner.reasons import Cause, Waiting
from colocated_rl_operator.planner.size import size_at_boundary
from colocated_rl_operator.planner.status import report

V2 = WeightVersion(2, 1)
ELASTIC = {"minReplicas": 1, "shrinkAfterSeconds": 30}
BLANK = pod_facts(absent_engine(), absent_trainer(), epoch=0)


def group_of(
    replicas: int,
    *,
    asked: int,
    saved: int = 2,
    sealed: int = 3,
    placement: Placement = Placement.TIME_SLICED,
    **spec: Any,
) -> Observation:
    """A group of so many replicas that serves step 2, while as many as `asked` are asked for."""
    climb = replace(make_climb(2, epoch=5, cause=Cause.NEXT_STEP), replicas=replicas)
    job = make_job(steps=5, replicas=asked, **PLACED[placement], **spec).led_by(climb)
    facts = facts_at(Rung.SERVING, V2, epoch=5, ladder=job.ladder)
    facts = facts.model_copy(update={"trainers": tuple(_saved(facts, saved))})
    rollout = rollout_facts(sealed=sealed, trained=2, epoch=5)
    return make_observation(job, [facts] * replicas, climb=climb, rollout=rollout, trained_step=2)


def _saved(facts: PodFacts, step: int) -> Any:
    return (each.model_copy(update={"saved": step}) for each in facts.trainers)


def without(seen: Observation, seat: str) -> Observation:
    """The seat's pod was lost, and another one was given to the node that is gone."""
    pending = make_member(seat, 1, phase=PodPhase.PENDING, node="lost", address=None, created_at=seen.now)
    return with_pod(seen, pending)


def with_pod(seen: Observation, pod: Member) -> Observation:
    others = [member for member in seen.members if member.seat != pod.seat]
    return remember(replace(seen, members=(*others, pod)))


def later(seen: Observation, seconds: float) -> Observation:
    return remember(replace(seen, now=seen.now + seconds))


def followed(seen: Observation, decided: Plan) -> Observation:
    """Return what is seen once the plan's climb is on record."""
    return remember(replace(seen.following(decided.climb), memory=replace(seen.memory, raised=True)))


def climb_of(decided: Plan) -> Climb:
    assert decided.climb is not None
    return decided.climb


def made(decided: Plan) -> list[str]:
    return [action.seat for action in decided.pods if isinstance(action, CreatePod)]


def deleted(decided: Plan) -> list[str]:
    """Return the pods that go: not one of them is at fault."""
    deletions = [action for action in decided.pods if isinstance(action, DeletePod)]
    assert not any(action.is_fault for action in deletions)
    return [action.name for action in deletions]


def world_sizes(decided: Plan) -> set[int]:
    targets = (target for target in decided.targets.values() if isinstance(target, PodTarget))
    return {target.rendezvous.world_size for target in targets if target.rendezvous}


# --------------------------------------------------------------------------------------------------- there is no room
def test_a_group_goes_on_with_the_replicas_for_which_there_is_room() -> None:
    seen = without(group_of(2, asked=2, elasticPolicy=ELASTIC), "gpu-1")
    waits = plan(later(seen, 29))
    assert not waits.raises
    assert seen.now + 30 == waits.wake_at
    assert Cause.RESIZED is climb_of(plan(later(seen, 31))).cause
    seen = later(seen, 30)
    decided = plan(seen)
    climb = climb_of(decided)
    assert (Cause.RESIZED, 1, "", 0) == (climb.cause, climb.replicas, climb.group, climb.restarts)
    assert "no node has taken on gpu-1: 1 of 2 replicas continue" == decided.message
    assert ([], []) == (made(decided), deleted(decided)), "a pod without a node holds nothing, and waits for one"
    decided = plan(followed(seen, decided))
    climb = climb_of(decided)
    assert (Cause.RESIZED, 1, 2) == (climb.cause, climb.replicas, climb.lineage)
    assert {1} == world_sizes(decided)


def test_a_group_loses_no_more_replicas_than_have_no_room() -> None:
    seen = without(group_of(3, asked=3, elasticPolicy=ELASTIC), "gpu-1")
    assert 2 == climb_of(plan(later(seen, 30))).replicas


def test_the_pod_that_is_left_takes_the_first_seat() -> None:
    """Ranks are counted from the first seat: its new pod needs the room of the last one."""
    seen = later(without(group_of(2, asked=2, elasticPolicy=ELASTIC), "gpu-0"), 30)
    decided = plan(seen)
    assert (1, ["sums-gpu-1-0"]) == (climb_of(decided).replicas, deleted(decided))
    seen = followed(seen, decided)
    seen = remember(replace(seen, members=tuple(pod for pod in seen.members if pod.seat != "gpu-1")))
    assert ([], []) == (made(plan(seen)), deleted(plan(seen))), "the last seat is not filled before the first"


def test_pods_that_start_on_their_node_are_waited_for() -> None:
    seen = group_of(2, asked=2, elasticPolicy=ELASTIC)
    seen = with_pod(seen, make_member("gpu-1", 1, phase=PodPhase.PENDING, is_accepted=True))
    assert not plan(later(seen, 300)).raises


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"elasticPolicy": {"minReplicas": 2}},
        {
            "elasticPolicy": ELASTIC,
            "podTemplates": {"gpu": {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}}},
        },
    ],
    ids=["no policy", "too few", "in a queue"],
)
def test_a_group_waits_where_it_may_not_be_smaller(spec: dict[str, Any]) -> None:
    assert not plan(later(without(group_of(2, asked=2, **spec), "gpu-1"), 300)).raises


def test_a_gang_keeps_its_size() -> None:
    """Its scheduler places all of its pods together, or none."""
    seen = without(group_of(2, asked=2, elasticPolicy=ELASTIC), "gpu-1")
    members = tuple(replace(member, is_in_gang=member.seat != "rollout") for member in seen.members)
    assert not plan(later(replace(seen, members=members), 300)).raises
    seen = group_of(2, asked=1)
    members = tuple(replace(member, is_in_gang=member.seat != "rollout") for member in seen.members)
    assert Cause.NEXT_STEP is climb_of(plan(replace(seen, members=members))).cause, "nor does a person change it"


def test_a_group_whose_rollout_controller_deals_no_batch_anew_keeps_its_size() -> None:
    seen = without(group_of(2, asked=2, elasticPolicy=ELASTIC), "gpu-1")
    seen = with_pod(seen, make_member("rollout", facts=rollout_facts(sealed=3, trained=2, epoch=5, deals_anew=False)))
    assert not plan(later(seen, 300)).raises


def test_a_new_job_starts_with_the_replicas_for_which_there_is_room() -> None:
    job = make_job(elasticPolicy=ELASTIC)
    seen = make_observation(job, [BLANK], climb=None, rollout=rollout_facts(epoch=0))
    seen = later(with_pod(seen, make_member("gpu-1", phase=PodPhase.PENDING)), 30)
    decided = plan(seen)
    assert (Cause.RESIZED, 1, 0) == (climb_of(decided).cause, climb_of(decided).replicas, climb_of(decided).lineage)
    decided = plan(followed(seen, decided))
    assert (Cause.FIRST_START, 1, 1) == (climb_of(decided).cause, climb_of(decided).replicas, climb_of(decided).lineage)


def test_an_operator_that_takes_over_keeps_the_number_on_record() -> None:
    seen = group_of(1, asked=2, sealed=2, elasticPolicy=ELASTIC)
    decided = plan(replace(seen, memory=replace(seen.memory, raised=False)))
    assert (Cause.TAKEOVER, 1) == (climb_of(decided).cause, climb_of(decided).replicas)


# ----------------------------------------------------------------------------------------------------- and room again
def test_waiting_pods_are_made_one_after_the_other_once_the_group_is_whole() -> None:
    seen = group_of(1, asked=3, sealed=2)
    assert ["gpu-1"] == made(plan(seen))
    pending = with_pod(seen, make_member("gpu-1", phase=PodPhase.PENDING))
    assert [] == made(plan(pending))
    placed = with_pod(seen, make_member("gpu-1", phase=PodPhase.PENDING, is_accepted=True))
    assert ["gpu-2"] == made(plan(placed))
    assert "gpu-1" not in made(plan(without(seen, "gpu-0")))


def test_a_pod_that_waits_gives_its_room_to_one_of_the_group_before_that_becomes_smaller() -> None:
    seen = with_pod(group_of(2, asked=3, elasticPolicy=ELASTIC), make_member("gpu-2", facts=BLANK))
    seen = without(seen, "gpu-1")
    assert [] == deleted(plan(later(seen, 29)))
    decided = plan(later(seen, 30))
    assert (False, ["sums-gpu-2-0"]) == (decided.raises, deleted(decided))
    ends = with_pod(seen, make_member("gpu-2", ends_at=200.0))
    assert not plan(later(ends, 31)).raises, "its room is not free before it has ended"
    gone = remember(replace(seen, members=tuple(pod for pod in seen.members if pod.seat != "gpu-2")))
    assert 1 == climb_of(plan(later(gone, 30))).replicas


def test_replicas_that_answer_join_at_the_next_step_behind_a_checkpoint() -> None:
    joining = make_member("gpu-1", facts=BLANK)
    seen = with_pod(group_of(1, asked=3, saved=1), joining)
    waits = plan(seen)
    assert not waits.raises
    assert waits.wait is not None
    assert Waiting.CHECKPOINT is waits.wait.reason
    assert {True} == {target.saves for target in waits.targets.values() if isinstance(target, PodTarget)}
    decided = plan(with_pod(group_of(1, asked=3, saved=2), joining))
    climb = climb_of(decided)
    assert (Cause.RESIZED, 2, 3, 2) == (climb.cause, climb.replicas, climb.step, climb.lineage)
    assert {2} == world_sizes(decided)
    assert {"sums-gpu-0-0", "sums-gpu-1-0"} <= decided.targets.keys()


def test_a_step_is_not_held_for_ever_by_a_checkpoint() -> None:
    seen = with_pod(group_of(1, asked=2, saved=1), make_member("gpu-1", facts=BLANK))
    waits = plan(seen)
    assert waits.wake_at is not None
    for late_s in (0, 1):
        decided = plan(later(seen, waits.wake_at - seen.now + late_s))
        assert (Cause.RESIZED, 2) == (climb_of(decided).cause, climb_of(decided).replicas)


def test_nobody_joins_before_the_next_batch_is_sealed() -> None:
    assert not plan(with_pod(group_of(1, asked=2, sealed=2), make_member("gpu-1", facts=BLANK))).raises


def test_a_recording_takes_replicas_in_at_once() -> None:
    seen = group_of(1, asked=2, placement=Placement.ROLLOUT_ONLY)
    assert (Cause.RESIZED, 2) == (lambda climb: (climb.cause, climb.replicas))(
        climb_of(plan(with_pod(seen, make_member("gpu-1", facts=BLANK))))
    )


# ------------------------------------------------------------------------------------------------- a person asks for it
@pytest.mark.parametrize("placement", TOGETHER)
def test_fewer_replicas_that_are_asked_for_are_so_from_the_next_step_on(placement: Placement) -> None:
    decided = plan(group_of(3, asked=1, placement=placement))
    climb = climb_of(decided)
    assert (Cause.RESIZED, 1, 3, 2) == (climb.cause, climb.replicas, climb.step, climb.lineage)
    assert ["sums-gpu-1-0", "sums-gpu-2-0"] == deleted(decided)
    assert {1} == world_sizes(decided)
    assert "sums-gpu-1-0" not in decided.targets


def test_fewer_replicas_wait_for_a_checkpoint_too() -> None:
    waits = plan(group_of(3, asked=1, saved=1))
    assert (False, []) == (waits.raises, deleted(waits))
    assert {True} == {target.saves for target in waits.targets.values() if isinstance(target, PodTarget)}


def test_fewer_replicas_are_asked_for_where_there_is_no_room_for_more() -> None:
    seen = without(group_of(2, asked=1), "gpu-1")
    assert not plan(later(seen, 29)).raises
    decided = plan(later(seen, 30))
    assert (Cause.RESIZED, 1, "") == (climb_of(decided).cause, climb_of(decided).replicas, climb_of(decided).group)


def test_a_group_that_forms_has_nothing_to_lose() -> None:
    seen = group_of(2, asked=1)
    seen = replace(seen, climb=replace(climb_of(plan(seen)), group="", cause=Cause.RESUMED, replicas=2, step=2))
    decided = plan(with_pod(seen, make_member("gpu-1", 1, phase=PodPhase.PENDING, is_accepted=True)))
    assert (Cause.RESIZED, 1, "") == (climb_of(decided).cause, climb_of(decided).replicas, climb_of(decided).group)


def test_a_job_is_resumed_with_what_is_asked_for_whatever_it_had() -> None:
    climb = replace(make_climb(2, epoch=5, cause=Cause.SUSPENDED), replicas=1)
    seen = make_observation(make_job(replicas=3).led_by(climb), [], climb=climb, rollout=None)
    decided = plan(replace(seen, members=()))
    assert (Cause.RESUMED, 3) == (climb_of(decided).cause, climb_of(decided).replicas)
    assert ["gpu-0", "gpu-1", "gpu-2", "rollout"] == made(decided)


def test_trainers_on_devices_of_their_own_are_as_many_as_there_is_room_for() -> None:
    climb = replace(make_climb(2, epoch=5, cause=Cause.NEXT_STEP), replicas=2)
    job = make_job(steps=5, rollout=OWN_ROLLOUT, elasticPolicy=ELASTIC).led_by(climb)
    pods: list[PodFacts | None] = [trainers_at(Rung.SERVING, V2, epoch=5)] * 2
    seen = make_observation(job, [*pods, None], climb=climb, rollout=rollout_facts(sealed=2, trained=2, epoch=5))
    assert not plan(later(without(seen, "engine-0"), 30)).raises, "the number of engines is fixed"
    assert 1 == climb_of(plan(later(without(seen, "trainer-1"), 30))).replicas


def test_trainers_on_devices_of_their_own_join_one_by_one_however_many_pods_an_engine_has() -> None:
    climb = replace(make_climb(2, epoch=5, cause=Cause.NEXT_STEP), replicas=2)
    spanning = OWN_ROLLOUT | {"replicas": 2, "engine": {"pods": 2}}
    job = make_job(steps=5, replicas=3, rollout=spanning).led_by(climb)
    facts = trainers_at(Rung.SERVING, V2, epoch=5)
    facts = facts.model_copy(update={"trainers": tuple(_saved(facts, 2))})
    rollout = rollout_facts(sealed=3, trained=2, epoch=5)
    seen = make_observation(job, [facts, facts, None, None], climb=climb, rollout=rollout, trained_step=2)
    assert 3 == size_at_boundary(with_pod(seen, make_member("trainer-2", facts=BLANK)))


def test_a_pod_that_is_made_in_a_group_of_several_knows_that_it_has_peers() -> None:
    """Asked for one alone, it compared no weights, and the others waited for its word in vain."""
    job = group_of(2, asked=1).job
    assert (2, 1) == (job.file_spec.replicas, job.spec.replicas)
    assert '"replicas":2' in config(job)["data"]["job.json"]
    assert 3 == group_of(2, asked=3).job.file_spec.replicas, "those that come have peers too"


# ---------------------------------------------------------------------------------------------------------- the status
def test_the_status_says_how_many_replicas_the_group_has_and_what_the_next_one_waits_for() -> None:
    waiting = make_member("gpu-1", phase=PodPhase.PENDING, trouble="not scheduled: 0/3 nodes are available")
    seen = with_pod(group_of(1, asked=2, sealed=2), waiting)
    status = report(seen, plan(seen), before=ColocatedRLJobStatus(), at=CREATED)
    assert (1, 1, 1) == (status.group_replicas, status.replicas, status.ready_replicas)
    [ready] = [one for one in status.conditions if one.type == "PodsReady"]
    assert ("True", "MembersAnswer") == (ready.status, ready.reason)
    assert "1 of 2 replicas" in ready.message
    assert "0/3 nodes are available" in ready.message


# -------------------------------------------------------------------------------------------------------------- spares
SPARE = "gpu-1024"


def spared(replicas: int, *spares: Member, **spec: Any) -> Observation:
    """A group that serves, and the spares that are there. Its next batch is not sealed."""
    return remember(with_all(group_of(replicas, asked=replicas, sealed=2, **spec), *spares))


def with_all(seen: Observation, *pods: Member) -> Observation:
    for each in pods:
        seen = with_pod(seen, each)
    return seen


def test_spares_are_made_one_after_the_other_once_the_group_is_whole() -> None:
    seen = spared(2, spares=2)
    assert [SPARE] == made(plan(seen))
    pending = make_member(SPARE, phase=PodPhase.PENDING)
    assert [] == made(plan(with_pod(seen, pending))), "there is no room for the first"
    assert ["gpu-1025"] == made(plan(with_pod(seen, replace(pending, is_accepted=True))))
    assert SPARE not in made(plan(without(seen, "gpu-1")))
    assert [] == made(plan(spared(2)))


def test_the_replicas_that_are_asked_for_come_before_spares() -> None:
    assert ["gpu-1"] == made(plan(group_of(1, asked=2, sealed=2, spares=1)))


def test_a_spare_never_joins_and_has_no_target() -> None:
    decided = plan(with_pod(group_of(2, asked=2, spares=1), make_member(SPARE, facts=BLANK)))
    assert (Cause.NEXT_STEP, 2) == (climb_of(decided).cause, climb_of(decided).replicas)
    assert not any("1024" in name for name in decided.targets)
    assert not any("1024" in name for name in decided.standings)


def test_a_spare_gives_its_room_to_a_pod_that_has_none() -> None:
    seen = without(spared(2, make_member(SPARE, facts=BLANK), spares=1), "gpu-1")
    assert ([], seen.now + 5) == (deleted(plan(later(seen, 4))), plan(seen).wake_at)
    decided = plan(later(seen, 5))
    assert ["sums-gpu-1024-0"] == deleted(decided)
    (action,) = decided.pods
    assert isinstance(action, DeletePod)
    assert "pod sums-gpu-1024-0 goes: it is a spare, and room is needed for gpu-1" == action.why


def test_a_pod_that_waits_for_a_spares_room_keeps_nobody_from_looking_again() -> None:
    """The moment from which it needed room was over and still the next one to look at: others came up to 30 s late."""
    seen = without(spared(3, make_member(SPARE, facts=BLANK), spares=1), "gpu-1")
    failed = make_member("gpu-2", 4, phase=PodPhase.FAILED, created_at=seen.now)
    for late_s in (5, 6):
        decided = plan(later(with_pod(seen, failed), late_s))
        assert (["sums-gpu-1024-0"], seen.now + 16) == (deleted(decided), decided.wake_at)


def test_a_seat_between_two_attempts_takes_no_spare() -> None:
    """Its next pod comes when the back-off is over, and may have room."""
    seen = spared(2, make_member(SPARE, facts=BLANK), spares=1)
    failed = make_member("gpu-1", 5, phase=PodPhase.FAILED, created_at=seen.now)
    decided = plan(later(with_pod(seen, failed), 20))
    assert [] == [*made(decided), *deleted(decided)]
    late = later(with_pod(seen, failed), 28)
    pending = with_pod(late, make_member("gpu-1", 6, phase=PodPhase.PENDING, created_at=late.now))
    assert [] == deleted(plan(later(pending, 1)))
    assert ["sums-gpu-1024-0"] == deleted(plan(later(pending, 5)))


def test_no_more_spares_go_than_pods_have_no_room() -> None:
    spares = [make_member(f"gpu-{number}", facts=BLANK) for number in (1024, 1025)]
    seen = without(spared(3, *spares, spares=2), "gpu-1")
    assert ["sums-gpu-1025-0"] == deleted(plan(later(seen, 5)))
    gone = remember(replace(seen, members=tuple(pod for pod in seen.members if pod.seat != "gpu-1025")))
    assert [] == deleted(plan(later(gone, 4))), "its room is not taken yet"
    assert ["sums-gpu-1024-0"] == deleted(plan(later(gone, 5))), "it was not enough"
    ends = later(with_pod(seen, make_member("gpu-1025", facts=BLANK, ends_at=seen.now + 60)), 30)
    assert [] == deleted(plan(ends)), "it is on its way"
    both = without(without(spared(3, *spares, spares=2), "gpu-1"), "gpu-0")
    all_three = without(both, "gpu-2")
    for short in (both, all_three):
        assert ["sums-gpu-1024-0", "sums-gpu-1025-0"] == deleted(plan(later(short, 5)))


def test_a_spare_that_waits_or_was_lost_is_not_taken_for_one_that_holds_room() -> None:
    waits = make_member("gpu-1025", phase=PodPhase.PENDING)
    for others in ((waits,), ()):
        seen = without(spared(2, make_member(SPARE, facts=BLANK), *others, spares=2), "gpu-1")
        assert "sums-gpu-1024-0" in deleted(plan(later(seen, 5)))


def test_a_spare_that_is_lost_with_its_node_leaves_no_room_for_which_another_pod_would_wait() -> None:
    """It ended a minute and a half later, by force: meanwhile no other spare went, nor did the group become smaller."""
    seen = without(spared(2, make_member("gpu-1025", facts=BLANK), spares=2, elasticPolicy=ELASTIC), "gpu-1")
    lost: dict[str, Any] = {"ends_at": seen.now + 60, "silent_since": seen.now}
    silent_before = make_member(SPARE, **lost | {"silent_since": seen.now - 25})
    assert ["sums-gpu-1025-0"] == deleted(plan(later(with_pod(seen, silent_before), 5)))
    alone = remember(replace(seen, members=tuple(pod for pod in seen.members if pod.seat != "gpu-1025")))
    for ending, replicas in (
        (make_member(SPARE, **lost), 1),
        (make_member(SPARE, **lost, notice=Notice(FailureCause.POD_EVICTED, "a taint")), 1),
        (make_member(SPARE, **lost, is_starting=True), 2),
        (make_member(SPARE, **lost, trouble="gpu: CrashLoopBackOff"), 2),
        (make_member(SPARE, **lost | {"silent_since": seen.now - 5}), 1),
        (make_member(SPARE, **lost | {"silent_since": seen.now + 1}), 2),
        (make_member(SPARE, facts=BLANK, ends_at=seen.now + 60), 2),
    ):
        assert replicas == climb_of(plan(later(with_pod(alone, ending), 30))).replicas
    silent_later = with_pod(alone, make_member(SPARE, **lost | {"silent_since": alone.now + 10}))
    assert alone.now + 40 == plan(later(silent_later, 35)).wake_at
    for heard_since, replicas in ((alone.now, 1), (alone.now + 1, 2), (None, 2)):  # it hears nobody, or only lately
        seen = replace(with_pod(alone, make_member(SPARE, **lost)), now=alone.now + 30)
        seen = replace(seen, memory=replace(seen.memory, heard_since=heard_since))
        assert replicas == climb_of(plan(seen)).replicas, heard_since


def test_the_room_of_a_sick_node_is_kept_from_the_group() -> None:
    """Nor does it count: the job is as if it had none, and becomes smaller."""
    sick = Notice(FailureCause.BAD_DEVICE, "condition GPUHealthy is False")
    for bad in (make_member(SPARE, facts=BLANK, notice=sick), make_member(SPARE, facts=BLANK, ill_device="gpu 0")):
        seen = spared(2, bad, spares=1, elasticPolicy=ELASTIC)
        status = report(seen, plan(seen), before=ColocatedRLJobStatus(), at=CREATED)
        [ready] = [each for each in status.conditions if each.type == "PodsReady"]
        assert (0, True) == (status.ready_spares, "0 of 1 spares hold room for the group (sums-gpu" in ready.message)
        seen = without(seen, "gpu-1")
        assert [] == deleted(plan(later(seen, 29)))
        assert 1 == climb_of(plan(later(seen, 30))).replicas


def test_replicas_that_wait_get_the_room_of_a_spare() -> None:
    seen = with_pod(group_of(2, asked=3, sealed=2, spares=1), make_member(SPARE, facts=BLANK))
    seen = with_pod(seen, make_member("gpu-2", phase=PodPhase.PENDING, created_at=seen.now))
    assert [] == deleted(plan(later(seen, 4)))
    assert ["sums-gpu-1024-0"] == deleted(plan(later(seen, 5)))


def test_each_pod_without_a_node_waits_by_itself() -> None:
    seen = later(without(spared(3, make_member(SPARE, facts=BLANK), spares=1), "gpu-1"), 4.5)
    seen = with_pod(without(seen, "gpu-2"), make_member("gpu-1", 1, phase=PodPhase.PENDING, is_accepted=True))
    assert [] == deleted(plan(later(seen, 1)))


@pytest.mark.parametrize("seat", [SPARE, "gpu-2"])
def test_a_pod_beside_the_group_that_has_ended_holds_no_room(seat: str) -> None:
    spec: dict[str, Any] = {"spares": 1, "asked": 2} if seat == SPARE else {"asked": 3}
    ended = make_member(seat, phase=PodPhase.FAILED, fate=FailureCause.POD_EVICTED)
    seen = without(with_pod(group_of(2, elasticPolicy=ELASTIC, **spec), ended), "gpu-1")
    assert 1 == climb_of(plan(later(seen, 30))).replicas


@pytest.mark.parametrize(("seat", "spec"), [(SPARE, {"spares": 1, "asked": 1}), ("gpu-1", {"asked": 2})])
def test_pods_beside_the_group_that_end_again_and_again_leave_one_each(seat: str, spec: dict[str, Any]) -> None:
    seen = group_of(1, sealed=2, **spec)
    made_ones = 0
    for _ in range(600):
        actions = plan(seen).pods
        gone = {action.uid for action in actions if isinstance(action, DeletePod)}
        assert not any(action.is_fault for action in actions if isinstance(action, DeletePod))
        new = [
            make_member(action.seat, action.attempt, phase=PodPhase.FAILED, created_at=seen.now)
            for action in actions
            if isinstance(action, CreatePod)
        ]
        made_ones += len(new)
        seen = later(replace(seen, members=(*(pod for pod in seen.members if pod.uid not in gone), *new)), 10)
    assert made_ones > 60
    assert len([pod for pod in seen.members if pod.seat == seat]) <= 2


def test_pods_that_have_ended_are_kept_for_their_logs_but_beside_the_group_older_ones() -> None:
    """The group's own seats leave no more of them behind than failures are allowed."""
    seen = group_of(2, asked=3)
    ended = [make_member("gpu-1", attempt, phase=PodPhase.FAILED) for attempt in (0, 1)]
    again = replace(seen.members[1], attempt=2, name="sums-gpu-1-2", uid=PodUid("uid-gpu-1-2"))
    waits = [make_member("gpu-2", 0, phase=PodPhase.FAILED), make_member("gpu-2", 1, facts=BLANK)]
    members = (seen.members[0], again, *seen.members[2:], *ended, *waits)
    seen = remember(replace(seen, members=members))
    assert [] == deleted(plan(seen))
    older = replace(waits[0], attempt=2, name="sums-gpu-2-2", uid=PodUid("uid-gpu-2-2"))
    assert ["sums-gpu-2-0"] == deleted(plan(remember(replace(seen, members=(*members, older)))))


def test_one_lost_pod_makes_a_group_smaller_by_one() -> None:
    """The room that the last seat gives to the first is offered before anybody looks for more."""
    seen = later(without(group_of(4, asked=4, elasticPolicy=ELASTIC), "gpu-0"), 30)
    decided = plan(seen)
    assert (3, ["sums-gpu-3-0"]) == (climb_of(decided).replicas, deleted(decided))
    seen = followed(seen, decided)
    seen = with_pod(seen, make_member("gpu-3", ends_at=seen.now + 30))
    assert not plan(later(seen, 1)).raises
    seen = later(remember(replace(seen, members=tuple(pod for pod in seen.members if pod.seat != "gpu-3"))), 2)
    assert not plan(seen).raises
    assert 2 == climb_of(plan(later(seen, 31))).replicas, "nobody could use it"


def test_a_spare_is_nothing_that_a_group_waits_for() -> None:
    waits = make_member(SPARE, phase=PodPhase.PENDING, trouble="not scheduled: 0/3 nodes are available")
    seen = spared(2, waits, spares=1)
    assert [] == report(seen, plan(seen), before=ColocatedRLJobStatus(), at=CREATED).out_of_line


def test_a_refused_spare_is_tried_again_later_and_the_status_says_why() -> None:
    seen = spared(2, spares=1)
    seen = replace(seen, refused={SPARE: RefusedPod(seen.now + 30, "exceeded quota: gpus")})
    decided = plan(seen)
    assert ([], seen.now + 30) == (made(decided), decided.wake_at)
    status = report(seen, decided, before=ColocatedRLJobStatus(), at=CREATED)
    [ready] = [each for each in status.conditions if each.type == "PodsReady"]
    assert "every member answers; 0 of 1 spares hold room for the group (exceeded quota: gpus)" == ready.message


def test_a_spare_goes_before_the_group_becomes_smaller() -> None:
    seen = without(spared(2, make_member(SPARE, facts=BLANK), spares=1, elasticPolicy=ELASTIC), "gpu-1")
    assert (False, ["sums-gpu-1024-0"]) == (plan(later(seen, 30)).raises, deleted(plan(later(seen, 30))))
    ends = with_pod(seen, make_member(SPARE, ends_at=200.0))
    assert not plan(later(ends, 31)).raises, "its room is not free before it has ended"
    gone = remember(replace(seen, members=tuple(pod for pod in seen.members if pod.seat != SPARE)))
    assert (Cause.RESIZED, 1) == (climb_of(plan(later(gone, 30))).cause, climb_of(plan(later(gone, 30))).replicas)


def test_spares_that_are_no_longer_asked_for_go() -> None:
    decided = plan(spared(2, make_member(SPARE, facts=BLANK)))
    (action,) = decided.pods
    assert isinstance(action, DeletePod)
    assert "pod sums-gpu-1024-0 goes: spec.spares is 0" == action.why


def test_a_job_that_rests_or_ends_leaves_no_spare() -> None:
    spare = make_member(SPARE, facts=BLANK)
    assert "sums-gpu-1024-0" in plan(spared(2, spare, spares=1, suspend=True)).targets, "it is told to stop"
    last = replace(make_climb(5, epoch=9, cause=Cause.ALL_STEPS_DONE), replicas=2)
    seen = spared(2, spare, spares=1).following(last)
    assert "sums-gpu-1024-0" in plan(remember(seen)).targets


def is_counted(budget: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether the disruption controller counts a pod with these labels."""
    selector = budget["spec"]["selector"]
    [seats] = selector["matchExpressions"]
    assert "In" == seats["operator"]
    return selector["matchLabels"].items() <= labels.items() and labels.get(seats["key"]) in seats["values"]


def test_pods_that_wait_to_join_the_group_are_counted_by_no_budget() -> None:
    """They were, as soon as they were ready, and until they joined as many more pods could be evicted at once."""
    job = make_job(replicas=3).sized(2)
    assert ("gpu-2",) == job.waiting_seats
    for replicas, counted in ((2, False), (3, True)):
        job = job.sized(replicas)
        budget = disruption_budget(job)
        assert replicas == budget["spec"]["minAvailable"], "of as many GPU pods and the rollout pod"
        labels = pod(job, "gpu-2", 0, PodImages("agent", "rollout", "gpu", "Never"))["metadata"]["labels"]
        assert counted == is_counted(budget, labels)


def test_spares_are_of_the_trainers_pods_and_counted_by_no_budget() -> None:
    job = make_job(replicas=1, spares=2)
    assert ("gpu-1024", "gpu-1025") == job.spare_seats
    assert ("trainer-1024",) == make_job(spares=1, rollout=OWN_ROLLOUT).spare_seats
    labels = [
        pod(job, seat, 0, PodImages("agent", "rollout", "gpu", "Never"))["metadata"]["labels"]
        for seat in ("gpu-0", SPARE)
    ]
    assert [None, "true"] == [each.get("rl.colocate.dev/spare") for each in labels]
    assert 1 == disruption_budget(job)["spec"]["minAvailable"]
    assert [True, False] == [is_counted(disruption_budget(job), each) for each in labels]
    assert {"gpu"} == {each["rl.colocate.dev/role"] for each in labels}, "an affinity of the job's is theirs too"
    assert [["ReadWriteOnce"], ["ReadWriteMany"]] == [
        claims(make_job(replicas=1, spares=spares))[1]["spec"]["accessModes"] for spares in (0, 1)
    ]


def test_the_status_says_how_many_spares_hold_room_and_what_the_others_wait_for() -> None:
    here = make_member(SPARE, facts=BLANK)
    waits = make_member("gpu-1025", phase=PodPhase.PENDING, trouble="not scheduled: 0/3 nodes are available")
    seen = spared(2, here, waits, spares=2)
    status = report(seen, plan(seen), before=ColocatedRLJobStatus(), at=CREATED)
    assert (2, 2, 1) == (status.replicas, status.ready_replicas, status.ready_spares)
    [ready] = [each for each in status.conditions if each.type == "PodsReady"]
    assert ready.message == (
        "every member answers; 1 of 2 spares hold room for the group "
        "(sums-gpu-1025-0: not scheduled: 0/3 nodes are available)"
    )
    without_any = spared(2)
    assert report(without_any, plan(without_any), before=ColocatedRLJobStatus(), at=CREATED).ready_spares is None
