"""A job may add to its pods what the operator does not set: places to run, labels, volumes and containers.

The words are core/v1's, and so is the verdict on what stands here as free-form maps: the API server is asked with the
whole pod before the first one is made. The operator's containers and volumes and what containers may do are its own:
what would touch those has no field, or is refused with words. What pods use of their node, an admin allows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from colocated_rl_api import names
from colocated_rl_api.parts import Options, Part, Rule, drop_nulls, is_path, path_rule
from colocated_rl_api.rungs import ReferencePlacement, RolloutPlacement

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
QUEUE_LABELS = (QUEUE_LABEL, "kueue.x-k8s.io/priority-class")  # that a job may have in place of its pods' template
"""Labels of a job that hold for its pods: Kueue admits them as one group."""

OWNED_PREFIXES = (f"{names.GROUP}/", "app.kubernetes.io/", "kueue.x-k8s.io/pod-group-")
"""Prefixes of labels and annotations by which selectors, the NetworkPolicy and queues find pods."""

OWNED_VARIABLES = (
    *(names.ENV_POD_NAME, names.ENV_POD_UID, names.ENV_POD_IP, names.ENV_POD_NAMESPACE),
    *(names.ENV_ROLE, names.ENV_REPLICA, names.ENV_GRACE, names.ENV_WIPED),
)

OWNED_VOLUMES = (
    *("state", "bin", "sock", "batches", "scratch", "agent-tmp", "gpu-tmp", "weights", "shm", "model", "checkpoints"),
    *("store", "recorded", "former", "former-samples", "tasks", "tmp", "rewards-tmp", "tls", "keys", "job"),
    "mirrors",
)
OWNED_VOLUME_PREFIXES = ("prompts-", "reward-token-")

OWNED_PATHS = (
    *("/run/colocate", "/etc/colocate", names.STATE_DIR, names.WEIGHTS_DIR, names.MODEL_DIR, names.PROMPTS_DIR),
    *(names.RECORDED_DIR, names.FORMER_DIR, names.FORMER_SAMPLES_DIR),
    *(names.CHECKPOINT_DIR, names.SCRATCH_DIR, "/tmp", "/dev/shm"),
)

CONTAINERS = {
    "gpu": (names.GPU_CONTAINER, names.AGENT_CONTAINER),
    "engine": (names.GPU_CONTAINER, names.AGENT_CONTAINER),
    "reference": (names.GPU_CONTAINER,),
    "rollout": (names.ROLLOUT_CONTAINER, names.REWARDS_CONTAINER),
}
"""Containers of the operator's to which a template may add something, by the template's field."""

TEMPLATE_OF = {
    **dict.fromkeys((names.ROLE_GPU, names.ROLE_TRAINER), "gpu"),
    **{role: role for role in (names.ROLE_ENGINE, names.ROLE_REFERENCE, names.ROLE_ROLLOUT)},
}
"""The field with the template of the pods of a role, by role."""

OWN_USERS = 3  # in a row: of engine, trainer and rollout controller; of the agent; of reward code

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


def _no_empty_queue() -> Rule:
    return Rule(
        "labels",
        f"!has(self.labels) || !self.labels.exists(key, key in {_cel(QUEUE_LABELS)} && self.labels[key] == '')",
        f"{' and '.join(QUEUE_LABELS)} have a name as their value: leave the label out; for a rollout pod that waits "
        "in no queue set scheduling.queuedPods to WithDevices",
    )


class PodMetadata(Part):
    """Labels and annotations of a pod."""

    RULES = (_no_owned("labels"), _no_owned("annotations"), _no_empty_queue())

    labels: Labels = Field(
        default_factory=dict,
        description="Further labels of the pod; kueue.x-k8s.io/queue-name of GPU pods puts all pods of the job into a "
        "queue as one group.",
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
_Words = Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=64)]


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
    message="name is a volume of the operator's: choose another, such as one with a word of yours before it",
)


class ExtraVolume(Part):
    """A volume of the person who made the job."""

    RULES = (_VOLUME,)

    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(description="By which containers mount it.")
    persistent_volume_claim: Options | None = Field(default=None, description="A claim, as in core/v1.")
    config_map: Options | None = Field(default=None, description="Files of a ConfigMap, as in core/v1.")
    secret: Options | None = Field(default=None, description="Files of a Secret, as in core/v1.")
    empty_dir: Options | None = Field(default=None, description="Room that goes with the pod, as in core/v1.")
    ephemeral: Options | None = Field(default=None, description="A claim that goes with the pod, as in core/v1.")
    csi: Options | None = Field(default=None, description="An inline volume of a CSI driver, as in core/v1.")
    projected: Options | None = Field(default=None, description="Files of several sources, as in core/v1.")
    image: Options | None = Field(default=None, description="Files of an image, as in core/v1.")
    nfs: Options | None = Field(
        default=None, description="A share, as in core/v1; not in a namespace with the restricted profile."
    )
    host_path: Options | None = Field(
        default=None, description="A path of the node, as in core/v1, of those that an admin allows."
    )


_MOUNT = Rule(
    field="mountPath",
    rule=f"!{_cel(OWNED_PATHS)}.exists(owned, (self.mountPath + '/').startsWith(owned + '/'))",
    message=f"mountPath may not be one of {', '.join(OWNED_PATHS)}, nor inside one: mount it elsewhere, and say where "
    "with env",
)


class Mount(Part):
    """Mount of a volume of the template in a container of the job's own."""

    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(description="Of a volume of the template.")
    mount_path: Annotated[str, is_path] = Field(
        max_length=512, json_schema_extra=path_rule, description="In the container."
    )
    sub_path: str | None = Field(default=None, max_length=512, description="In the volume; its root when absent.")
    read_only: bool = Field(default=False, description="Whether the container may only read it.")


class VolumeMount(Mount):
    """Mount of a volume of the template in a container of the operator's."""

    RULES = (_MOUNT,)


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


def _read_amount(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_Amount = Annotated[
    str, Field(max_length=32, json_schema_extra={"x-kubernetes-int-or-string": True}), BeforeValidator(_read_amount)
]
_Amounts = Annotated[dict[Key, _Amount], Field(max_length=16), BeforeValidator(drop_nulls)]


class VariableSource(Part):
    """An object of variables, as in core/v1."""

    prefix: str | None = Field(default=None, max_length=253, description="Before the name of each.")
    config_map_ref: Options | None = Field(default=None, description="A ConfigMap.")
    secret_ref: Options | None = Field(default=None, description="A Secret.")


class UsedClaim(Part):
    """A device claim that the container uses."""

    name: Name = Field(description="One of the template's resourceClaims.")
    request: Name | None = Field(default=None, description="One of its requests; all when absent.")


class ContainerResources(Part):
    """Resources of a container, as in core/v1."""

    requests: _Amounts = Field(default_factory=dict, description="Of the agent alone.")
    limits: _Amounts = Field(default_factory=dict, description="Of the agent alone.")
    claims: list[UsedClaim] = Field(default_factory=list, max_length=16, description="Devices that it uses.")


def _is_given(field: str) -> str:
    """Return CEL for a list or map that is there and not empty; `part.field` may lack its part."""
    part, _, _ = field.rpartition(".")
    there = f"has(self.{part}) && has(self.{field})" if part else f"has(self.{field})"
    return f"{there} && size(self.{field}) > 0"


_SIZED = Rule(
    field="resources",
    rule=f"self.name == '{names.AGENT_CONTAINER}' || "
    f"!({_is_given('resources.requests')} || {_is_given('resources.limits')})",
    message="resources have only claims here, but for the agent's: write requests and limits in gpus, rollout.gpus, "
    "reference.gpus, rollout.resources or rollout.prompts.resources",
)
_AGENT = Rule(
    field="name",
    rule=f"self.name != '{names.AGENT_CONTAINER}' || !("
    + " || ".join(_is_given(field) for field in ("env", "envFrom", "volumeMounts", "resources.claims"))
    + ")",
    message="agent holds keys of the job: a template says its requests and limits, and nothing else",
)


class ContainerTemplate(Part):
    """Additions to a container of the operator's."""

    RULES = (_SIZED, _AGENT)

    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(description="Of the container.")
    env: list[Variable] = Field(default_factory=list, max_length=64, description="Further environment variables.")
    env_from: list[VariableSource] = Field(
        default_factory=list,
        max_length=16,
        description="ConfigMaps and Secrets of variables; the operator's own count.",
    )
    volume_mounts: list[VolumeMount] = Field(
        default_factory=list, max_length=16, description="Where it finds volumes of the template."
    )
    resources: ContainerResources = Field(
        default_factory=ContainerResources, description="Claims that it uses; of the agent requests and limits."
    )


_OWN_NAME = Rule(
    field="name",
    rule=f"!(self.name in {_cel(names.CONTAINERS)})",
    message=f"name is a container of the operator's: any but {', '.join(names.CONTAINERS)}",
)


class OwnContainer(Part):
    """A container of the job's own, in core/v1's words. It sees volumes of the template alone.

    A word that is absent here, such as a security context or a readiness probe, can't be said.
    """

    RULES = (_OWN_NAME,)

    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(description="Of the container.")
    image: Annotated[str, Field(min_length=1, max_length=512)] = Field(description="What it runs.")
    image_pull_policy: str | None = Field(default=None, max_length=32, description="When its node pulls that.")
    restart_policy: str | None = Field(
        default=None, max_length=32, description="Always for a sidecar; when absent it ends before the next one starts."
    )
    command: _Words = Field(default_factory=list, description="Its program; the image's when absent.")
    args: _Words = Field(default_factory=list, description="Arguments of the program.")
    env: Annotated[list[Options], Field(max_length=64)] = Field(default_factory=list, description="Variables.")
    env_from: Terms = Field(default_factory=list, description="ConfigMaps and Secrets of variables.")
    volume_mounts: list[Mount] = Field(default_factory=list, max_length=16, description="Volumes of the template.")
    resources: Options = Field(default_factory=dict, description="Requests, limits and claims.")
    startup_probe: Options | None = Field(default=None, description="The next container waits for it.")
    liveness_probe: Options | None = Field(default=None, description="Restarts a sidecar.")


def _mounted(containers: str) -> Rule:
    return Rule(
        field=containers,
        rule=f"!has(self.{containers}) || self.{containers}.all(each, !has(each.volumeMounts) || "
        "each.volumeMounts.all(mount, has(self.volumes) && "
        "self.volumes.exists(volume, volume.name == mount.name)))",
        message="volumeMounts may name the volumes of the same template only: the operator mounts its own",
    )


class PodSecurity(Part):
    """The part of a pod's security context that is the job's to say."""

    run_as_user: int | None = Field(
        default=None,
        ge=1,
        le=2**31 - OWN_USERS,
        description="First of three users: of engine, trainer and rollout controller; next, of the agent; next, of "
        "reward code. 65532 when absent, or of the namespace's range.",
    )
    fs_group: int | None = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        description="Group of these users, which owns the pod's volumes; 65532 when absent.",
    )
    supplemental_groups: list[Annotated[int, Field(ge=1, le=2**31 - 1)]] = Field(
        default_factory=list, max_length=16, description="Further groups of its users, for files of shared volumes."
    )


class PodDefaults(Part):
    """The part of a pod's spec that an admin may say for all jobs: where it runs, and as whom."""

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
    security_context: PodSecurity = Field(default_factory=PodSecurity, description="Its users and their groups.")
    dns_policy: str | None = Field(default=None, max_length=32, description="Which names it resolves, as in core/v1.")
    dns_config: Options | None = Field(default=None, description="Name servers and search domains, as in core/v1.")
    image_pull_secrets: list[PullSecret] = Field(
        default_factory=list, max_length=16, description="Logins of registries for the pod's images."
    )


class PodSpec(PodDefaults):
    """The part of a pod's spec that is the job's to say."""

    RULES = (_mounted("containers"), _mounted("initContainers"))

    host_network: bool = Field(
        default=False, description="Whether it has the network of its node, where an admin allows that."
    )
    termination_grace_period_seconds: int | None = Field(
        default=None,
        ge=30,
        le=3600,
        description="Time for the pod to end once it is asked to; 60 for GPU pods and 30 for the rollout controller "
        "when absent.",
    )
    volumes: list[ExtraVolume] = Field(default_factory=list, max_length=16, description="Further volumes.")
    resource_claims: Terms = Field(
        default_factory=list, description="Claims of devices beside those of gpus, as in core/v1."
    )
    init_containers: list[OwnContainer] = Field(
        default_factory=list,
        max_length=8,
        description="Containers of the job's own, which start before the operator's: sidecars, and those that end.",
    )
    containers: list[ContainerTemplate] = Field(
        default_factory=list, max_length=4, description="Variables, mounts and claims of the operator's, by name."
    )

    def with_defaults(self, usual: PodDefaults) -> PodSpec:
        """Return the spec with the fields of `usual` that it says nothing of. A list or a map counts as a whole."""
        said, unsaid = (part.model_dump(exclude_defaults=True) for part in (self, usual))
        return self.model_copy(update={name: getattr(usual, name) for name in unsaid if name not in said})


class PodTemplate(Part):
    """Additions to the pods of one role."""

    metadata: PodMetadata = Field(default_factory=PodMetadata, description="Labels and annotations.")
    spec: PodSpec = Field(default_factory=PodSpec, description="Scheduling, identity, volumes and variables.")

    @property
    def queue(self) -> str | None:
        """Return the queue whose admission the pods wait for, together."""
        return self.metadata.labels.get(QUEUE_LABEL)


def _known_containers(template: str) -> Rule:
    path, allowed = f"self.{template}.spec.containers", CONTAINERS[template]
    return Rule(
        f"{template}.spec.containers",
        f"!has(self.{template}) || !has(self.{template}.spec) || !has({path}) || "
        f"{path}.all(each, each.name in {_cel(allowed)})",
        f"containers of {template} pods that a template may name: {', '.join(allowed)}; a container of your own is one "
        "of initContainers",
    )


def _one_queue(template: str) -> Rule:
    labels = f"self.{template}.metadata.labels"
    return Rule(
        f"{template}.metadata.labels",
        f"!has(self.{template}) || !has(self.{template}.metadata) || !has({labels}) || "
        f"!{labels}.exists(key, key in {_cel(QUEUE_LABELS)})",
        f"{template} pods wait in one queue with all GPU pods: write it in the job's labels, or in podTemplates.gpu",
    )


class PodTemplates(Part):
    """Additions to the job's pods, by role."""

    RULES = (*map(_known_containers, CONTAINERS), _one_queue("engine"), _one_queue("reference"))

    gpu: PodTemplate = Field(
        default_factory=PodTemplate,
        description="Of pods with trainers, and of all others with devices that have no template of their own.",
    )
    engine: PodTemplate | None = Field(
        default=None, description="Of engines with devices of their own, in the place of gpu."
    )
    reference: PodTemplate | None = Field(
        default=None, description="Of a reference with devices of its own, in the place of gpu."
    )
    rollout: PodTemplate = Field(default_factory=PodTemplate, description="Of the pod with the rollout controller.")

    def of(self, role: str) -> PodTemplate:
        """Return the template of the pods of a role. One of their own takes the place of gpu, and nothing is merged."""
        template: PodTemplate | None = getattr(self, TEMPLATE_OF[role])
        return template or self.gpu

    @property
    def has_host_network(self) -> bool:
        """Return whether pods of any role have the network of their nodes."""
        return any(self.of(role).spec.host_network for role in TEMPLATE_OF)


APART = (
    Rule(
        field="podTemplates.engine",
        rule="!has(self.podTemplates) || !has(self.podTemplates.engine) || "
        f"has(self.rollout.placement) && self.rollout.placement != '{RolloutPlacement.WITH_TRAINER}'",
        message="podTemplates.engine is of engine pods with devices of their own: give it with rollout.placement "
        "OwnDevices or Both, and only there",
    ),
    Rule(
        field="podTemplates.reference",
        rule="!has(self.podTemplates) || !has(self.podTemplates.reference) || has(self.reference) && "
        f"has(self.reference.placement) && self.reference.placement == '{ReferencePlacement.OWN_DEVICES}'",
        message="podTemplates.reference is of reference pods with devices of their own: give it with "
        "reference.placement OwnDevices, and only there",
    ),
)
"""Rules of the spec: a template is for pods that there are."""


def stated(part: Part) -> dict[str, Any]:
    """Return the fields that the part sets, as they go to the API server."""
    return part.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
