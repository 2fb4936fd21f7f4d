"""Lay a job's pod template over a pod as the operator renders it. The module is pure.

What the operator needs is never replaced: `pod_template` has no field for it, or refuses it. Mere defaults, the labels
and annotations below and a container's homes and caches, give way to the template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from colocated_rl_api.pod_template import PodTemplate, stated
from colocated_rl_operator.planner.observation import Job

Object = dict[str, Any]

USUAL_LABELS = {"sidecar.istio.io/inject": "false"}
USUAL_ANNOTATIONS = {
    # an eviction costs the whole group a climb: evict only where nothing else helps
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
    # members do their own TLS, by pod address, and a mesh's sidecar would outlive a finished pod
    "linkerd.io/inject": "disabled",
}

GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"  # ours, read by Kueue: admitted together or not at all
GROUP_SIZE = "kueue.x-k8s.io/pod-group-total-count"
GROUP_INDEX = "kueue.x-k8s.io/pod-group-pod-index"  # by which topology-aware scheduling puts neighbours side by side


@dataclass(frozen=True)
class QueueGroup:
    """A queue group holds the labels and annotations that a queue must find on each pod of the group."""

    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


NO_GROUP = QueueGroup()


def queue_group(job: Job, *, name: str, size: int) -> QueueGroup:
    """Return the group of pods that wait in a queue of Kueue; NO_GROUP without a queue.

    The job's own labels reach its pods, where Kueue reads them, unless the template has others.
    """
    if not job.queue:
        return NO_GROUP
    own = {label: value for label, value in job.queue_labels.items() if label not in _labels(job)}
    return QueueGroup(own | {GROUP_LABEL: name}, {GROUP_SIZE: str(size)})


def _labels(job: Job) -> Mapping[str, str]:
    return job.spec.pod_templates.gpu.metadata.labels


def lay(template: PodTemplate, *, over: Object) -> Object:
    """Return `over`, with metadata and spec of a pod, with the template laid over it."""
    metadata, spec = dict(over["metadata"]), dict(over["spec"])
    metadata["labels"] = USUAL_LABELS | template.metadata.labels | metadata["labels"]
    metadata["annotations"] = USUAL_ANNOTATIONS | template.metadata.annotations | metadata.get("annotations", {})
    stated_spec = stated(template.spec)
    beside = {each["name"]: each for each in stated_spec.pop("containers", ())}
    for kind in ("initContainers", "containers"):
        spec[kind] = [_lay_container(beside.get(each["name"], {}), over=each) for each in spec[kind]]
    spec["volumes"] = [*spec["volumes"], *stated_spec.pop("volumes", ())]
    spec["securityContext"] = {**stated_spec.pop("securityContext", {}), **spec["securityContext"]}
    if tolerations := [*spec.pop("tolerations", ()), *stated_spec.pop("tolerations", ())]:
        spec["tolerations"] = tolerations
    return over | {"metadata": metadata, "spec": spec | stated_spec}


def _lay_container(container_part: Object, *, over: Object) -> Object:
    container = dict(over)
    if env := container_part.get("env"):
        replaced = {each["name"] for each in env}
        container["env"] = [*(each for each in over.get("env", ()) if each["name"] not in replaced), *env]
    if sources := container_part.get("envFrom"):
        container["envFrom"] = sources
    if mounts := container_part.get("volumeMounts"):
        container["volumeMounts"] = [*over["volumeMounts"], *mounts]
    return container


_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def away_from(nodes: Sequence[str], spec: Object, *, strictly: bool) -> Object:
    """Return the spec of a pod that runs on none of the nodes, which are excluded by name: one may lack the label.

    The API takes one name in each requirement. Terms are alternatives, so each of them must exclude the nodes.
    strictly: rather nowhere than there; otherwise there if no other node has room.
    """
    if not nodes:
        return spec
    away = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    affinity = spec.get("affinity", {})
    chosen = affinity.get("nodeAffinity", {})
    if not strictly:
        wanted = [*chosen.get(_PREFERRED, ()), {"weight": 100, "preference": {"matchFields": away}}]
        return spec | {"affinity": affinity | {"nodeAffinity": chosen | {_PREFERRED: wanted}}}
    terms = chosen.get(_REQUIRED, {}).get("nodeSelectorTerms", [{}])
    kept = [{**term, "matchFields": [*term.get("matchFields", ()), *away]} for term in terms]
    return spec | {"affinity": affinity | {"nodeAffinity": chosen | {_REQUIRED: {"nodeSelectorTerms": kept}}}}
