"""A job's pods are one group: for a queue, for a scheduler of gangs, and near one another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import OWN_ROLLOUT, UID, make_job, make_manifest
from colocated_rl_api import names
from colocated_rl_api.scheduling import Gang
from colocated_rl_api.seats import ROLLOUT_SEAT, gpu_seat, role_of
from colocated_rl_operator.clients.errors import JobInvalid
from colocated_rl_operator.loop.observe import read_job
from colocated_rl_operator.manifests import belongings, resources
from colocated_rl_operator.manifests.gangs import NEEDS, Gangs, is_in_gang
from colocated_rl_operator.manifests.profiles import Profile, Profiles
from colocated_rl_operator.manifests.resources import PodImages
from colocated_rl_operator.planner.observation import Job

IMAGES = PodImages(agent="agent:1", rollout="rollout:1", gpu="gpu:1", pull_policy="IfNotPresent")
SCHEDULERS = {Gang.VOLCANO: "volcano", Gang.COSCHEDULING: "scheduler-plugins-scheduler"}
IN_QUEUE = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "research"}}}
APART: dict[str, Any] = {
    "rollout": OWN_ROLLOUT | {"replicas": 3},
    "reference": {"placement": "OwnDevices", "replicas": 1, "gpus": {"count": 1}},
}
RACK = "example.com/rack"
KUEUE = "kueue.x-k8s.io/"
REQUIRED, PREFERRED = (f"{kind}DuringSchedulingIgnoredDuringExecution" for kind in ("required", "preferred"))


def images(*kinds: Gang) -> PodImages:
    return replace(IMAGES, gangs=Gangs(kinds, SCHEDULERS))


def scheduled(gang: Gang | None = None, **topology: str) -> dict[str, Any]:
    return {"gang": gang, "topology": topology or None}


def group_of(job: Job, *kinds: Gang) -> dict[str, Any]:
    found = belongings.start_parts(job, images(*kinds)).gang
    assert found is not None
    return found


def pod(job: Job, seat: str, *kinds: Gang) -> dict[str, Any]:
    return resources.pod(job, seat, 0, images(*kinds))


# -------------------------------------------------------------------------------------------------------------- queues
def test_all_pods_of_a_job_in_a_queue_are_one_group_of_known_size() -> None:
    """Kueue's pod integration demands it: the group's name is a label, its size an annotation, the same on each pod."""
    job = make_job(podTemplates={"gpu": IN_QUEUE}, **APART)
    bodies = {seat: pod(job, seat)["metadata"] for seat in job.seats.all}
    assert {"sums-6f1f0c5e"} == {each["labels"][KUEUE + "pod-group-name"] for each in bodies.values()}
    assert {"research"} == {each["labels"][KUEUE + "queue-name"] for each in bodies.values()}
    size = 2 + 3 + 1 + 1  # trainers, engines, a reference, the rollout controller
    assert {str(size)} == {each["annotations"][KUEUE + "pod-group-total-count"] for each in bodies.values()}
    ranks = {seat: each["labels"].get(KUEUE + "pod-group-pod-index") for seat, each in bodies.items()}
    assert {"trainer-1": "1", "engine-2": "2", "reference-0": "0", ROLLOUT_SEAT: None}.items() <= ranks.items()
    assert not any(key.startswith("kueue") for key in pod(make_job(), gpu_seat(0))["metadata"]["labels"])


OF_ITS_OWN = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "small"}}}


@pytest.mark.parametrize(
    ("rollout", "scheduling", "expected"),
    [
        (OF_ITS_OWN, {}, {KUEUE + "queue-name": "small"}),
        (OF_ITS_OWN, {"queuedPods": "WithDevices"}, {KUEUE + "queue-name": "small"}),
        ({}, {"queuedPods": "WithDevices"}, {}),
        (IN_QUEUE, {"queuedPods": "WithDevices"}, {KUEUE + "queue-name": "research"}),
    ],
    ids=["another queue", "another queue by itself", "none", "the same queue by itself"],
)
def test_a_rollout_pod_with_a_queue_of_its_own_or_none_is_not_in_the_group(
    rollout: dict[str, Any], scheduling: dict[str, Any], expected: dict[str, str]
) -> None:
    job = make_job(podTemplates={"gpu": IN_QUEUE, "rollout": rollout}, scheduling=scheduling)
    made, gpu = (pod(job, seat)["metadata"] for seat in (ROLLOUT_SEAT, gpu_seat(0)))
    assert expected == {key: made["labels"][key] for key in made["labels"] if KUEUE in key}
    assert not any(KUEUE in key for key in made.get("annotations", {}))
    assert "2" == gpu["annotations"][KUEUE + "pod-group-total-count"]


def test_a_job_may_say_that_all_pods_wait_in_its_queue_as_by_default() -> None:
    said, unsaid = (make_job(podTemplates={"gpu": IN_QUEUE}, scheduling=each) for each in ({"queuedPods": "All"}, {}))
    assert pod(said, ROLLOUT_SEAT) == pod(unsaid, ROLLOUT_SEAT)
    assert "research" == pod(said, ROLLOUT_SEAT)["metadata"]["labels"][KUEUE + "queue-name"]


def test_the_job_s_own_label_puts_its_pods_into_the_queue() -> None:
    """Kueue's users write it so. The template's labels win, and no other label of the job reaches its pods."""
    labels = {"kueue.x-k8s.io/queue-name": "research", "kueue.x-k8s.io/priority-class": "low", "team": "rl"}

    def rendered(seat: str, **spec: Any) -> dict[str, Any]:
        manifest = make_manifest(**spec)
        metadata = {"namespace": "default", "uid": UID, "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
        job = read_job(manifest | {"metadata": manifest["metadata"] | metadata | {"labels": labels}})
        found: dict[str, Any] = resources.pod(job, seat, 0, IMAGES)["metadata"]
        return found

    of_both = {"podTemplates": {"gpu": IN_QUEUE}}
    assert rendered(gpu_seat(0), **of_both) == rendered(gpu_seat(0))
    other = {"podTemplates": {"gpu": {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "urgent"}}}}}
    for spec, queue in (({}, "research"), (other, "urgent")):
        for seat in (gpu_seat(0), ROLLOUT_SEAT):
            found = rendered(seat, **spec)
            assert (queue, "low", "sums-6f1f0c5e") == tuple(
                found["labels"][KUEUE + label] for label in ("queue-name", "priority-class", "pod-group-name")
            )
            assert ("3", False) == (found["annotations"][KUEUE + "pod-group-total-count"], "team" in found["labels"])


def test_a_queue_keeps_pods_of_each_role_in_the_domain() -> None:
    for kind in ("required", "preferred"):
        job = make_job(podTemplates={"gpu": IN_QUEUE}, scheduling=scheduled(None, **{kind: RACK}))
        gpu, rollout = (pod(job, seat, Gang.NATIVE) for seat in (gpu_seat(0), ROLLOUT_SEAT))
        assert RACK == gpu["metadata"]["annotations"][f"{KUEUE}podset-{kind}-topology"]
        assert not any("topology" in key for key in rollout["metadata"]["annotations"])
        assert "affinity" not in gpu["spec"]
        assert "schedulingConstraints" not in group_of(job, Gang.NATIVE)["spec"], "the queue's would differ"


# --------------------------------------------------------------------------------------------------------------- gangs
def test_all_pods_with_devices_are_one_gang_in_the_words_of_its_scheduler() -> None:
    job = make_job(**APART)
    size = 2 + 3 + 1
    for gang, spec in (
        (Gang.NATIVE, {"schedulingPolicy": {"gang": {"minCount": size}}}),
        (Gang.VOLCANO, {"minMember": size}),
        (Gang.COSCHEDULING, {"minMember": size}),
    ):
        group = group_of(job, gang)
        name = group["metadata"]["name"]
        assert (spec, "PodGroup") == (group["spec"], group["kind"])
        assert UID == group["metadata"]["ownerReferences"][0]["uid"]
        assert group["apiVersion"] in NEEDS
        for seat in job.seats.all:
            body = pod(job, seat, gang)
            carried = (
                body["spec"].get("schedulingGroup", {}).get("podGroupName"),
                body["metadata"]["annotations"].get("scheduling.k8s.io/group-name"),
                body["metadata"]["labels"].get("scheduling.x-k8s.io/pod-group"),
            )
            expected = tuple(name if each is gang else None for each in (Gang.NATIVE, Gang.VOLCANO, Gang.COSCHEDULING))
            is_placed_alone = seat == ROLLOUT_SEAT
            assert ((None, None, None) if is_placed_alone else expected) == carried, (gang, seat)
            assert (None if is_placed_alone else SCHEDULERS.get(gang)) == body["spec"].get("schedulerName")
            assert is_in_gang(body) is not is_placed_alone
    assert not is_in_gang(pod(job, "trainer-0"))


def test_a_job_that_names_no_gang_has_the_first_of_the_cluster() -> None:
    assert "scheduling.volcano.sh/v1beta1" == group_of(make_job(), Gang.VOLCANO, Gang.NATIVE)["apiVersion"]
    chosen = make_job(scheduling=scheduled(Gang.NATIVE))
    assert "scheduling.k8s.io/v1alpha2" == group_of(chosen, Gang.VOLCANO, Gang.NATIVE)["apiVersion"]
    for job, kinds in ((make_job(), ()), (make_job(scheduling=scheduled(Gang.NONE)), (Gang.VOLCANO,))):
        parts = belongings.start_parts(job, images(*kinds))
        assert parts.gang is None
        assert parts.templates == belongings.start_parts(job, IMAGES).templates


def test_a_gang_that_the_operator_may_not_make_is_refused_with_what_to_do() -> None:
    job = make_job(scheduling=scheduled(Gang.VOLCANO))
    words = Gangs((Gang.NATIVE,)).objection(job)
    assert "spec.scheduling.gang is Volcano" in words
    assert "scheduling.gangs" in words
    assert words.endswith("Native")
    assert "" == Gangs((Gang.NATIVE, Gang.VOLCANO)).objection(job)
    for harmless in (make_job(), make_job(scheduling=scheduled(Gang.NONE))):
        assert "" == Gangs().objection(harmless)


def test_the_template_s_scheduler_goes_before_the_usual_one_of_its_gang() -> None:
    job = make_job(podTemplates={"gpu": {"spec": {"schedulerName": "default-scheduler"}}})
    assert "default-scheduler" == pod(job, gpu_seat(0), Gang.COSCHEDULING)["spec"]["schedulerName"]


def test_every_pod_with_devices_in_a_queue_has_its_labels_whatever_template_it_has() -> None:
    """Kueue takes pods of one group only if they wait in one queue."""
    templates = {
        "gpu": IN_QUEUE,
        **{role: {"metadata": {"labels": {"pool": role}}} for role in ("engine", "reference")},
    }
    job = make_job(podTemplates=templates, **APART)
    for seat in ("trainer-0", "engine-0", "reference-0"):
        labels = pod(job, seat)["metadata"]["labels"]
        assert ("research", "sums-6f1f0c5e") == tuple(
            labels[f"kueue.x-k8s.io/{label}"] for label in ("queue-name", "pod-group-name")
        )


def test_another_size_is_another_group_whose_name_fits_a_label() -> None:
    """A group of Kubernetes' own never changes, and pods keep the one that they were made for."""
    two, three = (make_job("j" * 40, replicas=replicas) for replicas in (2, 3))
    for gang in (Gang.NATIVE, Gang.VOLCANO, Gang.COSCHEDULING):
        name, other = (group_of(job, gang)["metadata"]["name"] for job in (two, three))
        assert name != other
        assert name == group_of(two, gang)["metadata"]["name"]
        assert len(name) <= 63
    queued = pod(make_job("j" * 40, podTemplates={"gpu": IN_QUEUE}), gpu_seat(0))["metadata"]["labels"]
    assert len(queued[KUEUE + "pod-group-name"]) <= 63
    assert names.ROLE_GPU == queued[names.ROLE_LABEL]


def test_volcano_is_told_the_priority_that_a_profile_gives_the_pods() -> None:
    """Pods had it and their gang had none, by which Volcano ranks jobs."""
    usual = Profile.model_validate({"gpu": {"defaults": {"priorityClassName": "low"}}})
    given = replace(images(Gang.VOLCANO), profiles=Profiles({"default": usual}))
    for template, expected in (({}, "low"), ({"spec": {"priorityClassName": "high"}}, "high")):
        job = make_job(podTemplates={"gpu": template})
        parts = belongings.start_parts(job, given)
        made = resources.pod(job, gpu_seat(0), 0, given)
        assert parts.gang is not None
        assert [expected] * 2 == [each["spec"]["priorityClassName"] for each in (parts.gang, made)]
        assert parts.gang["metadata"]["name"] == made["metadata"]["annotations"]["scheduling.k8s.io/group-name"]


def test_volcano_is_told_queue_and_priority_of_the_gang() -> None:
    annotated = {"metadata": {"annotations": {"scheduling.volcano.sh/queue-name": "team"}}}
    job = make_job(podTemplates={"gpu": annotated | {"spec": {"priorityClassName": "low"}}})
    expected = {"minMember": 2, "queue": "team", "priorityClassName": "low"}
    assert expected == group_of(job, Gang.VOLCANO)["spec"]


# ------------------------------------------------------------------------------------------------------------- topology
@pytest.mark.parametrize(
    ("gang", "kind", "in_group"),
    [
        (Gang.NATIVE, "required", {"schedulingConstraints": {"topology": [{"key": RACK}]}}),
        (Gang.VOLCANO, "required", {"networkTopology": {"mode": "hard", "highestTierName": RACK}}),
        (Gang.VOLCANO, "preferred", {"networkTopology": {"mode": "soft", "highestTierName": RACK}}),
    ],
)
def test_a_group_that_knows_of_topology_keeps_it(gang: Gang, kind: str, in_group: dict[str, Any]) -> None:
    job = make_job(scheduling=scheduled(None, **{kind: RACK}))
    assert in_group.items() <= group_of(job, gang)["spec"].items()
    assert "affinity" not in pod(job, gpu_seat(0), gang)["spec"]


@pytest.mark.parametrize("gangs", [(), (Gang.COSCHEDULING,), (Gang.NATIVE,)])
def test_elsewhere_pods_have_an_affinity_to_one_another_beside_that_of_their_template(gangs: tuple[Gang, ...]) -> None:
    own = {"weight": 1, "podAffinityTerm": {"topologyKey": "example.com/row"}}
    templates = {"gpu": {"spec": {"affinity": {"podAffinity": {PREFERRED: [own]}, "podAntiAffinity": {"a": []}}}}}
    job = make_job(podTemplates=templates, scheduling=scheduled(None, preferred=RACK), **APART)
    for seat in (seat for seat in job.seats.all if seat != ROLLOUT_SEAT):
        affinity = pod(job, seat, *gangs)["spec"]["affinity"]
        first, added = affinity["podAffinity"][PREFERRED]
        term = added["podAffinityTerm"]
        assert (own, {"a": []}, RACK) == (first, affinity["podAntiAffinity"], term["topologyKey"])
        assert {names.JOB_UID_LABEL: UID} == term["labelSelector"]["matchLabels"]
    assert "affinity" not in pod(job, ROLLOUT_SEAT, *gangs)["spec"]


def test_a_required_domain_is_a_required_affinity_where_nothing_else_keeps_it() -> None:
    job = make_job(scheduling=scheduled(None, required=RACK))
    for gangs in ((), (Gang.COSCHEDULING,)):
        (term,) = pod(job, gpu_seat(1), *gangs)["spec"]["affinity"]["podAffinity"][REQUIRED]
        (others,) = term["labelSelector"]["matchExpressions"]
        assert (RACK, "NotIn", [role_of(ROLLOUT_SEAT)]) == (term["topologyKey"], others["operator"], others["values"])


ZONE = "topology.kubernetes.io/zone"


def of_roles(**scheduling: Any) -> Job:
    """Trainers in one rack, engines in one zone if there is room, a reference like the trainers."""
    rollout = APART["rollout"] | {"topology": {"preferred": ZONE}}
    return make_job(**APART | {"rollout": rollout}, scheduling=scheduled(None, required=RACK), **scheduling)


@pytest.mark.parametrize("gangs", [(), (Gang.NATIVE,), (Gang.VOLCANO,), (Gang.COSCHEDULING,)])
def test_pods_of_a_role_with_a_topology_of_its_own_are_near_one_another_alone(gangs: tuple[Gang, ...]) -> None:
    """A group has one topology for all of its pods, so no group keeps these."""
    job = of_roles()
    near: dict[str, tuple[str, str, list[str]]] = {}
    for seat in ("trainer-0", "engine-0", "reference-0"):
        ((kind, (term,)),) = pod(job, seat, *gangs)["spec"]["affinity"]["podAffinity"].items()
        term = term if kind == REQUIRED else term["podAffinityTerm"]
        ((roles),) = term["labelSelector"]["matchExpressions"]
        near[seat] = (kind + term["topologyKey"], roles["operator"], roles["values"])
    others = (REQUIRED + RACK, "NotIn", [names.ROLE_ROLLOUT, names.ROLE_ENGINE])
    engines = (PREFERRED + ZONE, "In", [names.ROLE_ENGINE])
    assert {"trainer-0": others, "engine-0": engines, "reference-0": others} == near
    if gangs:
        assert not {"schedulingConstraints", "networkTopology"} & group_of(job, *gangs)["spec"].keys()


def test_a_queue_keeps_pods_of_a_role_by_its_own_topology() -> None:
    job = of_roles(podTemplates={"gpu": IN_QUEUE})
    kept = {
        seat: {key: value for key, value in pod(job, seat)["metadata"]["annotations"].items() if "topology" in key}
        for seat in ("trainer-0", "engine-0", "reference-0", ROLLOUT_SEAT)
    }
    rack = {f"{KUEUE}podset-required-topology": RACK}
    engines = {f"{KUEUE}podset-preferred-topology": ZONE}
    assert {"trainer-0": rack, "engine-0": engines, "reference-0": rack, ROLLOUT_SEAT: {}} == kept


@pytest.mark.parametrize(("field", "value"), [("elasticPolicy", {"minReplicas": 1}), ("spares", 1)])
def test_a_job_in_a_queue_has_a_fixed_number_of_pods(field: str, value: Any) -> None:
    manifest = make_manifest(**{field: value}, podTemplates={"gpu": IN_QUEUE})
    metadata = {"namespace": "default", "uid": UID, "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
    with pytest.raises(JobInvalid, match=rf"spec\.{field}: .* fixed number of pods"):
        read_job(manifest | {"metadata": manifest["metadata"] | metadata})
