"""Make a job's pods one group, for the queue that admits them and for the scheduler that places them.

A gang is all pods with devices: they are placed together or not at all, so that a job that waits holds no device. Its
PodGroup is an object of the scheduler's own kind; the pods refer to it by its name, which has a digest of its spec: a
start with another number of pods has another group, and no field ever changes. In a queue of Kueue the rollout pod is
in the group too, so that one admission is for the whole job.

| by | kind | on each pod | topology |
|---|---|---|---|
| Kueue | none | labels, annotations | annotation: pods of each role together |
| Native | scheduling.k8s.io/v1alpha2 PodGroup | spec.schedulingGroup | required: constraint of the PodGroup |
| Volcano | scheduling.volcano.sh/v1beta1 PodGroup | annotation | networkTopology of the PodGroup |
| Coscheduling | scheduling.x-k8s.io/v1alpha1 PodGroup | label | none |

Where these have nothing for a topology, and where pods of a role have one of their own, pods have an affinity to one
another. The module is pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from colocated_rl_api import names
from colocated_rl_api.pod_template import QUEUE_LABELS
from colocated_rl_api.scheduling import Gang, QueuedPods, Topology
from colocated_rl_operator.planner.observation import Job

Object = dict[str, Any]

GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"  # ours, read by Kueue: admitted together or not at all
GROUP_SIZE = "kueue.x-k8s.io/pod-group-total-count"
GROUP_INDEX = "kueue.x-k8s.io/pod-group-pod-index"  # by which topology-aware scheduling puts neighbours side by side
QUEUE_TOPOLOGY = "kueue.x-k8s.io/podset-{}-topology"  # required or preferred

VOLCANO_GROUP = "scheduling.k8s.io/group-name"  # annotation
VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"  # annotation of the job's template
COSCHEDULING_GROUP = "scheduling.x-k8s.io/pod-group"  # label

VERSIONS = {
    Gang.NATIVE: "scheduling.k8s.io/v1alpha2",
    Gang.VOLCANO: "scheduling.volcano.sh/v1beta1",
    Gang.COSCHEDULING: "scheduling.x-k8s.io/v1alpha1",
}
"""API version of the PodGroups of each."""

NEEDS = {
    VERSIONS[Gang.NATIVE]: "Kubernetes 1.36 with the feature gates GenericWorkload and GangScheduling (for a required "
    "topology TopologyAwareWorkloadScheduling too), on API server and scheduler, and --runtime-config="
    "scheduling.k8s.io/v1alpha2=true",
    VERSIONS[Gang.VOLCANO]: "Volcano, for a topology 1.14 or newer",
    VERSIONS[Gang.COSCHEDULING]: "scheduler-plugins with its plugin Coscheduling and the CRD of its PodGroups",
}
"""What a cluster needs to have PodGroups of an API version."""


@dataclass(frozen=True)
class Gangs:
    """Gangs are the kinds that the cluster has: a job that names none has the first. schedulers: their names."""

    kinds: tuple[Gang, ...] = ()
    schedulers: Mapping[Gang, str] = field(default_factory=dict)

    def of(self, job: Job) -> Gang:
        return job.spec.scheduling.gang or next(iter(self.kinds), Gang.NONE)

    def objection(self, job: Job) -> str:
        """Return why the job can't have the gang that it names; "" if it can."""
        if (gang := self.of(job)) in (Gang.NONE, *self.kinds):
            return ""
        return (
            f"spec.scheduling.gang is {gang}, which the operator may not make here. An admin whose cluster has it adds "
            "it to the chart's value scheduling.gangs; without the field the job has the cluster's choice: "
            f"{next(iter(self.kinds), Gang.NONE)}"
        )


NO_GANGS = Gangs()


@dataclass(frozen=True)
class GangObject:
    """A gang has this PodGroup, here without the metadata that it has as an object of its job."""

    version: str
    name: str
    spec: Object


def pod_group(job: Job, gangs: Gangs, *, priority: str | None) -> GangObject | None:
    """Return the group of the job's gang; None if its pods are placed each by itself. priority: class of its pods."""
    if (gang := gangs.of(job)) is Gang.NONE:
        return None
    size = _size(job)
    spec: Object = {"schedulingPolicy": {"gang": {"minCount": size}}} if gang is Gang.NATIVE else {"minMember": size}
    if gang is Gang.VOLCANO:
        spec |= _volcano_fields(job, priority)
    elif (topology := _topology_of_group(job, gang)) is not None:
        spec["schedulingConstraints"] = {"topology": [{"key": topology.label}]}
    digest = hashlib.sha256(json.dumps([gang, spec], sort_keys=True).encode()).hexdigest()
    return GangObject(VERSIONS[gang], f"{job.name}-{digest[:8]}-{job.uid[:8]}", spec)


def _size(job: Job) -> int:
    return len(job.gpu_seats) + len(job.reference_seats)


def _own_topologies(job: Job) -> dict[str, Topology]:
    """Return the topologies of roles whose pods are near one another without those of other roles."""
    rollout, reference = job.spec.rollout.topology, job.spec.reference and job.spec.reference.topology
    return {role: each for role, each in ((names.ROLE_ENGINE, rollout), (names.ROLE_REFERENCE, reference)) if each}


def _topology_of(job: Job, role: str) -> Topology | None:
    return _own_topologies(job).get(role, job.spec.scheduling.topology)


def _topology_of_group(job: Job, gang: Gang) -> Topology | None:
    """Return the topology if the PodGroup keeps it. A queue keeps it otherwise than a group would: never both."""
    topology = job.spec.scheduling.topology
    if topology is None or job.queue or _own_topologies(job):
        return None
    return topology if gang is Gang.VOLCANO or (gang is Gang.NATIVE and topology.required) else None


def _volcano_fields(job: Job, priority: str | None) -> Object:
    """Return queue, priority and topology. Volcano's discovery by labels names the tier of its nodes by the label."""
    fields: Object = {}
    if queue := job.spec.pod_templates.gpu.metadata.annotations.get(VOLCANO_QUEUE):
        fields["queue"] = queue
    if priority is not None:
        fields["priorityClassName"] = priority
    if (topology := _topology_of_group(job, Gang.VOLCANO)) is not None:
        mode = "hard" if topology.required else "soft"
        fields["networkTopology"] = {"mode": mode, "highestTierName": topology.label}
    return fields


@dataclass(frozen=True)
class Membership:
    """A membership is what a pod carries to be in the groups of its job. affinity: to other pods, in core/v1's form."""

    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    spec: Object = field(default_factory=dict)
    affinity: Object = field(default_factory=dict)


def membership(job: Job, role: str, gangs: Gangs, *, priority: str | None) -> Membership:
    """Return what each pod of a role carries. priority: as `pod_group` has it."""
    labels, annotations = _in_queue(job, role) if in_queue(job, role) else ({}, {})
    if role == names.ROLE_ROLLOUT:
        return Membership(labels, annotations)
    gang, group = gangs.of(job), pod_group(job, gangs, priority=priority)
    spec: Object = {}
    if group is not None:
        spec = {"schedulerName": gangs.schedulers[gang]} if gang in gangs.schedulers else {}
        match gang:
            case Gang.NATIVE:
                spec["schedulingGroup"] = {"podGroupName": group.name}
            case Gang.VOLCANO:
                annotations = {**annotations, VOLCANO_GROUP: group.name}
            case _:
                labels = {**labels, COSCHEDULING_GROUP: group.name}
    return Membership(labels, annotations, spec, _affinity(job, role, gang))


def is_in_gang(pod: Object) -> bool:
    """Return whether the pod carries what makes it one of a gang."""
    metadata = pod["metadata"]
    marks = {"schedulingGroup": pod["spec"], VOLCANO_GROUP: metadata.get("annotations", {})}
    marks[COSCHEDULING_GROUP] = metadata.get("labels", {})
    return any(mark in part for mark, part in marks.items())


def in_queue(job: Job, role: str) -> bool:
    """Return whether pods of the role are in the group that a queue of Kueue admits.

    A rollout pod is not if its template names another queue, or if the job leaves it out.
    """
    if role != names.ROLE_ROLLOUT:
        return bool(job.queue)
    is_named = job.spec.pod_templates.rollout.queue in (None, job.queue)
    return bool(job.queue) and is_named and job.spec.scheduling.queued_pods is QueuedPods.ALL


def _in_queue(job: Job, role: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return labels and annotations of the queue's group.

    Queue and priority are the job's, unless a template has others. Kueue reads them of any pod of the group, so the
    rollout pod has those of the others.
    """
    templates = job.spec.pod_templates
    of_others, is_rollout = templates.gpu.metadata.labels, role == names.ROLE_ROLLOUT
    stated = templates.of(role).metadata.labels
    chosen = {**job.queue_labels, **{label: of_others[label] for label in QUEUE_LABELS if label in of_others}}
    labels = {label: value for label, value in chosen.items() if label not in stated}
    annotations = {GROUP_SIZE: str(_size(job) + in_queue(job, names.ROLE_ROLLOUT))}
    if (topology := _topology_of(job, role)) is not None and not is_rollout:
        annotations[QUEUE_TOPOLOGY.format("required" if topology.required else "preferred")] = topology.label
    return labels | {GROUP_LABEL: f"{job.name}-{job.uid[:8]}"}, annotations


def _affinity(job: Job, role: str, gang: Gang) -> Object:
    """Return the affinity to the pods near which the role's are, where neither queue nor group keeps the topology."""
    topology, own = _topology_of(job, role), _own_topologies(job)
    if topology is None or job.queue or _topology_of_group(job, gang) is not None:
        return {}
    others = {"key": names.ROLE_LABEL, "operator": "NotIn", "values": [names.ROLE_ROLLOUT, *own]}
    if role in own:
        others |= {"operator": "In", "values": [role]}
    selector = {"matchLabels": {names.JOB_UID_LABEL: job.uid}, "matchExpressions": [others]}
    term = {"topologyKey": topology.label, "labelSelector": selector}
    if topology.required:
        return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
