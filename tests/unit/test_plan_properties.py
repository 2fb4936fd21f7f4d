"""The plan drives a simulated group from start to end, whatever happens in between.

`fakes.group` checks its invariants on every move; the walks here only choose the moves. Each walk has a bounded number
of faults, anywhere; after the last one the group must reach Complete, or a failure with a name, within a bound. Engines
in pods of their own are explored by the model check (`test_plan_model`), with the agents' real table.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from builders import IN_ONE_POD, PLACED, TOGETHER, make_job
from colocated_rl_api.failure import FailureAction, FailureCause
from colocated_rl_api.ladder import TIME_SLICED, Ladder, Placement, Rung
from colocated_rl_operator import observation
from colocated_rl_operator.observation import Tally
from colocated_rl_operator.plan import Plan
from colocated_rl_operator.reasons import Cause
from fakes.group import Broken, Simulation, must

MOVES_TO_THE_END = 4000
ENDS = {str(Cause.ALL_STEPS_DONE), str(Cause.BACKOFF_LIMIT)}


def make_group(
    replicas: int = 2,
    placement: Placement = Placement.TIME_SLICED,
    *,
    reference: bool = False,
    policy: dict[str, Any] | None = None,
    verify: str = "Probe",
) -> Simulation:
    often = {"everySteps": 2}
    spec: dict[str, Any] = {
        **PLACED[placement],
        "checkpoint": often,
        "evaluation": None if placement is Placement.TRAIN_ONLY else often,
        "reference": {} if reference else None,
        "failurePolicy": policy,
        "weightSync": {"verify": verify},
    }
    return Simulation(make_job(replicas=replicas, steps=3, **spec))


@st.composite
def policies(draw: st.DrawFn) -> dict[str, Any]:
    """Any that does not end the job."""
    rules = []
    for _ in range(draw(st.integers(1, 4))):
        cause = draw(st.sampled_from(FailureCause))
        action = draw(st.sampled_from([each for each in cause.answers if each is not FailureAction.FAIL_JOB]))
        rule: dict[str, Any] = {"onCauses": [cause], "action": action, "counts": draw(st.booleans())}
        rules.append(rule | ({"maxTries": draw(st.integers(1, 2))} if draw(st.booleans()) else {}))
    return {"rules": rules, "backoffSeconds": draw(st.sampled_from([0, 10])), "maxBackoffSeconds": 60}


def fault(group: Simulation, rng: random.Random) -> str:
    pod = rng.choice(group.pods) if group.pods else None
    rollout = rng.choice(group.rollouts) if group.rollouts else None
    faults: dict[str, Callable[[], object]] = {
        "operator": group.operator_restarts,
        "operator between record and send": lambda: group.operator_pass(dies_after_record=True),
        "suspension": lambda: group.suspend(True),
        "resumption": lambda: group.suspend(False),
    }
    if group.job.spec.suspend:
        faults["other replicas"] = partial(group.resize, rng.randint(1, 3))
    if pod is not None:
        faults |= {
            "engine": partial(group.engine_dies, pod),
            "trainer": partial(group.trainer_dies, pod),
            "agent": partial(group.agent_restarts, pod),
            "pod": partial(group.pod_is_lost, pod),
            "connection": partial(group.connection_breaks, pod),
        }
        if group.compares:
            faults["weights"] = partial(setattr, pod, "spoils", 1)
    if rollout is not None:
        faults["rollout pod"] = partial(group.pod_is_lost, rollout)
    name = rng.choice(sorted(faults))
    faults[name]()
    return name


def move(group: Simulation, rng: random.Random) -> None:
    """One move of anybody, chosen at random; reports and targets lag behind because they are moves too."""
    pods, rollouts = group.pods, group.rollouts
    match rng.randrange(6):
        case 0 | 1:
            group.operator_pass()
        case 2 if pods:
            group.deliver(rng.choice(pods))
        case 3 if pods:
            group.agent_moves(rng.choice(pods))
        case 4 if pods:
            group.report(rng.choice(group.everybody))
        case 5 if rollouts:
            group.rollout_moves(rng.choice(rollouts))


def settle(group: Simulation) -> int:
    """Everybody moves in turn until the end; returns the rounds it took. Time passes only when nothing else moves."""
    group.suspend(False)
    for rounds in range(MOVES_TO_THE_END):
        if group.outcome is not None:
            return rounds
        decided, busy = everybody_moves(group)
        if not busy:
            must(
                decided.wake_at is not None or group.outcome is not None, "nobody moves, and the plan waits for nothing"
            )
            group.now = decided.wake_at or group.now
    raise AssertionError(f"no end in {MOVES_TO_THE_END} rounds: {group.climb}, {group.pods}")


def everybody_moves(group: Simulation) -> tuple[Plan, bool]:
    """Once, in turn. Whether anything changed."""
    before = (group.sent, group.climb, len(group.pods), len(group.rollouts))
    decided = group.operator_pass()
    busy = before != (group.sent, group.climb, len(group.pods), len(group.rollouts))
    for pod in list(group.pods):
        busy |= group.deliver(pod)
        busy |= group.agent_moves(pod)
        busy |= group.report(pod)
    for rollout in list(group.rollouts):
        busy |= group.rollout_moves(rollout)
        busy |= group.report(rollout)
    return decided, busy


def walk(
    seed: int,
    *,
    replicas: int,
    faults: int,
    moves: int = 300,
    placement: Placement = Placement.TIME_SLICED,
    reference: bool = False,
    policy: dict[str, Any] | None = None,
    verify: str = "Probe",
) -> Simulation:
    rng = random.Random(seed)
    group = make_group(replicas, placement, reference=reference, policy=policy, verify=verify)
    at = {rng.randrange(moves) for _ in range(faults)}
    for index in range(moves):
        if index in at:
            fault(group, rng)
        move(group, rng)
        group.now += 0.01
    settle(group)
    return group


@given(
    seed=st.integers(0, 2**32),
    replicas=st.integers(1, 3),
    faults=st.integers(0, 6),
    placement=st.sampled_from(IN_ONE_POD),
    reference=st.booleans(),
)
@settings(max_examples=100)
@example(seed=0, replicas=2, faults=0, placement=Placement.TIME_SLICED, reference=False)
def test_every_walk_ends_and_no_invariant_breaks(
    seed: int, replicas: int, faults: int, placement: Placement, reference: bool
) -> None:
    group = walk(seed, replicas=replicas, faults=faults, placement=placement, reference=reference)
    assert group.outcome in ENDS
    if faults <= group.job.spec.backoff_limit:
        assert str(Cause.ALL_STEPS_DONE) == group.outcome


@given(
    seed=st.integers(0, 2**32),
    replicas=st.integers(2, 4),
    faults=st.integers(1, 6),
    placement=st.sampled_from(TOGETHER),
)
@settings(max_examples=25)
def test_f52_every_walk_of_a_job_that_compares_engines_ends_and_none_serves_other_weights(
    seed: int, replicas: int, faults: int, placement: Placement
) -> None:
    group = walk(seed, replicas=replicas, faults=faults, placement=placement, verify="Checksum")
    assert str(Cause.ALL_STEPS_DONE) == group.outcome


@given(
    seed=st.integers(0, 2**32),
    replicas=st.integers(1, 3),
    faults=st.integers(1, 6),
    placement=st.sampled_from(IN_ONE_POD),
    policy=policies(),
)
@settings(max_examples=40)
def test_every_walk_under_any_policy_ends_and_no_invariant_breaks(
    seed: int, replicas: int, faults: int, placement: Placement, policy: dict[str, Any]
) -> None:
    group = walk(seed, replicas=replicas, faults=faults, placement=placement, policy=policy)
    assert group.climb is not None
    event(f"{group.climb.tally.cause}: {group.climb.tally.action}")
    assert group.outcome in ENDS
    if faults <= group.job.spec.backoff_limit:
        assert str(Cause.ALL_STEPS_DONE) == group.outcome


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


@pytest.mark.parametrize("kind", ["engine_dies", "trainer_dies", "agent_restarts", "pod_is_lost", "connection_breaks"])
@pytest.mark.parametrize("round_of_fault", range(0, 60, 3))
@pytest.mark.parametrize("placement", IN_ONE_POD)
def test_one_fault_at_any_time_is_healed(kind: str, round_of_fault: int, placement: Placement) -> None:
    group = make_group(placement=placement)
    for _ in range(round_of_fault):
        everybody_moves(group)
    if group.pods:
        getattr(group, kind)(group.pods[0])
    settle(group)
    assert str(Cause.ALL_STEPS_DONE) == group.outcome


@pytest.mark.parametrize("seat", ["gpu-0", "gpu-1", "rollout"])
@pytest.mark.parametrize("round_of_fault", range(0, 40, 12))
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
@pytest.mark.parametrize("round_of_fault", range(0, 60, 6))
@pytest.mark.parametrize("placement", TOGETHER)
def test_a_member_that_is_away_for_a_moment_costs_nothing(kind: str, round_of_fault: int, placement: Placement) -> None:
    group = make_group(placement=placement)
    for _ in range(round_of_fault):
        everybody_moves(group)
    for pod in group.everybody if kind == "connection_breaks" else group.pods:
        getattr(group, kind)(pod)
    settle(group)
    assert group.climb is not None
    assert (1, 0, Tally()) == (group.climb.lineage, group.climb.restarts, group.climb.tally)
    assert {0} == {pod.attempt for pod in group.everybody}


@pytest.mark.parametrize("round_of_suspension", range(0, 56, 4))
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
    group.resize(1 + round_of_suspension // 4 % 3)
    settle(group)
    assert str(Cause.ALL_STEPS_DONE) == group.outcome
    assert group.climb is not None
    assert 0 == group.climb.restarts
    assert len(group.job.gpu_seats) == len(group.pods)


def test_two_leaders_cannot_both_move_the_group() -> None:
    """One is paused with a plan in its hands; the other raises the epoch; then the first one's targets arrive."""
    group = make_group()
    for _ in range(12):
        group.operator_pass()
        for pod in group.pods:
            group.deliver(pod)
            group.agent_moves(pod)
            group.report(pod)
        for rollout in group.rollouts:
            group.report(rollout)
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
    """As `Ladder.next_barrier`, without those below Trained."""
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
    except Broken:
        return True
    return False
