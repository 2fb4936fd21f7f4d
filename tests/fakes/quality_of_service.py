"""Kubernetes' rule for the quality of service of a pod, whose class decides about cores and memory of its own."""

from __future__ import annotations

from typing import Any

COMPUTE = ("cpu", "memory")


def quality_of_service(body: dict[str, Any]) -> str:
    """Return the class of a pod, as the page of Kubernetes has the rule; a limit without a request is requested."""
    every = [each.get("resources", {}) for each in (*body["spec"]["initContainers"], *body["spec"]["containers"])]
    stated = [each.get(kind, {}) for each in every for kind in ("requests", "limits")]
    if not any(name in resources for resources in stated for name in COMPUTE):
        return "BestEffort"
    is_bound = all(
        (limit := each.get("limits", {}).get(name)) is not None and limit == each.get("requests", {}).get(name, limit)
        for each in every
        for name in COMPUTE
    )
    return "Guaranteed" if is_bound else "Burstable"
