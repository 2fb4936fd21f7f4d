"""Plan and status of a job with engines of both kinds (`rollout.placement: Both`).

Those in the trainers' pods take turns with them. Those with devices of their own serve on until there are new weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import (
    MIXED_ROLLOUT,
    absent_engine,
    engine,
    facts_at,
    make_first_step,
    make_job,
    pod_targets,
    rollout_facts,
    status_of,
)
from colocated_rl_api import names
from colocated_rl_api.facts import EngineFacts, EngineState, GateFacts, PodFacts
from colocated_rl_api.job_status import Holder, Phase
from colocated_rl_api.ladder import MIXED, SCORED_MIXED
from colocated_rl_api.member_wire import RolloutTarget
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from colocated_rl_operator.planner.actions import CreatePod
from colocated_rl_operator.planner.observation import Job, Observation
from colocated_rl_operator.planner.plan import patience_s, plan
from colocated_rl_operator.planner.reasons import Cause, Waiting

V0, V1 = WeightVersion(0, 1), WeightVersion(1, 1)
GPUS = ("sums-gpu-0-0", "sums-gpu-1-0")
ENGINES = ("sums-engine-0-0", "sums-engine-1-0")


def make_mixed(gpus: int = 2, engines: int = 2, **spec: Any) -> Job:
    return make_job(replicas=gpus, rollout=MIXED_ROLLOUT | {"replicas": engines}, **spec)


def gpu_at(rung: Rung, *, compared: bool = True) -> PodFacts:
    """Facts of a pod with trainers on the way to (1, 1). compared: it has read the weights that rank 0 wrote."""
    return facts_at(rung, V1, ladder=MIXED).model_copy(update={"export": V1 if compared else V0})


def apart_at(rung: Rung, **changes: Any) -> PodFacts:
    """Facts of a pod with an engine alone, likewise."""
    held = {Rung.EXPORTED: engine(V0), Rung.OFFLOADED: engine(V0), Rung.RESTORED: engine(V1), Rung.SERVING: engine(V1)}
    is_open = rung is not Rung.RESTORED
    facts = PodFacts(
        epoch=1,
        gate=GateFacts(open=is_open, settled=not is_open),
        engines=(held[rung],),
        trainers=(),
        export=V0 if rung is Rung.EXPORTED else V1,
    )
    return facts.model_copy(update=changes)


def climbing(gpus: list[Rung], engines: list[Rung | PodFacts], **options: Any) -> Observation:
    """Return a group on the way to (1, 1), epoch 1, whose engines served (0, 1)."""
    job = options.pop("job", None) or make_mixed(len(gpus), len(engines))
    pods: list[PodFacts | None] = [gpu_at(rung) for rung in gpus]
    pods += [apart_at(each) if isinstance(each, Rung) else each for each in engines]
    return make_first_step(job, pods, **options)


def granted(gpus: list[Rung], engines: list[Rung | PodFacts]) -> Rung:
    (rung,) = {target.rung for target in pod_targets(climbing(gpus, engines)).values()}
    return rung


def test_placement_follows_from_asking_for_both() -> None:
    job = make_mixed()
    assert (Placement.MIXED, MIXED) == (job.spec.placement, job.ladder)
    assert SCORED_MIXED is make_mixed(reference={}).ladder
    assert ("gpu-0", "gpu-1", "engine-0", "engine-1") == job.gpu_seats == job.engine_seats == job.serving_seats
    assert ("gpu-0", "gpu-1") == job.trainer_seats == job.lineage_seats


def test_engines_of_both_kinds_are_compared_with_each_other() -> None:
    job = make_mixed(1, 1)
    assert job.compares_engines
    assert job.spec.compares_engines
    assert not make_job(replicas=1).spec.compares_engines


def test_a_pod_stands_where_its_kind_does() -> None:
    for rung in MIXED.rungs:
        assert rung is MIXED.standing(gpu_at(rung), V1)
    for rung in (Rung.EXPORTED, Rung.OFFLOADED, Rung.RESTORED, Rung.SERVING):
        assert rung is MIXED.standing(apart_at(rung), V1)
    assert Rung.EXPORTED is MIXED.standing(gpu_at(Rung.OFFLOADED, compared=False), V1), "no engine may take them yet"
    trainers_alone = gpu_at(Rung.SEALED).model_copy(update={"engines": ()})
    assert Rung.UNKNOWN is MIXED.standing(trainers_alone, V1)


@pytest.mark.parametrize("other", [V0, WeightVersion(2, 1), WeightVersion(1, 2)], ids=str)
def test_weights_of_another_version_count_for_nothing_even_those_of_a_later_step(other: WeightVersion) -> None:
    """A step that was rolled back leaves weights behind that are of a later one."""
    beside = facts_at(Rung.OFFLOADED, V1, ladder=MIXED).model_copy(update={"export": other})
    starting = EngineFacts(name="engine-0", state=EngineState.STARTING, incarnation="e2", starts_on=other)
    for facts in beside, apart_at(Rung.OFFLOADED, export=other), apart_at(Rung.OFFLOADED, engines=(starting,)):
        assert Rung.EXPORTED is MIXED.standing(facts, V1)


@pytest.mark.parametrize(
    ("state", "starts_on", "rung"),
    [
        (EngineState.ABSENT, None, Rung.OFFLOADED),
        (EngineState.STARTING, V1, Rung.OFFLOADED),
        (EngineState.STARTING, V0, Rung.EXPORTED),
    ],
)
def test_nobody_waits_behind_closed_gates_for_an_engine_that_starts_on_older_weights(
    state: EngineState, starts_on: WeightVersion | None, rung: Rung
) -> None:
    lost = EngineFacts(name="engine-0", state=state, incarnation="e2", starts_on=starts_on)
    assert rung is MIXED.standing(
        apart_at(Rung.OFFLOADED, engines=(lost,), gate=GateFacts(open=False, settled=True)), V1
    )


@pytest.mark.parametrize(
    ("gpus", "rung"),
    [
        ([Rung.SEALED, Rung.CLOSED], Rung.PAUSED),
        ([Rung.CLOSED, Rung.PAUSED], Rung.PAUSED),
        ([Rung.PAUSED, Rung.PAUSED], Rung.DRAINED),
        ([Rung.DRAINED, Rung.DRAINED], Rung.RELEASED),
        ([Rung.RELEASED, Rung.RELEASED], Rung.TRAINED),
        ([Rung.TRAINED, Rung.TRAINED], Rung.EXPORTED),
        ([Rung.EXPORTED, Rung.OFFLOADED], Rung.OFFLOADED),
    ],
)
def test_engines_beside_trainers_pass_their_barriers_without_those_that_serve_on(gpus: list[Rung], rung: Rung) -> None:
    assert rung is granted(gpus, [Rung.EXPORTED, Rung.EXPORTED])


def test_no_gate_of_those_that_serve_on_closes_before_trainers_have_left_and_all_have_compared_the_weights() -> None:
    assert Rung.OFFLOADED is granted([Rung.OFFLOADED, Rung.OFFLOADED], [Rung.OFFLOADED, Rung.EXPORTED])
    assert Rung.OFFLOADED is granted([Rung.OFFLOADED, Rung.EXPORTED], [Rung.OFFLOADED, Rung.OFFLOADED])
    assert Rung.UPDATED is granted([Rung.OFFLOADED, Rung.OFFLOADED], [Rung.OFFLOADED, Rung.OFFLOADED])


def test_no_engine_serves_new_weights_before_all_of_either_kind_hold_them() -> None:
    assert Rung.UPDATED is granted([Rung.SERVING, Rung.UPDATED], [Rung.RESTORED, Rung.OFFLOADED])
    assert Rung.UPDATED is granted([Rung.OFFLOADED, Rung.UPDATED], [Rung.RESTORED, Rung.RESTORED])
    assert Rung.SERVING is granted([Rung.UPDATED, Rung.UPDATED], [Rung.RESTORED, Rung.RESTORED])


def test_engines_may_load_the_climbs_weights_once_every_trainer_has_exported() -> None:
    some = pod_targets(climbing([Rung.EXPORTED, Rung.TRAINED], [Rung.EXPORTED, Rung.EXPORTED]))
    assert {V0} == {target.weights for target in some.values()}
    every = pod_targets(climbing([Rung.EXPORTED, Rung.EXPORTED], [Rung.EXPORTED, Rung.EXPORTED]))
    assert {V1} == {target.weights for target in every.values()}


def test_samples_are_asked_of_all_engines_and_trainers_meet_at_the_first_of_their_own() -> None:
    seen = climbing([Rung.RELEASED, Rung.RELEASED], [Rung.EXPORTED, Rung.EXPORTED])
    rollout = next(each for each in plan(seen).targets.values() if isinstance(each, RolloutTarget))
    assert (*GPUS, *ENGINES) == tuple(endpoint.pod for endpoint in rollout.engines)
    (meeting,) = {target.rendezvous for target in pod_targets(seen).values()}
    assert meeting is not None
    assert (seen.current["gpu-0"].address, 2) == (meeting.address, meeting.world_size)


def test_a_step_is_done_when_every_engine_holds_its_weights() -> None:
    """Up to there some are still asked for samples of older ones: maxStaleness counts from the update."""
    for gpus, done in (([Rung.TRAINED] * 2, 0), ([Rung.OFFLOADED] * 2, 0), ([Rung.UPDATED] * 2, 1)):
        seen = climbing(list(gpus), [Rung.RESTORED, Rung.RESTORED])
        rollout = next(each for each in plan(seen).targets.values() if isinstance(each, RolloutTarget))
        assert done == rollout.trained_step


def test_a_lost_pod_of_an_engine_is_made_again_and_no_trainer_starts_again_for_it() -> None:
    whole = climbing([Rung.RELEASED, Rung.RELEASED], [Rung.EXPORTED, Rung.EXPORTED])
    lost = replace(whole, members=tuple(member for member in whole.members if member.seat != "engine-1"))
    decided = plan(lost)
    assert not decided.raises
    assert ["engine-1"] == [action.seat for action in decided.pods if isinstance(action, CreatePod)]
    assert whole.group == lost.group
    again = replace(whole.current["engine-1"], attempt=1, uid=names.PodUid("another"))
    back = replace(whole, members=tuple(again if member.seat == "engine-1" else member for member in whole.members))
    assert not plan(back).raises


def test_a_lost_pod_with_trainers_begins_a_new_lineage() -> None:
    whole = climbing([Rung.RELEASED, Rung.RELEASED], [Rung.EXPORTED, Rung.EXPORTED])
    again = replace(whole.current["gpu-1"], attempt=1, uid=names.PodUid("another"))
    decided = plan(replace(whole, members=tuple(again if pod.seat == "gpu-1" else pod for pod in whole.members)))
    assert decided.climb is not None
    assert (2, Cause.POD_REPLACED) == (decided.climb.lineage, decided.climb.cause)


@pytest.mark.parametrize(("seat", "waits"), [("gpu-0", True), ("engine-0", False)])
def test_only_an_engine_whose_memory_trainers_need_holds_the_next_step_while_it_starts(seat: str, waits: bool) -> None:
    """One of several in a pod, which stands at the top without it."""
    job = make_job(rollout=MIXED_ROLLOUT | {"replicas": 2, "engine": {"perPod": 2}})
    up = climbing([Rung.SERVING] * 2, [Rung.SERVING] * 2, job=job, rollout=rollout_facts(sealed=2), served=V1)
    failed = absent_engine().model_copy(
        update={"name": "engine-1", "state": EngineState.STARTING, "starts_on": V1, "failures": 1, "shut": True}
    )
    facts = up.current[seat].pod_facts
    assert facts is not None
    facts = facts.model_copy(update={"engines": (*facts.engines, failed)})
    seen = replace(up, members=tuple(replace(pod, facts=facts) if pod.seat == seat else pod for pod in up.members))
    assert seen.is_up
    decided = plan(seen)
    assert waits == (not decided.raises)
    assert waits == (decided.wait is not None and decided.wait.reason is Waiting.ENGINE)


def test_an_evaluation_ends_before_the_next_step_begins() -> None:
    job = make_mixed(evaluation={"everySteps": 1})
    up = climbing([Rung.SERVING] * 2, [Rung.SERVING] * 2, job=job, rollout=rollout_facts(sealed=2), served=V1)
    decided = plan(up)
    assert not decided.raises
    asked = [each.evaluate for each in decided.targets.values() if isinstance(each, RolloutTarget)]
    assert [1] == asked


def test_a_group_may_wait_for_an_engine_that_starts_on_older_weights_and_for_requests_that_end() -> None:
    switch = make_mixed(
        switch={
            "settleSeconds": 1,
            "engineCallSeconds": 10,
            "engineStartSeconds": 7000,
            "trainerStartSeconds": 100,
            "trainerProgressSeconds": 1000,
        }
    ).spec.switch
    assert 7000 + 30 == patience_s(MIXED, Rung.OFFLOADED, switch)
    assert 1000 + 7000 + 1 + 4 * 10 + 30 == patience_s(MIXED, Rung.UPDATED, switch)


def test_status_says_what_follows_from_the_placement() -> None:
    status = status_of(climbing([Rung.RELEASED, Rung.RELEASED], [Rung.EXPORTED, Rung.EXPORTED]))
    assert (Placement.MIXED, Phase.TRAINING) == (status.placement, status.phase)
    assert (Holder.BOTH, 4) == (status.gpu_holder, status.ready_replicas)
    assert [] == status.out_of_line, "engines of either kind stand where their kind does"
