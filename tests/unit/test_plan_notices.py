"""A node gives notice that it is about to go, or that its devices are bad: its pods leave it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import (
    TOGETHER,
    absent_engine,
    absent_trainer,
    engine_at,
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
from colocated_rl_api.member_wire import PodTarget
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from colocated_rl_api.seats import ROLLOUT_SEAT
from colocated_rl_operator.planner.actions import CreatePod, DeletePod
from colocated_rl_operator.planner.notices import NOTICE_S, NodeSigns, Notice
from colocated_rl_operator.planner.observation import MAX_AVOIDED, Member, Observation, remember
from colocated_rl_operator.planner.plan import Plan, plan
from colocated_rl_operator.planner.reasons import Cause
from fakes.walks import everybody_moves, make_group, settle

V2 = WeightVersion(2, 1)
LEAVING = Notice(FailureCause.POD_EVICTED, "taint spot-notice", since=100.0)
BAD = Notice(FailureCause.BAD_DEVICE, "condition GPUHealthy is False: XID 79", since=100.0)


def noticed(rung: Rung = Rung.SERVING, *, saved: int = 0, notice: Notice = LEAVING, **spec: Any) -> Observation:
    """Two pods on the way to step 2, of which the node of the second gives notice at 100 s, which is now."""
    climb = make_climb(2, epoch=5, cause=Cause.NEXT_STEP)
    facts = facts_at(rung, V2, epoch=5)
    facts = facts.model_copy(update={"trainers": (facts.trainers[0].model_copy(update={"saved": saved}),)})
    rollout = rollout_facts(sealed=3, trained=2, epoch=5)
    seen = make_observation(make_job(steps=5, **spec), [facts, facts], climb=climb, rollout=rollout, trained_step=1)
    members = [replace(member, node=f"node-{place}") for place, member in enumerate(seen.members)]
    members[1] = replace(members[1], notice=notice)
    return remember(replace(seen, members=tuple(members)))


def later(seen: Observation, seconds: float) -> Observation:
    return remember(replace(seen, now=seen.now + seconds))


def deleted(decided: Plan) -> list[tuple[str, int | None]]:
    return [(action.name, action.grace_s) for action in decided.pods if isinstance(action, DeletePod)]


def asked_to_save(decided: Plan) -> set[bool]:
    return {target.saves for target in decided.targets.values() if isinstance(target, PodTarget)}


def test_a_pod_leaves_a_node_that_is_about_to_go_once_its_step_is_saved() -> None:
    """The next batch is there, and its step waits: it would only be thrown away."""
    waiting = plan(noticed(saved=0))
    assert not waiting.raises
    assert ([], {True}) == (deleted(waiting), asked_to_save(waiting))
    assert (130.0, 30.0) == (waiting.wake_at, NOTICE_S)
    decided = plan(noticed(saved=2))
    assert decided.climb is not None
    assert (Cause.POD_REPLACED, "", 0) == (decided.climb.cause, decided.climb.group, decided.climb.restarts)
    assert [("sums-gpu-1-0", None)] == deleted(decided), "it has its grace, to hand back what it has"
    assert ("node-1",) == decided.climb.tally.avoids
    assert "pod sums-gpu-1-0 leaves node node-1 (taint spot-notice): sums-gpu-1-0 recreated" in decided.message
    assert "does not count" in decided.message


@pytest.mark.parametrize("rung", [Rung.RELEASED, Rung.SERVING])
def test_a_pod_leaves_without_a_checkpoint_when_there_is_no_more_time(rung: Rung) -> None:
    assert [] == deleted(plan(later(noticed(rung), NOTICE_S - 1)))
    for late_s in (0, 1):
        assert [("sums-gpu-1-0", None)] == deleted(plan(later(noticed(rung), NOTICE_S + late_s)))


@pytest.mark.parametrize("rung", [Rung.RELEASED, Rung.SERVING])
def test_a_pod_leaves_a_node_with_bad_devices_at_once(rung: Rung) -> None:
    decided = plan(noticed(rung, notice=BAD))
    assert decided.climb is not None
    assert [("sums-gpu-1-0", None)] == deleted(decided)
    assert ("BadDevice", ("node-1",)) == (decided.climb.tally.cause, decided.climb.tally.avoids)
    assert ["node-1"] == [taint.node for taint in decided.taints]


def test_a_node_that_is_about_to_go_is_not_tainted() -> None:
    decided = plan(noticed(Rung.SERVING, saved=2))
    assert decided.climb is not None
    assert (("node-1",), ()) == (decided.climb.tally.avoids, decided.taints)


def test_a_pod_that_came_back_to_such_a_node_stays_there() -> None:
    """No other node had room. Otherwise it would be made again and again, and its job never go on."""
    decided = plan(avoiding(noticed(saved=2), attempt=1, created_at=LEAVING.since + 1))
    assert decided.climb is not None
    assert ([], 3, Cause.NEXT_STEP) == (deleted(decided), decided.climb.step, decided.climb.cause)


@pytest.mark.parametrize("cause", ["PodEvicted", "BadDevice", "MemberSilent"])
@pytest.mark.parametrize("attempt", [0, 1])
def test_a_pod_leaves_a_node_that_was_left_before_by_another_or_for_another_notice(cause: str, attempt: int) -> None:
    """Only the first of two on one node left, and after one upgrade of all nodes no drain moved a pod any more."""
    seen = avoiding(noticed(saved=2), cause=cause, attempt=attempt, created_at=LEAVING.since - 1)
    assert [f"sums-gpu-1-{attempt}"] == [name for name, _ in deleted(plan(seen))]


@pytest.mark.parametrize("notice", [LEAVING, BAD], ids=["leaving", "bad"])
def test_all_pods_of_a_node_leave_it_at_once(notice: Notice) -> None:
    seen = noticed(saved=2, notice=notice)
    both = tuple(replace(pod, node="one", notice=notice) for pod in seen.members[:2])
    decided = plan(remember(replace(seen, members=(*both, *seen.members[2:]))))
    assert decided.climb is not None
    assert ["sums-gpu-0-0", "sums-gpu-1-0"] == [name for name, _ in deleted(decided)]
    assert ("one",) == decided.climb.tally.avoids
    assert "pod sums-gpu-0-0 leaves node one" in decided.message
    assert "pod sums-gpu-1-0 leaves node one" in decided.message


def avoiding(seen: Observation, *, cause: str = "PodEvicted", **second: Any) -> Observation:
    """The job avoids the second pod's node already. second: what differs in that pod."""
    assert seen.climb is not None
    tally = replace(seen.climb.tally, avoids=("node-1",), cause=cause)
    pod = replace(seen.members[1], **second)
    members = (seen.members[0], replace(pod, name=f"sums-gpu-1-{pod.attempt}"), *seen.members[2:])
    return remember(replace(seen, climb=replace(seen.climb, tally=tally), members=members))


@pytest.mark.parametrize("notice", [LEAVING, BAD], ids=["leaving", "bad"])
@pytest.mark.parametrize("nodes", [MAX_AVOIDED, MAX_AVOIDED + 1, 2 * MAX_AVOIDED])
def test_where_all_nodes_give_notice_each_pod_is_made_again_once(nodes: int, notice: Notice) -> None:
    """It always comes back to its node. With more nodes than are avoided, pods were made again for ever."""

    def on_its_node(pod: Member) -> Member:
        return pod if pod.seat == ROLLOUT_SEAT else replace(pod, node=f"node of {pod.seat}", notice=notice)

    climb, job = make_climb(2, epoch=5, cause=Cause.NEXT_STEP), make_job(replicas=nodes, steps=5)
    rollout = rollout_facts(sealed=2, trained=2, epoch=5)
    seen = make_observation(job, [facts_at(Rung.SERVING, V2, epoch=5)] * nodes, climb=climb, rollout=rollout)
    seen = remember(replace(seen, members=tuple(map(on_its_node, seen.members))))
    deletions = list[str]()
    for _ in range(100):
        seen = later(seen, 2)
        decided = plan(seen)
        seen = replace(seen.following(decided.climb), memory=replace(seen.memory, raised=True))
        gone = {action.uid: action.name for action in decided.pods if isinstance(action, DeletePod)}
        deletions += gone.values()
        blank = pod_facts(absent_engine(), absent_trainer(), epoch=0)
        new = [
            on_its_node(make_member(action.seat, action.attempt, facts=blank, created_at=seen.now))
            for action in decided.pods
            if isinstance(action, CreatePod)
        ]
        seen = remember(replace(seen, members=(*(pod for pod in seen.members if pod.uid not in gone), *new)))
    assert {f"sums-{seat}-0" for seat in job.gpu_seats} == set(deletions)
    assert nodes == len(deletions)


def test_a_pod_of_an_engine_alone_leaves_at_once_and_its_trainers_go_on() -> None:
    climb = make_climb(2, epoch=5, cause=Cause.NEXT_STEP)
    rollout = {"prompts": {"reasoningGym": {"name": "chain_sum"}}, "batchSize": 4, "groupSize": 2}
    job = make_job(replicas=1, steps=5, rollout=rollout | {"placement": "OwnDevices", "replicas": 1})
    pods: list[PodFacts | None] = [engine_at(Rung.SERVING, V2, epoch=5), trainers_at(Rung.SERVING, V2, epoch=5)]
    pods = pods if job.gpu_seats[0].startswith("engine") else pods[::-1]
    seen = make_observation(job, pods, climb=climb, rollout=rollout_facts(sealed=2, trained=2, epoch=5))
    members = [
        replace(member, node=member.seat, notice=LEAVING if member.seat == "engine-0" else None)
        for member in seen.members
    ]
    seen = remember(replace(seen, members=tuple(members)))
    decided = plan(seen)
    assert decided.climb is not None
    assert seen.climb is not None
    assert [("sums-engine-0-0", None)] == deleted(decided)
    assert (seen.climb.group, 1) == (decided.climb.group, decided.climb.lineage)


@pytest.mark.parametrize("placement", TOGETHER)
@pytest.mark.parametrize("rounds", [3, 12, 20, 33])
def test_a_job_whose_nodes_go_one_after_the_other_loses_no_step_and_no_try(placement: Placement, rounds: int) -> None:
    """Checkpoints are rare: without the one that a notice asks for, each move would begin at the model again."""
    group = make_group(placement=placement, steps=6, backoffLimit=0, checkpoint={"everySteps": 100})
    for _ in range(3):
        for _ in range(rounds):
            decided, busy = everybody_moves(group)
            group.now = group.now if busy else decided.wake_at or group.now
        if group.pods and group.outcome is None:
            group.node_gives_notice(group.pods[0])
    settle(group)
    assert str(Cause.ALL_STEPS_DONE) == group.outcome
    trained = [step for lineage in sorted(group.trained_in) for step in group.trained_in[lineage]]
    assert trained == sorted(set(trained)), "no step was trained twice"


# ------------------------------------------------------------------------------------------------ what a node says
SIGNS = NodeSigns(frozenset({("GPUHealthy", "False"), ("XidErrors", "True")}), frozenset({"spot-notice"}))


def node(*conditions: dict[str, str], taints: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "metadata": {"name": "node-1"},
        "spec": {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]},
        "status": {"conditions": list(conditions)},
    }


@pytest.mark.parametrize(
    ("found", "cause", "message"),
    [
        (node(), None, ""),
        (node({"type": "Ready", "status": "False"}), None, ""),
        (node({"type": "GPUHealthy", "status": "True"}), None, ""),
        (node({"type": "GPUHealthy", "status": "Unknown"}), None, ""),
        (node(taints=("other",)), None, ""),
        (
            node({"type": "GPUHealthy", "status": "False", "message": "XID 79"}),
            FailureCause.BAD_DEVICE,
            "condition GPUHealthy is False: XID 79",
        ),
        (
            node({"type": "GPUHealthy", "status": "False", "message": "x" * 200}),
            FailureCause.BAD_DEVICE,
            "condition GPUHealthy is False: ".ljust(200, "x"),
        ),
        (
            node({"type": "XidErrors", "status": "True", "reason": "Xid"}, taints=("spot-notice",)),
            FailureCause.BAD_DEVICE,
            "condition XidErrors is True: Xid",
        ),
        (node(taints=("other", "spot-notice")), FailureCause.POD_EVICTED, "taint spot-notice"),
        ({"metadata": {"name": "new"}}, None, ""),
    ],
)
def test_a_node_gives_notice_by_the_conditions_and_taints_of_the_setting(
    found: dict[str, Any], cause: FailureCause | None, message: str
) -> None:
    assert SIGNS.read(found) == (None if cause is None else Notice(cause, message, since=0.0))


def test_nodes_are_looked_at_for_either_kind_of_sign() -> None:
    assert NodeSigns(bad_conditions=SIGNS.bad_conditions)
    assert NodeSigns(leaving_taints=SIGNS.leaving_taints)
    assert not NodeSigns()
