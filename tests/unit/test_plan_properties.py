"""The plan drives a simulated group from start to end, whatever happens in between: `fakes.walks`, a few of them.

Engines in pods of their own are explored by the model check (`test_plan_model`), with the agents' real table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings

from builders import IN_ONE_POD, TOGETHER
from colocated_rl_api import ladder
from colocated_rl_api.ladder import TIME_SLICED, Ladder
from colocated_rl_api.member_wire import PodTarget
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from colocated_rl_operator.planner import observation
from colocated_rl_operator.planner.observation import FailureTally
from colocated_rl_operator.planner.reasons import Cause
from fakes.group import GpuPod, Simulation
from fakes.model_pod import InvariantBroken
from fakes.walks import (
    ANY_WALK,
    COMPARING_WALK,
    DISRUPTIONS,
    ELASTIC_WALK,
    FAULTS,
    MOVES_TO_THE_END,
    RETRIED_WALK,
    ROUNDS,
    WALK_UNDER_A_POLICY,
    everybody_moves,
    make_group,
    must_end,
    must_end_elastic,
    must_go_on_when_told,
    must_heal,
    must_serve_the_same_weights,
    settle,
    walk,
)


@given(**ANY_WALK)
@settings(max_examples=30)
@example(seed=0, replicas=2, faults=0, placement=Placement.TIME_SLICED, reference=False)
def test_every_walk_ends_and_no_invariant_breaks(**chosen: Any) -> None:
    must_end(**chosen)


@given(**COMPARING_WALK)
@settings(max_examples=10)
def test_f52_every_walk_of_a_job_that_compares_engines_ends_and_none_serves_other_weights(**chosen: Any) -> None:
    must_serve_the_same_weights(**chosen)


@given(**ELASTIC_WALK)
@settings(max_examples=10)
@example(seed=122, replicas=2, faults=3, placement=Placement.TIME_SLICED, reference=False)
def test_every_walk_of_an_elastic_job_ends_and_no_invariant_breaks(**chosen: Any) -> None:
    must_end_elastic(**chosen)


@given(**RETRIED_WALK)
@settings(max_examples=8)
def test_a_job_that_failed_goes_on_to_its_end_each_time_that_it_is_told_to(**chosen: Any) -> None:
    must_go_on_when_told(**chosen)


@given(**WALK_UNDER_A_POLICY)
@settings(max_examples=15)
def test_every_walk_under_any_policy_ends_and_no_invariant_breaks(**chosen: Any) -> None:
    must_end(**chosen)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_undisturbed_recording_raises_one_epoch_and_another_for_the_end(replicas: int) -> None:
    group = make_group(replicas, Placement.ROLLOUT_ONLY)
    settle(group)
    assert group.climb is not None
    assert (str(Cause.ALL_STEPS_DONE), 2) == (group.outcome, group.climb.epoch)
    assert (3, 0, {}) == (group.sealed, group.store_trained, group.trained_in)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("placement", [each for each in IN_ONE_POD if each is not Placement.ROLLOUT_ONLY])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_an_undisturbed_job_raises_one_epoch_for_each_step_and_sends_each_barrier_once(
    replicas: int, placement: Placement, reference: bool
) -> None:
    group = make_group(replicas, placement, reference=reference)
    settle(group)
    assert str(Cause.ALL_STEPS_DONE) == group.outcome
    assert group.climb is not None
    assert 1 + 3 + 1 == group.climb.epoch  # first start, three steps, the end
    assert {1: [1, 2, 3]} == group.trained_in
    assert group.sent <= (replicas * (len(group.ladder.barriers) + 1) + 6) * group.climb.epoch


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("placement", [each for each in IN_ONE_POD if each is not Placement.ROLLOUT_ONLY])
def test_f43_an_undisturbed_job_ends_though_its_clock_stands_still(placement: Placement, reference: bool) -> None:
    """Whatever comes next follows from what is seen: nobody waits for time to pass."""
    group = make_group(2, placement, reference=reference)
    began = group.now
    for _ in range(MOVES_TO_THE_END):
        _, busy = everybody_moves(group)
        if group.outcome is not None:
            break
        assert busy, "everybody waits"
    assert (str(Cause.ALL_STEPS_DONE), began) == (group.outcome, group.now)


@pytest.mark.parametrize("barrier", [Rung.CLOSED, Rung.SETTLED])
def test_f64_a_barrier_that_is_added_to_the_ladder_is_kept_in_each_step(
    barrier: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan and pods know no ladder but the one that they are given: a further stage is a value, and no code."""
    longer = replace(TIME_SLICED, barriers=TIME_SLICED.barriers | {barrier})
    monkeypatch.setitem(ladder._LADDERS, (Placement.TIME_SLICED, False), longer)
    group = make_group(2)
    assert longer is group.ladder
    granted = []
    accept = group.accept

    def note(pod: GpuPod, target: PodTarget) -> None:
        if target.rung is barrier:
            granted.append((target.step, pod.seat))
        accept(pod, target)

    monkeypatch.setattr(group, "accept", note)
    settle(group)
    assert (str(Cause.ALL_STEPS_DONE), {1: [1, 2, 3]}) == (group.outcome, group.trained_in)
    assert {(step, seat) for step in (1, 2, 3) for seat in ("gpu-0", "gpu-1")} <= set(granted)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize(
    ("placement", "round_of_fault"),
    [(placement, round_) for placement in IN_ONE_POD for round_ in range(0, ROUNDS[placement], ROUNDS[placement] // 5)],
)
def test_one_fault_at_any_time_is_healed(kind: str, round_of_fault: int, placement: Placement) -> None:
    must_heal(kind, after_rounds=round_of_fault, placement=placement)


@pytest.mark.parametrize("seat", ["gpu-0", "gpu-1", "rollout"])
@pytest.mark.parametrize("round_of_fault", range(0, 54, 16))
@pytest.mark.parametrize("placement", TOGETHER)
def test_a_pod_that_does_not_come_back_costs_the_others_their_devices_only_until_it_does(
    seat: str, round_of_fault: int, placement: Placement
) -> None:
    group = make_group(placement=placement)
    for _ in range(round_of_fault):
        everybody_moves(group)
    group.blocked.add(seat)
    for pod in [pod for pod in group.everybody if pod.seat == seat]:
        group.pod_is_lost(pod)
    for _ in range(MOVES_TO_THE_END):
        decided, busy = everybody_moves(group)
        is_queued = group.climb is not None and group.climb.cause is Cause.PODS_NOT_READY
        if is_queued and not group.everybody:
            break
        if not busy:
            group.now = decided.wake_at or group.now
    else:
        pytest.fail("the others keep their devices")
    group.blocked.clear()
    settle(group)
    assert str(Cause.ALL_STEPS_DONE) == group.outcome
    assert group.climb is not None
    assert 0 == group.climb.restarts


@pytest.mark.parametrize("kind", ["agent_restarts", "connection_breaks"])
@pytest.mark.parametrize("round_of_fault", range(0, max(ROUNDS.values()), 8))
@pytest.mark.parametrize("placement", TOGETHER)
def test_a_member_that_is_away_for_a_moment_costs_nothing(kind: str, round_of_fault: int, placement: Placement) -> None:
    group = make_group(placement=placement)
    for _ in range(round_of_fault):
        everybody_moves(group)
    for pod in group.everybody if kind == "connection_breaks" else group.pods:
        getattr(group, kind)(pod)
    settle(group)
    assert group.climb is not None
    assert (1, 0, FailureTally()) == (group.climb.lineage, group.climb.restarts, group.climb.tally)
    assert {0} == {pod.attempt for pod in group.everybody}


@pytest.mark.parametrize("round_of_suspension", range(0, 72, 5))
@pytest.mark.parametrize("restarts", [False, True])
def test_a_suspension_at_any_time_frees_every_pod_and_costs_no_restart(
    round_of_suspension: int, restarts: bool
) -> None:
    group = make_group()
    for _ in range(round_of_suspension):
        everybody_moves(group)
    group.suspend(True)
    busy = True
    while busy:
        if restarts:
            group.operator_restarts()
        _, busy = everybody_moves(group)
    assert [] == group.everybody
    group.resize(1 + round_of_suspension // 5 % 3)
    settle(group)
    assert str(Cause.ALL_STEPS_DONE) == group.outcome
    assert group.climb is not None
    assert 0 == group.climb.restarts
    assert len(group.job.gpu_seats) == len(group.pods)


@pytest.mark.parametrize("kind", DISRUPTIONS)
@pytest.mark.parametrize("placement", [each for each in IN_ONE_POD if each is not Placement.ROLLOUT_ONLY])
def test_fifty_drains_in_a_row_end_no_job_and_one_trainer_s_death_does(kind: str, placement: Placement) -> None:
    """The job may not fail once: each drain comes at another moment, now of this pod and now of that."""
    group = make_group(placement=placement, steps=10_000, backoffLimit=0)

    def go_on(rounds: int) -> list[GpuPod]:
        for _ in range(rounds):
            decided, busy = everybody_moves(group)
            group.now = group.now if busy else decided.wake_at or group.now
        return [pod for pod in group.pods if pod.alive]

    for drains in range(50):
        pods = go_on(12 + 7 * drains % 40)
        assert getattr(group, kind)(pods[drains % 2])
    pods = go_on(100)
    assert group.climb is not None
    assert (0, 0) == (group.climb.restarts, group.climb.tally.step_retries)
    assert group.climb.tally.pod_restarts > 25, "of many pods each, before the group was whole again"
    assert group.trainer_dies(pods[0])
    settle(group)
    assert str(Cause.BACKOFF_LIMIT) == group.outcome


def pods_move(group: Simulation) -> None:
    """Everybody moves once but the rollout controller, so no further step begins."""
    group.operator_pass()
    for pod in list(group.pods):
        group.deliver(pod)
        group.agent_moves(pod)
        group.report(pod)
    for rollout in group.rollouts:
        group.report(rollout)


@pytest.mark.parametrize("mirrors", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("placement", [each for each in IN_ONE_POD if each is not Placement.ROLLOUT_ONLY])
def test_pods_that_are_drained_while_their_group_rests_take_no_step_with_them(
    placement: Placement, replicas: int, *, mirrors: bool
) -> None:
    """No checkpoint is due, and without steps in memory the one that is asked for is the only one."""
    rarely: dict[str, Any] = {} if mirrors else {"checkpoint": {"everySteps": 100}}
    group = make_group(replicas, placement, mirrors=mirrors, steps=5, evaluation=None, **rarely)
    for step in (1, 2, 3):
        move_until(group, partial(climbs_to, WeightVersion(step, step)), everybody_moves)
        move_until(group, rests, pods_move)
        assert group.pod_is_drained([pod for pod in group.pods if pod.alive][step % replicas])
        move_until(group, partial(climbs_to, WeightVersion(step, step + 1)), pods_move)
    settle(group)
    assert str(Cause.ALL_STEPS_DONE) == group.outcome
    assert [1, 2, 3, 4, 5] == [step for steps in group.trained_in.values() for step in steps]


def move_until(group: Simulation, holds: Callable[[Simulation], bool], move: Callable[[Simulation], object]) -> None:
    """Move once a second until something holds."""
    for _ in range(100):
        if holds(group):
            return
        move(group)
        group.now += 1
    raise AssertionError("it does not come to that")


def climbs_to(version: WeightVersion, group: Simulation) -> bool:
    return group.climb is not None and group.climb.version == version


def rests(group: Simulation) -> bool:
    """Return whether all pods stand at the top, and the operator knows it."""
    pods = [pod for pod in group.pods if pod.alive]
    return {group.ladder.top} == {pod.rung for pod in pods} and not any(map(group.report, pods))


def test_two_leaders_cannot_both_move_the_group() -> None:
    """One is paused with a plan in its hands; the other raises the epoch; then the first one's targets arrive."""
    group = make_group()
    for _ in range(12):
        pods_move(group)
    assert group.climb is not None
    old = [target.model_copy(update={"epoch": group.climb.epoch}) for pod in group.pods if (target := pod.target)]
    group.operator_restarts()
    group.operator_pass()
    for pod in group.pods:
        while group.deliver(pod):
            pass
    facts = [pod.facts for pod in group.pods]
    for pod, target in zip(group.pods, old, strict=True):
        pod.inbox.append(target.model_copy(update={"rung": Rung.SERVING}))
        group.deliver(pod)
    assert facts == [pod.facts for pod in group.pods]


# --------------------------------------------------------------------------------- the checks themselves can fail
def straight_to_training(ladder: Ladder, after: Rung) -> Rung:
    """Return what `Ladder.next_barrier` does, without the barriers below Trained."""
    return Rung.SERVING if ladder.reaches(after, Rung.TRAINED) else Rung.TRAINED


@pytest.mark.parametrize("defect", ["a barrier is dropped", "facts of older epochs count"])
def test_a_seeded_defect_is_caught(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if defect == "a barrier is dropped":
        monkeypatch.setattr(Ladder, "next_barrier", straight_to_training)
    else:
        monkeypatch.setattr(
            observation.Observation,
            "standings",
            property(
                lambda seen: {
                    member.name: TIME_SLICED.standing(member.pod_facts, seen.climb.version)
                    if member.pod_facts and seen.climb
                    else Rung.UNKNOWN
                    for member in seen.gpu_members
                }
            ),
        )
    assert any(_breaks(seed) for seed in range(150)), f"no walk noticed that {defect}"


def _breaks(seed: int) -> bool:
    try:
        walk(seed, replicas=2, faults=4)
    except InvariantBroken:
        return True
    return False
