"""Render the pods of a job, and name all its objects. The module is pure.

Every pod passes the restricted pod security profile: no root, no capabilities, a read-only root file system, and
volumes for everything that is written. Only a template that uses the node, as an admin allows, leaves it. Agent and GPU
container have different users, so that engine and trainer can't reach the agent's journal and keys. Reward code comes
from other people: it has a container of its own beside the rollout controller, another user, and none of that one's
volumes but a socket.

The name of every object but a pod contains the job's UID: an object that an earlier job of the same name left behind,
or that somebody made in advance, is never taken for ours. `belongings` renders the objects that pods need.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from colocated_rl_api import names
from colocated_rl_api.failure import FailureAction
from colocated_rl_api.job import Gpus
from colocated_rl_api.model import HubModel, ModelClaim, ModelImage
from colocated_rl_api.parts import Resources, size_in_bytes
from colocated_rl_api.prompts import claim_names_of, secret_names_of
from colocated_rl_api.seats import ROLLOUT_SEAT, is_spare, role_of
from colocated_rl_operator.manifests import overlay
from colocated_rl_operator.manifests.confinement import LAST_WORDS, NO_WORDS, RESTRICTED, USUAL_USERS, Users, users_of
from colocated_rl_operator.manifests.gangs import GROUP_INDEX, GROUP_LABEL, NO_GANGS, Gangs, in_queue, membership
from colocated_rl_operator.manifests.profiles import NO_PROFILES, Profiles
from colocated_rl_operator.planner.observation import Job

Object = dict[str, Any]

GPU_GRACE_S = 60
ROLLOUT_GRACE_S = 30
REFERENCE_GRACE_S = 5  # it has nothing to clean up
SHM = "/dev/shm"
TMP = "/tmp"
TLS_VOLUME = "tls"
DEVICES = "gpus"  # the device claim of a GPU pod, where devices are claimed and not counted

# Volumes on a node's disk end where these say, beyond which kubelet evicts the pod: one program that writes without end
# would otherwise fill the disk of everybody on the node.
DISK = "ephemeral-storage"
OWN_VOLUME_LIMIT = "1Gi"  # of what holds only files of ours: sockets, a journal of 16 MiB, the runner
VOLUME_LIMIT = "100Gi"  # of what programs of others fill, where the job does not limit the container's disk
GPU_DISK, ROLLOUT_DISK = "4Gi", "2Gi"  # requested where the job says nothing: compiled kernels, shards, logs, prompts
# Likewise of a rollout pod: a node without memory ends first what requests none. And Kueue 0.19 ends, for all queues,
# where a pod that requests nothing comes to nodes with a topology.
ROLLOUT_REQUESTS = {"cpu": "200m", "memory": "512Mi"}
REWARDS_REQUESTS = {"cpu": "100m", "memory": "256Mi"}
SHM_LIMIT = "64Gi"  # of a container whose memory has no limit; else half of that, which Linux gives a tmpfs by itself


@dataclass(frozen=True)
class PodImages:
    """Containers run these images if the job names none.

    takes_faults: agents take faults that a person injects. requests_disk: nodes count the disk that pods request.
    profiles, gangs: those that jobs may have. users: of pods whose template names none.
    """

    agent: str
    rollout: str
    gpu: str
    pull_policy: str
    takes_faults: bool = False
    requests_disk: bool = True
    profiles: Profiles = NO_PROFILES
    gangs: Gangs = NO_GANGS
    users: Users = USUAL_USERS

    def priority(self, job: Job) -> str | None:
        """Return the priority class of pods with trainers, which is that of the job's gang; None for none."""
        usual = self.profiles.defaults(job, names.ROLE_GPU)
        return job.spec.pod_templates.gpu.spec.with_defaults(usual).priority_class_name


# --------------------------------------------------------------------------------------------------------------- names
def pod_name(job: Job, seat: str, attempt: int) -> str:
    return f"{job.name}-{seat}-{attempt}"


def seat_and_attempt(job: Job, name: str) -> tuple[str, int] | None:
    """Invert `pod_name`: labels may change, and names never do. Return None for a name that we did not make."""
    roles = "|".join((*names.GPU_ROLES, names.ROLE_REFERENCE))
    match = re.fullmatch(rf"{job.name}-({ROLLOUT_SEAT}|({roles})-\d{{1,4}})-(\d{{1,9}})", name)
    return (match[1], int(match[3])) if match else None


def keys_name(pod_name: str, nonce: str) -> str:
    """Return the name of the Secret with the keys of one pod. nonce: of this pod alone, for nobody to guess."""
    return f"{pod_name}-tls-{nonce}"


def keys_of(pod: Object) -> str | None:
    """Return the name of the Secret with the keys of this pod alone.

    None: it has none, or those of the whole job, which an older operator has made.
    """
    prefix = keys_name(pod["metadata"]["name"], "")
    for volume in pod["spec"].get("volumes", ()):
        name: str = volume.get("secret", {}).get("secretName", "")
        if volume["name"] == TLS_VOLUME and name.startswith(prefix):
            return name
    return None


def client_keys_name(job: Job, mark: str) -> str:
    return f"{job.name}-client-{mark[:8]}-{job.uid}"


def config_name(job: Job) -> str:
    return f"{job.name}-job-{job.uid}"


# ------------------------------------------------------------------------------------------------------------ metadata
def metadata_of(job: Job, name: str, labels: Mapping[str, str] | None = None, *, owned: bool = True) -> Object:
    metadata: Object = {
        "name": name,
        "namespace": job.namespace,
        "labels": {
            names.MANAGED_BY_LABEL: names.MANAGED_BY,
            "app.kubernetes.io/name": names.SINGULAR,
            "app.kubernetes.io/instance": job.name,
            names.JOB_NAME_LABEL: job.name,
            names.JOB_UID_LABEL: job.uid,
            **(labels or {}),
        },
    }
    if owned:
        kind = {"apiVersion": names.API_VERSION, "kind": names.KIND}
        metadata["ownerReferences"] = [
            {**kind, "name": job.name, "uid": job.uid, "controller": True, "blockOwnerDeletion": True}
        ]
    return metadata


# ---------------------------------------------------------------------------------------------------------------- pods
def pod(job: Job, seat: str, attempt: int, images: PodImages, *, avoids: Sequence[str] = ()) -> Object:
    """Return the pod that fills a seat. avoids: nodes on which it may not run."""
    return seated(pod_template(job, role_of(seat), images), job, seat, attempt, avoids=avoids)


def pod_templates(job: Job, images: PodImages) -> dict[str, Object]:
    """Return the template of the pods of each role that the job has, by role."""
    return {role: pod_template(job, role, images) for role in map(role_of, job.seats.all)}


def pod_template(job: Job, role: str, images: PodImages) -> Object:
    """Return the labels, annotations and spec that all pods of a role share. `seated` adds what one pod has alone."""
    template = job.spec.pod_templates.of(role)
    group = membership(job, role, images.gangs, priority=images.priority(job))
    usual = images.profiles.defaults(job, role)
    template = template.model_copy(update={"spec": template.spec.with_defaults(usual)})
    users = users_of(template.spec.security_context, images.users)
    match role:
        case names.ROLE_ROLLOUT:
            spec = _rollout_spec(job, images, users)
        case names.ROLE_REFERENCE:
            spec = _reference_spec(job, images, users)
        case _:
            spec = _gpu_spec(job, role, images, users)
    metadata = {"labels": group.labels | {names.ROLE_LABEL: role}, "annotations": group.annotations}
    laid = overlay.lay(template, over={"metadata": metadata, "spec": group.spec | spec})
    return laid | {"spec": overlay.beside(group.affinity, laid["spec"])}


def seated(
    template: Object,
    job: Job,
    seat: str,
    attempt: int,
    *,
    avoids: Sequence[str] = (),
    nonce: str = "0",
    keys_mark: str = "",
) -> Object:
    """Return the pod that fills a seat, made of the template of its role. avoids: nodes on which it may not run.

    nonce: for the name of its Secret. keys_mark: which keys are in that, for who can't take others later.

    The template may be of another version of the operator: what is added here is a part of its form. Nodes are avoided
    at any price only where a rule asks for that: a usual answer must not leave a small cluster's job without a place.
    """
    shared, spec = template["metadata"], dict(template["spec"])
    labels = {names.ATTEMPT_LABEL: str(attempt), names.PROFILE_LABEL: job.spec.profile, names.SEAT_LABEL: seat}
    labels |= {names.SPARE_LABEL: "true"} if is_spare(seat) else {}
    if seat != ROLLOUT_SEAT:
        labels[names.REPLICA_LABEL] = seat.rpartition("-")[2]
        if GROUP_LABEL in shared["labels"]:
            labels[GROUP_INDEX] = labels[names.REPLICA_LABEL]
        replica = _env(**{names.ENV_REPLICA: labels[names.REPLICA_LABEL]})
        spec["initContainers"] = [
            each | {"env": [*each["env"], *replica]} if each["name"] == names.AGENT_CONTAINER else each
            for each in spec["initContainers"]
        ]
    metadata = metadata_of(job, pod_name(job, seat, attempt), labels)
    marks = {names.KEYS_ANNOTATION: keys_mark} if role_of(seat) == names.ROLE_REFERENCE else {}
    metadata |= {"labels": shared["labels"] | metadata["labels"], "annotations": shared["annotations"] | marks}
    if all(volume["name"] != TLS_VOLUME for volume in spec["volumes"]):  # else of an older operator: of the whole job
        keys = {"secretName": keys_name(metadata["name"], nonce), "defaultMode": 0o440}
        spec["volumes"] = [{"name": TLS_VOLUME, "secret": keys}, *spec["volumes"]]
    rules = job.spec.failure_policy.rules
    spec = overlay.away_from(
        avoids, spec, strictly=any(rule.action is FailureAction.REPLACE_POD_ELSEWHERE for rule in rules)
    )
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _pod_spec(users: Users, *, grace_s: int, claims: Sequence[Object] = ()) -> Object:
    return {
        **({"resourceClaims": list(claims)} if claims else {}),
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": users.shared,
            "runAsGroup": users.group,
            "fsGroup": users.group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _gpu_spec(job: Job, role: str, images: PodImages, users: Users) -> Object:
    """Return the spec of a pod with engine, trainers or both. Only one with trainers can write the shared weights."""
    spec, trains = job.spec, role != names.ROLE_ENGINE
    gpus = spec.gpus if trains else spec.engine_gpus
    grace_s = spec.pod_templates.of(role).spec.termination_grace_period_seconds or GPU_GRACE_S
    return _pod_spec(users, grace_s=grace_s, claims=_claims(gpus)) | {
        "initContainers": [
            *_model_containers(job, images, tmp="gpu-tmp", beside=gpus.resources),
            {
                "name": names.RUNNER_CONTAINER,
                "image": images.agent,
                "imagePullPolicy": images.pull_policy,
                "terminationMessagePolicy": LAST_WORDS,
                "args": ["install-runner", names.BIN_DIR],
                "securityContext": RESTRICTED | {"runAsUser": users.agent},
                "resources": _fixed(cpu="100m", memory="128Mi", beside=gpus.resources),
                "env": _env(HOME="/tmp"),
                "volumeMounts": [_mount("bin", names.BIN_DIR), _mount("agent-tmp", "/tmp")],
            },
            {
                "name": names.AGENT_CONTAINER,
                "image": images.agent,
                "imagePullPolicy": images.pull_policy,
                "terminationMessagePolicy": LAST_WORDS,
                "restartPolicy": "Always",  # a sidecar: it starts before the GPU container and ends after it
                "securityContext": RESTRICTED | {"runAsUser": users.agent},
                # of the memory its gate takes 1.4 at all of its bounds
                "resources": _fixed(cpu="200m", memory="2Gi", beside=gpus.resources),
                "env": [
                    *_env(HOME="/tmp"),
                    *_identity(),
                    *_env(**{names.ENV_ROLE: role}),
                    *(_env(**{names.ENV_FAULTS: names.FAULTS_TAKEN}) if images.takes_faults else ()),
                ],
                "ports": _ports(),
                "startupProbe": _probe(period_s=1, failures=120),
                "readinessProbe": _probe(period_s=5, failures=3),
                "livenessProbe": _probe(period_s=10, failures=6),
                "volumeMounts": [
                    _mount("state", names.STATE_DIR),
                    _mount("sock", names.SOCKET_DIR),
                    _mount("batches", names.BATCH_DIR),
                    _mount("weights", names.WEIGHTS_DIR, read_only=not trains),
                    _mount(TLS_VOLUME, names.TLS_DIR, read_only=True),
                    _mount("keys", names.KEYS_DIR),
                    _mount("job", _directory(names.JOB_FILE), read_only=True),
                    _mount("agent-tmp", "/tmp"),
                ],
            },
        ],
        "containers": [
            {
                "name": names.GPU_CONTAINER,
                **_gpu_image(job, gpus, images),
                "command": [f"{names.BIN_DIR}/runner"],
                "securityContext": RESTRICTED,
                "resources": _gpu_resources(gpus, disk=_gpu_disk(job, images)),
                "env": _env(
                    **_cache_env(names.SCRATCH_DIR),
                    **{names.ENV_GRACE: str(grace_s), names.ENV_WIPED: f"{SHM}:{TMP}"},
                ),
                "volumeMounts": [
                    _mount("bin", names.BIN_DIR, read_only=True),
                    _mount("sock", names.SOCKET_DIR),
                    _mount("batches", names.BATCH_DIR, read_only=not spec.ladder.scores),
                    _mount("weights", names.WEIGHTS_DIR, read_only=not trains),
                    _mount("shm", SHM),
                    _mount("model", names.MODEL_DIR, read_only=True),
                    *([_mount("checkpoints", names.CHECKPOINT_DIR), *_former_mounts(job)] if trains else []),
                    *([_mount("mirrors", names.MIRROR_DIR)] if trains and spec.checkpoint.in_memory else []),
                    _mount("job", _directory(names.JOB_FILE), read_only=True),
                    _mount("scratch", names.SCRATCH_DIR),
                    _mount("gpu-tmp", "/tmp"),
                ],
            }
        ],
        "volumes": [
            *_on_disk("state", "bin", "sock", "agent-tmp", limit=OWN_VOLUME_LIMIT),
            *_on_disk("batches", "scratch", "gpu-tmp", limit=_volume_limit(gpus.resources)),
            _weights(job, trains=trains),
            _empty("shm", medium="Memory", sizeLimit=_shm_limit(gpus.resources)),
            _renewed_keys(),
            _model_volume(job),
            *([_claimed("checkpoints", job.claim_name("checkpoints")), *_former_volumes(job)] if trains else []),
            *(_mirrors(job) if trains else []),
            *_job_volumes(job),
        ],
    }


def _gpu_image(job: Job, gpus: Gpus, images: PodImages) -> Object:
    return {
        "image": gpus.image or job.spec.gpus.image or images.gpu,
        "imagePullPolicy": images.pull_policy,
        "terminationMessagePolicy": NO_WORDS,
    }


def _reference_spec(job: Job, images: PodImages, users: Users) -> Object:
    """Return the spec of a reference: no member, so without an agent. If its node is lost, it is soon made again."""
    gpus = job.spec.reference_gpus
    lost = [
        {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
        for state in ("not-ready", "unreachable")
    ]
    return _pod_spec(users, grace_s=REFERENCE_GRACE_S, claims=_claims(gpus)) | {
        "tolerations": lost,
        "initContainers": _model_containers(job, images, tmp="gpu-tmp", beside=gpus.resources),
        "containers": [
            {
                "name": names.GPU_CONTAINER,
                **_gpu_image(job, gpus, images),
                "terminationMessagePolicy": LAST_WORDS,  # this container runs only our code
                "command": ["python3", "-P", "-m", "colocated_rl_trainer.ref_policy"],
                "securityContext": RESTRICTED,
                "resources": _gpu_resources(gpus, disk=_gpu_disk(job, images)),
                "env": [*_env(**_cache_env(names.SCRATCH_DIR)), *_identity()],
                "ports": _ports("data", "metrics"),
                "startupProbe": _probe(period_s=1, failures=300),
                "readinessProbe": _probe(period_s=2, failures=3, path="/readyz"),
                "livenessProbe": _probe(period_s=10, failures=6),
                "volumeMounts": [
                    _mount("model", names.MODEL_DIR, read_only=True),
                    _mount(TLS_VOLUME, names.TLS_DIR, read_only=True),
                    _mount("job", _directory(names.JOB_FILE), read_only=True),
                    _mount("scratch", names.SCRATCH_DIR),
                    _mount("gpu-tmp", "/tmp"),
                ],
            }
        ],
        "volumes": [
            *_on_disk("scratch", "gpu-tmp", limit=_volume_limit(gpus.resources)),
            _model_volume(job),
            *_job_volumes(job),
        ],
    }


def _rollout_spec(job: Job, images: PodImages, users: Users) -> Object:
    sidecars, mounts, volumes = _rollout_sources(job, images, users)
    return _pod_spec(users, grace_s=ROLLOUT_GRACE_S) | {
        "initContainers": [*_model_containers(job, images, tmp="tmp", beside=job.spec.rollout.resources), *sidecars],
        "containers": [
            {
                "name": names.ROLLOUT_CONTAINER,
                "image": images.rollout,
                "imagePullPolicy": images.pull_policy,
                "terminationMessagePolicy": LAST_WORDS,
                "securityContext": RESTRICTED,
                "resources": _resources(
                    job.spec.rollout.resources, usual={**ROLLOUT_REQUESTS, **_rollout_disk(job, images)}
                ),
                "env": [*_env(**_cache_env(TMP)), *_identity()],
                "ports": _ports(),
                "startupProbe": _probe(period_s=1, failures=300),
                "readinessProbe": _probe(period_s=5, failures=3),
                "livenessProbe": _probe(period_s=10, failures=6),
                "volumeMounts": [
                    _mount("store", names.STATE_DIR),
                    _mount("model", names.MODEL_DIR, read_only=True),
                    _mount(TLS_VOLUME, names.TLS_DIR, read_only=True),
                    _mount("keys", names.KEYS_DIR),
                    _mount("job", _directory(names.JOB_FILE), read_only=True),
                    _mount("tmp", "/tmp"),
                    *_former_mounts(job, with_samples=True),
                    *mounts,
                ],
            }
        ],
        "volumes": [
            _claimed("store", job.claim_name("store")),
            _model_volume(job),
            *_on_disk("tmp", limit=_volume_limit(job.spec.rollout.resources)),
            _renewed_keys(),
            *_former_volumes(job, with_samples=True),
            *volumes,
            *_job_volumes(job),
        ],
    }


def _rollout_sources(job: Job, images: PodImages, users: Users) -> tuple[list[Object], list[Object], list[Object]]:
    """Return sidecars, mounts of the rollout controller and volumes. A recording needs neither prompts nor rewards."""
    recorded, sources = job.spec.recorded, job.spec.sources
    if recorded is not None:
        mount = _mount("recorded", names.RECORDED_DIR, read_only=True)
        return [], [mount], [_claimed("recorded", recorded.claim_name, read_only=True)]
    mounts = [_mount("tasks", names.TASKS_DIR, read_only=True)]
    volumes = [
        *_on_disk("tasks", limit=OWN_VOLUME_LIMIT),
        *_on_disk("rewards-tmp", limit=_volume_limit(job.spec.rollout.prompts.resources)),
    ]
    for number, secret in enumerate(secret_names_of(sources)):
        mounts.append(_mount(f"reward-token-{number}", f"{names.REWARD_TOKENS_DIR}/{secret}", read_only=True))
        volumes.append(_reward_token(f"reward-token-{number}", secret))
    for number, claim in enumerate(claim_names_of(sources)):
        volumes.append(_claimed(f"prompts-{number}", claim, read_only=True))
    return [_rewards_container(job, images, users)], mounts, volumes


def _rewards_container(job: Job, images: PodImages, users: Users) -> Object:
    """Return the container for prompts and rewards: a sidecar, so that it ends with the rollout controller."""
    prompts = job.spec.rollout.prompts
    return {
        "name": names.REWARDS_CONTAINER,
        "image": prompts.image or images.rollout,
        "imagePullPolicy": images.pull_policy,
        "terminationMessagePolicy": NO_WORDS,
        "restartPolicy": "Always",
        "command": ["python3", "-P", "-m", "colocated_rl_rollout.tasks.task_server"],
        "securityContext": RESTRICTED | {"runAsUser": users.rewards},
        "resources": _resources(prompts.resources, usual=REWARDS_REQUESTS),
        "env": _env(**_cache_env("/tmp")),
        "volumeMounts": [
            _mount("tasks", names.TASKS_DIR),
            _mount("rewards-tmp", "/tmp"),
            *(
                _mount(f"prompts-{number}", f"{names.PROMPTS_DIR}/{claim}", read_only=True)
                for number, claim in enumerate(claim_names_of(job.spec.sources))
            ),
        ],
    }


def _model_containers(job: Job, images: PodImages, *, tmp: str, beside: Resources) -> list[Object]:
    """Return the container that fetches a model of the hub before the others start.

    tmp: a volume of the pod. beside: resources of the pod's main container.
    """
    hub = job.spec.model.hugging_face
    if hub is None:
        return []
    token = {"name": hub.secret_name, "key": names.HUB_TOKEN_FILE}
    private = [{"name": names.ENV_HUB_TOKEN, "valueFrom": {"secretKeyRef": token}}] if hub.secret_name else []
    return [
        {
            "name": names.MODEL_CONTAINER,
            "image": images.rollout,
            "imagePullPolicy": images.pull_policy,
            "terminationMessagePolicy": LAST_WORDS,
            "command": ["python3", "-P", "-m", "colocated_rl_rollout.fetch_model"],
            "securityContext": RESTRICTED,
            "resources": _fixed(cpu="200m", memory="1Gi", beside=beside),
            "env": [*_env(**_cache_env("/tmp"), HF_HUB_OFFLINE="0"), *private],
            "volumeMounts": [
                _mount("model", names.MODEL_DIR),
                _mount("job", _directory(names.JOB_FILE), read_only=True),
                _mount(tmp, "/tmp"),
            ],
        }
    ]


# -------------------------------------------------------------------------------------------------- parts of containers
def _env(**values: str) -> list[Object]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _identity() -> list[Object]:
    fields = {
        names.ENV_POD_NAME: "metadata.name",
        names.ENV_POD_UID: "metadata.uid",
        names.ENV_POD_NAMESPACE: "metadata.namespace",
        names.ENV_POD_IP: "status.podIP",
    }
    return [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]


def _cache_env(directory: str) -> dict[str, str]:
    """Return the user's name and the cache directories, for a user without a passwd entry and a read-only root."""
    return {
        "HOME": directory,
        "USER": "colocate",
        "LOGNAME": "colocate",
        "XDG_CACHE_HOME": f"{directory}/.cache",
        "HF_HOME": f"{directory}/huggingface",
        "TORCHINDUCTOR_CACHE_DIR": f"{directory}/inductor",
        "TRITON_CACHE_DIR": f"{directory}/triton",
        "FLASHINFER_WORKSPACE_BASE": f"{directory}/flashinfer",
        "NUMBA_CACHE_DIR": f"{directory}/numba",
    }


def _ports(*of: str) -> list[Object]:
    """Return the ports that are named, or all."""
    ports = {"control": names.CONTROL_PORT, "data": names.DATA_PORT, "metrics": names.METRICS_PORT}
    return [{"name": name, "containerPort": ports[name], "protocol": "TCP"} for name in of or ports]


def _probe(*, period_s: int, failures: int, path: str = "/healthz") -> Object:
    """Return a probe of the member process, never of an engine: an engine's own health route generates tokens (H16)."""
    get = {"path": path, "port": names.METRICS_PORT}
    return {"httpGet": get, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}


WHOLE_CPU = "1"
NOTHING: Mapping[str, str] = {}


def _fixed(*, cpu: str, memory: str, beside: Resources) -> Object:
    """Return the resources of a container of ours. CPU has no limit: devices would wait for a throttled data path.

    beside: of the pod's main container. If its CPUs are limited the pod is meant to be Guaranteed, for which every
    container needs a limit: then it is a whole CPU, which a node with static CPU management gives to it alone.
    """
    if "cpu" in beside.limits:
        return _resources(Resources(limits={"cpu": WHOLE_CPU, "memory": memory}))
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory}}


def _resources(resources: Resources, *, usual: Mapping[str, str] = NOTHING) -> Object:
    """Return the resources; one without a request is requested up to its limit. usual: requests of those not named."""
    return {"requests": {**usual, **resources.limits, **resources.requests}, "limits": dict(resources.limits)}


def _gpu_disk(job: Job, images: PodImages) -> Mapping[str, str]:
    """Return the disk that is requested. A queue of Kueue admits no pod that requests what it has no quota of."""
    return {DISK: GPU_DISK} if images.requests_disk and not job.queue else NOTHING


def _rollout_disk(job: Job, images: PodImages) -> Mapping[str, str]:
    is_queued = job.spec.pod_templates.rollout.queue or in_queue(job, names.ROLE_ROLLOUT)
    return {DISK: ROLLOUT_DISK} if images.requests_disk and not is_queued else NOTHING


def _gpu_resources(gpus: Gpus, *, disk: Mapping[str, str]) -> Object:
    resources = _resources(gpus.resources, usual=disk)
    if gpus.resource_claim_template_name is not None:
        resources["claims"] = [{"name": DEVICES}]
    elif gpus.count > 0:
        resources["limits"][gpus.resource_name] = str(gpus.count)
        resources["requests"][gpus.resource_name] = str(gpus.count)
    return resources


def _claims(gpus: Gpus) -> Sequence[Object]:
    template = gpus.resource_claim_template_name
    return [] if template is None else [{"name": DEVICES, "resourceClaimTemplateName": template}]


def _mount(name: str, path: str, *, read_only: bool = False) -> Object:
    return {"name": name, "mountPath": path, "readOnly": True} if read_only else {"name": name, "mountPath": path}


# -------------------------------------------------------------------------------------------------------------- volumes
def _empty(name: str, **options: str) -> Object:
    return {"name": name, "emptyDir": options}


def _on_disk(*volumes: str, limit: str) -> list[Object]:
    return [_empty(name, sizeLimit=limit) for name in volumes]


def _volume_limit(resources: Resources) -> str:
    """Return the limit of each volume that a container fills. The kubelet holds all of them to the container's own."""
    return resources.limits.get(DISK, VOLUME_LIMIT)


def _shm_limit(resources: Resources) -> str:
    limit = resources.limits.get("memory")
    return SHM_LIMIT if limit is None else str(size_in_bytes(limit) // 2)


def _claimed(name: str, claim: str, *, read_only: bool = False) -> Object:
    source: Object = {"claimName": claim}
    if read_only:
        source["readOnly"] = True
    return {"name": name, "persistentVolumeClaim": source}


def _model_volume(job: Job) -> Object:
    """Return the volume of the starting weights; every container but the one that fetches them mounts it read-only."""
    match job.spec.model.source:
        case ModelClaim() as claim:
            return _claimed("model", claim.name, read_only=True)
        case ModelImage() as image:
            pulled = {"pullPolicy": image.pull_policy.value} if image.pull_policy else {}
            return {"name": "model", "image": {"reference": image.reference, **pulled}}
        case HubModel(cache_claim_name=str(claim_name)):
            return _claimed("model", claim_name)
        case HubModel(cache_host_path=str(path)):
            return {"name": "model", "hostPath": {"path": path, "type": "Directory"}}
        case _:
            return _empty("model")


def _weights(job: Job, *, trains: bool) -> Object:
    """Return the volume for exports: memory that a pod's engine and trainers share, or a claim of all GPU pods."""
    if job.spec.placement.shares_weights:
        return _claimed("weights", job.claim_name("weights"), read_only=not trains)
    return _empty("weights", medium="Memory", sizeLimit=job.spec.weight_sync.size_limit)


def _mirrors(job: Job) -> Sequence[Object]:
    """Return the volume in which trainers keep their state between checkpoints: memory that outlives containers."""
    kept = job.spec.checkpoint.in_memory
    return [] if kept is None else [_empty("mirrors", medium="Memory", sizeLimit=kept.size_limit)]


def _former(job: Job, *, with_samples: bool) -> Sequence[tuple[str, str, str]]:
    """Return volume, claim and mount path of what the job goes on from. A claim that has both is one volume."""
    former = job.spec.restore_from
    if former is None:
        return ()
    found = [("former", former.claim_name, names.FORMER_DIR)]
    if with_samples and former.samples is not None:
        is_same = former.samples.claim_name == former.claim_name
        volume = "former" if is_same else "former-samples"
        found.append((volume, former.samples.claim_name, names.FORMER_SAMPLES_DIR))
    return found


def _former_mounts(job: Job, *, with_samples: bool = False) -> Sequence[Object]:
    return [_mount(volume, path, read_only=True) for volume, _, path in _former(job, with_samples=with_samples)]


def _former_volumes(job: Job, *, with_samples: bool = False) -> Sequence[Object]:
    claims = {volume: claim for volume, claim, _ in _former(job, with_samples=with_samples)}
    return [_claimed(volume, claim, read_only=True) for volume, claim in claims.items()]


def _reward_token(name: str, secret: str) -> Object:
    """Return the volume with the one entry of the user's Secret that is ours to use."""
    items = [{"key": names.REWARD_TOKEN_FILE, "path": names.REWARD_TOKEN_FILE}]
    return {"name": name, "secret": {"secretName": secret, "items": items, "defaultMode": 0o440}}


def _job_volumes(job: Job) -> Sequence[Object]:
    """Return the volume of the job's file. That of its keys is a pod's own: `seated` adds it."""
    return ({"name": "job", "configMap": {"name": config_name(job)}},)


def _renewed_keys() -> Object:
    return _empty("keys", medium="Memory", sizeLimit="1Mi")


def _directory(path: str) -> str:
    return path.rsplit("/", 1)[0]
