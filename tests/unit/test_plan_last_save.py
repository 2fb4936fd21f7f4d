"""Pods end that were drained or deleted: their group saves its step, if there is time, before they are gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import (
    PLACED,
    absent_engine,
    engine_at,
    facts_at,
    make_climb,
    make_job,
    make_member,
    make_observation,
    rollout_facts,
    trainers_at,
)
from colocated_rl_api.facts import PodFacts, TrainerState
from colocated_rl_api.failure import FailureCause
from colocated_rl_api.member_wire import PodTarget
from colocated_rl_api.names import PodUid
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from colocated_rl_operator.planner.actions import CreatePod
from colocated_rl_operator.planner.notices import NOTICE_S, Notice
from colocated_rl_operator.planner.observation import Member, Observation, PodPhase, remember
from colocated_rl_operator.planner.plan import Plan, plan
from colocated_rl_operator.planner.reasons import Cause, Waiting

AT = WeightVersion(2, 1)
DELETED: dict[str, Any] = {"ends_at": 160.0}
SIGNALLED: dict[str, Any] = {"ending": True}
BOTH_WAYS = pytest.mark.parametrize("told", [DELETED, SIGNALLED], ids=["deleted", "signalled"])


def resting(rung: Rung = Rung.SERVING, *, replicas: int = 2, mirrored: int | None = None, **spec: Any) -> Observation:
    """Return a group that stands behind step 2, of which there is no checkpoint, at 100 s."""
    job = make_job(replicas=replicas, steps=5, **spec)
    facts = facts_at(rung, AT, epoch=5)
    facts = with_ranks(facts, saved=0, mirrored=mirrored)
    climb, rollout = make_climb(AT.step, epoch=5, cause=Cause.NEXT_STEP), rollout_facts(sealed=2, trained=2, epoch=5)
    return make_observation(job, [facts] * replicas, climb=climb, rollout=rollout, trained_step=2)


def with_ranks(facts: PodFacts, **changes: Any) -> PodFacts:
    return facts.model_copy(update={"trainers": tuple(rank.model_copy(update=changes) for rank in facts.trainers)})


def changed(seen: Observation, index: int, *, ending: bool = False, ranks: Any = None, **changes: Any) -> Observation:
    """Return the observation once a pod has changed. ranks: changes of its trainers."""
    pod = seen.members[index]
    facts = pod.pod_facts
    if facts is not None and "facts" not in changes:
        facts = facts.model_copy(update={"ending": facts.ending or ending})
        changes["facts"] = with_ranks(facts, **ranks) if ranks else facts
    members = (*seen.members[:index], replace(pod, **changes), *seen.members[index + 1 :])
    return remember(replace(seen, members=members))


def with_successor(seen: Observation) -> Observation:
    """Another pod fills the second seat, and answers."""
    blank = facts_at(Rung.SEALED, AT, epoch=0)
    return remember(replace(seen, members=(*seen.members, make_member("gpu-1", 1, facts=blank, created_at=seen.now))))


def later(seen: Observation, seconds: float) -> Observation:
    return remember(replace(seen, now=seen.now + seconds))


def asked_to_save(decided: Plan) -> list[str]:
    """Return the GPU pods that are to save the step at which they stand, in the epoch in which they do."""
    targets = decided.targets.items()
    found = {name: target for name, target in targets if isinstance(target, PodTarget) and target.saves}
    assert {(5, AT)} >= {(target.epoch, target.version) for target in found.values()}
    return [*found]


@BOTH_WAYS
def test_a_step_is_saved_by_the_whole_group_while_a_pod_of_it_ends(told: dict[str, Any]) -> None:
    decided = plan(changed(resting(), 1, **told))
    assert not decided.raises
    assert ["sums-gpu-0-0", "sums-gpu-1-0"] == asked_to_save(decided)
    assert decided.wait is not None
    assert (Waiting.CHECKPOINT, "step 2 is saved before sums-gpu-1-0 ends") == (
        decided.wait.reason,
        decided.wait.message,
    )
    assert 130.0 == decided.wake_at
    made = [each for each in decided.pods if isinstance(each, CreatePod)]
    assert [CreatePod("gpu-1", 1)] * (told is DELETED) == made, "its successor starts meanwhile"


@pytest.mark.parametrize("first", [0, 1])
def test_whoever_ends_the_others_meet_where_they_met_before(first: int) -> None:
    """The successor of the first pod has another address, and is none of the group."""
    seen = changed(resting(), first, **DELETED)
    targets = [target for target in plan(seen).targets.values() if isinstance(target, PodTarget)]
    (before, _) = [target for target in plan(resting()).targets.values() if isinstance(target, PodTarget)]
    assert [before.rendezvous] * 2 == [target.rendezvous for target in targets]


@BOTH_WAYS
def test_the_successor_joins_once_the_step_is_saved(told: dict[str, Any]) -> None:
    seen = with_successor(changed(resting(), 1, **told)) if told is DELETED else changed(resting(), 1, **told)
    assert not plan(seen).raises
    for index in (0, 1):
        seen = changed(seen, index, ranks={"saved": 2})
    assert [] == asked_to_save(plan(seen))
    decided = plan(seen if told is DELETED else with_successor(changed(seen, 1, facts=None, ends_at=160.0)))
    assert decided.climb is not None
    assert (Cause.POD_REPLACED, 2, 2) == (decided.climb.cause, decided.climb.step, decided.climb.lineage)


@pytest.mark.parametrize(
    "then",
    [
        {"after": NOTICE_S},
        {"after": NOTICE_S + 60},
        {"facts": None},
        {"ranks": {"exit_code": -9, "state": TrainerState.ABSENT, "step": None, "exported": None}},
    ],
    ids=["time is over", "time is long over", "the pod is gone", "its trainers are gone"],
)
def test_the_successor_joins_without_a_checkpoint_when_there_is_no_more_time(then: dict[str, Any]) -> None:
    seen = with_successor(changed(resting(), 1, **DELETED))
    assert not plan(later(seen, NOTICE_S - 1)).raises
    decided = plan(later(seen, then["after"]) if "after" in then else changed(seen, 1, **then))
    assert decided.climb is not None
    assert (Cause.POD_REPLACED, 2) == (decided.climb.cause, decided.climb.lineage)
    assert [] == asked_to_save(decided)


def test_a_group_without_room_for_the_successor_becomes_smaller_once_the_step_is_saved() -> None:
    """The step that was being saved was given up, if shrinkAfterSeconds are fewer than a checkpoint takes."""
    seen = changed(resting(elasticPolicy={"minReplicas": 1, "shrinkAfterSeconds": 1}), 1, **DELETED)
    without_node = make_member("gpu-1", 1, phase=PodPhase.PENDING, address=None, created_at=seen.now)
    seen = later(remember(replace(seen, members=(*seen.members, without_node))), NOTICE_S - 1)
    assert (False, ["sums-gpu-0-0", "sums-gpu-1-0"]) == (plan(seen).raises, asked_to_save(plan(seen)))
    for then in (changed(seen, 0, ranks={"saved": 2}), later(seen, 1)):
        climb = plan(then).climb
        assert climb is not None
        assert (Cause.RESIZED, 1) == (climb.cause, climb.replicas)


@pytest.mark.parametrize(
    ("ends", "is_saved"),
    [((1,), False), ((0, 1), True)],
    ids=["in the memory of the other pod", "both that have it end"],
)
def test_a_step_that_outlives_the_pod_in_memory_is_not_saved(ends: tuple[int, ...], *, is_saved: bool) -> None:
    seen = resting(mirrored=2, checkpoint={"everySteps": 100, "inMemory": {"sizeLimit": "1Gi"}})
    for index in ends:
        seen = changed(seen, index, **DELETED)
    assert is_saved is bool(asked_to_save(plan(seen)))
    assert asked_to_save(plan(changed(resting(mirrored=1), 1, **DELETED))), "only an older one is kept"
    assert asked_to_save(plan(changed(resting(replicas=1, mirrored=2), 0, **DELETED))), "there is no other pod"


BAD = Notice(FailureCause.BAD_DEVICE, "condition GPUHealthy is False")


@pytest.mark.parametrize(
    ("seen", "changes"),
    [
        (resting(Rung.RELEASED), DELETED),
        (resting(Rung.OFFLOADED), DELETED),
        (changed(resting(), 0, ranks={"saved": 2}), DELETED),
        (resting(), DELETED | {"ill_device": "GPU-1"}),
        (resting(), DELETED | {"notice": BAD}),
        (resting(), DELETED | {"facts": None}),
        (resting(), {}),
        (replace(resting(), climb=replace(make_climb(2, epoch=5), group="others")), DELETED),
        (replace(resting(), climb=replace(make_climb(2, epoch=5), group="0")), DELETED),
    ],
    ids=[
        "a step is under way",
        "engines have no new weights yet",
        "there is a checkpoint",
        "a bad device",
        "a node with bad devices",
        "nobody hears it",
        "nobody ends",
        "it is of another group",
        "it is of yet another group",
    ],
)
def test_nothing_is_saved_that_is_not_whole_or_not_needed(seen: Observation, changes: dict[str, Any]) -> None:
    assert [] == asked_to_save(plan(changed(seen, 1, **changes)))


def test_what_is_only_recorded_is_not_saved() -> None:
    job = make_job(steps=5, **PLACED[Placement.ROLLOUT_ONLY])
    facts = facts_at(Rung.SERVING, WeightVersion(0, 1), epoch=5).model_copy(update={"trainers": ()})
    climb = make_climb(0, epoch=5, cause=Cause.FIRST_START)
    seen = make_observation(job, [facts] * 2, climb=climb, rollout=rollout_facts(epoch=5))
    assert not plan(changed(seen, 1, **DELETED)).raises


def test_trainers_without_engines_save_too() -> None:
    job = make_job(steps=5, checkpoint={"everySteps": 100}, **PLACED[Placement.TRAIN_ONLY])
    facts = with_ranks(trainers_at(Rung.EXPORTED, AT, epoch=5), saved=0)
    climb, rollout = make_climb(AT.step, epoch=5, cause=Cause.NEXT_STEP), rollout_facts(sealed=2, trained=2, epoch=5)
    seen = make_observation(job, [facts] * 2, climb=climb, rollout=rollout, trained_step=2)
    decided = plan(changed(seen, 1, **DELETED))
    assert ["sums-gpu-0-0", "sums-gpu-1-0"] == asked_to_save(decided)
    assert {Rung.EXPORTED} == {target.rung for target in decided.targets.values() if isinstance(target, PodTarget)}


def test_a_pod_of_a_former_group_that_is_slow_to_end_keeps_no_step_from_being_saved() -> None:
    """It counted as the one that ends in its seat, in the place of its successor, and its time as that of the next."""
    seen = resting()
    former = replace(make_member("gpu-0", facts=seen.members[0].facts), uid=PodUid("former"), ends_at=3600.0)
    slow = later(remember(replace(seen, members=(former, *seen.members))), NOTICE_S + 1)
    assert slow.memory.ending_since is None
    assert ["sums-gpu-0-0", "sums-gpu-1-0"] == asked_to_save(plan(changed(slow, 2, **DELETED)))


@pytest.mark.parametrize("placement", [Placement.DISAGGREGATED, Placement.MIXED])
@pytest.mark.parametrize(
    "engine_pod",
    [
        {"ends_at": 60.0, "facts": None},
        {"facts": engine_at(Rung.SERVING, AT, epoch=0)},
        {"facts": engine_at(Rung.DRAINED, AT, epoch=5).model_copy(update={"engines": (absent_engine(),)})},
        {"facts": engine_at(Rung.TRAINED, AT, epoch=5)},
    ],
    ids=["lost", "made again", "starts again", "compares the weights"],
)
def test_trainers_save_whatever_became_of_engines_with_devices_of_their_own(
    placement: Placement, engine_pod: dict[str, Any]
) -> None:
    """A drain takes pods in turns: the step was not saved while an engine started, and was waited for in vain.

    Trainers in pods of their own save only at the top of the ladder, which they have been granted in this epoch.
    """
    job = make_job(replicas=2, steps=5, checkpoint={"everySteps": 100}, **PLACED[placement])
    is_mixed = placement is Placement.MIXED
    facts = facts_at(Rung.SERVING, AT, epoch=5) if is_mixed else trainers_at(Rung.EXPORTED, AT, epoch=5)
    facts = with_ranks(facts.model_copy(update={"export": AT}), saved=0)
    climb, rollout = make_climb(AT.step, epoch=5, cause=Cause.NEXT_STEP), rollout_facts(sealed=2, trained=2, epoch=5)
    pods: list[PodFacts | None] = [facts, facts, engine_at(Rung.SERVING, AT, epoch=5)]
    seen = make_observation(job, pods, climb=climb, rollout=rollout, trained_step=2)
    trainers = [pod.name for pod in seen.trainer_members]
    decided = plan(changed(changed(seen, 2, **engine_pod), 1, **DELETED))
    assert not decided.raises
    assert {*trainers} <= {*asked_to_save(decided)}
    target = decided.targets[trainers[0]]
    assert isinstance(target, PodTarget)
    assert Rung.SERVING is target.rung


@pytest.mark.parametrize(
    ("action", "cause"), [("FailJob", Cause.FAILURE_POLICY), ("ReplacePodElsewhere", Cause.POD_REPLACED)]
)
def test_a_rule_answers_an_eviction_at_once(action: str, cause: Cause) -> None:
    """Otherwise the seat would be filled meanwhile, perhaps on the same node, and nobody would know of a loss."""
    rules = {"rules": [{"onCauses": ["PodEvicted"], "action": action}], "backoffSeconds": 0}
    decided = plan(changed(resting(failurePolicy=rules), 1, fate=FailureCause.POD_EVICTED, **DELETED))
    assert decided.climb is not None
    assert (cause, []) == (decided.climb.cause, asked_to_save(decided))


def test_an_operator_that_takes_over_saves_nothing_before_it_has_raised_the_epoch() -> None:
    seen = changed(resting(), 1, **SIGNALLED)
    other = remember(replace(seen, memory=replace(seen.memory, raised=False)))
    decided = plan(other)
    assert decided.climb is not None
    assert (Cause.TAKEOVER, []) == (decided.climb.cause, asked_to_save(decided))


def test_moments_of_an_end_are_forgotten_with_it() -> None:
    seen = changed(resting(), 1, **DELETED)
    assert 100.0 == later(seen, 3).memory.ending_since
    assert changed(later(seen, 3), 1, facts=None).memory.ending_since is None


def test_a_pod_ends_that_was_told_to_and_still_reports() -> None:
    pods: list[Member] = [make_member("gpu-0", facts=facts_at(Rung.SERVING, AT)), make_member("gpu-0", facts=None)]
    assert [False, False] == [pod.is_ending for pod in pods]
    assert [True, False] == [replace(pod, ends_at=160.0).is_ending for pod in pods]
