"""The templates of a job come into its pods, and take nothing away that the operator needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import OWN_ROLLOUT, make_job
from colocated_rl_agent.runner import runner
from colocated_rl_api import names
from colocated_rl_api.pod_template import (
    OWN_USERS,
    OWNED_PATHS,
    OWNED_VARIABLES,
    OWNED_VOLUME_PREFIXES,
    OWNED_VOLUMES,
    PodSpec,
)
from colocated_rl_api.seats import ROLLOUT_SEAT, gpu_seat, role_of
from colocated_rl_operator.manifests import resources
from colocated_rl_operator.manifests.confinement import RESTRICTED
from colocated_rl_operator.manifests.profiles import Profile, Profiles
from colocated_rl_operator.manifests.resources import PodImages
from fakes.quality_of_service import quality_of_service

IMAGES = PodImages(agent="agent:1", rollout="rollout:1", gpu="gpu:1", pull_policy="IfNotPresent")
SEATS = (gpu_seat(0), ROLLOUT_SEAT)
IN_QUEUE = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "research"}}}


STRICT = {"rules": [{"onCauses": ["TrainerDied"], "action": "ReplacePodElsewhere"}]}


def pod(seat: str, *avoids: str, **spec: Any) -> dict[str, Any]:
    return resources.pod(make_job(**spec), seat, 0, IMAGES, avoids=avoids)


def gpu_pod(template: dict[str, Any], *avoids: str, **spec: Any) -> dict[str, Any]:
    return pod(gpu_seat(0), *avoids, podTemplates={"gpu": template}, **spec)


def profiles(**written: Any) -> Profiles:
    return Profiles({name: Profile.model_validate(each) for name, each in written.items()})


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


APART: dict[str, Any] = {
    "rollout": OWN_ROLLOUT,
    "reference": {"placement": "OwnDevices", "replicas": 1},
}


def pool(name: str) -> dict[str, Any]:
    return {"metadata": {"labels": {"pool": name}}, "spec": {"nodeSelector": {"pool": name}}}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ((), {"trainer-0": "gpu", "engine-0": "gpu", "reference-0": "gpu"}),
        (("engine",), {"trainer-0": "gpu", "engine-0": "engine", "reference-0": "gpu"}),
        (("reference", "engine"), {"trainer-0": "gpu", "engine-0": "engine", "reference-0": "reference"}),
    ],
)
def test_pods_of_a_role_have_a_template_of_their_own_or_all_of_that_of_gpu_pods(own: Any, expected: Any) -> None:
    templates = {name: pool(name) for name in ("gpu", *own)} | {"rollout": {}}
    for seat, name in expected.items():
        body = pod(seat, podTemplates=templates, **APART)
        assert (name, {"pool": name}) == (body["metadata"]["labels"]["pool"], body["spec"]["nodeSelector"])
    assert "nodeSelector" not in pod(ROLLOUT_SEAT, podTemplates=templates, **APART)["spec"]


def test_a_template_of_its_own_takes_nothing_from_that_of_gpu_pods() -> None:
    """Two lists that were merged could be made shorter by nobody."""
    of_gpu = {"tolerations": [{"key": "trainers"}], "terminationGracePeriodSeconds": 90, "runtimeClassName": "nvidia"}
    templates = {"gpu": {"spec": of_gpu}, "engine": {"spec": {"tolerations": [{"key": "engines"}]}}}
    spec = pod("engine-0", podTemplates=templates, **APART)["spec"]
    assert [{"key": "engines"}] == spec["tolerations"]
    assert "runtimeClassName" not in spec
    grace = {each["name"]: each.get("value") for each in spec["containers"][0]["env"]}[runner.GRACE]
    assert (resources.GPU_GRACE_S, str(resources.GPU_GRACE_S)) == (spec["terminationGracePeriodSeconds"], grace)


def test_what_a_template_says_nothing_of_is_as_an_admin_says_for_all_jobs() -> None:
    """A field counts as a whole: in a merge of lists, nobody could take one of an admin's items away."""
    usual = {"tolerations": [{"key": "gpu"}], "priorityClassName": "low", "securityContext": {"runAsUser": 7000}}
    images = replace(IMAGES, profiles=profiles(default={"gpu": {"defaults": usual}}, other={}))
    own = {"gpu": {"spec": {"tolerations": [{"key": "mine"}], "nodeSelector": {"pool": "a"}}}}
    laid, plain, rollout = (
        resources.pod(make_job(podTemplates=templates), seat, 0, images)["spec"]
        for seat, templates in ((gpu_seat(0), own), (gpu_seat(0), {}), (ROLLOUT_SEAT, own))
    )
    assert ([{"key": "mine"}], "low", {"pool": "a"}, 7000) == (
        *(laid[field] for field in ("tolerations", "priorityClassName", "nodeSelector")),
        laid["securityContext"]["runAsUser"],
    )
    assert ([{"key": "gpu"}], "low", None) == tuple(
        plain.get(field) for field in ("tolerations", "priorityClassName", "nodeSelector")
    )
    assert pod(ROLLOUT_SEAT)["spec"] == rollout, "each role has its own"
    stored = {"gpu": {"spec": PodSpec().model_dump(mode="json", by_alias=True, exclude_none=True)}}
    assert plain == resources.pod(make_job(podTemplates=stored), gpu_seat(0), 0, images)["spec"]
    assert pod(gpu_seat(0))["spec"] == resources.pod(make_job(profile="other"), gpu_seat(0), 0, images)["spec"]


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


@pytest.mark.parametrize("seat", [gpu_seat(0), ROLLOUT_SEAT, "reference-0"])
def test_users_of_a_namespaces_range_take_the_place_of_all_three_and_differ_as_those_do(seat: str) -> None:
    first = 1000660000
    own = {"spec": {"securityContext": {"runAsUser": first, "fsGroup": first + 7}}}
    chosen, usual = (
        pod(seat, podTemplates=templates, reference=APART["reference"])
        for templates in ({"gpu": own, "rollout": own}, {})
    )
    assert first + 7 == chosen["spec"]["securityContext"]["fsGroup"] == chosen["spec"]["securityContext"]["runAsGroup"]
    shared = usual["spec"]["securityContext"]["runAsUser"]
    assert all(
        shared <= asked < shared + OWN_USERS and asked + first - shared == users(chosen)[name]
        for name, asked in users(usual).items()
    )
    assert {"gpu-0": 2, ROLLOUT_SEAT: 2, "reference-0": 1}[seat] == len({*users(chosen).values()})


def users(body: dict[str, Any]) -> dict[str, int]:
    usual = body["spec"]["securityContext"]["runAsUser"]
    return {name: each["securityContext"].get("runAsUser", usual) for name, each in containers(body).items()}


# ----------------------------------------------------------------------------------------- resources, device claims
def test_claims_of_devices_come_beside_those_of_gpus_and_go_to_the_container_that_uses_them() -> None:
    network = {"name": "network", "resourceClaimTemplateName": "eight-nics"}
    used = [{"name": "network", "request": "nics"}]
    template = {"spec": {"resourceClaims": [network], "containers": [{"name": "gpu", "resources": {"claims": used}}]}}
    for gpus, devices in (({"count": 8}, []), ({"count": 8, "resourceClaimTemplateName": "eight"}, [{"name": "gpus"}])):
        body, usual = gpu_pod(template, gpus=gpus), pod(gpu_seat(0), gpus=gpus)
        assert [*usual["spec"].get("resourceClaims", []), network] == body["spec"]["resourceClaims"]
        before = containers(usual)["gpu"]["resources"]
        assert before | {"claims": [*devices, *used]} == containers(body)["gpu"]["resources"]
    assert "claims" not in containers(body)["agent"]["resources"]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"limits": {"memory": "4Gi"}}, {"requests": {"cpu": "200m", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}),
        ({"requests": {"cpu": 2}}, {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"memory": "2Gi"}}),
        (
            {"requests": {"memory": "1Gi"}, "limits": {"memory": "4Gi", "cpu": "1"}},
            {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "4Gi", "cpu": "1"}},
        ),
    ],
)
def test_a_resource_of_the_agent_is_what_the_template_says_of_it(stated: Any, expected: Any) -> None:
    template = {"spec": {"containers": [{"name": "agent", "resources": stated}]}}
    assert expected == containers(gpu_pod(template))["agent"]["resources"]


SIDECAR = {"name": "logs", "image": "logs:1", "restartPolicy": "Always"}
BOUND = {"limits": {"cpu": "4", "memory": "8Gi"}}


@pytest.mark.parametrize("seat", ["gpu-0", "reference-0", ROLLOUT_SEAT])
@pytest.mark.parametrize(
    ("own", "main", "expected"),
    [
        ([], BOUND, "Guaranteed"),
        ([SIDECAR | {"resources": BOUND}], BOUND, "Guaranteed"),
        ([SIDECAR], BOUND, "Burstable"),
        ([], {"limits": {"memory": "8Gi"}}, "Burstable"),
        ([], BOUND | {"requests": {"cpu": "2"}}, "Burstable"),
    ],
)
def test_a_pod_is_guaranteed_if_each_container_has_what_it_may_have(
    seat: str, own: Any, main: Any, expected: str
) -> None:
    rollout = OWN_ROLLOUT | {"placement": "WithTrainer", "replicas": None, "resources": main}
    rollout["prompts"] = rollout["prompts"] | {"resources": main}
    hub = {"huggingFace": {"name": "us/small", "revision": "a" * 40}}
    templates = {role: {"spec": {"initContainers": own}} for role in ("gpu", "rollout")}
    gpus = {"count": 8, "resources": main}
    body = pod(seat, gpus=gpus, rollout=rollout, model=hub, podTemplates=templates, reference=APART["reference"])
    assert expected == quality_of_service(body)


# --------------------------------------------------------------------------------------------------- own containers
def test_containers_of_the_job_start_before_the_operators_and_may_do_no_more_than_those() -> None:
    fetch: dict[str, Any] = {
        "name": "fetch",
        "image": "tools:1",
        "volumeMounts": [{"name": "cache", "mountPath": "/tmp"}],
    }
    template = {"volumes": [{"name": "cache", "emptyDir": {}}], "initContainers": [fetch, SIDECAR]}
    for seat, role in ((gpu_seat(0), "gpu"), (ROLLOUT_SEAT, "rollout")):
        body, usual = pod(seat, podTemplates={role: {"spec": template}}), pod(seat)
        own, others = body["spec"]["initContainers"][:2], body["spec"]["initContainers"][2:]
        assert usual["spec"]["initContainers"] == others
        assert [fetch, SIDECAR] == [
            {key: each[key] for key in given} for each, given in zip(own, (fetch, SIDECAR), strict=True)
        ]
        for each in own:
            assert RESTRICTED == each["securityContext"]
            assert "File" == each["terminationMessagePolicy"], "its log may quote anything"
            assert {"cache"} >= {mount["name"] for mount in each.get("volumeMounts", ())}


def test_a_name_that_no_container_of_the_job_may_have_is_that_of_each_of_the_operators() -> None:
    hub = {"huggingFace": {"name": "us/small", "revision": "a" * 40}}
    bodies = [pod(seat, model=hub, reference=APART["reference"]) for seat in (*SEATS, "reference-0")]
    assert {*names.CONTAINERS} == {name for body in bodies for name in containers(body)}


# ------------------------------------------------------------------------------------------------------------- nodes
def test_a_pod_with_the_network_of_its_node_still_finds_names_of_the_cluster() -> None:
    spec = gpu_pod({"spec": {"hostNetwork": True}})["spec"]
    assert (True, "ClusterFirstWithHostNet") == (spec["hostNetwork"], spec["dnsPolicy"])
    assert "Default" == gpu_pod({"spec": {"hostNetwork": True, "dnsPolicy": "Default"}})["spec"]["dnsPolicy"]
    assert not {"hostNetwork", "dnsPolicy"} & gpu_pod({})["spec"].keys()


OF_THE_NODE = {
    "hostNetwork": True,
    "volumes": [
        {"name": "nvme", "hostPath": {"path": "/mnt/nvme", "type": "Directory"}},
        {"name": "below", "hostPath": {"path": "/mnt/nvme/cache"}},
        {"name": "room", "emptyDir": {}},
    ],
}


def refusals(written: Profiles, seat: str = "gpu-0", **spec: Any) -> list[str]:
    job = make_job(**spec)
    return [*written.refusals(job, role_of(seat), resources.pod(job, seat, 0, IMAGES)["spec"])]


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [
        ({}, ["hostNetwork", "/mnt/nvme ", "/mnt/nvme/cache "]),
        ({"gpu": {"hostNetwork": True}}, ["/mnt/nvme ", "/mnt/nvme/cache "]),
        ({"gpu": {"hostPaths": ["/mnt/nvme"]}}, ["hostNetwork", "/mnt/nvme/cache "]),
        ({"gpu": {"hostNetwork": True, "hostPaths": ["/mnt/nvme", "/mnt/nvme/cache"]}}, []),
        (
            {"engine": {"hostNetwork": True, "hostPaths": ["/mnt/nvme"]}},
            ["hostNetwork", "/mnt/nvme ", "/mnt/nvme/cache "],
        ),
    ],
)
def test_what_a_pod_uses_of_its_node_is_refused_by_name_unless_its_profile_allows_it(
    allowed: Any, refused: Any
) -> None:
    template = {"gpu": {"spec": OF_THE_NODE}}
    all_of_it = {"gpu": {"hostNetwork": True, "hostPaths": ["/mnt/nvme", "/mnt/nvme/cache"]}}
    found = refusals(profiles(default=all_of_it, nvme=allowed), podTemplates=template, profile="nvme")
    assert len(refused) == len(found)
    for what, words in zip(refused, found, strict=True):
        assert what in words
        value = "hostNetwork" if what == "hostNetwork" else "hostPaths"
        assert "gpu pods of profile nvme may not have" in words
        assert f"have an admin of the cluster allow it by profiles.nvme.gpu.{value}" in words


def test_a_path_of_the_node_is_allowed_to_pods_of_one_role() -> None:
    template, paths = {"gpu": {"spec": OF_THE_NODE}}, ["/mnt/nvme", "/mnt/nvme/cache"]
    written = profiles(default={"engine": {"hostNetwork": True, "hostPaths": paths}})
    seats = ("trainer-0", "engine-0")
    assert [3, 0] == [len(refusals(written, seat, podTemplates=template, **APART)) for seat in seats]
    assert [] == refusals(profiles(default={}))


def test_a_directory_of_the_node_keeps_a_model_where_the_profile_allows_it_to_each_role() -> None:
    hub = {"name": "us/small", "revision": "a" * 40, "cacheHostPath": "/mnt/models"}
    written = profiles(default={"gpu": {"hostPaths": ["/mnt/models"]}})
    assert [] == refusals(written, model={"huggingFace": hub})
    [words] = refusals(written, ROLLOUT_SEAT, model={"huggingFace": hub})
    assert "/mnt/models of their node (hostPath of volume model): remove it from spec.model.huggingFace" in words
    assert "profiles.default.rollout.hostPaths" in words


def test_what_a_profile_fixes_no_template_has_and_the_profile_gives() -> None:
    given = {"nodeSelector": {"pool": "spot"}, "priorityClassName": "low"}
    written = profiles(default={"gpu": {"defaults": given, "fixed": ["nodeSelector", "schedulerName"]}})
    own = {"nodeSelector": {"pool": "best"}, "priorityClassName": "high", "schedulerName": "mine"}
    templates: list[dict[str, Any]] = [{}, {"priorityClassName": "high"}, {"nodeSelector": {}}]
    for template in templates:
        job = make_job(podTemplates={"gpu": {"spec": template}})
        body = resources.pod(job, gpu_seat(0), 0, replace(IMAGES, profiles=written))
        assert {"pool": "spot"} == body["spec"]["nodeSelector"]
        assert [] == [*written.refusals(job, "gpu", body["spec"])]
    selector, scheduler = refusals(written, podTemplates={"gpu": {"spec": own}})
    assert "gpu pods of profile default may not have nodeSelector of their own: remove it from spec.pod" in selector
    assert "schedulerName" in scheduler
    assert "profiles.default.gpu.fixed" in scheduler
    assert [] == refusals(written, ROLLOUT_SEAT, podTemplates={"rollout": {"spec": own}}), "each role has its own"


def test_a_profile_that_there_is_not_or_not_here_is_refused_with_those_that_there_are() -> None:
    written = profiles(default={}, nvme={"namespaces": ["research"]}, mine={"namespaces": ["other", "default"]})
    assert [] == refusals(written, profile="mine")
    [unknown], [elsewhere] = (refusals(written, profile=name) for name in ("fast", "nvme"))
    assert "spec.profile is fast, and jobs of namespace default may have default, mine" in unknown
    assert "have an admin of the cluster allow it by profiles.fast in the values" in unknown
    assert "allow it by profiles.nvme.namespaces in the values" in elsewhere
    [none] = refusals(profiles(default={"namespaces": ["research"]}))
    assert "may have none yet" in none


def test_each_pod_says_by_which_profile_the_chart_s_policy_judges_it() -> None:
    assert ["nvme", "default"] == [
        resources.pod(make_job(**spec), ROLLOUT_SEAT, 0, IMAGES)["metadata"]["labels"][names.PROFILE_LABEL]
        for spec in ({"profile": "nvme"}, {})
    ]


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
    "rollout": {"prompts": {"mix": {"sources": [{"file": file} for file in JUDGED]}}, "batchSize": 4, "groupSize": 2},
    "checkpoint": {"inMemory": {"sizeLimit": "1Gi"}},
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
