"""These tests show what users see of the CRD on a real API server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from contract.api_server import Answer, ApiServer, Document, Kubectl

import quick_yaml
from builders import make_job
from colocated_rl_api import names
from colocated_rl_operator import crd
from colocated_rl_operator.clients.cluster import find_cluster
from colocated_rl_operator.clients.errors import Conflict
from colocated_rl_operator.clients.kube import APPLY, Kube
from colocated_rl_operator.manifests.resources import PodImages, pod
from setup.layout import CHECKOUT

pytestmark = pytest.mark.cluster

NAME = f"{names.PLURAL}.{names.GROUP}"
JOBS = f"/apis/{names.API_VERSION}/namespaces/default/{names.PLURAL}"
SEEN_AT = "2026-01-01T00:00:00Z"

STATUS: Document = {
    "phase": "Rollout",
    "step": 3,
    "readyReplicas": 2,
    "replicas": 3,
    "gpuHolder": "Rollout",
    "weightVersion": "3-1",
    "rung": "Serving",
    "rollout": {"reward": 0.25, "staleness": 0.5},
    "checkpoint": {"step": 40, "time": SEEN_AT},
    "lastSwitchSeconds": 1.5,
    "conditions": [
        {
            "type": "Ready",
            "status": "True",
            "reason": "Serving",
            "message": "",
            "lastTransitionTime": SEEN_AT,
            "observedGeneration": 1,
        }
    ],
}


@pytest.fixture
def job(api: ApiServer) -> Any:
    manifest = quick_yaml.load((CHECKOUT.root / "crds/examples/minimal.yaml").read_text())
    answer = api.request("POST", JOBS, manifest)
    assert answer.is_accepted, answer.message
    yield answer.body
    api.request("DELETE", f"{JOBS}/{manifest['metadata']['name']}")


def write_status(api: ApiServer, name: str, status: Document) -> Document:
    answer = api.request(
        "PATCH", f"{JOBS}/{name}/status", {"status": status}, content_type="application/merge-patch+json"
    )
    assert answer.is_accepted, answer.message
    return answer.body


def test_schema_is_structural_and_its_names_are_accepted(api: ApiServer) -> None:
    crd_path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{NAME}"
    conditions = api.request("GET", crd_path).body["status"]["conditions"]
    assert {"NamesAccepted": "True", "Established": "True"} == {each["type"]: each["status"] for each in conditions}


def test_plain_kubectl_apply_takes_the_crd(kubectl: Kubectl, api: ApiServer) -> None:
    kubectl("apply", "--dry-run=server", "--validate=strict", "-f", CHECKOUT.root / crd.CRD_FILE)


@pytest.mark.parametrize("name", [names.SHORT_NAME, names.SINGULAR, names.PLURAL, "rl"])
def test_jobs_are_listed_under_every_name(kubectl: Kubectl, job: Document, name: str) -> None:
    assert job["metadata"]["name"] in kubectl("get", name)


def test_columns_say_where_a_job_stands(kubectl: Kubectl, api: ApiServer, job: Document) -> None:
    name = job["metadata"]["name"]
    write_status(api, name, STATUS)
    header, line = kubectl("get", names.SHORT_NAME, name).splitlines()
    assert ["NAME", "PHASE", "STEP", "READY", "REPLICAS", "HOLDER", "VERSION", "AGE"] == header.split()
    assert [name, "Rollout", "3", "2", "3", "Rollout", "3-1"] == line.split()[:-1]
    header, line = kubectl("get", names.SHORT_NAME, name, "-o", "wide").splitlines()
    assert ["RUNG", "REWARD", "STALENESS", "CHECKPOINT", "SAVED", "LAST-SWITCH"] == header.split()[-6:]
    assert ["Serving", "0.25", "0.5", "40", "1.5"] == [line.split()[place] for place in (-6, -5, -4, -3, -1)]


def test_status_is_written_only_through_its_own_door(api: ApiServer, job: Document) -> None:
    name = job["metadata"]["name"]
    answer = api.request("PATCH", f"{JOBS}/{name}", {"status": STATUS}, content_type="application/merge-patch+json")
    assert {"observedGeneration": -1} == answer.body["status"]
    assert job["metadata"]["generation"] == write_status(api, name, STATUS)["metadata"]["generation"]


def test_two_writers_of_conditions_keep_each_others(api: ApiServer, job: Document) -> None:
    name = job["metadata"]["name"]
    for writer, kind in (("one", "Ready"), ("two", "Quota")):
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": name},
            "status": {"conditions": [STATUS["conditions"][0] | {"type": kind}]},
        }
        path = f"{JOBS}/{name}/status?fieldManager={writer}"
        answer = api.request("PATCH", path, body, content_type="application/apply-patch+yaml")
        assert answer.is_accepted, answer.message
    assert {"Ready", "Quota"} == {each["type"] for each in answer.body["status"]["conditions"]}


async def test_what_a_restored_backup_wrote_goes_with_the_operators_write_and_would_outlive_an_apply(
    api: ApiServer, kubectl: Kubectl, job: Document
) -> None:
    """An apply removes no field that another manager wrote too: a job that is restored and retried would be over still.

    An apply that is fenced by the version of the object is refused as often as a write that is: it saves no conflict.
    """
    name = job["metadata"]["name"]
    ended = STATUS | {"completionTime": SEEN_AT}
    path, old = f"{JOBS}/{name}/status?fieldManager=", job["metadata"]["resourceVersion"]
    restored = api.request("PATCH", f"{path}backup", {"status": ended}, content_type="application/merge-patch+json")
    assert restored.is_accepted, restored.message

    def apply(version: str) -> Answer:
        whose = {"apiVersion": names.API_VERSION, "kind": names.KIND}
        body = whose | {"metadata": {"name": name, "resourceVersion": version}, "status": STATUS}
        return api.request("PATCH", f"{path}{names.FIELD_MANAGER}&force=true", body, content_type=APPLY)

    assert 409 == apply(old).status
    applied = apply(restored.body["metadata"]["resourceVersion"])
    assert SEEN_AT == applied.body["status"]["completionTime"]

    async with Kube(find_cluster({"KUBECONFIG": str(kubectl.kubeconfig)})) as kube:
        version = applied.body["metadata"]["resourceVersion"]
        with pytest.raises(Conflict):
            await kube.write_status("default", name, resource_version=old, status=STATUS)
        written = await kube.write_status("default", name, resource_version=version, status=STATUS)
    assert STATUS == written["status"]


def test_condition_without_a_reason_is_refused(api: ApiServer, job: Document) -> None:
    condition = {key: value for key, value in STATUS["conditions"][0].items() if key != "reason"}
    answer = api.request(
        "PATCH",
        f"{JOBS}/{job['metadata']['name']}/status",
        {"status": {"conditions": [condition]}},
        content_type="application/merge-patch+json",
    )
    assert "status.conditions[0].reason" in answer.fields


def test_a_job_that_no_operator_has_seen_is_not_taken_for_one_at_rest(kubectl: Kubectl, job: Document) -> None:
    """kstatus finds a job without conditions Current, and `helm --wait` returned before anything had begun."""
    assert {"observedGeneration": -1} == job["status"]
    kubectl("wait", "--for=jsonpath={.status.observedGeneration}=-1", f"{names.SHORT_NAME}/{job['metadata']['name']}")


def test_kubectl_wait_follows_conditions(kubectl: Kubectl, api: ApiServer, job: Document) -> None:
    name = job["metadata"]["name"]
    write_status(api, name, STATUS)
    kubectl("wait", "--for=condition=Ready", f"{names.SHORT_NAME}/{name}", "--timeout=60s")
    kubectl("wait", "--for=jsonpath={.status.phase}=Rollout", f"{names.SHORT_NAME}/{name}", "--timeout=60s")


def test_kubectl_explain_has_a_sentence_for_every_field(kubectl: Kubectl, api: ApiServer) -> None:
    known = kubectl("explain", names.SHORT_NAME, "--recursive")
    properties = crd.resource_schema()["properties"]
    for part in ("spec", "status"):
        for fact in crd.facts_of(properties[part], path=part):
            assert f"  {fact.path.rsplit('.', 1)[1].removesuffix('[]')}\t" in known
    assert "<no description>" not in known
    limit = kubectl("explain", f"{names.SHORT_NAME}.spec.switch.settleSeconds")
    assert "From the closing of the gate to nothing in flight. (seconds; 1 to 3,600; default 30)" in " ".join(
        limit.split()
    )


def test_typo_is_refused_by_kubectl_with_the_field(kubectl: Kubectl, api: ApiServer) -> None:
    manifest = quick_yaml.load((CHECKOUT.root / "crds/examples/minimal.yaml").read_text())
    manifest["spec"]["rollout"]["batchsize"] = 3
    assert 'unknown field "spec.rollout.batchsize"' in kubectl.refusal(
        "apply", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest)
    )


def test_crd_of_this_checkout_replaces_one_with_stored_jobs(kubectl: Kubectl, api: ApiServer, job: Document) -> None:
    """A field that gets a default later appears in stored jobs, without a write."""
    later = quick_yaml.load((CHECKOUT.root / crd.CRD_FILE).read_text())
    spec = later["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"]["addedLater"] = {"type": "integer", "default": 5, "minimum": 0, "maximum": 9}
    name = f"{names.SHORT_NAME}/{job['metadata']['name']}"
    try:
        kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(later))
        kubectl("wait", "--for=jsonpath={.spec.addedLater}=5", name, "--timeout=60s")
    finally:
        kubectl("apply", "--server-side", "--force-conflicts", "-f", CHECKOUT.root / crd.CRD_FILE)


@pytest.mark.parametrize("action", ["RetryStep", "ReplacePodElsewhere"])
def test_a_pod_that_avoids_nodes_is_valid(api: ApiServer, action: str) -> None:
    """The API takes one name in each requirement on a node's name."""
    job = make_job(failurePolicy={"rules": [{"onCauses": ["TrainerDied"], "action": action}]})
    body = pod(job, "gpu-0", 3, PodImages("agent", "rollout", "gpu", "Always"), avoids=("node-1", "node-2"))
    answer = api.request("POST", "/api/v1/namespaces/default/pods?dryRun=All&fieldValidation=Strict", body)
    assert answer.is_accepted, answer.message
    affinity = answer.body["spec"]["affinity"]["nodeAffinity"]
    if action == "ReplacePodElsewhere":
        [term] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    else:
        [term] = [each["preference"] for each in affinity["preferredDuringSchedulingIgnoredDuringExecution"]]
    assert [["node-1"], ["node-2"]] == [field["values"] for field in term["matchFields"]]
