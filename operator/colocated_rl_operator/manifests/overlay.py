"""Lay a job's pod template over a pod as the operator renders it. The module is pure.

What the operator needs is never replaced: `pod_template` has no field for it, or refuses it. Mere defaults, the labels
and annotations below and a container's homes and caches, give way to the template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from colocated_rl_api.pod_template import PodSpec, PodTemplate, stated
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


def lay(template: PodTemplate, *, over: Object, avoids: Sequence[str] = ()) -> Object:
    """Return the pod `over` with the template laid over it. avoids: nodes it may not run on in any case."""
    metadata, spec = dict(over["metadata"]), dict(over["spec"])
    metadata["labels"] = USUAL_LABELS | template.metadata.labels | metadata["labels"]
    metadata["annotations"] = USUAL_ANNOTATIONS | template.metadata.annotations | metadata.get("annotations", {})
    stated_spec = stated(template.spec)
    beside = {each["name"]: each for each in stated_spec.pop("containers", ())}
    for kind in ("initContainers", "containers"):
        spec[kind] = [_lay_container(beside.get(each["name"], {}), over=each) for each in spec[kind]]
    spec["volumes"] = [*spec["volumes"], *stated_spec.pop("volumes", ())]
    if tolerations := [*spec.pop("tolerations", ()), *stated_spec.pop("tolerations", ())]:
        spec["tolerations"] = tolerations
    if affinity := _affinity(template.spec, stated_spec.pop("affinity", {}), avoids):
        spec["affinity"] = affinity
    return over | {"metadata": metadata, "spec": spec | stated_spec}


def _lay_container(container_part: Object, *, over: Object) -> Object:
    container = dict(over)
    if env := container_part.get("env"):
        replaced = {each["name"] for each in env}
        container["env"] = [*(each for each in over.get("env", ()) if each["name"] not in replaced), *env]
    if mounts := container_part.get("volumeMounts"):
        container["volumeMounts"] = [*over["volumeMounts"], *mounts]
    return container


_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def _affinity(spec: PodSpec, affinity: Object, avoids: Sequence[str]) -> Object:
    """Return the pod's affinity that also avoids nodes by name: a node may lack the host name label.

    The API takes one name in each requirement. Terms are alternatives, so each of them must exclude the nodes.
    """
    if not avoids:
        return affinity
    away = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in avoids]
    nodes = affinity.get("nodeAffinity", {})
    terms = nodes.get(_REQUIRED, {}).get("nodeSelectorTerms", [{}])
    kept = [{**term, "matchFields": [*term.get("matchFields", ()), *away]} for term in terms]
    return affinity | {"nodeAffinity": nodes | {_REQUIRED: {"nodeSelectorTerms": kept}}}
