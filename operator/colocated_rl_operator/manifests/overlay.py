"""Lays what a job says of its pods over a pod as the operator renders it. Pure.

What the operator needs is never replaced: `pod_template` has no field for it, or refuses it. What is merely usual, the
annotations below and a container's homes and caches, gives way to the job's own word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from colocated_rl_api.pod_template import PodSpec, PodTemplate, stated

Object = dict[str, Any]

USUAL_LABELS = {"sidecar.istio.io/inject": "false"}
USUAL_ANNOTATIONS = {
    # an eviction costs the whole group a climb: only where nothing else helps
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
    # members do their own TLS, by pod address, and a mesh's sidecar would outlive a pod that is done
    "linkerd.io/inject": "disabled",
}

GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"  # ours, read by Kueue: admitted together or not at all
GROUP_SIZE = "kueue.x-k8s.io/pod-group-total-count"


@dataclass(frozen=True)
class QueueGroup:
    """What a queue has to find on each pod of a group."""

    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


NO_GROUP = QueueGroup()


def queue_group(template: PodTemplate, *, name: str, size: int) -> QueueGroup:
    """Of pods that wait in a queue of Kueue; none of those that do not."""
    return QueueGroup({GROUP_LABEL: name}, {GROUP_SIZE: str(size)}) if template.queue else NO_GROUP


def lay(template: PodTemplate, *, over: Object, avoids: Sequence[str] = ()) -> Object:
    """The pod with what its job says of it. avoids: nodes on which it may not stand, whatever the job says."""
    metadata, spec = dict(over["metadata"]), dict(over["spec"])
    metadata["labels"] = USUAL_LABELS | template.metadata.labels | metadata["labels"]
    metadata["annotations"] = USUAL_ANNOTATIONS | template.metadata.annotations | metadata.get("annotations", {})
    said = stated(template.spec)
    beside = {each["name"]: each for each in said.pop("containers", ())}
    for kind in ("initContainers", "containers"):
        spec[kind] = [_lay_container(beside.get(each["name"], {}), over=each) for each in spec[kind]]
    spec["volumes"] = [*spec["volumes"], *said.pop("volumes", ())]
    if tolerations := [*spec.pop("tolerations", ()), *said.pop("tolerations", ())]:
        spec["tolerations"] = tolerations
    if affinity := _affinity(template.spec, said.pop("affinity", {}), avoids):
        spec["affinity"] = affinity
    return over | {"metadata": metadata, "spec": spec | said}


def _lay_container(said: Object, *, over: Object) -> Object:
    container = dict(over)
    if env := said.get("env"):
        replaced = {each["name"] for each in env}
        container["env"] = [*(each for each in over.get("env", ()) if each["name"] not in replaced), *env]
    if mounts := said.get("volumeMounts"):
        container["volumeMounts"] = [*over["volumeMounts"], *mounts]
    return container


_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def _affinity(spec: PodSpec, said: Object, avoids: Sequence[str]) -> Object:
    """By the nodes' names and not a label that a node may lack; the API takes one name in each requirement.

    Terms are alternatives: the nodes are taken out of each.
    """
    if not avoids:
        return said
    away = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in avoids]
    nodes = said.get("nodeAffinity", {})
    terms = nodes.get(_REQUIRED, {}).get("nodeSelectorTerms", [{}])
    kept = [{**term, "matchFields": [*term.get("matchFields", ()), *away]} for term in terms]
    return said | {"nodeAffinity": nodes | {_REQUIRED: {"nodeSelectorTerms": kept}}}
