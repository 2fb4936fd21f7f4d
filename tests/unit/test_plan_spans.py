"""The operator tells each pod of an engine over several pods of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import (
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
)
from colocated_rl_api.facts import EngineFacts, EngineState, PodFacts
from colocated_rl_api.ladder import TIME_SLICED
from colocated_rl_api.member_wire import EngineSpan, PodTarget, RolloutTarget
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from colocated_rl_operator.planner.observation import Job, Observation, remember
from colocated_rl_operator.planner.plan import plan, stop
from colocated_rl_operator.planner.reasons import Cause

V1 = WeightVersion(1, 1)
UIDS = [f"uid-gpu-{index}-0" for index in range(4)]


def spanning(placement: Placement = Placement.TIME_SLICED) -> Job:
    """Two engines over two pods each."""
    return make_job(replicas=4, rollout=PLACED[placement]["rollout"] | {"engine": {"pods": 2}})


def facts_of(job: Job, index: int, **changes: Any) -> PodFacts:
    """The pod of a seat serves. Each has an incarnation of its own, and the second of two is part of the first."""
    first = index - index % 2
    own = {"incarnation": f"process-{index}", "part_of": f"process-{first}" if index > first else None, **changes}
    facts = facts_at(Rung.SERVING, V1, ladder=job.ladder)
    return facts.model_copy(update={"engines": (facts.engines[0].model_copy(update=own),)})


def observed(job: Job, **changed: PodFacts | None) -> Observation:
    """Observe the pods, with other facts of some seats, as in gpu_1."""
    pods = [changed.get(f"gpu_{index}", facts_of(job, index)) for index in range(4)]
    climb = make_climb(1, cause=Cause.NEXT_STEP)
    return make_observation(job, pods, climb=climb, rollout=rollout_facts(sealed=1, trained=1))


def spans(seen: Observation, *, stops: bool = False) -> dict[str, EngineSpan]:
    """Return what each pod is told, by its seat. stops: when the job is deleted."""
    targets = (stop if stops else plan)(seen).targets
    found = ((member.seat, targets.get(member.name)) for member in seen.gpu_members)
    return {seat: target.span for seat, target in found if isinstance(target, PodTarget) and target.span}


def engine_of(facts: PodFacts) -> EngineFacts:
    return facts.engines[0]


def without(seen: Observation, seat: str) -> Observation:
    return replace(seen, members=tuple(pod for pod in seen.members if pod.seat != seat))


@pytest.mark.parametrize("placement", TOGETHER)
@pytest.mark.parametrize("stops", [False, True])
def test_each_pod_is_told_of_its_engine_and_only_of_that(placement: Placement, stops: bool) -> None:
    job = spanning(placement)
    seen = observed(job)
    addresses = {member.seat: member.address for member in seen.gpu_members}
    for first in (0, 2):
        served, pods = facts_of(job, first), (UIDS[first], UIDS[first + 1])
        told = spans(seen, stops=stops)
        assert EngineSpan(pods=pods, address=addresses[f"gpu-{first}"]) == told[f"gpu-{first}"]
        of_part = {"engine": engine_of(served), "gate": served.gate}
        assert EngineSpan(pods=pods, address=addresses[f"gpu-{first}"], **of_part) == told[f"gpu-{first + 1}"]


def test_only_first_pods_are_named_to_the_rollout_controller_and_compared() -> None:
    decided = plan(observed(spanning()))
    [target] = [each for each in decided.targets.values() if isinstance(each, RolloutTarget)]
    assert ["sums-gpu-0-0", "sums-gpu-2-0"] == [endpoint.pod for endpoint in target.engines]
    odd = plan(observed(spanning(), gpu_1=facts_of(spanning(), 1, checksum="none of ours")))
    assert not odd.raises, "a part reports what the first pod did, perhaps late"


@pytest.mark.parametrize(
    ("changes", "is_lost"),
    [
        ({"state": EngineState.ABSENT, "version": None}, True),
        ({"state": EngineState.ABSENT, "version": None, "part_of": "process-9"}, False),
        ({"state": EngineState.ABSENT, "version": None, "part_of": "process-1"}, False),
        ({"state": EngineState.ABSENT, "version": None, "part_of": None}, False),
        ({}, False),
    ],
    ids=["it ended", "a later one ended", "one before ended", "it never began", "it lives"],
)
def test_the_first_pod_alone_is_told_that_a_part_of_its_engine_has_ended(
    changes: dict[str, Any], is_lost: bool
) -> None:
    job = spanning()
    told = spans(observed(job, gpu_3=facts_of(job, 3, **changes)))
    assert {"gpu-0": None, "gpu-1": None, "gpu-2": "process-2" if is_lost else None, "gpu-3": None} == {
        seat: span.lost for seat, span in told.items()
    }


def test_pods_are_told_apart_by_their_place_and_not_by_the_letters_of_their_seat() -> None:
    job = make_job(replicas=12, rollout=PLACED[Placement.TIME_SLICED]["rollout"] | {"engine": {"pods": 3}})
    pods: list[PodFacts | None] = [facts_of(job, index, part_of=None) for index in range(12)]
    pods[10] = facts_of(job, 10, state=EngineState.ABSENT, version=None, part_of="process-9")
    climb = make_climb(1, cause=Cause.NEXT_STEP)
    told = spans(make_observation(job, pods, climb=climb, rollout=rollout_facts(sealed=1, trained=1)), stops=True)
    assert ("process-9", None, None) == tuple(told[f"gpu-{index}"].lost for index in (9, 10, 11))
    assert engine_of(facts_of(job, 9, part_of=None)) == told["gpu-10"].engine == told["gpu-11"].engine


def test_no_part_is_lost_of_an_engine_that_is_not_there() -> None:
    job = spanning()
    absent = {"state": EngineState.ABSENT, "version": None, "part_of": None, "incarnation": None}
    told = spans(observed(job, gpu_2=facts_of(job, 2, **absent), gpu_3=facts_of(job, 3, **absent)))
    assert {None} == {span.lost for span in told.values()}


def test_pods_that_are_missing_or_say_nothing_are_not_made_up() -> None:
    job = spanning()
    seen = observed(job)
    assert (UIDS[0],) == spans(without(seen, "gpu-1"), stops=True)["gpu-0"].pods
    assert EngineSpan(pods=(UIDS[1],)) == spans(without(seen, "gpu-0"), stops=True)["gpu-1"]
    silent = spans(observed(job, gpu_0=None), stops=True)["gpu-1"]
    assert (silent.pods, silent.engine, silent.gate) == ((UIDS[0], UIDS[1]), None, None)
    served = facts_of(job, 0)
    bare = spans(observed(job, gpu_0=served.model_copy(update={"engines": ()})), stops=True)["gpu-1"]
    assert (bare.engine, bare.gate) == (None, served.gate)


def test_pods_with_engines_of_their_own_are_told_of_no_others() -> None:
    assert {} == spans(observed(make_job(replicas=4)))


def test_only_the_first_pod_of_each_engine_serves() -> None:
    job = spanning()
    assert ("gpu-0", "gpu-2") == job.serving_seats
    assert ("gpu-0", "gpu-1") == job.spans["gpu-0"] == job.spans["gpu-1"]
    assert ("gpu-2", "gpu-3") == job.spans["gpu-2"] == job.spans["gpu-3"]
    assert job.compares_engines
    assert job.spec.compares_engines
    one = make_job(replicas=2, rollout=PLACED[Placement.TIME_SLICED]["rollout"] | {"engine": {"pods": 2}})
    assert (False, False) == (one.compares_engines, one.spec.compares_engines)


def test_no_memory_comes_back_before_every_pod_of_such_an_engine_is_free() -> None:
    spec = spanning().spec
    assert Rung.OFFLOADED in spec.ladder.barriers
    assert Rung.OFFLOADED not in TIME_SLICED.barriers
    assert spec.ladder is spanning().spec.ladder, "ladders are compared by what they are"


def test_the_pods_of_an_engine_join_a_running_group_together() -> None:
    """One came alone: it had no engine, the group waited for it, and the job failed by its backoffLimit."""
    climb = replace(make_climb(1, cause=Cause.NEXT_STEP), replicas=2)
    job = spanning().led_by(climb)
    saved: list[PodFacts | None] = [saved_at(facts_of(job, index), 1) for index in range(2)]
    rollout = rollout_facts(sealed=2, trained=1)
    blank = pod_facts(absent_engine(), absent_trainer(), epoch=0)
    seen = make_observation(job, saved, climb=climb, rollout=rollout, trained_step=1)
    for seat, goes_on in (("gpu-2", 2), ("gpu-3", 4)):
        seen = remember(replace(seen, members=(*seen.members, make_member(seat, facts=blank))))
        decided = plan(seen)
        assert decided.climb is not None
        assert (goes_on, 2) == (decided.climb.replicas, decided.climb.step)


def saved_at(facts: PodFacts, step: int) -> PodFacts:
    return facts.model_copy(update={"trainers": tuple(t.model_copy(update={"saved": step}) for t in facts.trainers)})
