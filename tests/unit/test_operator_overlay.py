"""The templates of a job come into its pods, and take nothing away that the operator needs."""

from __future__ import annotations

from typing import Any

import pytest

from builders import UID, make_job, make_manifest
from colocated_rl_agent.runner import runner
from colocated_rl_api import names
from colocated_rl_api.pod_template import OWNED_PATHS, OWNED_VARIABLES, OWNED_VOLUME_PREFIXES, OWNED_VOLUMES
from colocated_rl_api.seats import ROLLOUT_SEAT, gpu_seat
from colocated_rl_operator.loop.observe import read_job
from colocated_rl_operator.manifests import resources
from colocated_rl_operator.manifests.resources import PodImages

IMAGES = PodImages(agent="agent:1", rollout="rollout:1", gpu="gpu:1", pull_policy="IfNotPresent")
SEATS = (gpu_seat(0), ROLLOUT_SEAT)
IN_QUEUE = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "research"}}}


STRICT = {"rules": [{"onCauses": ["TrainerDied"], "action": "ReplacePodElsewhere"}]}


def pod(seat: str, *avoids: str, **spec: Any) -> dict[str, Any]:
    return resources.pod(make_job(**spec), seat, 0, IMAGES, avoids=avoids)


def gpu_pod(template: dict[str, Any], *avoids: str, **spec: Any) -> dict[str, Any]:
    return pod(gpu_seat(0), *avoids, podTemplates={"gpu": template}, **spec)


def containers(body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in [*body["spec"].get("initContainers", []), *body["spec"]["containers"]]}


def test_where_a_pod_runs_is_written_in_the_words_of_a_pod() -> None:
    placement = {
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}},
        "priorityClassName": "research",
        "runtimeClassName": "nvidia",
        "schedulerName": "volcano",
        "serviceAccountName": "reader",
        "imagePullSecrets": [{"name": "registry"}],
    }
    usual, laid = pod(gpu_seat(0)), gpu_pod({"spec": placement})
    assert usual["spec"] | placement == laid["spec"]
    assert usual["metadata"] == laid["metadata"]
    assert usual["spec"]["automountServiceAccountToken"] is False


def test_a_template_is_of_one_role() -> None:
    templates = {"gpu": {"spec": {"nodeSelector": {"pool": "gpu"}}}, "rollout": {"spec": {"schedulerName": "slow"}}}
    gpu, rollout = (pod(seat, podTemplates=templates)["spec"] for seat in SEATS)
    assert ({"pool": "gpu"}, None) == (gpu["nodeSelector"], gpu.get("schedulerName"))
    assert (None, "slow") == (rollout.get("nodeSelector"), rollout["schedulerName"])


def test_labels_and_annotations_come_beside_the_operators_and_before_the_usual() -> None:
    laid = gpu_pod({"metadata": {"labels": {"team": "rl", "sidecar.istio.io/inject": "true"}}})
    usual = pod(gpu_seat(0))["metadata"]["labels"]
    assert usual | {"team": "rl", "sidecar.istio.io/inject": "true"} == laid["metadata"]["labels"]
    laid = gpu_pod({"metadata": {"annotations": {"karpenter.sh/do-not-disrupt": "false", "a": "b"}}})
    expected = {"karpenter.sh/do-not-disrupt": "false", "a": "b", "linkerd.io/inject": "disabled"}
    assert expected.items() <= laid["metadata"]["annotations"].items()


@pytest.mark.parametrize("seat", SEATS)
def test_a_service_mesh_leaves_pods_of_jobs_alone(seat: str) -> None:
    """Members do their own TLS by pod address, and a sidecar of a mesh outlives a pod that is done."""
    metadata = pod(seat)["metadata"]
    assert "false" == metadata["labels"]["sidecar.istio.io/inject"]
    assert "disabled" == metadata["annotations"]["linkerd.io/inject"]


def test_variables_and_mounts_go_to_the_container_that_they_are_given_for() -> None:
    secret = {"secretKeyRef": {"name": "wandb", "key": "key"}}
    template: dict[str, Any] = {
        "volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}],
        "containers": [
            {
                "name": "gpu",
                "env": [{"name": "WANDB_API_KEY", "valueFrom": secret}, {"name": "HF_HOME", "value": "/cache"}],
                "volumeMounts": [{"name": "cache", "mountPath": "/cache", "readOnly": True}],
            }
        ],
    }
    usual, laid = pod(gpu_seat(0)), gpu_pod({"spec": template})
    assert [*usual["spec"]["volumes"], *template["volumes"]] == laid["spec"]["volumes"]
    gpu, before = containers(laid)["gpu"], containers(usual)["gpu"]
    assert {"name": "WANDB_API_KEY", "valueFrom": secret} in gpu["env"]
    assert ["/cache"] == [each["value"] for each in gpu["env"] if each["name"] == "HF_HOME"], "not the usual one too"
    assert len(before["env"]) + 1 == len(gpu["env"])
    mount = {"name": "cache", "mountPath": "/cache", "readOnly": True}
    assert [*before["volumeMounts"], mount] == gpu["volumeMounts"]
    others = set(containers(usual)) - {"gpu"}
    assert {name: containers(usual)[name] for name in others} == {name: containers(laid)[name] for name in others}


def test_sources_of_variables_go_to_their_container_and_never_count_above_the_operators() -> None:
    """The kubelet lets `env` win over `envFrom`, and the operator's variables stay in `env`."""
    sources = [{"secretRef": {"name": "trackers"}}]
    laid = gpu_pod({"spec": {"containers": [{"name": "gpu", "envFrom": sources}]}})
    assert sources == containers(laid)["gpu"]["envFrom"]
    assert containers(pod(gpu_seat(0)))["gpu"]["env"] == containers(laid)["gpu"]["env"]
    assert ["gpu"] == [name for name, each in containers(laid).items() if "envFrom" in each]


def test_groups_come_beside_users_that_stay_as_they_are() -> None:
    usual = pod(gpu_seat(0))["spec"]["securityContext"]
    laid = gpu_pod({"spec": {"securityContext": {"supplementalGroups": [5000]}}})["spec"]["securityContext"]
    assert usual | {"supplementalGroups": [5000]} == laid


@pytest.mark.parametrize(
    "fields",
    [
        {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]},
        {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["10.0.0.10"]}},
    ],
)
def test_further_fields_of_a_pod_reach_it_as_they_are(fields: dict[str, Any]) -> None:
    assert fields.items() <= gpu_pod({"spec": fields})["spec"].items()


def test_the_runner_is_told_how_long_its_pod_may_take_to_end() -> None:
    """It ends its children in time by itself, and took every pod's grace for a minute."""
    laid = gpu_pod({"spec": {"terminationGracePeriodSeconds": 90}})
    usual = pod(gpu_seat(0))
    for body, grace_s in ((laid, 90), (usual, resources.GPU_GRACE_S)):
        assert grace_s == body["spec"]["terminationGracePeriodSeconds"]
        assert {"name": runner.GRACE, "value": str(grace_s)} in containers(body)["gpu"]["env"]


NOT = {"key": "metadata.name", "operator": "NotIn", "values": ["bad"]}
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({}, [{"matchFields": [NOT]}]),
        ({"podAffinity": {REQUIRED: []}}, [{"matchFields": [NOT]}]),
        (
            {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [1]}, {"matchFields": [2]}]}}},
            [{"matchExpressions": [{"a": 1}], "matchFields": [NOT]}, {"matchFields": [{"a": 2}, NOT]}],
        ),
    ],
)
def test_a_node_that_the_job_avoids_is_avoided_by_each_alternative(placement: Any, expected: Any) -> None:
    """Terms of node affinity are alternatives: one more would have been a way around."""
    for term in placement.get("nodeAffinity", {}).get(REQUIRED, {}).get("nodeSelectorTerms", ()):
        for key, [number] in term.items():
            term[key] = [{"a": number}]
    affinity = gpu_pod({"spec": {"affinity": placement}}, "bad", failurePolicy=STRICT)["spec"]["affinity"]
    assert expected == affinity["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert placement.get("podAffinity") == affinity.get("podAffinity")


def test_without_a_rule_for_it_a_node_is_avoided_only_while_others_have_room() -> None:
    """A usual answer would have left the job of a cluster with one node without any."""
    near = {"weight": 1, "preference": {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}}
    placement = {"nodeAffinity": {PREFERRED: [near]}}
    nodes = gpu_pod({"spec": {"affinity": placement}}, "bad")["spec"]["affinity"]["nodeAffinity"]
    assert {PREFERRED: [near, {"weight": 100, "preference": {"matchFields": [NOT]}}]} == nodes


# ---------------------------------------------------------------------------------------------------------- refusals
FILES = [{"claimName": f"c{number}", "path": "a.jsonl"} for number in range(2)]
JUDGED = [file | {"reward": {"http": {"url": "http://judge/", "secretName": "judge"}}} for file in FILES]
FULL = {
    "rollout": {"prompts": {"mix": {"sources": [{"file": file} for file in JUDGED]}}, "batchSize": 4, "groupSize": 2}
}


@pytest.mark.parametrize("seat", SEATS)
def test_what_a_template_may_not_name_is_all_that_the_operator_gives_a_pod(seat: str) -> None:
    """A volume, a path or a variable of ours that is not in those lists could be taken over."""
    body = pod(seat, **FULL)
    volumes = {each["name"] for each in body["spec"]["volumes"]}
    assert [] == [name for name in volumes if name not in OWNED_VOLUMES and not name.startswith(OWNED_VOLUME_PREFIXES)]
    paths = {mount["mountPath"] for each in containers(body).values() for mount in each["volumeMounts"]}
    assert [] == [path for path in paths if not any(f"{path}/".startswith(f"{owned}/") for owned in OWNED_PATHS)]
    variables = {
        variable["name"]
        for each in containers(body).values()
        for variable in each["env"]
        if "valueFrom" in variable or variable["name"].startswith("COLOCATE_")
    }
    assert variables <= set(OWNED_VARIABLES)


# ------------------------------------------------------------------------------------------------------------ devices
def test_devices_of_a_claim_are_not_counted_too() -> None:
    gpus = {"count": 8, "resourceClaimTemplateName": "eight", "resources": {"limits": {"memory": "1Gi"}}}
    body = pod(gpu_seat(0), gpus=gpus)
    assert [{"name": "gpus", "resourceClaimTemplateName": "eight"}] == body["spec"]["resourceClaims"]
    requested = {"memory": "1Gi", "ephemeral-storage": "4Gi"}
    expected = {"requests": requested, "limits": {"memory": "1Gi"}, "claims": [{"name": "gpus"}]}
    assert expected == containers(body)["gpu"]["resources"]
    assert not any("claims" in each["resources"] for name, each in containers(body).items() if name != "gpu")
    assert "resourceClaims" not in pod(ROLLOUT_SEAT, gpus=gpus)["spec"]


# ------------------------------------------------------------------------------------------------------------- queues
def test_gpu_pods_in_a_queue_are_one_group_of_known_size() -> None:
    """Kueue's pod integration demands it: the group's name is a label, its size an annotation, the same on each pod."""
    spec: dict[str, Any] = {"replicas": 3, "podTemplates": {"gpu": IN_QUEUE}}
    bodies = [pod(gpu_seat(replica), **spec)["metadata"] for replica in range(3)]
    assert {"sums-gpu-6f1f0c5e"} == {each["labels"]["kueue.x-k8s.io/pod-group-name"] for each in bodies}
    assert {"3"} == {each["annotations"]["kueue.x-k8s.io/pod-group-total-count"] for each in bodies}
    assert ["0", "1", "2"] == [each["labels"]["kueue.x-k8s.io/pod-group-pod-index"] for each in bodies]
    assert {"research"} == {each["labels"]["kueue.x-k8s.io/queue-name"] for each in bodies}
    rollout = pod(ROLLOUT_SEAT, **spec)["metadata"]
    assert not any(key.startswith("kueue") for key in (*rollout["labels"], *rollout["annotations"]))
    assert not any(key.startswith("kueue") for key in pod(gpu_seat(0))["metadata"]["labels"])


def test_the_job_s_own_label_puts_its_gpu_pods_into_the_queue() -> None:
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
        found = rendered(gpu_seat(0), **spec)
        assert (queue, "low", "sums-gpu-6f1f0c5e") == tuple(
            found["labels"][f"kueue.x-k8s.io/{label}"] for label in ("queue-name", "priority-class", "pod-group-name")
        )
        assert ("2", False) == (found["annotations"]["kueue.x-k8s.io/pod-group-total-count"], "team" in found["labels"])
    assert not any(key.startswith("kueue") for key in rendered(ROLLOUT_SEAT)["labels"])


def test_a_groups_name_fits_a_label() -> None:
    body = resources.pod(make_job("j" * 40, podTemplates={"gpu": IN_QUEUE}), gpu_seat(0), 0, IMAGES)
    assert len(body["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"]) <= 63
    assert names.ROLE_GPU == body["metadata"]["labels"][names.ROLE_LABEL]
