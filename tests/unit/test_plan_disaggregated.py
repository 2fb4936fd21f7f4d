"""Plan and status of a job whose engines have pods and devices of their own (`rollout.placement: OwnDevices`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from builders import (
    OWN_ROLLOUT,
    PLACED,
    ROLLOUT,
    absent_engine,
    engine_at,
    facts_at,
    make_climb,
    make_first_step,
    make_job,
    make_observation,
    pod_targets,
    rollout_facts,
    status_of,
    trainers_at,
)
from colocated_rl_api import names
from colocated_rl_api.facts import PodFacts
from colocated_rl_api.failure import FailureCause
from colocated_rl_api.job_status import Holder, Phase
from colocated_rl_api.ladder import DISAGGREGATED, SCORED_DISAGGREGATED
from colocated_rl_api.member_wire import Goal, PodTarget, RolloutTarget
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from colocated_rl_operator.planner.actions import CreatePod, DeletePod
from colocated_rl_operator.planner.observation import (
    FailureTally,
    Job,
    Memory,
    Observation,
    PodPhase,
    remember,
)
from colocated_rl_operator.planner.plan import Plan, plan
from colocated_rl_operator.planner.reasons import Cause
from colocated_rl_operator.planner.silence import SILENCE_S

V0, V1 = WeightVersion(0, 1), WeightVersion(1, 1)
TRAINERS = ("sums-trainer-0-0", "sums-trainer-1-0")
ENGINES = ("sums-engine-0-0", "sums-engine-1-0")


def make_apart(trainers: int = 2, engines: int = 2, **spec: Any) -> Job:
    return make_job(replicas=trainers, rollout=OWN_ROLLOUT | {"replicas": engines}, **spec)


def climbing(trainers: list[Rung], engines: list[Rung | PodFacts], **options: Any) -> Observation:
    """Return a group on the way to (1, 1), epoch 1, whose engines serve (0, 1)."""
    job = options.pop("job", None) or make_apart(len(trainers), len(engines))
    pods: list[PodFacts | None] = [trainers_at(rung, V1) for rung in trainers]
    pods += [engine_at(rung, V1) if isinstance(rung, Rung) else rung for rung in engines]
    return make_first_step(job, pods, **options)


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
        ({"placement": "OwnDevices"}, "replicas is the number of engine pods with devices of their own"),
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
    asked = pod_targets(climbing([Rung.SEALED, Rung.TRAINED], [Rung.TRAINED, Rung.TRAINED]))
    assert {Rung.TRAINED} == {target.rung for target in asked.values()}
    assert {V0} == {target.weights for target in asked.values()}, "for an engine that has to start again"


def test_engines_get_weights_as_target_once_every_trainer_has_written_them() -> None:
    one = pod_targets(climbing([Rung.EXPORTED, Rung.TRAINED], [Rung.TRAINED, Rung.TRAINED]))
    assert {(Rung.EXPORTED, V0)} == {(target.rung, target.weights) for target in one.values()}
    both = pod_targets(climbing([Rung.EXPORTED, Rung.EXPORTED], [Rung.TRAINED, Rung.TRAINED]))
    assert {(Rung.EXPORTED, V1)} == {(target.rung, target.weights) for target in both.values()}


def test_an_engine_that_joins_while_a_trainer_pod_is_gone_starts_on_the_weights_that_all_served() -> None:
    joins = engine_at(Rung.TRAINED, V1, epoch=0)
    whole = climbing([Rung.EXPORTED, Rung.EXPORTED], [Rung.TRAINED, joins])
    seen = replace(whole, members=tuple(member for member in whole.members if member.seat != "trainer-1"))
    assert {ENGINES[1]: V0} == {name: target.weights for name, target in pod_targets(seen).items()}


def test_no_gate_closes_before_every_engine_pod_has_compared_the_weights() -> None:
    waiting = pod_targets(climbing([Rung.EXPORTED, Rung.EXPORTED], [Rung.EXPORTED, Rung.TRAINED]))
    assert {Rung.EXPORTED} == {target.rung for target in waiting.values()}
    ready = pod_targets(climbing([Rung.EXPORTED, Rung.EXPORTED], [Rung.EXPORTED, Rung.EXPORTED]))
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
    asked = pod_targets(climbing([Rung.SERVING, Rung.SERVING], engines))
    assert {granted} == {target.rung for target in asked.values()}
    assert {V1} == {target.weights for target in asked.values()}


def test_samples_are_asked_of_engine_pods_and_trainers_meet_at_the_first_of_their_own() -> None:
    seen = climbing([Rung.SEALED, Rung.SEALED], [Rung.TRAINED, Rung.TRAINED])
    rollout = next(each for each in plan(seen).targets.values() if isinstance(each, RolloutTarget))
    assert ENGINES == tuple(endpoint.pod for endpoint in rollout.engines)
    (meeting,) = {target.rendezvous for target in pod_targets(seen).values()}
    assert meeting is not None
    assert (seen.current["trainer-0"].address, 2) == (meeting.address, meeting.world_size)


def test_a_lost_engine_pod_is_made_again_and_no_trainer_starts_again_for_it() -> None:
    whole = climbing([Rung.SEALED, Rung.SEALED], [Rung.TRAINED, Rung.TRAINED])
    lost = replace(whole, members=tuple(member for member in whole.members if member.seat != "engine-1"))
    decided = plan(lost)
    assert not decided.raises
    assert ["engine-1"] == [action.seat for action in decided.pods if isinstance(action, CreatePod)]
    assert whole.group == lost.group
    again = replace(
        next(member for member in whole.members if member.seat == "engine-1"), attempt=1, uid=names.PodUid("another")
    )
    back = replace(whole, members=tuple(again if member.seat == "engine-1" else member for member in whole.members))
    assert not plan(back).raises


PODS: list[tuple[str, dict[str, Any]]] = [
    ("PodEvicted", {"fate": FailureCause.POD_EVICTED, "ends_at": 160.0, "facts": None}),
    ("PodFailed", {"fate": FailureCause.POD_FAILED, "phase": PodPhase.FAILED, "facts": None}),
    ("MemberSilent", {"silent_since": 100.0 - SILENCE_S, "facts": None}),
]


def training(action: str, cause: str, **more: Any) -> Observation:
    """Trainers at work, under a policy of one rule. Pods stand on node-0 to node-3."""
    policy = {"rules": [{"onCauses": [cause], "action": action, **more}]}
    job = make_apart(failurePolicy=policy, backoffLimit=1)
    seen = climbing([Rung.SEALED, Rung.SEALED], [Rung.TRAINED, Rung.TRAINED], job=job)
    return remember(
        replace(seen, members=tuple(replace(pod, node=f"node-{place}") for place, pod in enumerate(seen.members)))
    )


def changed(seen: Observation, seat: str, **changes: Any) -> Observation:
    members = (replace(pod, **changes) if pod.seat == seat else pod for pod in seen.members)
    return remember(replace(seen, members=tuple(members)))


def recorded(seen: Observation, decided: Plan) -> Observation:
    return remember(replace(seen, climb=decided.climb))


@pytest.mark.parametrize("seat", ["trainer-0", "engine-0"])
def test_pods_of_either_side_avoid_the_nodes_that_the_job_avoids(seat: str) -> None:
    climb = replace(make_climb(1, cause=Cause.NEXT_STEP), tally=FailureTally(avoids=("node-2",)))
    seen = changed(climbing([Rung.SERVING] * 2, [Rung.SERVING] * 2, climb=climb), seat, phase=PodPhase.FAILED)
    assert CreatePod(seat, 1, avoids=("node-2",)) in plan(seen).pods


@pytest.mark.parametrize(("cause", "signs"), PODS, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize(("action", "avoids"), [("RestartPod", ()), ("ReplacePodElsewhere", ("node-3",))])
def test_no_rule_for_lost_pods_starts_the_trainers_again_for_one_of_engines_alone(
    cause: str, signs: dict[str, Any], action: str, avoids: tuple[str, ...]
) -> None:
    whole = training(action, cause)
    assert whole.climb is not None
    decided = plan(changed(whole, "engine-1", **signs))
    assert decided.raises, "what is counted and avoided is on record before the pod is made again"
    assert decided.climb is not None
    tally = FailureTally(
        pod_restarts=1,
        step=1,
        tries=1,
        cause=cause,
        action=decided.climb.tally.action,
        rule=0,
        avoids=avoids,
        counted=(1,) * (signs.get("fate") is FailureCause.POD_FAILED),
    )
    assert replace(whole.climb, epoch=2, cause=Cause.POD_REPLACED, tally=tally, replicas=2) == decided.climb
    assert action == decided.climb.tally.action
    assert set(TRAINERS) < decided.targets.keys()
    assert {(1, 1)} == {
        (target.step, target.lineage) for target in decided.targets.values() if isinstance(target, PodTarget)
    }
    of_trainers = plan(changed(whole, "trainer-1", **signs)).climb
    assert of_trainers is not None
    assert "" == of_trainers.group, "the trainers wait for theirs"


@pytest.mark.parametrize("action", ["RestartPod", "ReplacePodElsewhere"])
def test_a_lost_pod_of_engines_is_answered_once(action: str) -> None:
    """No second answer follows until its seat may be filled again; another pod that is
    lost with it is made again at the same time.
    """
    evicted = dict(PODS)["PodEvicted"]
    lost = changed(training(action, "PodEvicted", counts=True), "engine-1", created_at=99.5, **evicted)
    after = recorded(lost, plan(lost))
    assert not plan(after).raises
    later = changed(after, "engine-0", **evicted)
    again = plan(later)
    assert again.climb is not None
    assert (Cause.BACKOFF_LIMIT, 1) == (again.climb.cause, again.climb.restarts), "each loss counts"
    assert not plan(remember(replace(after, memory=Memory(epoch=1, raised=True)))).raises, (
        "another leader counts none twice"
    )


def test_a_pod_of_engines_that_was_lost_while_a_step_began_is_answered_too() -> None:
    """It was gone when the epoch was raised, but nothing had been decided about it."""
    lost = changed(training("RestartPod", "PodEvicted"), "engine-1", **dict(PODS)["PodEvicted"])
    gone = frozenset(pod.uid for pod in lost.members if pod.seat == "engine-1")
    decided = plan(replace(lost, memory=replace(lost.memory, gone=gone)))
    assert decided.climb is not None
    assert (Cause.POD_REPLACED, 1) == (decided.climb.cause, decided.climb.tally.pod_restarts)


def test_a_rule_that_counts_tries_ends_a_job_that_loses_engine_pods_again_and_again() -> None:
    rules = [
        {"onCauses": ["PodEvicted"], "action": "RestartPod", "maxTries": 1, "counts": False},
        {"onCauses": ["PodEvicted"], "action": "FailJob"},
    ]
    whole = training("RestartPod", "PodEvicted")
    whole = replace(whole, job=make_apart(failurePolicy={"rules": rules}))
    lost = changed(whole, "engine-1", **dict(PODS)["PodEvicted"])
    first = plan(lost)
    assert first.climb is not None
    assert (Cause.POD_REPLACED, 0) == (first.climb.cause, first.climb.restarts)
    assert not plan(recorded(lost, first)).raises
    second = plan(changed(recorded(lost, first), "engine-0", **dict(PODS)["PodEvicted"])).climb
    assert second is not None
    assert Cause.FAILURE_POLICY is second.cause


def test_a_pod_whose_engine_is_lost_too_often_is_made_again_beside_the_trainers() -> None:
    whole = training("ReplacePodElsewhere", "EngineLost")
    facts = whole.current["engine-0"].pod_facts
    assert facts is not None
    failing = facts.engines[0].model_copy(update={"failures": 1})
    decided = plan(changed(whole, "engine-0", facts=facts.model_copy(update={"engines": (failing,)})))
    assert whole.climb is not None
    assert decided.climb is not None
    assert [ENGINES[0]] == [action.name for action in decided.pods if isinstance(action, DeletePod)]
    assert (whole.group, 1, ("node-2",)) == (decided.climb.group, decided.climb.lineage, decided.climb.tally.avoids)


def test_a_lost_pod_of_trainers_begins_a_new_lineage_while_engines_serve_on() -> None:
    whole = climbing([Rung.SEALED, Rung.SEALED], [Rung.TRAINED, Rung.TRAINED])
    again = replace(whole.current["trainer-1"], attempt=1, uid=names.PodUid("another"))
    back = replace(whole, members=tuple(again if member.seat == "trainer-1" else member for member in whole.members))
    decided = plan(back)
    assert decided.raises
    assert decided.climb is not None
    assert (2, Cause.POD_REPLACED) == (decided.climb.lineage, decided.climb.cause)


def test_trainer_pods_stop_before_the_rollout_controller() -> None:
    seen = climbing([Rung.SERVING] * 2, [Rung.SERVING] * 2, climb=make_climb(1, cause=Cause.ALL_STEPS_DONE))
    for seat in ("engine-0", "engine-1", "trainer-0"):
        facts = seen.current[seat].pod_facts
        assert facts is not None
        seen = changed(seen, seat, facts=facts.model_copy(update={"stopped": True}))
    asked = {name: target.goal for name, target in plan(seen).targets.items()}
    assert {TRAINERS[1]: Goal.STOP, "sums-rollout-0": Goal.CLIMB} == asked


def test_an_engine_that_joins_a_resting_group_takes_what_the_others_serve() -> None:
    gone = engine_at(Rung.SERVING, V1).model_copy(update={"engines": (absent_engine(),), "export": None})
    joining = climbing([Rung.SERVING, Rung.SERVING], [Rung.SERVING, gone], rollout=rollout_facts(), served=V1)
    assert Rung.TRAINED is joining.slowest
    assert {(Rung.EXPORTED, V1)} == {(target.rung, target.weights) for target in pod_targets(joining).values()}


@pytest.mark.parametrize("placement", [Placement.TIME_SLICED, Placement.RESIDENT])
def test_other_placements_name_no_weights(placement: Placement) -> None:
    job = make_job(replicas=1, **PLACED[placement])
    assert (names.ROLE_GPU,) == tuple({seat.rpartition("-")[0] for seat in job.gpu_seats})
    assert job.trainer_seats == job.engine_seats == job.gpu_seats
    facts = facts_at(Rung.EXPORTED, V1, ladder=job.ladder)
    seen = make_observation(job, [facts], climb=make_climb(1), rollout=rollout_facts(sealed=1), served=V0)
    assert {None} == {target.weights for target in pod_targets(seen).values()}


def test_a_step_is_done_when_every_engine_holds_its_weights() -> None:
    for engines, done in (([Rung.UPDATED, Rung.DRAINED], 0), ([Rung.UPDATED, Rung.UPDATED], 1)):
        seen = climbing([Rung.SERVING, Rung.SERVING], list(engines))
        rollout = next(each for each in plan(seen).targets.values() if isinstance(each, RolloutTarget))
        assert done == rollout.trained_step


def test_status_says_what_follows_from_the_placement() -> None:
    seen = climbing([Rung.SEALED, Rung.SEALED], [Rung.TRAINED, Rung.TRAINED])
    status = status_of(seen)
    assert (Placement.DISAGGREGATED, Holder.BOTH, 4) == (status.placement, status.gpu_holder, status.ready_replicas)
    assert Phase.TRAINING is status.phase
    assert [] == status.out_of_line, "trainers and engines stand where their kind does"


def test_a_pod_out_of_line_is_one_that_stands_elsewhere_than_its_kind() -> None:
    seen = climbing([Rung.SEALED, Rung.SEALED, Rung.TRAINED], [Rung.TRAINED, Rung.TRAINED])
    status = status_of(seen)
    assert ["sums-trainer-2-0"] == [pod.name for pod in status.out_of_line]
