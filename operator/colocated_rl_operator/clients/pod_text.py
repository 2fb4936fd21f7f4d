"""Read pods as the API server sends them, and keep of each what the operator looks at.

The operator reads the pods of everybody that have its label, and whoever may make pods in one namespace decides what
else is in them: 1.5 MB in the server's store are 3 MB of JSON and 50 MB of Python's objects, or more levels than Python
reads. So one pod is whole in memory at a time, while it is parsed, and no more than its `brief` is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

from colocated_rl_api import names
from colocated_rl_api.bounded_json import without_excess
from colocated_rl_api.pod_template import OWNED_VOLUMES

Pod = dict[str, Any]

MOST_ITEMS = 64  # of a list or a map; no pod of the operator's has more
OF_POD = ("apiVersion", "kind", "status")
OF_METADATA = (
    *("name", "namespace", "uid", "resourceVersion"),
    *("creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"),
)
OF_SPEC = ("nodeName", "schedulingGroup")
OF_CONTAINER = ("name", "image")
OF_WORDS = (f"{names.GROUP}/", names.MANAGED_BY_LABEL, "scheduling.")
"""Prefixes of labels and annotations: the operator's own, and those of groups of pods (`manifests.gangs`)."""

_PODS = re.compile(r".*/api/v1/(namespaces/[^/]+/)?pods")


def brief(pod: Pod) -> Pod:
    """Return of a pod what the operator reads, and no more. A brief of a brief is the same."""
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    kept = _only(OF_METADATA, metadata)
    for part in ("labels", "annotations"):
        words = ((name, word) for name, word in (metadata.get(part) or {}).items() if name.startswith(OF_WORDS))
        kept[part] = dict(islice(words, MOST_ITEMS))
    kept["ownerReferences"] = (metadata.get("ownerReferences") or [])[:MOST_ITEMS]
    containers = {
        kind: [_only(OF_CONTAINER, each) for each in (spec.get(kind) or ())[:MOST_ITEMS]]
        for kind in ("initContainers", "containers")
    }
    gates = {"schedulingGates": gates[:MOST_ITEMS]} if (gates := spec.get("schedulingGates")) else {}
    volumes = [each for each in spec.get("volumes") or () if "secret" in each and each["name"] in OWNED_VOLUMES]
    return _only(OF_POD, pod) | {
        "metadata": kept,
        "spec": _only(OF_SPEC, spec) | gates | containers | {"volumes": volumes},
        "status": pod.get("status") or {},
    }


def is_list(path: str) -> bool:
    """Return whether pods are listed, or made, at this path of the API server."""
    return _PODS.fullmatch(path) is not None


def read_pods(text: str, *, level: int) -> Any:
    """Parse an event or a list of pods, each of which begins at `level`, as its `brief`. Raises ValueError."""
    try:
        return json.loads(text, object_hook=_as_brief)
    except RecursionError:
        return json.loads(without_excess(text, level=level), object_hook=_as_brief)


def _as_brief(value: dict[str, Any]) -> dict[str, Any]:
    return brief(value) if {"metadata", "spec", "status"} <= value.keys() else value


def _only(fields: tuple[str, ...], value: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value[field] for field in fields if field in value}
