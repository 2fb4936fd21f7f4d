"""Lay a job's pod template over a pod as the operator renders it. The module is pure.

What the operator needs is never replaced: `pod_template` has no field for it, or refuses it. Mere defaults, the labels
and annotations below and a container's homes and caches, give way to the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colocated_rl_api.pod_template import PodTemplate, stated
from colocated_rl_operator.manifests.confinement import NO_WORDS, RESTRICTED

Object = dict[str, Any]

USUAL_LABELS = {"sidecar.istio.io/inject": "false"}
USUAL_ANNOTATIONS = {
    # an eviction costs the whole group a climb: evict only where nothing else helps
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
    # members do their own TLS, by pod address, and a mesh's sidecar would outlive a finished pod
    "linkerd.io/inject": "disabled",
}


def lay(template: PodTemplate, *, over: Object) -> Object:
    """Return `over`, with metadata and spec of a pod, with the template laid over it."""
    metadata, spec = dict(over["metadata"]), dict(over["spec"])
    metadata["labels"] = USUAL_LABELS | template.metadata.labels | metadata["labels"]
    metadata["annotations"] = USUAL_ANNOTATIONS | template.metadata.annotations | metadata.get("annotations", {})
    stated_spec = stated(template.spec)
    beside = {each["name"]: each for each in stated_spec.pop("containers", ())}
    for kind in ("initContainers", "containers"):
        spec[kind] = [_lay_container(beside.get(each["name"], {}), over=each) for each in spec[kind]]
    spec["initContainers"] = [*map(_own_container, stated_spec.pop("initContainers", ())), *spec["initContainers"]]
    spec["securityContext"] = {**stated_spec.pop("securityContext", {}), **spec["securityContext"]}
    for kind in ("volumes", "tolerations", "resourceClaims"):
        if both := [*spec.pop(kind, ()), *stated_spec.pop(kind, ())]:
            spec[kind] = both
    if stated_spec.get("hostNetwork"):
        spec["dnsPolicy"] = "ClusterFirstWithHostNet"  # Kubernetes' own default would not find names of the cluster
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
    if own := container_part.get("resources"):
        container["resources"] = _lay_resources(own, over=over["resources"])
    return container


def _lay_resources(own: Object, *, over: Object) -> Object:
    """Return the resources of a container. One that the template names is as it says: a limit alone is requested."""
    limits, requests = own.get("limits", {}), own.get("limits", {}) | own.get("requests", {})
    resources = {
        kind: {name: value for name, value in over.get(kind, {}).items() if name not in requests} | stated_part
        for kind, stated_part in (("requests", requests), ("limits", limits))
    }
    claims = [*over.get("claims", ()), *own.get("claims", ())]
    return resources | ({"claims": claims} if claims else {})


def _own_container(container: Object) -> Object:
    """Return a container of the job's own. Its log may quote anything, so the pod's status has no end of it."""
    return container | {"securityContext": RESTRICTED, "terminationMessagePolicy": NO_WORDS}


def beside(affinity: Object, spec: Object) -> Object:
    """Return the spec of a pod with more affinity to other pods than it has, in core/v1's form."""
    if not affinity:
        return spec
    chosen = spec.get("affinity", {})
    to_pods = chosen.get("podAffinity", {})
    added = {kind: [*to_pods.get(kind, ()), *terms] for kind, terms in affinity.items()}
    return spec | {"affinity": chosen | {"podAffinity": to_pods | added}}


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
