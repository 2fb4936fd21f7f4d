"""Pods as the operator renders them, on a real API server with its scheduler: templates, claimed devices, queues."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml
from cluster import Cluster
from contract.api_server import ApiServer, Document, Kubectl
from documents.blocks import under

import quick_yaml
from builders import OWN_ROLLOUT, make_job
from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.seats import ROLLOUT_SEAT, gpu_seat
from colocated_rl_operator.loop.objects import IS_ENDING
from colocated_rl_operator.manifests import belongings
from colocated_rl_operator.manifests.resources import PodImages, pod
from fakes.quality_of_service import quality_of_service
from scenarios.corpus import GOOD, GPU_EXAMPLES, Case
from setup.layout import CHECKOUT

pytestmark = pytest.mark.cluster

NAMESPACE = "rendered"
OPEN_NAMESPACE = "rendered-open"
BASELINE_NAMESPACE = "rendered-baseline"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
IMAGES = PodImages(
    "agent", "rollout", "gpu", "Always", requests_disk=False
)  # which the nodes of this cluster do not count
DEADLINE_S = 120.0

CLUSTER: list[Document] = [
    {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
    },
    {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": OPEN_NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "privileged"}},
    },
    {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": BASELINE_NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "baseline"}},
    },
    {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "research"},
        "value": 7,
    },
    {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"},
    {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "model", "namespace": NAMESPACE},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}},
    },
    {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "reader", "namespace": NAMESPACE}},
]

GATES: list[Document] = [  # what Kueue's webhook does to a pod with the label of a queue, in the server's own words
    {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": "queue"},
        "spec": {
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "matchConstraints": {
                "resourceRules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                ],
                "objectSelector": {"matchExpressions": [{"key": "kueue.x-k8s.io/queue-name", "operator": "Exists"}]},
            },
            "mutations": [
                {
                    "patchType": "ApplyConfiguration",
                    "applyConfiguration": {
                        "expression": "Object{spec: Object.spec{schedulingGates: "
                        "[Object.spec.schedulingGates{name: 'kueue.x-k8s.io/admission'}]}}"
                    },
                }
            ],
        },
    },
    {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": "queue"},
        "spec": {"policyName": "queue"},
    },
]


def rendered(name: str, seat: str = "gpu-0", **spec: Any) -> Document:
    return of_this_server(pod(make_job(name, **spec), seat, 0, IMAGES))


def of_this_server(body: Document) -> Document:
    """A pod without its job, which is not there."""
    del body["metadata"]["ownerReferences"]
    body["metadata"]["namespace"] = NAMESPACE
    return body


@pytest.fixture(scope="module", autouse=True)
def world(kubectl: Kubectl) -> Iterator[None]:
    """Create the objects that an admin has prepared, and the claims of a job."""
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(CLUSTER))
    for namespace in (NAMESPACE, OPEN_NAMESPACE, BASELINE_NAMESPACE):
        kubectl.wait_until_pods_may_come(namespace)
    yield
    kubectl("delete", "--wait=false", "-f", "-", stdin=yaml.safe_dump_all(CLUSTER))


@pytest.fixture
def queue(kubectl: Kubectl) -> Iterator[None]:
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(GATES))
    yield
    kubectl("delete", "--wait=false", "-f", "-", stdin=yaml.safe_dump_all(GATES))


def dry_run(api: ApiServer, body: Document) -> str:
    """The server's objection, with pod security and all other admission; empty when there is none."""
    answer = api.request("POST", f"{PODS}?dryRun=All&fieldValidation=Strict", body)
    return "" if answer.is_accepted else answer.message


@pytest.mark.parametrize("seat", [gpu_seat(0), "reference-0", ROLLOUT_SEAT])
@pytest.mark.parametrize(
    "file",
    [
        pytest.param("crds/examples/full.yaml", marks=pytest.mark.since_kubernetes(1, 36)),  # its gang
        "tests/scenarios/manifests/good/pod-templates.yaml",
    ],
)
def test_pods_with_everything_that_a_template_may_say_are_admitted(api: ApiServer, file: str, seat: str) -> None:
    spec = quick_yaml.load((CHECKOUT.root / file).read_text())["spec"]
    assert "" == dry_run(api, rendered("templated", seat, **spec))


@pytest.mark.parametrize("seat", ["trainer-0", "engine-3", "reference-0", ROLLOUT_SEAT])
def test_pods_with_a_template_of_their_role_are_admitted(api: ApiServer, seat: str) -> None:
    assert "" == dry_run(api, rendered("pools", seat, **quick_yaml.load(GOOD["pod-templates-by-role"].text)["spec"]))


def test_what_an_admin_lets_pods_have_of_their_node_their_namespace_has_to_let_in_too(api: ApiServer) -> None:
    spec = quick_yaml.load(GOOD["pod-templates-of-the-node"].text)["spec"]
    body = rendered("noded", **spec)
    refused = dry_run(api, body)
    assert 'violates PodSecurity "restricted:latest": host namespaces (hostNetwork=true)' in refused
    assert 'restricted volume type "hostPath"' in refused
    body["metadata"]["namespace"] = OPEN_NAMESPACE
    answer = api.request("POST", f"/api/v1/namespaces/{OPEN_NAMESPACE}/pods?dryRun=All&fieldValidation=Strict", body)
    assert answer.is_accepted, answer.message
    assert "ClusterFirstWithHostNet" == answer.body["spec"]["dnsPolicy"]


@pytest.mark.parametrize("seat", [gpu_seat(0), ROLLOUT_SEAT])
def test_a_volume_of_a_file_server_is_for_namespaces_that_enforce_less_than_restricted(
    api: ApiServer, seat: str
) -> None:
    body = rendered("filed", seat, **quick_yaml.load(GOOD["pod-templates-nfs"].text)["spec"])
    assert 'violates PodSecurity "restricted:latest": restricted volume types' in dry_run(api, body)
    body["metadata"]["namespace"] = BASELINE_NAMESPACE
    place = f"/api/v1/namespaces/{BASELINE_NAMESPACE}/pods?dryRun=All&fieldValidation=Strict"
    answer = api.request("POST", place, body)
    assert answer.is_accepted, answer.message
    [volume] = [each["nfs"] for each in answer.body["spec"]["volumes"] if "nfs" in each]
    assert {"server": "files.example.com", "path": "/data", "readOnly": True} == volume


@pytest.mark.parametrize(
    "model",
    [
        {"huggingFace": {"name": "us/small", "revision": "a" * 40, "secretName": "hub"}},
        {"huggingFace": {"name": "us/small", "revision": "a" * 40, "cacheClaimName": "models"}},
        pytest.param(
            {"image": {"reference": "registry.example.com/models/small:1", "pullPolicy": "IfNotPresent"}},
            marks=pytest.mark.since_kubernetes(1, 35),
        ),
    ],
    ids=["hub", "hub-with-cache", "image"],
)
@pytest.mark.parametrize("seat", [gpu_seat(0), "reference-0", ROLLOUT_SEAT])
def test_pods_are_admitted_wherever_their_model_comes_from(api: ApiServer, seat: str, model: Document) -> None:
    assert "" == dry_run(api, rendered("sourced", seat, model=model))


@pytest.mark.parametrize("seat", [gpu_seat(0), ROLLOUT_SEAT])
def test_a_model_that_nodes_keep_is_for_a_namespace_that_lets_their_paths_in(api: ApiServer, seat: str) -> None:
    hub = {"name": "us/small", "revision": "a" * 40, "cacheHostPath": "/mnt/models"}
    body = rendered("kept", seat, model={"huggingFace": hub})
    assert "restricted volume types" in dry_run(api, body)
    body["metadata"]["namespace"] = OPEN_NAMESPACE
    place = f"/api/v1/namespaces/{OPEN_NAMESPACE}/pods?dryRun=All&fieldValidation=Strict"
    answer = api.request("POST", place, body)
    assert answer.is_accepted, answer.message


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"priorityClassName": "nobody-knows"}, "no PriorityClass with name nobody-knows was found"),
        ({"affinity": {"podAffinity": {"typo": []}}}, 'unknown field "spec.affinity.podAffinity.typo"'),
        (
            {"volumes": [{"name": "a", "emptyDir": {}, "configMap": {"name": "a"}}]},
            "may not specify more than 1 volume",
        ),
        ({"tolerations": [{"operator": "Sometimes"}]}, "spec.tolerations[0].operator"),
    ],
)
def test_what_the_schema_cannot_judge_the_server_does(api: ApiServer, template: Document, words: str) -> None:
    body = rendered("judged", podTemplates={"gpu": {"spec": template}})
    assert words in dry_run(api, body)


@pytest.mark.parametrize("limits", [{}, {"memory": "8Gi", "ephemeral-storage": "20Gi"}], ids=["usual", "limited"])
@pytest.mark.parametrize("seat", [gpu_seat(0), "reference-0", ROLLOUT_SEAT])
def test_volumes_and_disk_of_a_pod_are_what_the_server_takes(api: ApiServer, seat: str, limits: Document) -> None:
    rollout = OWN_ROLLOUT | {"resources": {"limits": limits}}
    job = make_job("filled", gpus={"count": 0, "resources": {"limits": limits}}, rollout=rollout)
    body = of_this_server(pod(job, seat, 0, replace(IMAGES, requests_disk=True)))
    answer = api.request("POST", f"{PODS}?dryRun=All&fieldValidation=Strict", body)
    assert answer.is_accepted, answer.message
    volumes = {each["name"]: each["emptyDir"] for each in answer.body["spec"]["volumes"] if "emptyDir" in each}
    assert {"100Gi", "20Gi"} & {each["sizeLimit"] for each in volumes.values()}
    if seat == gpu_seat(0):
        assert {"medium": "Memory", "sizeLimit": str(4 << 30) if limits else "64Gi"} == volumes["shm"]


SIDECAR = {"name": "logs", "image": "logs", "restartPolicy": "Always"}
BOUND: Document = {"limits": {"cpu": "4", "memory": "8Gi"}}


@pytest.mark.parametrize("seat", [gpu_seat(0), "reference-0", ROLLOUT_SEAT])
@pytest.mark.parametrize(
    ("resources", "beside", "expected"),
    [
        (BOUND, [], "Guaranteed"),
        (BOUND, [SIDECAR | {"resources": BOUND}], "Guaranteed"),
        (BOUND, [SIDECAR], "Burstable"),
        ({"limits": {"memory": "8Gi"}}, [], "Burstable"),
    ],
    ids=["CPUs limited", "a sidecar's too", "a sidecar's not", "CPUs not limited"],
)
def test_a_pod_whose_cpus_are_limited_is_guaranteed_and_others_may_use_what_is_idle(
    api: ApiServer, seat: str, resources: Document, beside: list[Document], expected: str
) -> None:
    rollout = OWN_ROLLOUT | {"placement": "WithTrainer", "replicas": None, "resources": resources}
    rollout |= {"prompts": OWN_ROLLOUT["prompts"] | {"resources": resources}}
    body = rendered(
        "classed",
        seat,
        gpus={"count": 1, "resources": resources},
        rollout=rollout,
        model={"huggingFace": {"name": "us/small", "revision": "a" * 40}},
        podTemplates={role: {"spec": {"initContainers": beside}} for role in ("gpu", "rollout")},
    )
    answer = api.request("POST", f"{PODS}?dryRun=All&fieldValidation=Strict", body)
    assert answer.is_accepted, answer.message
    assert expected == answer.body["status"]["qosClass"] == quality_of_service(body)


@pytest.mark.parametrize("example", GPU_EXAMPLES, ids=lambda case: case.name)
def test_every_pod_of_the_jobs_for_gpu_nodes_is_accepted(api: ApiServer, example: Case) -> None:
    manifest = quick_yaml.load(example.text)
    spec = ColocatedRLJobSpec.model_validate(manifest["spec"])
    job = replace(make_job(manifest["metadata"]["name"]), spec=spec)
    for seat in job.seats.all:
        answer = api.request(
            "POST", f"{PODS}?dryRun=All&fieldValidation=Strict", of_this_server(pod(job, seat, 0, IMAGES))
        )
        assert answer.is_accepted, f"{seat}: {answer.message}"


def test_nodes_are_labelled_and_their_devices_shown_as_the_page_for_one_gpu_says(kubectl: Kubectl) -> None:
    """No device plugin is there, so none is shown."""
    label, _, show = under("docs/first-gpu-job.md", "What you need")
    _, *words = shlex.split(label)
    labelled = json.loads(kubectl(*words, "--dry-run=server", "-o", "json"))
    nodes = labelled.get("items", [labelled])  # of one node, that
    assert {"true"} == {node["metadata"]["labels"]["nvidia.com/gpu.present"] for node in nodes}
    _, *words = shlex.split(show)
    heads, *rows = (line.split() for line in kubectl(*words).splitlines())
    assert ["NAME", "GPUS"] == heads
    assert sorted([node["metadata"]["name"], "<none>"] for node in nodes) == sorted(rows)


@pytest.mark.since_kubernetes(1, 34)
def test_devices_of_a_claim_come_to_the_pod_by_the_scheduler(plain_cluster: Cluster, api: ApiServer) -> None:
    """No device plugin is there: an admin has written a ResourceClaimTemplate, for GPUs and for what is beside them."""
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "one", "namespace": NAMESPACE},
        "spec": {
            "spec": {
                "devices": {
                    "requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.example.com", "count": 1}}]
                }
            }
        },
    }
    beside = {
        "resourceClaims": [{"name": "network", "resourceClaimTemplateName": "one"}],
        "containers": [{"name": "gpu", "resources": {"claims": [{"name": "network"}]}}],
    }
    spec: dict[str, Any] = {
        "gpus": {"count": 1, "resourceClaimTemplateName": "one"},
        "podTemplates": {"gpu": {"spec": beside}},
    }
    job = make_job("claims", replicas=1, **spec)
    claims = [each | {"metadata": each["metadata"] | {"namespace": NAMESPACE}} for each in belongings.claims(job)]
    plain_cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all([template, *claims]))
    body = rendered("claims", replicas=1, **spec)
    answer = api.request("POST", f"{PODS}?fieldValidation=Strict", body)
    assert answer.is_accepted, answer.message
    where = ("--namespace", NAMESPACE)

    def devices() -> dict[str, list[str]] | None:
        seen = plain_cluster.get("pod", body["metadata"]["name"], *where)
        if condition(seen, "PodScheduled")[:1] != ("True",):
            return None
        found = {}
        for claim in seen["status"]["resourceClaimStatuses"]:
            allocated = plain_cluster.get("resourceclaim", claim["resourceClaimName"], *where)["status"]["allocation"]
            found[claim["name"]] = [each["driver"] for each in allocated["devices"]["results"]]
        return found

    try:
        found = plain_cluster.wait_for("a node with two devices", devices, DEADLINE_S)
        assert {"gpus": ["gpu.example.com"], "network": ["gpu.example.com"]} == found
    finally:
        plain_cluster.kubectl("delete", "pod", body["metadata"]["name"], *where, "--force", "--grace-period=0")


def test_a_name_that_will_be_free_is_distinguished_from_one_that_is_taken(api: ApiServer) -> None:
    """The server's message distinguishes them: the operator waits for the one, and reports who has the other."""
    body = rendered("taken")
    body["metadata"]["finalizers"] = ["rl.colocate.dev/of-a-test"]
    place = f"{PODS}/{body['metadata']['name']}"
    assert api.request("POST", PODS, body).is_accepted
    taken = api.request("POST", PODS, body)
    api.request("DELETE", f"{place}?gracePeriodSeconds=0")
    ending = api.request("POST", PODS, body)
    api.request("PATCH", place, {"metadata": {"finalizers": None}}, content_type="application/merge-patch+json")
    assert [(409, False), (409, True)] == [
        (message.status, IS_ENDING in message.message) for message in (taken, ending)
    ]


@pytest.mark.since_kubernetes(1, 36)  # policies that mutate
@pytest.mark.usefixtures("queue")
def test_pods_in_a_queue_wait_for_admission_and_others_do_not(plain_cluster: Cluster, api: ApiServer) -> None:
    """The gate is what Kueue puts on a pod with that label; nothing of the operator's takes it off."""
    queued = {"gpu": {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "research"}}}}

    def gates(seat: str, **templates: Document) -> list[str]:
        answer = api.request("POST", f"{PODS}?dryRun=All", rendered("queued", seat, podTemplates=templates))
        assert answer.is_accepted, answer.message
        return [gate["name"] for gate in answer.body["spec"].get("schedulingGates", ())]

    admission = ["kueue.x-k8s.io/admission"]
    plain_cluster.wait_for("the policy at work", lambda: gates(gpu_seat(0), **queued) == admission, DEADLINE_S)
    assert (admission, []) == (gates(ROLLOUT_SEAT, **queued), gates(ROLLOUT_SEAT))


def condition(body: Document, kind: str) -> tuple[str, ...]:
    found = [each for each in body.get("status", {}).get("conditions", ()) if each["type"] == kind]
    return tuple(each["status"] for each in found)


def test_plain_json_is_all_that_a_pod_holds() -> None:
    """Values that the models read as enums and numbers go to the server as text and numbers."""
    body = rendered("plain", podTemplates={"gpu": {"spec": {"tolerations": [{"tolerationSeconds": 3}]}}})
    assert body == json.loads(json.dumps(body))
