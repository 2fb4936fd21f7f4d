"""Plan and status of a job whose engines have pods and devices of their own (`rollout.colocateWith: ""`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from builders import (
    CREATED,
    OWN_ROLLOUT,
    PLACED,
    ROLLOUT,
    absent_engine,
    engine_at,
    make_climb,
    make_job,
    make_observation,
    rollout_facts,
    trainers_at,
)
from colocated_rl_api import names
from colocated_rl_api.job_status import ColocatedRLJobStatus, Holder, Phase
from colocated_rl_api.ladder import DISAGGREGATED, SCORED_DISAGGREGATED, Placement, Rung, WeightVersion
from colocated_rl_api.member_wire import PodFacts, PodTarget, RolloutTarget
from colocated_rl_operator.actions import CreatePod
from colocated_rl_operator.observation import Job, Observation
from colocated_rl_operator.plan import plan
from colocated_rl_operator.reasons import Cause
from colocated_rl_operator.status import report

V0, V1 = WeightVersion(0, 1), WeightVersion(1, 1)
TRAINERS = ("sums-trainer-0-0", "sums-trainer-1-0")
ENGINES = ("sums-engine-0-0", "sums-engine-1-0")


def make_apart(trainers: int = 2, engines: int = 2, **spec: Any) -> Job:
    return make_job(replicas=trainers, rollout=OWN_ROLLOUT | {"replicas": engines}, **spec)


def climbing(trainers: list[Rung], engines: list[Rung | PodFacts], **options: Any) -> Observation:
    """On the way to (1, 1), epoch 1; engines serve (0, 1)."""
    job = options.pop("job", None) or make_apart(len(trainers), len(engines))
    pods: list[PodFacts | None] = [trainers_at(rung, V1) for rung in trainers]
    pods += [engine_at(rung, V1) if isinstance(rung, Rung) else rung for rung in engines]
    usual: dict[str, Any] = {
        "climb": make_climb(1, cause=Cause.NEXT_STEP),
        "rollout": rollout_facts(sealed=1),
        "served": V0,
    }
    return make_observation(job, pods, **usual | options)


def targets(seen: Observation) -> dict[str, PodTarget]:
    return {name: each for name, each in plan(seen).targets.items() if isinstance(each, PodTarget)}


def status_of(seen: Observation) -> ColocatedRLJobStatus:
    return report(seen, plan(seen), before=ColocatedRLJobStatus(), at=CREATED)


def test_placement_follows_from_asking_for_devices_of_their_own() -> None:
    job = make_apart(2, 3)
    assert (Placement.DISAGGREGATED, DISAGGREGATED) == (job.spec.placement, job.ladder)
    assert SCORED_DISAGGREGATED is make_apart(reference={}).ladder
    assert ("trainer-0", "trainer-1", "engine-0", "engine-1", "engine-2") == job.gpu_seats
    assert ("trainer-0", "trainer-1") == job.trainer_seats == job.lineage_seats


@pytest.mark.parametrize(("mode", "seats"), [("RolloutOnly", ("engine-0",)), ("TrainOnly", ("trainer-0", "trainer-1"))])
def test_one_side_alone_has_pods_of_that_side(mode: str, seats: tuple[str, ...]) -> None:
    recorded = {"claimName": "recording"} if mode == "TrainOnly" else None
    assert seats == make_job(mode=mode, recorded=recorded, rollout=OWN_ROLLOUT).gpu_seats


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"colocateWith": ""}, "replicas is the number of engine pods with devices of their own"),
        ({"replicas": 2}, "replicas is the number of engine pods with devices of their own"),
        ({"gpus": {"count": 1}}, "gpus are the devices of engine pods of their own"),
    ],
)
def test_engine_pods_are_counted_where_there_are_some_and_only_there(rollout: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        make_job(rollout=ROLLOUT | rollout)


def test_engines_on_devices_of_their_own_leave_no_room_for_others() -> None:
    assert make_job(gpus={"count": 1}, rollout=OWN_ROLLOUT | {"offload": []}).spec.placement is Placement.DISAGGREGATED


def test_engines_serve_while_the_trainers_work() -> None:
    asked = targets(climbing([Rung.SEALED, Rung.TRAINED], [Rung.TRAINED, Rung.TRAINED]))
    assert {Rung.TRAINED} == {target.rung for target in asked.values()}
    assert {V0} == {target.weights for target in asked.values()}, "for an engine that has to start again"


def test_engines_are_told_of_weights_once_every_trainer_has_written_them() -> None:
    one = targets(climbing([Rung.EXPORTED, Rung.TRAINED], [Rung.TRAINED, Rung.TRAINED]))
    assert {(Rung.EXPORTED, V0)} == {(target.rung, target.weights) for target in one.values()}
    both = targets(climbing([Rung.EXPORTED, Rung.EXPORTED], [Rung.TRAINED, Rung.TRAINED]))
    assert {(Rung.EXPORTED, V1)} == {(target.rung, target.weights) for target in both.values()}


def test_no_gate_closes_before_every_engine_pod_has_compared_the_weights() -> None:
    waiting = targets(climbing([Rung.EXPORTED, Rung.EXPORTED], [Rung.EXPORTED, Rung.TRAINED]))
    assert {Rung.EXPORTED} == {target.rung for target in waiting.values()}
    ready = targets(climbing([Rung.EXPORTED, Rung.EXPORTED], [Rung.EXPORTED, Rung.EXPORTED]))
    assert {Rung.PAUSED} == {target.rung for target in ready.values()}


@pytest.mark.parametrize(
    ("engines", "granted"),
    [
        ([Rung.PAUSED, Rung.CLOSED], Rung.PAUSED),
        ([Rung.PAUSED, Rung.PAUSED], Rung.DRAINED),
        ([Rung.DRAINED, Rung.DRAINED], Rung.UPDATED),
        ([Rung.SERVING, Rung.UPDATED], Rung.SERVING),
    ],
)
def test_engines_update_together_barrier_by_barrier(engines: list[Rung | PodFacts], granted: Rung) -> None:
    asked = targets(climbing([Rung.SERVING, Rung.SERVING], engines))
    assert {granted} == {target.rung for target in asked.values()}
    assert {V1} == {target.weights for target in asked.values()}


def test_samples_are_asked_of_engine_pods_and_trainers_meet_at_the_first_of_their_own() -> None:
    seen = climbing([Rung.SEALED, Rung.SEALED], [Rung.TRAINED, Rung.TRAINED])
    rollout = next(each for each in plan(seen).targets.values() if isinstance(each, RolloutTarget))
    assert ENGINES == tuple(endpoint.pod for endpoint in rollout.engines)
    (meeting,) = {target.rendezvous for target in targets(seen).values()}
    assert meeting is not None
    assert (seen.current["trainer-0"].address, 2) == (meeting.address, meeting.world_size)


def test_a_lost_engine_pod_is_made_again_and_no_trainer_starts_again_for_it() -> None:
    whole = climbing([Rung.SEALED, Rung.SEALED], [Rung.TRAINED, Rung.TRAINED])
    lost = replace(whole, members=tuple(member for member in whole.members if member.seat != "engine-1"))
    decided = plan(lost)
    assert not decided.raises
    assert ["engine-1"] == [action.seat for action in decided.pods if isinstance(action, CreatePod)]
    assert whole.group == lost.group
    again = replace(next(member for member in whole.members if member.seat == "engine-1"), attempt=1, uid="another")
    back = replace(whole, members=tuple(again if member.seat == "engine-1" else member for member in whole.members))
    assert not plan(back).raises


def test_a_lost_pod_of_trainers_begins_a_new_lineage_while_engines_serve_on() -> None:
    whole = climbing([Rung.SEALED, Rung.SEALED], [Rung.TRAINED, Rung.TRAINED])
    again = replace(whole.current["trainer-1"], attempt=1, uid="another")
    back = replace(whole, members=tuple(again if member.seat == "trainer-1" else member for member in whole.members))
    decided = plan(back)
    assert decided.raises
    assert decided.climb is not None
    assert (2, Cause.POD_REPLACED) == (decided.climb.lineage, decided.climb.cause)


def test_an_engine_that_joins_a_resting_group_takes_what_the_others_serve() -> None:
    gone = engine_at(Rung.SERVING, V1).model_copy(update={"engines": (absent_engine(),), "export": None})
    joining = climbing([Rung.SERVING, Rung.SERVING], [Rung.SERVING, gone], rollout=rollout_facts(), served=V1)
    assert Rung.TRAINED is joining.slowest
    assert {(Rung.EXPORTED, V1)} == {(target.rung, target.weights) for target in targets(joining).values()}


def test_other_placements_name_no_weights() -> None:
    for placement in (Placement.TIME_SLICED, Placement.RESIDENT):
        job = make_job(replicas=1, **PLACED[placement])
        assert (names.ROLE_GPU,) == tuple({seat.rpartition("-")[0] for seat in job.gpu_seats})
        assert job.trainer_seats == job.engine_seats == job.gpu_seats


def test_a_step_is_done_when_every_engine_holds_its_weights() -> None:
    for engines, done in (([Rung.UPDATED, Rung.DRAINED], 0), ([Rung.UPDATED, Rung.UPDATED], 1)):
        seen = climbing([Rung.SERVING, Rung.SERVING], list(engines))
        rollout = next(each for each in plan(seen).targets.values() if isinstance(each, RolloutTarget))
        assert done == rollout.trained_step


def test_status_says_what_follows_from_the_placement() -> None:
    seen = climbing([Rung.SEALED, Rung.SEALED], [Rung.TRAINED, Rung.TRAINED])
    status = status_of(seen)
    assert (Placement.DISAGGREGATED, Holder.BOTH, "4/4") == (status.placement, status.gpu_holder, status.ready)
    assert Phase.TRAINING is status.phase
    assert [] == status.out_of_line, "trainers and engines stand where their kind does"


def test_a_pod_out_of_line_is_one_that_stands_elsewhere_than_its_kind() -> None:
    seen = climbing([Rung.SEALED, Rung.SEALED, Rung.TRAINED], [Rung.TRAINED, Rung.TRAINED])
    status = status_of(seen)
    assert ["sums-trainer-2-0"] == [pod.name for pod in status.out_of_line]
