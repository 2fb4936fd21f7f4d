"""Walks of a simulated group (`fakes.group`) from start to end, on which anything may go wrong.

The group checks its invariants on every move; a walk only chooses the moves. Each has a bounded number of faults,
anywhere; after the last one the group must reach Complete, or a failure with a name, within a bound. The fast layer
takes some of them (`test_plan_properties`), the contract layer many more (`test_plan_walks`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import event
from hypothesis import strategies as st

from builders import IN_ONE_POD, PLACED, TOGETHER, make_job
from colocated_rl_api.failure import FailureAction, FailureCause
from colocated_rl_api.rungs import Placement
from colocated_rl_api.seats import is_spare
from colocated_rl_operator.planner.plan import Plan
from colocated_rl_operator.planner.reasons import Cause
from fakes.group import Simulation
from fakes.model_pod import must

MOVES_TO_THE_END = 4000
ENDS = {str(Cause.ALL_STEPS_DONE), str(Cause.BACKOFF_LIMIT)}
DISRUPTIONS = ("pod_is_evicted", "pod_is_drained")
NOTICES = ("node_gives_notice",)
FAULTS = ("engine_dies", "trainer_dies", "agent_restarts", "pod_is_lost", "connection_breaks", *DISRUPTIONS, *NOTICES)
ROUNDS = {  # of everybody, in which an undisturbed job of two pods comes to its end
    Placement.TIME_SLICED: 80, Placement.RESIDENT: 64, Placement.ROLLOUT_ONLY: 14, Placement.TRAIN_ONLY: 30,
}  # fmt: skip

SEEDS = st.integers(0, 2**32)


def make_group(
    replicas: int = 2,
    placement: Placement = Placement.TIME_SLICED,
    *,
    reference: bool = False,
    policy: dict[str, Any] | None = None,
    mirrors: bool = False,
    **more: Any,
) -> Simulation:
    often = {"everySteps": 2}
    rarely = {"everySteps": 100, "inMemory": {"sizeLimit": "1Gi"}}
    spec: dict[str, Any] = {
        **PLACED[placement],
        "checkpoint": rarely if mirrors else often,
        "evaluation": None if placement is Placement.TRAIN_ONLY else often,
        "reference": {} if reference else None,
        "failurePolicy": policy or {"backoffSeconds": 0},
    }
    return Simulation(make_job(replicas=replicas, **{"steps": 3} | spec | more))


@st.composite
def policies(draw: st.DrawFn) -> dict[str, Any]:
    """Any that does not end the job."""
    rules = []
    for _ in range(draw(st.integers(1, 4))):
        cause = draw(st.sampled_from(FailureCause))
        action = draw(st.sampled_from([each for each in cause.answers if each is not FailureAction.FAIL_JOB]))
        rule: dict[str, Any] = {"onCauses": [cause], "action": action, "counts": draw(st.booleans())}
        rules.append(rule | ({"maxTries": draw(st.integers(1, 2))} if draw(st.booleans()) else {}))
    growth = {"maxTrainerGrowth": "20Gi"} if draw(st.booleans()) else {}
    return {"rules": rules, "backoffSeconds": draw(st.sampled_from([0, 10])), "maxBackoffSeconds": 60} | growth


def fault(group: Simulation, rng: random.Random) -> str:
    is_elastic = group.job.spec.elastic_policy is not None
    pod = rng.choice(group.pods) if group.pods else None
    rollout = rng.choice(group.rollouts) if group.rollouts else None
    faults: dict[str, Callable[[], object]] = {
        "operator": group.operator_restarts,
        "operator between record and send": lambda: group.operator_pass(dies_after_record=True),
        "suspension": lambda: group.suspend(True),
        "resumption": lambda: group.suspend(False),
        "retry": group.retry,
    }
    if group.job.spec.suspend or is_elastic:
        faults["other replicas"] = partial(group.resize, rng.randint(1, 3))
    if pod is not None:
        faults |= {
            "engine": partial(group.engine_dies, pod),
            "trainer": partial(group.trainer_dies, pod),
            "growth": partial(group.trainer_grows, pod),
            "agent": partial(group.agent_restarts, pod),
            "pod": partial(group.pod_is_lost, pod),
            "eviction": partial(group.pod_is_evicted, pod),
            "drain": partial(group.pod_is_drained, pod),
            "notice": partial(group.node_gives_notice, pod),
            "connection": partial(group.connection_breaks, pod),
        }
        if is_elastic or group.job.spec.spares:
            faults |= {"node": partial(group.node_is_lost, pod), "room": group.node_is_back}
        if group.compares:
            faults["weights"] = partial(group.weights_spoil, pod, rng.randint(1, 2))
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
            group.agent_moves(rng.choice(pods), rng)
        case 4 if pods:
            group.report(rng.choice(group.everybody))
        case 5 if rollouts:
            group.rollout_moves(rng.choice(rollouts))


def settle(group: Simulation) -> int:
    """Everybody moves in turn until the end, with room for all; returns the rounds it took."""
    group.suspend(False)
    group.node_is_back()
    return go_to_the_end(group)


def go_to_the_end(group: Simulation) -> int:
    """Everybody moves in turn until the end; returns the rounds it took. Time passes only when nothing else moves."""
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
    """Move everybody once, in turn. Returns the plan, and whether anything changed."""
    before = (group.sent, group.climb, len(group.pods), len(group.rollouts), len(group.pending))
    decided = group.operator_pass()
    busy = before != (group.sent, group.climb, len(group.pods), len(group.rollouts), len(group.pending))
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
    **more: Any,
) -> Simulation:
    rng = random.Random(seed)
    group = make_group(replicas, placement, reference=reference, policy=policy, **more)
    at = {rng.randrange(moves) for _ in range(faults)}
    for index in range(moves):
        if index in at:
            fault(group, rng)
        move(group, rng)
        group.now += 0.01
    settle(group)
    return group


# ------------------------------------------------------------------------------------------ what holds for every walk
ANY_WALK: dict[str, st.SearchStrategy[Any]] = {
    "seed": SEEDS,
    "replicas": st.integers(1, 3),
    "faults": st.integers(0, 6),
    "placement": st.sampled_from(IN_ONE_POD),
    "reference": st.booleans(),
}
COMPARING_WALK: dict[str, st.SearchStrategy[Any]] = {
    "seed": SEEDS,
    "replicas": st.integers(2, 4),
    "faults": st.integers(1, 6),
    "placement": st.sampled_from(TOGETHER),
}
WALK_UNDER_A_POLICY: dict[str, st.SearchStrategy[Any]] = {
    "seed": SEEDS,
    "replicas": st.integers(1, 3),
    "faults": st.integers(1, 6),
    "placement": st.sampled_from(IN_ONE_POD),
    "policy": policies(),
}


SPARED_WALK: dict[str, st.SearchStrategy[Any]] = ANY_WALK | {"spares": st.integers(1, 2), "elastic": st.booleans()}
RETRIED_WALK: dict[str, st.SearchStrategy[Any]] = {
    "seed": SEEDS,
    "replicas": st.integers(1, 3),
    "faults": st.integers(1, 6),
    "placement": st.sampled_from(IN_ONE_POD),
}


ELASTIC_WALK: dict[str, st.SearchStrategy[Any]] = {
    "seed": SEEDS,
    "replicas": st.integers(2, 3),
    "faults": st.integers(1, 6),
    "placement": st.sampled_from(IN_ONE_POD),
    "reference": st.booleans(),
}


def must_end(*, seed: int, faults: int, **more: Any) -> None:
    """Walk, and require an end. more: as for `walk`."""
    group = walk(seed, faults=faults, **more)
    assert group.climb is not None
    event(f"{group.climb.tally.cause}: {group.climb.tally.action}")
    assert group.outcome in ENDS
    if faults <= group.job.spec.backoff_limit:
        assert str(Cause.ALL_STEPS_DONE) == group.outcome


def must_end_elastic(*, seed: int, faults: int, **more: Any) -> None:
    """Walk a job that loses nodes and gets them back, and whose number of replicas a person changes."""
    group = walk(seed, faults=faults, elasticPolicy={"minReplicas": 1}, **more)
    assert group.climb is not None
    event(f"{group.climb.replicas} of {group.job.spec.replicas} replicas")
    assert group.outcome in ENDS
    if 2 * faults <= group.job.spec.backoff_limit:  # weights that two loads spoil may cost two restarts
        assert str(Cause.ALL_STEPS_DONE) == group.outcome


def must_end_with_spares(*, seed: int, faults: int, spares: int, elastic: bool, **more: Any) -> None:
    """Walk a job that has spares, and loses nodes. Where all is well at the end, each spare holds room again."""
    more |= {"spares": spares} | ({"elasticPolicy": {"minReplicas": 1}} if elastic else {})
    group = walk(seed, faults=faults, **more)
    event(f"{spares} spares, {sum(is_spare(pod.seat) for pod in group.pods)} at the end")
    assert group.outcome in ENDS
    if 2 * faults <= group.job.spec.backoff_limit:
        assert str(Cause.ALL_STEPS_DONE) == group.outcome


def must_go_on_in_the_room_of_spares(placement: Placement, *, spares: int) -> None:
    """A job loses as many nodes as it has spares, in which there were pods of the group, and gets none of them back."""
    group = make_group(2, placement, spares=spares)
    while sum(is_spare(pod.seat) for pod in group.pods) < spares:
        everybody_moves(group)
    began = group.now
    for pod in [pod for pod in group.pods if not is_spare(pod.seat)][:spares]:
        assert group.node_is_lost(pod)
    go_to_the_end(group)
    assert str(Cause.ALL_STEPS_DONE) == group.outcome
    assert {2} == {len(seats) for seats in group.seats_in.values()}
    assert group.now < began + 60, "it waits for no deadline"


def must_end_with_mirrors(*, seed: int, faults: int, **more: Any) -> None:
    """Walk a job whose only checkpoint is that of its last step, and which keeps each step before it in memory."""
    group = walk(seed, faults=faults, mirrors=True, **more)
    event(f"{sum(map(len, group.trained_in.values()))} steps trained, {faults} faults")
    assert group.outcome in ENDS
    if 2 * faults <= group.job.spec.backoff_limit:
        assert str(Cause.ALL_STEPS_DONE) == group.outcome


def must_repeat_one_step_at_most(kind: str, *, after_rounds: int, placement: Placement, replicas: int) -> None:
    """One fault at any time takes back no step but the one that was under way: no checkpoint is there to go back to."""
    group = make_group(replicas, placement, mirrors=True, steps=5)
    for _ in range(after_rounds):
        everybody_moves(group)
    if group.pods:
        getattr(group, kind)(group.pods[after_rounds % len(group.pods)])
    settle(group)
    assert str(Cause.ALL_STEPS_DONE) == group.outcome
    trained = [step for steps in group.trained_in.values() for step in steps]
    assert sorted(set(trained)) == [1, 2, 3, 4, 5]
    assert len(trained) <= 6, f"{kind} after {after_rounds} rounds: {group.trained_in}"


def must_serve_the_same_weights(*, seed: int, faults: int, **more: Any) -> None:
    """Walk a job that compares engines, and check its end."""
    group = walk(seed, faults=faults, **more)
    assert group.outcome in ENDS
    if 2 * faults <= group.job.spec.backoff_limit:  # one that spoils two loads may cost two restarts
        assert str(Cause.ALL_STEPS_DONE) == group.outcome


def must_go_on_when_told(*, seed: int, replicas: int, faults: int, placement: Placement) -> None:
    """Each failure ends the job, and each end is followed by a retry."""
    rng, ends = random.Random(seed), 0
    group = make_group(replicas, placement, backoffLimit=0)
    for _ in range(faults):
        for _ in range(rng.randrange(ROUNDS[placement])):
            everybody_moves(group)
        fault(group, rng)
    settle(group)
    while group.outcome == str(Cause.BACKOFF_LIMIT):
        ends += 1
        group.retry()
        group.operator_pass()
        settle(group)
    event(f"{ends} retries")
    assert str(Cause.ALL_STEPS_DONE) == group.outcome


def must_heal(kind: str, *, after_rounds: int, placement: Placement) -> None:
    """One fault, at any time."""
    group = make_group(placement=placement)
    for _ in range(after_rounds):
        everybody_moves(group)
    if group.pods:
        getattr(group, kind)(group.pods[0])
    settle(group)
    assert str(Cause.ALL_STEPS_DONE) == group.outcome
