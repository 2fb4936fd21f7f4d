"""Plan, pods and status of a job whose reference has pods and devices of its own: no climb knows of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import (
    CREATED,
    OWN_ROLLOUT,
    PLACED,
    UID,
    condition,
    facts_at,
    make_climb,
    make_job,
    make_member,
    make_observation,
    plan_past_pods_deadline,
    rollout_facts,
    status_of,
)
from colocated_rl_api import names
from colocated_rl_api.failure import FailureCause
from colocated_rl_api.job_status import Phase
from colocated_rl_api.member_wire import PodTarget, RolloutTarget
from colocated_rl_api.rungs import Placement, ReferencePlacement, Rung, WeightVersion
from colocated_rl_operator.loop.observe import read_job
from colocated_rl_operator.manifests import belongings, resources
from colocated_rl_operator.manifests.resources import PodImages
from colocated_rl_operator.planner.actions import CreatePod, DeletePod
from colocated_rl_operator.planner.observation import (
    Job,
    Member,
    Observation,
    PodPhase,
    remember,
)
from colocated_rl_operator.planner.plan import patience_s, plan
from colocated_rl_operator.planner.reasons import Cause, ConditionType, Waiting
from colocated_rl_operator.planner.status import SCORING, SHARING

V1 = WeightVersion(1, 1)
IMAGES = PodImages(agent="agent:1", rollout="rollout:1", gpu="gpu:1", pull_policy="IfNotPresent")
APART: dict[str, Any] = {"reference": {"placement": "OwnDevices", "replicas": 2}}
SEATS = ("reference-0", "reference-1")


def make_apart(replicas: int = 1, **spec: Any) -> Job:
    return make_job(replicas=replicas, **APART | spec)


def seen_with(*references: Member, rung: Rung = Rung.SERVING, **options: Any) -> Observation:
    """Everybody else stands at (1, 1), in epoch 1."""
    usual: dict[str, Any] = {
        "climb": make_climb(1, cause=Cause.NEXT_STEP), "rollout": rollout_facts(trained=1, unscored=3), "served": V1,
    }  # fmt: skip
    job = options.pop("job", None) or make_apart()
    seen = make_observation(job, [facts_at(rung, V1)] * len(job.gpu_seats), **usual | options)
    return remember(replace(seen, members=(*seen.members, *references)))


def make_reference(replica: int, *, is_ready: bool = True, **changes: Any) -> Member:
    return make_member(f"reference-{replica}", is_ready=is_ready, **changes)


READY = make_reference(0), make_reference(1)


# -------------------------------------------------------------------------------------------------- seats and ladders
@pytest.mark.parametrize("placement", [Placement.TIME_SLICED, Placement.RESIDENT, Placement.DISAGGREGATED])
def test_no_ladder_has_a_rung_for_it(placement: Placement) -> None:
    job = make_apart(**PLACED[placement])
    assert make_job(**PLACED[placement]).ladder is job.ladder
    assert job.spec.seals_with_scores
    assert SEATS == job.reference_seats
    assert not {*SEATS} & {*job.gpu_seats}
    assert (*job.gpu_seats, *SEATS, "rollout") == job.seats.all


@pytest.mark.parametrize("placement", [Placement.TIME_SLICED, Placement.RESIDENT, Placement.DISAGGREGATED])
@pytest.mark.parametrize("reference", [ReferencePlacement.WITH_TRAINER, ReferencePlacement.OWN_DEVICES])
def test_f45_each_role_is_offloaded_for_the_devices_that_it_shares_itself(
    placement: Placement, reference: ReferencePlacement
) -> None:
    """In one job one role may share the trainers' devices, and another have its own."""
    is_apart = reference is ReferencePlacement.OWN_DEVICES
    job = make_job(replicas=1, **(APART if is_apart else {"reference": {}}), **PLACED[placement])
    assert (Rung.RELEASED in job.ladder.rungs) == (placement is Placement.TIME_SLICED), "engines give memory up"
    assert (Rung.SCORED in job.ladder.rungs) != is_apart, "the reference takes its turn before the step"
    status = status_of(seen_with(*(READY if is_apart else ()), job=job))
    assert (placement, reference) == (status.placement, status.reference and status.reference.placement)
    _, sharing = condition(status, ConditionType.GPU_SHARING_READY)
    assert SHARING[placement][1] + SCORING[reference] == sharing


def test_it_is_there_where_samples_are_made_and_only_there() -> None:
    assert SEATS == make_apart(mode="RolloutOnly").reference_seats
    recorded = make_apart(mode="TrainOnly", recorded={"claimName": "recording"})
    assert ((), True) == (recorded.reference_seats, recorded.spec.seals_with_scores), "its batches have the scores"
    assert () == make_job(reference={}).reference_seats
    assert not make_job(reference={}).spec.seals_with_scores


# ------------------------------------------------------------------------------------------------------------- the plan
def test_rollout_gets_its_address_and_nobody_else_hears_of_it() -> None:
    seen = seen_with(READY[0], make_reference(1, is_ready=False))
    targets = plan(seen).targets
    (rollout,) = [each for each in targets.values() if isinstance(each, RolloutTarget)]
    assert ["sums-reference-0-0", "sums-reference-1-0"] == [each.pod for each in rollout.references]
    assert {names.DATA_PORT} == {each.port for each in rollout.references}
    assert {"sums-gpu-0-0", "sums-rollout-0"} == {*targets}
    assert (Rung.SERVING, True) == (seen.slowest, seen.is_up)


def test_a_new_job_starts_without_waiting_for_it() -> None:
    seen = seen_with(make_reference(0, is_ready=False), climb=None, served=None)
    decided = plan(seen)
    assert decided.raises
    assert decided.climb is not None
    assert Cause.FIRST_START is decided.climb.cause
    assert ["reference-1"] == [action.seat for action in decided.pods if isinstance(action, CreatePod)]


def test_steps_go_on_while_none_of_it_is_there() -> None:
    """Batches that are sealed have its scores already."""
    seen = seen_with(rollout=rollout_facts(sealed=2, trained=1))
    decided = plan(seen)
    assert decided.raises
    assert decided.climb is not None
    assert (2, 1, Cause.NEXT_STEP) == (decided.climb.step, decided.climb.lineage, decided.climb.cause)
    assert {*SEATS} == {action.seat for action in decided.pods if isinstance(action, CreatePod)}


def test_a_lost_one_is_made_again_and_costs_nobody_anything() -> None:
    whole = seen_with(*READY)
    assert plan(whole).wait is None
    fallen = make_reference(1, is_ready=False, phase=PodPhase.FAILED, fate=FailureCause.POD_EVICTED)
    lost = seen_with(READY[0], fallen, now=1000.0)
    decided = plan(lost)
    assert not decided.raises
    assert [("reference-1", 1)] == [(each.seat, each.attempt) for each in decided.pods if isinstance(each, CreatePod)]
    assert whole.group == lost.group
    assert decided.wait is not None
    assert (Waiting.PODS, ("reference-1",)) == (decided.wait.reason, decided.wait.who)
    back = seen_with(READY[0], make_reference(1, attempt=1, uid="another"))
    assert not plan(back).raises


def test_devices_are_not_held_for_ever_for_one_that_never_comes() -> None:
    """PodsReadyDeadlineSeconds runs for it as for any pod."""
    missing = seen_with(READY[0])
    decided = plan_past_pods_deadline(missing)
    assert decided.climb is not None
    assert Cause.PODS_NOT_READY is decided.climb.cause
    assert "reference-1 (no pod)" in decided.message


def test_deadlines_of_rungs_run_on_without_it() -> None:
    climbing = seen_with(READY[0], rung=Rung.PAUSED)
    patience = patience_s(climbing.job.ladder, Rung.DRAINED, climbing.job.spec.switch)
    assert climbing.now + patience == plan(climbing).wake_at


def test_it_goes_at_once_when_a_job_ends_and_the_end_waits_for_it() -> None:
    stopped = {"stopped": True}
    done = make_climb(3, cause=Cause.ALL_STEPS_DONE)
    seen = seen_with(*READY, climb=done)
    decided = plan(seen)
    gone = [action.name for action in decided.pods if isinstance(action, DeletePod)]
    assert ["sums-reference-0-0", "sums-reference-1-0"] == gone
    assert not any(action.is_fault for action in decided.pods if isinstance(action, DeletePod))
    assert {"sums-gpu-0-0": "Stop"} == {
        name: target.goal for name, target in decided.targets.items() if isinstance(target, PodTarget)
    }

    facts = facts_at(Rung.SERVING, V1).model_copy(update=stopped)
    others = make_observation(
        make_apart(), [facts], climb=done, rollout=rollout_facts().model_copy(update=stopped), served=V1
    )
    assert plan(others).is_over
    still = remember(replace(others, members=(*others.members, READY[0])))
    assert (False, ["sums-reference-0-0"]) == (
        plan(still).is_over, [action.name for action in plan(still).pods if isinstance(action, DeletePod)],
    )  # fmt: skip
    ending = remember(replace(others, members=(*others.members, replace(READY[0], ends_at=200.0))))
    assert plan(ending).is_over


def test_it_goes_when_the_job_is_suspended() -> None:
    """Its pods go with all others, and are deleted by force where their node does not answer."""
    resting = make_climb(1, cause=Cause.SUSPENDED)
    seen = seen_with(*READY, climb=resting, job=make_apart(suspend=True))
    gone = {action.name for action in plan(seen).pods if isinstance(action, DeletePod)}
    assert {"sums-reference-0-0", "sums-reference-1-0"} <= gone


# --------------------------------------------------------------------------------------------------------------- status
def test_status_says_where_it_is_and_what_waits_for_it() -> None:
    status = status_of(seen_with(READY[0], make_reference(1, is_ready=False)))
    assert status.reference is not None
    found = status.reference
    assert (ReferencePlacement.OWN_DEVICES, 1, 2, 3) == (
        found.placement, found.ready_replicas, found.replicas, found.unscored,
    )  # fmt: skip
    _, shared = condition(status, ConditionType.GPU_SHARING_READY)
    assert shared.startswith(SHARING[Placement.TIME_SLICED][1])
    assert "the reference has GPUs of its own" in shared

    beside = status_of(make_observation(make_job(reference={}), [], climb=None, rollout=None)).reference
    assert beside is not None
    assert (ReferencePlacement.WITH_TRAINER, None, None) == (beside.placement, beside.ready_replicas, beside.unscored)
    assert status_of(make_observation(make_job(), [], climb=None, rollout=None)).reference is None


def test_rollout_goes_on_and_conditions_say_who_is_waited_for() -> None:
    status = status_of(seen_with(READY[0], make_reference(1, is_ready=False, trouble="gpu: no such model")))
    assert (Phase.ROLLOUT, "True") == (status.phase, condition(status, ConditionType.READY)[0])
    assert ("False", "reference-1 (gpu: no such model)") == (
        condition(status, ConditionType.PODS_READY)[0],
        condition(status, ConditionType.PODS_READY)[1].removeprefix("waiting for "),
    )
    assert 1 == status.ready_replicas == status.replicas, "of the pods that climb"
    whole = status_of(seen_with(*READY))
    assert "True" == condition(whole, ConditionType.PODS_READY)[0]
    loading = status_of(seen_with(READY[0], make_reference(1, is_ready=False)))
    assert "reference-1 (pod Running, not ready)" in condition(loading, ConditionType.PODS_READY)[1]


# -------------------------------------------------------------------------------------------------- pods and objects


def pod(seat: str, **spec: Any) -> dict[str, Any]:
    return resources.pod(make_apart(**spec), seat, 0, IMAGES)


def test_its_pods_have_devices_of_their_own_and_the_jobs_model() -> None:
    spec: dict[str, Any] = {"gpus": {"count": 8, "image": "all:1"}}
    spec["reference"] = APART["reference"] | {"gpus": {"count": 2, "resourceName": "amd.com/gpu"}}
    body = pod("reference-1", **spec)
    (container,) = body["spec"]["containers"]
    assert [] == body["spec"]["initContainers"], "no agent: it is no member"
    assert (names.GPU_CONTAINER, "all:1") == (container["name"], container["image"])
    assert "2" == container["resources"]["limits"]["amd.com/gpu"]
    assert ["python3", "-P", "-m", "colocated_rl_trainer.ref_policy"] == container["command"]
    mounted = {each["name"]: each.get("readOnly", False) for each in container["volumeMounts"]}
    assert {"model": True, "tls": True, "job": True}.items() <= mounted.items()
    assert not {"checkpoints", "weights", "batches", "store"} & {*mounted}
    assert {each["name"] for each in body["spec"]["volumes"]} == {*mounted}
    labels = body["metadata"]["labels"]
    assert ("reference", "1") == (labels[names.ROLE_LABEL], labels[names.REPLICA_LABEL])
    assert "/readyz" == container["readinessProbe"]["httpGet"]["path"]
    assert "OnFailure" == body["spec"]["restartPolicy"]


def test_its_pods_have_the_devices_of_all_when_nothing_else_is_specified() -> None:
    (container,) = pod("reference-0", gpus={"count": 4})["spec"]["containers"]
    assert "4" == container["resources"]["limits"]["nvidia.com/gpu"]
    claimed = pod("reference-0", gpus={"count": 4, "resourceClaimTemplateName": "four"})
    assert ["four"] == [each["resourceClaimTemplateName"] for each in claimed["spec"]["resourceClaims"]]


def test_template_of_gpu_pods_is_laid_over_them_and_a_lost_node_still_loses_them_soon() -> None:
    mine = {"key": "gpu", "operator": "Exists"}
    template = {"gpu": {"spec": {"tolerations": [mine], "priorityClassName": "low"}}}
    spec = pod("reference-0", podTemplates=template)["spec"]
    assert "low" == spec["priorityClassName"]
    assert mine in spec["tolerations"]
    assert {30} == {each["tolerationSeconds"] for each in spec["tolerations"] if each != mine}


def test_trainers_keep_no_scores_beside_batches_that_have_them() -> None:
    def mount_of(job: Job) -> dict[str, Any]:
        (gpu,) = resources.pod(job, "gpu-0", 0, IMAGES)["spec"]["containers"]
        (found,) = [each for each in gpu["volumeMounts"] if each["name"] == "batches"]
        return dict(found)

    assert mount_of(make_apart())["readOnly"]
    assert "readOnly" not in mount_of(make_job(reference={}))


def test_longest_name_of_its_pods_is_a_name() -> None:
    job = replace(make_apart(reference=APART["reference"] | {"replicas": 100}), name="a" * 40)
    seat = job.reference_seats[-1]
    name = resources.pod_name(job, seat, 999_999_999)
    assert 63 == len(name)
    assert (seat, 999_999_999) == resources.seat_and_attempt(job, name)


def test_only_the_rollout_controller_reaches_its_data_port() -> None:
    job = make_apart(rollout=OWN_ROLLOUT)
    _, policy, *_, own, _ = belongings.applied(job, operator_namespace="operators")
    (left_out,) = policy["spec"]["podSelector"]["matchExpressions"]
    assert (names.ROLE_LABEL, "NotIn", ["reference"]) == (left_out["key"], left_out["operator"], left_out["values"])
    assert {names.JOB_UID_LABEL: UID, names.ROLE_LABEL: "reference"} == own["spec"]["podSelector"]["matchLabels"]
    data, metrics = own["spec"]["ingress"]
    assert [{"protocol": "TCP", "port": names.DATA_PORT}] == data["ports"]
    assert [{names.JOB_UID_LABEL: UID, names.ROLE_LABEL: "rollout"}] == [
        each["podSelector"]["matchLabels"] for each in data["from"]
    ]
    assert [{"protocol": "TCP", "port": names.METRICS_PORT}] == metrics["ports"]
    assert "from" not in metrics
    assert policy["metadata"]["name"] != own["metadata"]["name"]
    assert 5 == len(belongings.applied(make_job(reference={}), operator_namespace="operators"))


def test_spec_is_read_as_it_was_written() -> None:
    job = make_apart()
    spec = job.spec.model_dump(by_alias=True, exclude_none=True, mode="json")
    metadata = {"namespace": "default", "name": "sums", "uid": UID, "generation": 1}
    body = {"metadata": {**metadata, "creationTimestamp": CREATED.isoformat()}, "spec": spec}
    assert job == read_job(body)


def test_references_get_new_keys_with_new_pods_one_after_the_other() -> None:
    """Nobody can send a reference another certificate or token: it listens to no operator."""
    both = frozenset(each.name for each in READY)

    def replaced(*references: Member, outdated: frozenset[str] = both) -> list[str]:
        seen = replace(seen_with(*references), outdated=outdated)
        deletions = [each for each in plan(seen).pods if isinstance(each, DeletePod)]
        assert not any(each.is_fault for each in deletions)
        return [each.name for each in deletions]

    assert ["sums-reference-0-0"] == replaced(*READY)
    assert ["sums-reference-1-0"] == replaced(*READY, outdated=both - {"sums-reference-0-0"})
    assert [] == replaced(*READY, outdated=frozenset())
    assert [] == replaced(make_reference(0, attempt=1, is_ready=False), READY[1]), "the first is not back yet"
    assert [] == replaced(READY[1]), "its seat is vacant"
