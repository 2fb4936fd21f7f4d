"""The objects of a job, as they go to the API server."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from builders import MIXED_ROLLOUT, OWN_ROLLOUT, PLACED, UID, make_job
from colocated_rl_api import names
from colocated_rl_api.job import JOB_NAME_MAX
from colocated_rl_api.member_wire import JobFile
from colocated_rl_api.rungs import Placement
from colocated_rl_api.seats import ROLLOUT_SEAT, gpu_seat
from colocated_rl_operator.manifests import belongings, resources
from colocated_rl_operator.manifests.resources import PodImages
from setup.layout import CHECKOUT

IMAGES = PodImages(agent="agent:1", rollout="rollout:1", gpu="gpu:1", pull_policy="IfNotPresent")


def pod(seat: str, **spec: Any) -> dict[str, Any]:
    return resources.pod(make_job(**spec), seat, 0, IMAGES)


def containers(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [*body["spec"].get("initContainers", []), *body["spec"]["containers"]]


def container(body: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in containers(body) if each["name"] == name)


def mounts(body: dict[str, Any], name: str) -> dict[str, bool]:
    """Volume to whether it is read-only."""
    return {each["name"]: each.get("readOnly", False) for each in container(body, name)["volumeMounts"]}


@pytest.mark.parametrize("takes_faults", [False, True])
def test_f97_agents_take_faults_only_where_the_chart_allows_it(takes_faults: bool) -> None:
    images = dataclasses.replace(IMAGES, takes_faults=takes_faults)
    body = resources.pod(make_job(), gpu_seat(0), 0, images)
    taken = {"name": names.ENV_FAULTS, "value": names.FAULTS_TAKEN}
    assert [names.AGENT_CONTAINER] * takes_faults == [each["name"] for each in containers(body) if taken in each["env"]]


@pytest.mark.parametrize("seat", [gpu_seat(0), "engine-0", "trainer-0", ROLLOUT_SEAT])
def test_every_container_passes_the_restricted_profile(seat: str) -> None:
    body = pod(seat)
    context = body["spec"]["securityContext"]
    assert context["runAsNonRoot"]
    assert {"type": "RuntimeDefault"} == context["seccompProfile"]
    assert body["spec"]["automountServiceAccountToken"] is False
    for each in containers(body):
        assert {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        }.items() <= each["securityContext"].items()
    kinds = {kind for volume in body["spec"]["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"emptyDir", "secret", "configMap", "persistentVolumeClaim"}


@pytest.mark.parametrize("seat", [gpu_seat(0), "engine-0", "trainer-0", "reference-0", ROLLOUT_SEAT])
def test_every_container_requests_the_memory_that_it_may_take(seat: str) -> None:
    """Agents asked for 512Mi and were allowed 2Gi: under pressure a node evicts first who is over its request."""
    limits = {"resources": {"limits": {"memory": "9Gi"}}}
    rollout = OWN_ROLLOUT | limits | {"prompts": OWN_ROLLOUT["prompts"] | limits, "gpus": {"count": 2} | limits}
    reference = {"placement": "OwnDevices", "replicas": 1, "gpus": {"count": 1} | limits}
    body = pod(seat, gpus={"count": 2} | limits, rollout=rollout, reference=reference)
    for each in containers(body):
        asked, most = each["resources"]["requests"], each["resources"]["limits"]
        assert most.items() <= asked.items(), each["name"]
        assert "memory" in most


HUB = {"name": "us/small", "revision": "a" * 40}
ALL_SEATS = (gpu_seat(0), "engine-0", "trainer-0", "reference-0", ROLLOUT_SEAT)


@pytest.mark.parametrize("seat", ALL_SEATS)
def test_a_model_of_the_hub_is_fetched_before_all_else_and_nothing_else_can_write_it(seat: str) -> None:
    body = pod(seat, model={"huggingFace": HUB})
    assert names.MODEL_CONTAINER == body["spec"]["initContainers"][0]["name"]
    assert "restartPolicy" not in body["spec"]["initContainers"][0]  # it ends before the others start
    writes = {each["name"]: mounts(body, each["name"]).get("model") is False for each in containers(body)}
    assert [names.MODEL_CONTAINER] == [name for name, can in writes.items() if can]
    assert {"name": "model", "emptyDir": {}} in body["spec"]["volumes"]  # no more than the model is written to it


@pytest.mark.parametrize("seat", ALL_SEATS)
def test_only_what_fetches_a_private_model_has_its_token(seat: str) -> None:
    body = pod(seat, model={"huggingFace": HUB | {"secretName": "hub", "cacheClaimName": "models"}})
    token = {"secretKeyRef": {"name": "hub", "key": names.HUB_TOKEN_FILE}}
    has = [each["name"] for each in containers(body) if token in [item.get("valueFrom") for item in each["env"]]]
    assert [names.MODEL_CONTAINER] == has
    assert '"hub"' not in json.dumps([body["spec"]["volumes"], body["spec"]["containers"]])
    claim = {"persistentVolumeClaim": {"claimName": "models"}}
    assert {"name": "model", **claim} in body["spec"]["volumes"]


@pytest.mark.parametrize("seat", ALL_SEATS)
def test_a_directory_of_the_node_keeps_a_model_and_only_what_fetches_it_can_write_there(seat: str) -> None:
    """It has to be there: the kubelet would make one that belongs to root."""
    body = pod(seat, model={"huggingFace": HUB | {"cacheHostPath": "/mnt/nvme/models"}})
    kept = {"name": "model", "hostPath": {"path": "/mnt/nvme/models", "type": "Directory"}}
    assert [kept] == [each for each in body["spec"]["volumes"] if "hostPath" in each]
    writes = {each["name"]: mounts(body, each["name"]).get("model") is False for each in containers(body)}
    assert [names.MODEL_CONTAINER] == [name for name, can in writes.items() if can]


@pytest.mark.parametrize("pulled", [{}, {"pullPolicy": "Always"}])
@pytest.mark.parametrize("seat", ALL_SEATS)
def test_a_model_of_an_image_is_a_volume_of_it(seat: str, pulled: dict[str, str]) -> None:
    body = pod(seat, model={"image": {"reference": "models/small:1", "path": "small", **pulled}})
    assert {"name": "model", "image": {"reference": "models/small:1", **pulled}} in body["spec"]["volumes"]
    assert names.MODEL_CONTAINER not in [each["name"] for each in containers(body)]


def test_what_a_field_requests_is_requested() -> None:
    resources = {"requests": {"memory": "2Gi", "cpu": "1"}, "limits": {"memory": "8Gi"}}
    body = pod(ROLLOUT_SEAT, rollout=OWN_ROLLOUT | {"resources": resources})
    found = container(body, names.ROLLOUT_CONTAINER)["resources"]
    assert resources == found | {"requests": resources["requests"]}
    assert resources["requests"].items() <= found["requests"].items()


@pytest.mark.parametrize("queued", [False, True])
def test_a_rollout_pod_requests_something_of_each_resource_that_the_job_does_not_name(queued: bool) -> None:
    """A node without memory ends first what requests none, and Kueue's manager ends where a pod requests nothing."""
    template = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "research"}}} if queued else {}
    usual = pod(ROLLOUT_SEAT, podTemplates={"rollout": template})
    for name, expected in (
        ("rollout", {"cpu": "200m", "memory": "512Mi"}),
        ("rewards", {"cpu": "100m", "memory": "256Mi"}),
    ):
        found = container(usual, name)["resources"]
        assert expected.items() <= found["requests"].items()
        assert {} == found["limits"], "nothing is taken from it"
    limited = OWN_ROLLOUT | {"resources": {"limits": {"memory": "8Gi"}}}
    requested = container(pod(ROLLOUT_SEAT, rollout=limited), "rollout")["resources"]["requests"]
    assert ("200m", "8Gi") == (requested["cpu"], requested["memory"])


def test_trainers_write_beside_their_batches_only_where_a_reference_has_something_to_keep() -> None:
    assert mounts(pod(gpu_seat(0)), names.GPU_CONTAINER)["batches"]
    assert not mounts(pod(gpu_seat(0), reference={}), names.GPU_CONTAINER)["batches"]


def test_the_runner_empties_shared_memory_and_temporary_files_of_its_own_container_and_nothing_else() -> None:
    body = pod("gpu-0")
    gpu = container(body, names.GPU_CONTAINER)
    [wiped] = [each["value"].split(":") for each in gpu["env"] if each["name"] == names.ENV_WIPED]
    assert ["/dev/shm", "/tmp"] == wiped
    volumes = {mount["name"] for mount in gpu["volumeMounts"] if mount["mountPath"] in wiped}
    others = [each for each in containers(body) if each is not gpu]
    assert not [each for each in others if volumes & {mount["name"] for mount in each["volumeMounts"]}]


def test_of_each_volume_that_a_gpu_container_may_fill_and_the_runner_leaves_the_page_says_why() -> None:
    page = (CHECKOUT.root / "docs/sizing.md").read_text()
    rows = page.partition("A volume of a pod outlives its containers")[2].partition("A limit reserves nothing")[0]
    body = pod("gpu-0", reference={}, checkpoint={"inMemory": {"sizeLimit": "7Gi"}})
    of_pod = {volume["name"] for volume in body["spec"]["volumes"] if "emptyDir" in volume}
    gpu = container(body, names.GPU_CONTAINER)
    filled = {mount["name"] for mount in gpu["volumeMounts"] if not mount.get("readOnly")} & of_pod
    assert {"sock", "batches", "scratch", "weights", "mirrors"} == filled - {"shm", "gpu-tmp"}
    assert not [name for name in filled - {"shm", "gpu-tmp"} if f"`{name}`" not in rows]


@pytest.mark.parametrize(("limit", "expected"), [(None, "64Gi"), ("8Gi", str(4 << 30)), ("1500M", "750000000")])
def test_shared_memory_takes_half_of_what_its_container_may_use(limit: str | None, expected: str) -> None:
    resources = {"limits": {"memory": limit}} if limit else {}
    volumes = pod("gpu-0", gpus={"count": 0, "resources": resources})["spec"]["volumes"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": expected}} in volumes


def test_pods_with_trainers_have_memory_for_their_state_where_the_job_keeps_steps_there() -> None:
    kept: dict[str, Any] = {"checkpoint": {"inMemory": {"sizeLimit": "7Gi"}}}
    volume = {"name": "mirrors", "emptyDir": {"medium": "Memory", "sizeLimit": "7Gi"}}
    apart = PLACED[Placement.DISAGGREGATED] | kept
    cases = [("gpu-0", kept, True), ("gpu-0", {}, False), ("trainer-0", apart, True), ("engine-0", apart, False)]
    for seat, spec, has_it in cases:
        body = pod(seat, **spec)
        assert has_it is (volume in body["spec"]["volumes"])
        paths = {each["name"]: [mount["mountPath"] for mount in each["volumeMounts"]] for each in containers(body)}
        assert [names.GPU_CONTAINER] * has_it == [name for name in paths if names.MIRROR_DIR in paths[name]]


@pytest.mark.parametrize("seat", ALL_SEATS)
def test_each_volume_of_a_pod_has_a_limit(seat: str) -> None:
    """It is that of the container that fills the volume, where the job gives it one."""
    room = {"limits": {"ephemeral-storage": "20Gi"}}
    spec: dict[str, Any] = {
        "gpus": {"count": 0, "resources": room},
        "rollout": OWN_ROLLOUT | {"resources": room, "prompts": OWN_ROLLOUT["prompts"] | {"resources": room}},
    }
    for limits, filled in ((pod(seat), "100Gi"), (pod(seat, **spec), "20Gi")):
        found = {
            volume["name"]: volume["emptyDir"].get("sizeLimit")
            for volume in limits["spec"]["volumes"]
            if "emptyDir" in volume and volume["emptyDir"].get("medium") != "Memory"
        }
        assert found
        assert {"1Gi", filled} >= set(found.values())
        own = {"state", "bin", "sock", "agent-tmp", "tasks"}
        assert {name: "1Gi" if name in own else filled for name in found} == found


def requested_disk(seat: str, *, requests_disk: bool = True, **spec: Any) -> list[str]:
    body = resources.pod(make_job(**spec), seat, 0, dataclasses.replace(IMAGES, requests_disk=requests_disk))
    asked = (each["resources"].get("requests", {}).get("ephemeral-storage") for each in containers(body))
    return [room for room in asked if room is not None]


def test_pods_request_disk_where_their_nodes_count_it() -> None:
    assert [["4Gi"], ["2Gi"]] == [requested_disk(seat) for seat in ("gpu-0", ROLLOUT_SEAT)]
    assert [[], []] == [requested_disk(seat, requests_disk=False) for seat in ("gpu-0", ROLLOUT_SEAT)]
    own: dict[str, Any] = {"gpus": {"count": 0, "resources": {"limits": {"ephemeral-storage": "20Gi"}}}}
    assert ["20Gi"] == requested_disk("gpu-0", **own) == requested_disk("gpu-0", requests_disk=False, **own)


def test_pods_that_wait_in_a_queue_request_no_disk_of_their_own_accord() -> None:
    """Kueue admits no pod that requests what its queue has no quota of."""
    queued = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "research"}}}
    for seat, template in (("gpu-0", "gpu"), (ROLLOUT_SEAT, "gpu"), (ROLLOUT_SEAT, "rollout")):
        assert [] == requested_disk(seat, podTemplates={template: queued})


def test_the_agent_is_a_sidecar_of_its_own_user_and_keys_and_journal_are_its_alone() -> None:
    body = pod(gpu_seat(1))
    agent, gpu = container(body, names.AGENT_CONTAINER), container(body, names.GPU_CONTAINER)
    assert "Always" == agent["restartPolicy"]
    assert agent["securityContext"]["runAsUser"] != body["spec"]["securityContext"]["runAsUser"]
    assert {"tls", "state"}.isdisjoint(mounts(body, gpu["name"]))
    assert {"model", "checkpoints"}.isdisjoint(mounts(body, agent["name"]))
    assert mounts(body, gpu["name"])["bin"]
    assert mounts(body, gpu["name"])["batches"]
    assert not mounts(body, agent["name"])["batches"]
    assert {"name": names.ENV_REPLICA, "value": "1"} in agent["env"]


def test_what_is_mounted_is_declared_and_the_other_way_round() -> None:
    for seat in (gpu_seat(0), ROLLOUT_SEAT):
        body = pod(seat)
        used = {mount["name"] for each in containers(body) for mount in each["volumeMounts"]}
        assert {volume["name"] for volume in body["spec"]["volumes"]} == used


def test_reward_code_has_a_user_of_its_own_and_nothing_but_a_socket_and_its_prompts() -> None:
    """It ran beside store, keys and data token, as their user."""
    file = {"claimName": "mine", "path": "train.jsonl", "reward": {"function": "rewards:score"}}
    endpoint = {"url": "http://judge/", "secretName": "judge"}
    judged = {"claimName": "yours", "path": "*.parquet", "reward": {"http": endpoint}}
    made = {"name": "making:problem", "reward": {"math": {}}}
    functions = [{"function": made}, {"function": {**made, "claimName": "zoo"}}]
    mix = {"sources": [{"file": file}, {"file": {**file, "path": "b.jsonl"}}, {"file": judged}, *functions]}
    prompts = {"mix": mix, "image": "mine", "resources": {"limits": {"memory": "8Gi"}}}
    body = pod(ROLLOUT_SEAT, rollout={"prompts": prompts, "batchSize": 4, "groupSize": 2})
    rewards, rollout = container(body, names.REWARDS_CONTAINER), container(body, names.ROLLOUT_CONTAINER)
    claims = {f"prompts-{number}": True for number in range(3)}
    assert {"tasks": False, "rewards-tmp": False, **claims} == mounts(body, rewards["name"])
    own = {"store": False, "tls": True, "tasks": True, "reward-token-0": True}
    assert own.items() <= mounts(body, rollout["name"]).items()
    assert not any(name.startswith("prompts") for name in mounts(body, rollout["name"]))
    usual: dict[str, Any] = body["spec"]["securityContext"]
    others = [each for each in containers(body) if each is not rewards]
    assert {usual["runAsUser"]} == {each["securityContext"].get("runAsUser", usual["runAsUser"]) for each in others}
    assert rewards["securityContext"]["runAsUser"] not in (usual["runAsUser"], usual["runAsGroup"])
    assert ("mine", {"memory": "8Gi"}) == (rewards["image"], rewards["resources"]["limits"])
    assert not any("valueFrom" in variable for variable in rewards["env"])
    assert "Always" == rewards["restartPolicy"], "a sidecar, which ends with the rollout controller"
    volumes = {volume["name"]: volume for volume in body["spec"]["volumes"]}
    assert {"claimName": "mine", "readOnly": True} == volumes["prompts-0"]["persistentVolumeClaim"]
    paths = [mount["mountPath"] for mount in rewards["volumeMounts"] if mount["name"].startswith("prompts")]
    assert [f"{names.PROMPTS_DIR}/{claim}" for claim in ("mine", "yours", "zoo")] == paths
    token = volumes["reward-token-0"]["secret"]
    entry = "reward-token"  # not "token": a job could have the token of any service account of its namespace sent off
    assert ("judge", [{"key": entry, "path": entry}]) == (token["secretName"], token["items"])


def test_a_set_of_an_evaluation_has_its_claim_and_its_token() -> None:
    endpoint = {"url": "http://judge/", "secretName": "judge"}
    file = {"claimName": "aime", "path": "aime.jsonl", "reward": {"http": endpoint}}
    body = pod(ROLLOUT_SEAT, evaluation={"sets": [{"name": "held-out"}, {"name": "aime", "file": file}]})
    volumes = {volume["name"]: volume for volume in body["spec"]["volumes"]}
    assert {"claimName": "aime", "readOnly": True} == volumes["prompts-0"]["persistentVolumeClaim"]
    assert "judge" == volumes["reward-token-0"]["secret"]["secretName"]
    assert mounts(body, names.REWARDS_CONTAINER)["prompts-0"]
    assert mounts(body, names.ROLLOUT_CONTAINER)["reward-token-0"]


def test_a_job_that_trains_a_recording_has_no_reward_code_and_none_of_its_claims_and_secrets() -> None:
    """It mounted them all the same, and waited for volumes that another node had."""
    reward = {"http": {"url": "http://judge/", "secretName": "judge"}}
    prompts = {"file": {"claimName": "mine", "path": "train.jsonl", "reward": reward}}
    rollout = {"prompts": prompts, "batchSize": 4, "groupSize": 2}
    body = pod(ROLLOUT_SEAT, mode="TrainOnly", recorded={"claimName": "theirs"}, rollout=rollout)
    assert [names.ROLLOUT_CONTAINER] == [each["name"] for each in containers(body)]
    mounted = mounts(body, names.ROLLOUT_CONTAINER)
    assert {"recorded", "store", "model", "tls", "keys", "job", "tmp"} == set(mounted)
    assert set(mounted) == {volume["name"] for volume in body["spec"]["volumes"]}
    assert mounted["recorded"], "it is only read"


@pytest.mark.parametrize(
    ("samples", "claims"),
    [
        (None, {"former": "old"}),
        ({"claimName": "old", "path": "store"}, {"former": "old"}),
        ({"claimName": "other"}, {"former": "old", "former-samples": "other"}),
    ],
    ids=["none", "same claim", "another claim"],
)
def test_a_former_jobs_claims_are_only_read_and_each_is_mounted_once(samples: Any, claims: dict[str, str]) -> None:
    spec = {"claimName": "old"} | ({"samples": samples} if samples else {})
    trainers, rollout, engines = (
        resources.pod(make_job(restoreFrom=spec, rollout=OWN_ROLLOUT), seat, 0, IMAGES)
        for seat in ("trainer-0", ROLLOUT_SEAT, "engine-0")
    )
    volumes = {each["name"]: each.get("persistentVolumeClaim") for each in rollout["spec"]["volumes"]}
    found = {name: claim for name, claim in volumes.items() if name.startswith("former")}
    assert {name: {"claimName": claim, "readOnly": True} for name, claim in claims.items()} == found
    paths = {
        each["mountPath"]: (each["name"], each.get("readOnly"))
        for each in container(rollout, names.ROLLOUT_CONTAINER)["volumeMounts"]
        if each["name"].startswith("former")
    }
    wanted = {names.FORMER_DIR: ("former", True)}
    if samples:
        wanted[names.FORMER_SAMPLES_DIR] = (list(claims)[-1], True)
    assert wanted == paths
    assert mounts(trainers, names.GPU_CONTAINER)["former"]
    assert "former" not in mounts(trainers, names.AGENT_CONTAINER) | mounts(engines, names.GPU_CONTAINER)


def test_a_user_without_a_passwd_entry_and_a_read_only_root_finds_its_home() -> None:
    env = {item["name"]: item["value"] for item in container(pod(gpu_seat(0)), names.GPU_CONTAINER)["env"]}
    assert {"HOME": names.SCRATCH_DIR, "USER": "colocate", "LOGNAME": "colocate"}.items() <= env.items()


@pytest.mark.parametrize(("count", "expected"), [(0, {}), (2, {"amd.com/gpu": "2"})])
def test_devices_are_asked_for_by_count_and_name(count: int, expected: dict[str, str]) -> None:
    body = pod(gpu_seat(0), gpus={"count": count, "resourceName": "amd.com/gpu"})
    assert expected == container(body, names.GPU_CONTAINER)["resources"]["limits"]


def test_the_jobs_own_image_and_the_operators_default() -> None:
    assert "gpu:1" == container(pod(gpu_seat(0)), names.GPU_CONTAINER)["image"]
    assert "mine" == container(pod(gpu_seat(0), gpus={"count": 0, "image": "mine"}), names.GPU_CONTAINER)["image"]


def test_derived_names_fit() -> None:
    job = make_job("j" * JOB_NAME_MAX, replicas=1024)
    assert len(resources.pod_name(job, gpu_seat(1023), 9999)) <= 63
    assert len(job.claim_name("checkpoints")) <= 63
    name = resources.pod_name(job, gpu_seat(1023), 9999)
    assert len(resources.keys_name(name, "f" * 16)) <= 253
    assert len(resources.client_keys_name(job, "f" * 32)) <= 253


def test_each_pod_has_a_secret_of_its_own_that_goes_with_it_and_never_changes() -> None:
    job = make_job()
    template = resources.pod_template(job, names.ROLE_GPU, IMAGES)
    one, other = (resources.seated(template, job, gpu_seat(at), 0, nonce="some") for at in (0, 1))
    names_of = resources.keys_of(one), resources.keys_of(other)
    assert ("sums-gpu-0-0-tls-some", "sums-gpu-1-0-tls-some") == names_of
    pod_uid = names.PodUid("pod")
    secret = belongings.pod_keys(
        job, name="some", pod="sums-gpu-0-0", pod_uid=pod_uid, role=names.ROLE_GPU, files={"a": "b"}
    )
    assert [("Pod", "sums-gpu-0-0", "pod")] == [
        (owner["kind"], owner["name"], owner["uid"]) for owner in secret["metadata"]["ownerReferences"]
    ]
    assert secret["immutable"]


def test_pod_of_an_older_operators_template_keeps_the_secret_of_its_job() -> None:
    template = resources.pod_template(make_job(), names.ROLE_GPU, IMAGES)
    volume = {"name": "tls", "secret": {"secretName": "sums-tls-uid"}}
    older = template | {"spec": template["spec"] | {"volumes": [*template["spec"]["volumes"], volume]}}
    made = resources.seated(older, make_job(), gpu_seat(0), 1, nonce="some")
    assert [volume] == [each for each in made["spec"]["volumes"] if each["name"] == "tls"]
    assert resources.keys_of(made) is None


def test_clients_get_no_key_and_another_secret_with_another_token() -> None:
    job, files = make_job(), {"ca.crt": "x", "data-token": "y"}
    one, other = (belongings.client_keys(job, mark=mark * 32, files=files) for mark in "ab")
    assert one["metadata"]["name"] != other["metadata"]["name"]
    assert UID in one["metadata"]["name"]
    assert files == one["stringData"]


def test_retained_volumes_have_no_owner_and_others_do() -> None:
    job = make_job(storage={"volume": {"retain": False}})
    store, checkpoints = belongings.claims(job)
    assert [UID] == [owner["uid"] for owner in store["metadata"]["ownerReferences"]]
    assert "ownerReferences" not in checkpoints["metadata"]
    assert ["ReadWriteMany"] == checkpoints["spec"]["accessModes"]
    assert ["ReadWriteOnce"] == belongings.claims(make_job(replicas=1))[1]["spec"]["accessModes"]


def test_members_read_the_job_as_it_is_and_the_trainer_its_configuration() -> None:
    job = make_job(trainer={"config": {"learningRate": 0.1}})
    data = belongings.config(job)["data"]
    assert job.spec == JobFile.model_validate_json(data["job.json"]).spec
    assert {"learningRate": 0.1} == json.loads(data["trainer.json"])


def may_reach(
    port: int, *, labels: dict[str, str], namespace: str = "default", to: dict[str, str] | None = None
) -> bool:
    """Return whether the job's policy lets a pod with these labels open a connection to a pod of the job."""
    policy = belongings.network_policy(make_job(), operator_namespace="operators")
    assert (
        policy["spec"]["podSelector"]["matchLabels"].items() <= (to or pod(gpu_seat(0))["metadata"]["labels"]).items()
    )

    def fits(peer: dict[str, Any]) -> bool:
        wanted_namespace = peer.get("namespaceSelector", {}).get("matchLabels")
        here = {"kubernetes.io/metadata.name": namespace}
        is_there = here == wanted_namespace if wanted_namespace else namespace == policy["metadata"]["namespace"]
        return is_there and bool(peer["podSelector"]["matchLabels"].items() <= labels.items())

    return any(
        any(item["port"] <= port <= item.get("endPort", item["port"]) for item in rule["ports"])
        and ("from" not in rule or any(fits(peer) for peer in rule["from"]))
        for rule in policy["spec"]["ingress"]
    )


RENDEZVOUS = (names.RENDEZVOUS_PORT, names.RENDEZVOUS_PORT + names.RENDEZVOUS_PORTS - 1, 40_000)


@pytest.mark.parametrize("port", RENDEZVOUS)
def test_the_trainers_process_group_is_open_to_the_jobs_own_gpu_pods_alone(port: int) -> None:
    """It asks for no password, and the rollout pod, where rewards run, could reach it too."""
    gpu, rollout = (pod(seat)["metadata"]["labels"] for seat in (gpu_seat(1), ROLLOUT_SEAT))
    assert may_reach(port, labels=gpu)
    assert not may_reach(port, labels=rollout)
    assert not may_reach(port, labels=gpu | {names.JOB_UID_LABEL: "another job"})
    assert not may_reach(port, labels=gpu, namespace="elsewhere")
    assert not may_reach(port, labels={"app.kubernetes.io/name": names.MANAGED_BY}, namespace="operators")


def test_only_the_operator_reaches_control_ports_and_only_the_job_itself_its_data_ports() -> None:
    rollout, operator = pod(ROLLOUT_SEAT)["metadata"]["labels"], {"app.kubernetes.io/name": names.MANAGED_BY}
    assert may_reach(names.CONTROL_PORT, labels=operator, namespace="operators")
    assert not may_reach(names.CONTROL_PORT, labels=operator)
    assert not may_reach(names.CONTROL_PORT, labels=rollout)
    assert may_reach(names.DATA_PORT, labels=rollout)
    assert may_reach(names.DATA_PORT, labels=pod(gpu_seat(0))["metadata"]["labels"], to=rollout)
    assert not may_reach(names.DATA_PORT, labels=operator, namespace="operators")
    assert may_reach(names.METRICS_PORT, labels={}, namespace="monitoring")


@pytest.mark.parametrize(
    ("spec", "stay"),
    [
        ({"replicas": 1}, 1),
        ({"replicas": 7}, 7),
        ({"replicas": 2, "rollout": OWN_ROLLOUT | {"replicas": 3}}, 5),
        ({"replicas": 2, "reference": {"placement": "OwnDevices", "replicas": 2}}, 4),
    ],
    ids=["one", "seven", "engines-apart", "a-reference"],
)
def test_evictions_leave_all_pods_of_a_job_but_one(spec: dict[str, Any], stay: int) -> None:
    """The budget has the number of pods that stay: of others the server asks the job for a scale that it has not."""
    job = make_job(**spec)
    budget = next(each for each in belongings.applied(job, operator_namespace="o") if "Budget" in each["kind"])
    pods = [resources.pod(job, seat, 0, IMAGES)["metadata"]["labels"] for seat in job.seats.all]
    assert (stay, stay + 1) == (budget["spec"]["minAvailable"], len(pods))
    selector = budget["spec"]["selector"]
    assert all(selector["matchLabels"].items() <= labels.items() for labels in pods)
    [seats] = selector["matchExpressions"]
    assert ("In", sorted(seats["values"])) == (seats["operator"], sorted(labels[seats["key"]] for labels in pods))


@pytest.mark.parametrize("seat", [gpu_seat(0), ROLLOUT_SEAT])
def test_labels_find_the_pods_of_a_job(seat: str) -> None:
    labels = pod(seat)["metadata"]["labels"]
    expected = {names.MANAGED_BY_LABEL: names.MANAGED_BY, names.JOB_UID_LABEL: UID, names.ATTEMPT_LABEL: "0"}
    assert expected.items() <= labels.items()


@pytest.mark.parametrize("seat", [gpu_seat(0), ROLLOUT_SEAT])
def test_the_end_of_a_containers_log_outlives_it_in_the_pods_status_unless_others_write_it(seat: str) -> None:
    """The output of engines, trainers and reward functions may quote prompts and responses."""
    policies = {each["name"]: each["terminationMessagePolicy"] for each in containers(pod(seat))}
    of_others = {"gpu", "rewards"} & policies.keys()
    assert {"FallbackToLogsOnError"} == {policies[name] for name in policies.keys() - of_others}
    assert {"File"} == {policies[name] for name in of_others}


@pytest.mark.parametrize("seat", [gpu_seat(0), gpu_seat(1023), ROLLOUT_SEAT])
def test_a_pods_name_says_its_seat_and_attempt(seat: str) -> None:
    job = make_job()
    assert (seat, 17) == resources.seat_and_attempt(job, resources.pod_name(job, seat, 17))


@pytest.mark.parametrize("name", ["sums-gpu-0", "sums-rollout-x", "other-gpu-0-0", "sums-gpu-0-0-0", "sums-gpu--1-0"])
def test_a_name_that_the_operator_did_not_make_is_no_seat(name: str) -> None:
    assert resources.seat_and_attempt(make_job(), name) is None


# ----------------------------------------------------------------------------- engines in pods and devices of their own
def test_engine_pods_have_their_own_devices_and_read_what_trainers_write() -> None:
    rollout = OWN_ROLLOUT | {"gpus": {"count": 2, "image": "engine:1"}}
    spec: dict[str, Any] = {"gpus": {"count": 8, "image": "trainer:1"}, "rollout": rollout}
    trainer, engine = pod("trainer-0", **spec), pod("engine-0", **spec)
    for body, role, count, image in ((trainer, "trainer", "8", "trainer:1"), (engine, "engine", "2", "engine:1")):
        gpu = container(body, names.GPU_CONTAINER)
        assert (image, count) == (gpu["image"], gpu["resources"]["limits"]["nvidia.com/gpu"])
        assert (role, "0") == tuple(body["metadata"]["labels"][key] for key in (names.ROLE_LABEL, names.REPLICA_LABEL))
        assert {"name": names.ENV_ROLE, "value": role} in container(body, names.AGENT_CONTAINER)["env"]
        for name in (names.GPU_CONTAINER, names.AGENT_CONTAINER):
            assert (role == "engine") == mounts(body, name)["weights"]
    claim = {"claimName": make_job(**spec).claim_name("weights")}
    (of_trainer,), (of_engine,) = (
        [each["persistentVolumeClaim"] for each in body["spec"]["volumes"] if each["name"] == "weights"]
        for body in (trainer, engine)
    )
    assert (claim, claim | {"readOnly": True}) == (of_trainer, of_engine)
    assert "checkpoints" not in mounts(engine, names.GPU_CONTAINER)


def test_of_a_mixed_job_all_pods_have_the_volume_of_weights_and_those_with_trainers_write_it() -> None:
    claim = {"claimName": make_job().claim_name("weights")}
    for seat, is_apart in (("gpu-0", False), ("engine-0", True)):
        body = pod(seat, gpus={"count": 2}, rollout=MIXED_ROLLOUT)
        (volume,) = [each["persistentVolumeClaim"] for each in body["spec"]["volumes"] if each["name"] == "weights"]
        assert claim | ({"readOnly": True} if is_apart else {}) == volume
        for name in (names.GPU_CONTAINER, names.AGENT_CONTAINER):
            assert is_apart == mounts(body, name)["weights"]
        assert is_apart != ("checkpoints" in mounts(body, names.GPU_CONTAINER))
    assert 3 == len(belongings.claims(make_job(rollout=MIXED_ROLLOUT)))


def test_engine_pods_without_words_of_their_own_are_as_all_gpu_pods() -> None:
    gpus = {"count": 4, "image": "both:1"}
    gpu = container(pod("engine-0", gpus=gpus, rollout=OWN_ROLLOUT), names.GPU_CONTAINER)
    assert ("both:1", "4") == (gpu["image"], gpu["resources"]["limits"]["nvidia.com/gpu"])


def test_weights_that_travel_have_a_volume_of_the_job_that_goes_with_it() -> None:
    apart = {claim["metadata"]["name"]: claim for claim in belongings.claims(make_job(rollout=OWN_ROLLOUT))}
    weights = apart[make_job().claim_name("weights")]
    assert ["ReadWriteMany"] == weights["spec"]["accessModes"]
    assert UID == weights["metadata"]["ownerReferences"][0]["uid"]
    assert 3 == len(apart)
    assert 2 == len(belongings.claims(make_job()))


def test_what_a_volume_holds_is_reported_of_those_that_nobody_can_fill_again() -> None:
    """Weights that travel are written again, and without trainers nobody ever wrote a checkpoint."""
    for job, volumes in (
        (make_job(), ["store", "checkpoints"]),
        (make_job(rollout=OWN_ROLLOUT), ["store", "checkpoints"]),
        (make_job(mode="RolloutOnly"), ["store"]),
        (make_job(**PLACED[Placement.TRAIN_ONLY]), ["store", "checkpoints"]),
    ):
        assert [job.claim_name(volume) for volume in volumes] == [*belongings.irreplaceable(job)]


@pytest.mark.parametrize(("pods", "let_in"), [(1, ["trainer"]), (2, ["trainer", "engine"])])
def test_processes_of_trainers_are_closed_to_engine_pods_unless_an_engine_is_over_several(
    pods: int, let_in: list[str]
) -> None:
    job = make_job(rollout=OWN_ROLLOUT | {"replicas": 2, "engine": {"pods": pods}})
    policy = belongings.network_policy(job, operator_namespace="system")
    roles = [
        each["podSelector"]["matchLabels"].get(names.ROLE_LABEL)
        for rule in policy["spec"]["ingress"]
        for each in rule.get("from", ())
    ]
    assert let_in == [role for role in roles if role]
