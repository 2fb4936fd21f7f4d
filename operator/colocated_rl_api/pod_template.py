"""A job may add to its pods what the operator does not set: places to run, labels, volumes and containers.

The words are core/v1's, and so is the verdict on what stands here as free-form maps: the API server is asked with the
whole pod before the first one is made. Containers, users, volumes and the node's own namespaces are the operator's:
what would touch those has no field, or is refused with words.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from colocated_rl_api import names
from colocated_rl_api.parts import Options, Part, Rule, drop_nulls, rules, should_match

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
QUEUE_LABELS = (QUEUE_LABEL, "kueue.x-k8s.io/priority-class")  # that a job may have in place of its pods' template
"""Of GPU pods, by the job: Kueue admits them as one group."""

OWNED_PREFIXES = (f"{names.GROUP}/", "app.kubernetes.io/", "kueue.x-k8s.io/pod-group-")
"""Of labels and annotations: selectors, the NetworkPolicy and queues go by them."""

OWNED_VARIABLES = (
    *(names.ENV_POD_NAME, names.ENV_POD_UID, names.ENV_POD_IP, names.ENV_POD_NAMESPACE),
    *(names.ENV_ROLE, names.ENV_REPLICA, names.ENV_GRACE),
)

OWNED_VOLUMES = (
    *("state", "bin", "sock", "batches", "scratch", "agent-tmp", "gpu-tmp", "weights", "shm", "model", "checkpoints"),
    *("store", "recorded", "former", "former-samples", "tasks", "tmp", "rewards-tmp", "tls", "job"),
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
def _owned_words(what: str) -> str:
    return f"{what} may not begin with {', '.join(OWNED_PREFIXES)}: the operator finds and guards its pods by those"


def _no_owned(what: str) -> Rule:
    owned = f"{_cel(OWNED_PREFIXES)}.exists(owned, key.startsWith(owned))"
    return Rule(what, f"!has(self.{what}) || !self.{what}.exists(key, {owned})", _owned_words(what))


class PodMetadata(Part):
    """Labels and annotations of a pod."""

    model_config = ConfigDict(json_schema_extra=rules(_no_owned("labels"), _no_owned("annotations")))

    labels: Labels = Field(
        default_factory=dict,
        description="Further labels of the pod; kueue.x-k8s.io/queue-name puts the job's GPU pods into a queue as one "
        "group.",
    )
    annotations: Words = Field(default_factory=dict, description="Further annotations of the pod.")

    @model_validator(mode="after")
    def _leave_ours_alone(self) -> Self:
        for what, keys in (("labels", self.labels), ("annotations", self.annotations)):
            if any(key.startswith(OWNED_PREFIXES) for key in keys):
                raise ValueError(_owned_words(what))
        return self


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
_VOLUME_WORDS = f"name is a volume of the operator's: any but {', '.join((*OWNED_VOLUMES, *OWNED_VOLUME_PREFIXES))}"


class ExtraVolume(Part):
    """A volume of the person who made the job. Kinds that the restricted profile of pod security allows."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "name",
                f"!(self.name in {_cel(OWNED_VOLUMES)}) && "
                f"!{_cel(OWNED_VOLUME_PREFIXES)}.exists(owned, self.name.startsWith(owned))",
                _VOLUME_WORDS,
            )
        )
    )

    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(description="By which containers mount it.")
    persistent_volume_claim: Options | None = Field(default=None, description="A claim, as in core/v1.")
    config_map: Options | None = Field(default=None, description="Files of a ConfigMap, as in core/v1.")
    secret: Options | None = Field(default=None, description="Files of a Secret, as in core/v1.")
    empty_dir: Options | None = Field(default=None, description="Room that goes with the pod, as in core/v1.")
    ephemeral: Options | None = Field(default=None, description="A claim that goes with the pod, as in core/v1.")
    csi: Options | None = Field(default=None, description="An inline volume of a CSI driver, as in core/v1.")

    @model_validator(mode="after")
    def _has_a_name_of_its_own(self) -> Self:
        if self.name in OWNED_VOLUMES or self.name.startswith(OWNED_VOLUME_PREFIXES):
            raise ValueError(_VOLUME_WORDS)
        return self


_is_path, _path_rule = should_match(
    r"(/\.?[A-Za-z0-9_-][A-Za-z0-9._-]*)+", "should be a path from the root, without .. in it: /data/cache"
)
_MOUNT_WORDS = (
    f"mountPath may not be one of {', '.join(OWNED_PATHS)}, nor inside one: mount it elsewhere, and say where with env"
)


class VolumeMount(Part):
    """Mount of a volume of the template in a container."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "mountPath",
                f"!{_cel(OWNED_PATHS)}.exists(owned, (self.mountPath + '/').startsWith(owned + '/'))",
                _MOUNT_WORDS,
            )
        )
    )

    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(description="Of a volume of the template.")
    mount_path: Annotated[str, _is_path] = Field(
        max_length=512, json_schema_extra=_path_rule, description="In the container."
    )
    sub_path: str | None = Field(default=None, max_length=512, description="In the volume; its root when absent.")
    read_only: bool = Field(default=False, description="Whether the container may only read it.")

    @model_validator(mode="after")
    def _is_beside_ours(self) -> Self:
        if any(f"{self.mount_path}/".startswith(f"{owned}/") for owned in OWNED_PATHS):
            raise ValueError(_MOUNT_WORDS)
        return self


_VARIABLE_WORDS = f"name may not be one of {', '.join(OWNED_VARIABLES)}: the operator sets those"


class Variable(Part):
    """An environment variable."""

    model_config = ConfigDict(
        json_schema_extra=rules(Rule("name", f"!(self.name in {_cel(OWNED_VARIABLES)})", _VARIABLE_WORDS))
    )

    name: Name = Field(description="Of the variable; it takes the place of one of the operator's for caches or home.")
    value: str | None = Field(default=None, max_length=32_768, description="Its value; empty when absent.")
    value_from: Options | None = Field(default=None, description="Where its value stands, as in core/v1.")

    @model_validator(mode="after")
    def _is_not_ours(self) -> Self:
        if self.name in OWNED_VARIABLES:
            raise ValueError(_VARIABLE_WORDS)
        return self


class ContainerTemplate(Part):
    """Additions to a container of the pod."""

    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(description="Of the container.")
    env: list[Variable] = Field(default_factory=list, max_length=64, description="Further environment variables.")
    volume_mounts: list[VolumeMount] = Field(
        default_factory=list, max_length=16, description="Where it finds volumes of the template."
    )


_MOUNTED_WORDS = "volumeMounts may name the volumes of the same template only: the operator mounts its own"


class PodSpec(Part):
    """The part of a pod's spec that is the job's to say."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "containers",
                "!has(self.containers) || self.containers.all(each, !has(each.volumeMounts) || each.volumeMounts.all("
                "mount, has(self.volumes) && self.volumes.exists(volume, volume.name == mount.name)))",
                _MOUNTED_WORDS,
            )
        )
    )

    node_selector: Labels = Field(default_factory=dict, description="Labels of the nodes on which the pod may run.")
    tolerations: list[Toleration] = Field(default_factory=list, max_length=32, description="Taints it may stand on.")
    affinity: Affinity | None = Field(default=None, description="Near what it runs.")
    priority_class_name: Name | None = Field(default=None, description="How it ranks among waiting pods.")
    runtime_class_name: Name | None = Field(default=None, description="How its containers are run.")
    scheduler_name: Name | None = Field(default=None, description="Who finds its node; the cluster's own when absent.")
    service_account_name: Name | None = Field(
        default=None, description="Whose identity it has. No token of it is mounted: cloud identities bring their own."
    )
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

    @model_validator(mode="after")
    def _mounts_its_own(self) -> Self:
        known = {volume.name for volume in self.volumes}
        if any(mount.name not in known for each in self.containers for mount in each.volume_mounts):
            raise ValueError(_MOUNTED_WORDS)
        return self


class PodTemplate(Part):
    """Additions to the pods of one role."""

    metadata: PodMetadata = Field(default_factory=PodMetadata, description="Labels and annotations.")
    spec: PodSpec = Field(default_factory=PodSpec, description="Scheduling, identity, volumes and variables.")

    @property
    def queue(self) -> str | None:
        """Return the queue whose admission the pods wait for, together."""
        return self.metadata.labels.get(QUEUE_LABEL)


def _container_words(role: str, allowed: Iterable[str]) -> str:
    return f"containers of {role} pods that a template may name: {', '.join(allowed)}; others are the operator's"


def _known_containers(role: str, allowed: Iterable[str]) -> Rule:
    path = f"self.{role}.spec.containers"
    return Rule(
        f"{role}.spec.containers",
        f"!has(self.{role}) || !has(self.{role}.spec) || !has({path}) || "
        f"{path}.all(each, each.name in {_cel(allowed)})",
        _container_words(role, allowed),
    )


class PodTemplates(Part):
    """Additions to the job's pods, by role."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            _known_containers(names.ROLE_GPU, GPU_CONTAINERS), _known_containers(names.ROLE_ROLLOUT, ROLLOUT_CONTAINERS)
        )
    )

    gpu: PodTemplate = Field(default_factory=PodTemplate, description="Of the pods with engine and trainer.")
    rollout: PodTemplate = Field(default_factory=PodTemplate, description="Of the pod with the rollout controller.")

    @model_validator(mode="after")
    def _names_containers_that_there_are(self) -> Self:
        for role, template, allowed in (
            (names.ROLE_GPU, self.gpu, GPU_CONTAINERS),
            (names.ROLE_ROLLOUT, self.rollout, ROLLOUT_CONTAINERS),
        ):
            if any(each.name not in allowed for each in template.spec.containers):
                raise ValueError(_container_words(role, allowed))
        return self


def stated(part: Part) -> dict[str, Any]:
    """Return the fields that the part sets, as they go to the API server."""
    return part.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
