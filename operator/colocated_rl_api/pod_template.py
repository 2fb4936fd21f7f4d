"""A job may add to its pods what the operator does not set: places to run, labels, volumes and containers.

The words are core/v1's, and so is the verdict on what stands here as free-form maps: the API server is asked with the
whole pod before the first one is made. Containers, users, volumes and the node's own namespaces are the operator's:
what would touch those has no field, or is refused with words.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from colocated_rl_api import names
from colocated_rl_api.parts import Options, Part, Rule, drop_nulls, should_match

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
QUEUE_LABELS = (QUEUE_LABEL, "kueue.x-k8s.io/priority-class")  # that a job may have in place of its pods' template
"""Labels of a job that hold for its GPU pods: Kueue admits them as one group."""

OWNED_PREFIXES = (f"{names.GROUP}/", "app.kubernetes.io/", "kueue.x-k8s.io/pod-group-")
"""Prefixes of labels and annotations by which selectors, the NetworkPolicy and queues find pods."""

OWNED_VARIABLES = (
    *(names.ENV_POD_NAME, names.ENV_POD_UID, names.ENV_POD_IP, names.ENV_POD_NAMESPACE),
    *(names.ENV_ROLE, names.ENV_REPLICA, names.ENV_GRACE, names.ENV_WIPED),
)

OWNED_VOLUMES = (
    *("state", "bin", "sock", "batches", "scratch", "agent-tmp", "gpu-tmp", "weights", "shm", "model", "checkpoints"),
    *("store", "recorded", "former", "former-samples", "tasks", "tmp", "rewards-tmp", "tls", "keys", "job"),
)
OWNED_VOLUME_PREFIXES = ("prompts-", "reward-token-")

OWNED_PATHS = (
    *("/run/colocate", "/etc/colocate", names.STATE_DIR, names.WEIGHTS_DIR, names.MODEL_DIR, names.PROMPTS_DIR),
    *(names.RECORDED_DIR, names.FORMER_DIR, names.FORMER_SAMPLES_DIR),
    *(names.CHECKPOINT_DIR, names.SCRATCH_DIR, "/tmp", "/dev/shm"),
)

GPU_CONTAINERS = (names.GPU_CONTAINER,)
ROLLOUT_CONTAINERS = (names.ROLLOUT_CONTAINER, names.REWARDS_CONTAINER)

Name = Annotated[str, Field(min_length=1, max_length=253)]
Key = Annotated[str, Field(max_length=317)]  # a domain, / and a name
Words = Annotated[dict[Key, Annotated[str, Field(max_length=4096)]], Field(max_length=32), BeforeValidator(drop_nulls)]
Labels = Annotated[dict[Key, Annotated[str, Field(max_length=63)]], Field(max_length=32), BeforeValidator(drop_nulls)]


def _cel(words: Iterable[str]) -> str:
    return "[" + ", ".join(f"'{word}'" for word in words) + "]"


# ------------------------------------------------------------------------------------------------------------ metadata
def _no_owned(what: str) -> Rule:
    owned = f"{_cel(OWNED_PREFIXES)}.exists(owned, key.startsWith(owned))"
    words = f"{what} may not begin with {', '.join(OWNED_PREFIXES)}: the operator finds and guards its pods by those"
    return Rule(what, f"!has(self.{what}) || !self.{what}.exists(key, {owned})", words)


class PodMetadata(Part):
    """Labels and annotations of a pod."""

    RULES = (_no_owned("labels"), _no_owned("annotations"))

    labels: Labels = Field(
        default_factory=dict,
        description="Further labels of the pod; kueue.x-k8s.io/queue-name puts the job's GPU pods into a queue as one "
        "group.",
    )
    annotations: Words = Field(default_factory=dict, description="Further annotations of the pod.")


# ---------------------------------------------------------------------------------------------------------- scheduling
class Toleration(Part):
    """A taint that the pod may stand on."""

    key: str | None = Field(default=None, max_length=317, description="Of the taint; every taint when absent.")
    operator: str | None = Field(default=None, max_length=32, description="Exists, or Equal when absent.")
    value: str | None = Field(default=None, max_length=63, description="Of the taint, for Equal.")
    effect: str | None = Field(default=None, max_length=32, description="Of the taint; every effect when absent.")
    toleration_seconds: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="How long a NoExecute taint is tolerated; for ever when absent."
    )


Terms = Annotated[list[Options], Field(max_length=16)]


class NodeSelectorTerm(Part):
    """Requirements that a node has to meet together."""

    match_expressions: Terms = Field(default_factory=list, description="Requirements on its labels, as in core/v1.")
    match_fields: Terms = Field(default_factory=list, description="Requirements on its fields, as in core/v1.")


class RequiredNodes(Part):
    """Nodes on which the pod may run."""

    node_selector_terms: list[NodeSelectorTerm] = Field(
        min_length=1, max_length=16, description="A node has to meet one of them."
    )


class NodeAffinity(Part):
    """Nodes on which the pod may or should run."""

    required_during_scheduling_ignored_during_execution: RequiredNodes | None = Field(
        default=None, description="Nodes on which the pod may run; ReplacePodElsewhere takes some of them away."
    )
    preferred_during_scheduling_ignored_during_execution: Terms = Field(
        default_factory=list, description="Nodes on which it should, as in core/v1."
    )


class Affinity(Part):
    """Near what the pod runs, as in core/v1."""

    node_affinity: NodeAffinity | None = Field(default=None, description="To nodes.")
    pod_affinity: Options = Field(default_factory=dict, description="To other pods, as in core/v1.")
    pod_anti_affinity: Options = Field(default_factory=dict, description="Away from other pods, as in core/v1.")


class PullSecret(Part):
    """A Secret with the login of a registry."""

    name: Name = Field(description="Of the Secret, in the job's namespace.")


# ----------------------------------------------------------------------------------------------- volumes and variables
_VOLUME = Rule(
    field="name",
    rule=f"!(self.name in {_cel(OWNED_VOLUMES)}) && "
    f"!{_cel(OWNED_VOLUME_PREFIXES)}.exists(owned, self.name.startsWith(owned))",
    message=f"name is a volume of the operator's: any but {', '.join((*OWNED_VOLUMES, *OWNED_VOLUME_PREFIXES))}",
)


class ExtraVolume(Part):
    """A volume of the person who made the job. Kinds that the restricted profile of pod security allows."""

    RULES = (_VOLUME,)

    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(description="By which containers mount it.")
    persistent_volume_claim: Options | None = Field(default=None, description="A claim, as in core/v1.")
    config_map: Options | None = Field(default=None, description="Files of a ConfigMap, as in core/v1.")
    secret: Options | None = Field(default=None, description="Files of a Secret, as in core/v1.")
    empty_dir: Options | None = Field(default=None, description="Room that goes with the pod, as in core/v1.")
    ephemeral: Options | None = Field(default=None, description="A claim that goes with the pod, as in core/v1.")
    csi: Options | None = Field(default=None, description="An inline volume of a CSI driver, as in core/v1.")
    image: Options | None = Field(default=None, description="Files of an image, as in core/v1.")
    nfs: Options | None = Field(
        default=None, description="A share, as in core/v1; not in a namespace with the restricted profile."
    )


_is_path, _path_rule = should_match(
    r"(/\.?[A-Za-z0-9_-][A-Za-z0-9._-]*)+", "should be a path from the root, without .. in it: /data/cache"
)
_MOUNT = Rule(
    field="mountPath",
    rule=f"!{_cel(OWNED_PATHS)}.exists(owned, (self.mountPath + '/').startsWith(owned + '/'))",
    message=f"mountPath may not be one of {', '.join(OWNED_PATHS)}, nor inside one: mount it elsewhere, and say where "
    "with env",
)


class VolumeMount(Part):
    """Mount of a volume of the template in a container."""

    RULES = (_MOUNT,)

    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(description="Of a volume of the template.")
    mount_path: Annotated[str, _is_path] = Field(
        max_length=512, json_schema_extra=_path_rule, description="In the container."
    )
    sub_path: str | None = Field(default=None, max_length=512, description="In the volume; its root when absent.")
    read_only: bool = Field(default=False, description="Whether the container may only read it.")


_VARIABLE = Rule(
    field="name",
    rule=f"!(self.name in {_cel(OWNED_VARIABLES)})",
    message=f"name may not be one of {', '.join(OWNED_VARIABLES)}: the operator sets those",
)


class Variable(Part):
    """An environment variable."""

    RULES = (_VARIABLE,)

    name: Name = Field(description="Of the variable; it takes the place of one of the operator's for caches or home.")
    value: str | None = Field(default=None, max_length=32_768, description="Its value; empty when absent.")
    value_from: Options | None = Field(default=None, description="Where its value stands, as in core/v1.")


class ContainerTemplate(Part):
    """Additions to a container of the pod."""

    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(description="Of the container.")
    env: list[Variable] = Field(default_factory=list, max_length=64, description="Further environment variables.")
    env_from: Terms = Field(
        default_factory=list,
        description="ConfigMaps and Secrets of variables, as in core/v1; the operator's own count.",
    )
    volume_mounts: list[VolumeMount] = Field(
        default_factory=list, max_length=16, description="Where it finds volumes of the template."
    )


_MOUNTED = Rule(
    field="containers",
    rule="!has(self.containers) || self.containers.all(each, !has(each.volumeMounts) || each.volumeMounts.all("
    "mount, has(self.volumes) && self.volumes.exists(volume, volume.name == mount.name)))",
    message="volumeMounts may name the volumes of the same template only: the operator mounts its own",
)


class PodSecurity(Part):
    """The part of a pod's security context that is the job's to say."""

    supplemental_groups: list[Annotated[int, Field(ge=1, le=2**31 - 1)]] = Field(
        default_factory=list, max_length=16, description="Further groups of its users, for files of shared volumes."
    )


class PodSpec(Part):
    """The part of a pod's spec that is the job's to say."""

    RULES = (_MOUNTED,)

    node_selector: Labels = Field(default_factory=dict, description="Labels of the nodes on which the pod may run.")
    tolerations: list[Toleration] = Field(default_factory=list, max_length=32, description="Taints it may stand on.")
    affinity: Affinity | None = Field(default=None, description="Near what it runs.")
    topology_spread_constraints: Terms = Field(
        default_factory=list, description="Over what such pods spread, as in core/v1."
    )
    priority_class_name: Name | None = Field(default=None, description="How it ranks among waiting pods.")
    runtime_class_name: Name | None = Field(default=None, description="How its containers are run.")
    scheduler_name: Name | None = Field(default=None, description="Who finds its node; the cluster's own when absent.")
    service_account_name: Name | None = Field(
        default=None, description="Whose identity it has. No token of it is mounted: cloud identities bring their own."
    )
    security_context: PodSecurity = Field(default_factory=PodSecurity, description="Groups of its users.")
    dns_policy: str | None = Field(default=None, max_length=32, description="Which names it resolves, as in core/v1.")
    dns_config: Options | None = Field(default=None, description="Name servers and search domains, as in core/v1.")
    image_pull_secrets: list[PullSecret] = Field(
        default_factory=list, max_length=16, description="Logins of registries for the pod's images."
    )
    termination_grace_period_seconds: int | None = Field(
        default=None,
        ge=30,
        le=3600,
        description="Time for the pod to end once it is asked to; 60 for GPU pods and 30 for the rollout controller "
        "when absent.",
    )
    volumes: list[ExtraVolume] = Field(default_factory=list, max_length=16, description="Further volumes.")
    containers: list[ContainerTemplate] = Field(
        default_factory=list, max_length=4, description="Variables and mounts, by container."
    )


class PodTemplate(Part):
    """Additions to the pods of one role."""

    metadata: PodMetadata = Field(default_factory=PodMetadata, description="Labels and annotations.")
    spec: PodSpec = Field(default_factory=PodSpec, description="Scheduling, identity, volumes and variables.")

    @property
    def queue(self) -> str | None:
        """Return the queue whose admission the pods wait for, together."""
        return self.metadata.labels.get(QUEUE_LABEL)


def _known_containers(role: str, allowed: Iterable[str]) -> Rule:
    path = f"self.{role}.spec.containers"
    return Rule(
        f"{role}.spec.containers",
        f"!has(self.{role}) || !has(self.{role}.spec) || !has({path}) || "
        f"{path}.all(each, each.name in {_cel(allowed)})",
        f"containers of {role} pods that a template may name: {', '.join(allowed)}; others are the operator's",
    )


class PodTemplates(Part):
    """Additions to the job's pods, by role."""

    RULES = (
        _known_containers(names.ROLE_GPU, GPU_CONTAINERS),
        _known_containers(names.ROLE_ROLLOUT, ROLLOUT_CONTAINERS),
    )

    gpu: PodTemplate = Field(default_factory=PodTemplate, description="Of the pods with engine and trainer.")
    rollout: PodTemplate = Field(default_factory=PodTemplate, description="Of the pod with the rollout controller.")


def stated(part: Part) -> dict[str, Any]:
    """Return the fields that the part sets, as they go to the API server."""
    return part.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
