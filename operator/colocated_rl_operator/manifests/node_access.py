"""Judge what a pod has of its node: its network and its paths, which an admin of the cluster allows role by role.

The pod is judged as it goes to the API server, wherever its template comes from. A path is allowed as it stands, and
not what lies below it: whoever may write there could put a link to anywhere in the way. A mount's `subPath`, which the
kubelet resolves inside the volume, leads to what is below. The module is pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from colocated_rl_api.parts import Part, should_match
from colocated_rl_api.pod_template import TEMPLATE_OF

_is_path, _ = should_match("(/[^/]+)+", "should be a path from the root, without / at its end: /mnt/nvme")


class NodeAccess(Part):
    """Names what pods with one template may have of their node."""

    host_network: bool = False
    host_paths: list[Annotated[str, _is_path]] = Field(default_factory=list)


def refusals(role: str, spec: Mapping[str, Any], access: Mapping[str, NodeAccess]) -> Iterator[str]:
    """Yield what a pod of the role uses of its node and may not, with who may allow it. access: by template."""
    template = TEMPLATE_OF[role]
    allowed = access.get(template, NodeAccess())
    if spec.get("hostNetwork") and not allowed.host_network:
        yield _refusal(role, "the network of their node (hostNetwork)", f"{template}.hostNetwork")
    for volume in spec["volumes"]:
        path = volume.get("hostPath", {}).get("path")
        if path is not None and path not in allowed.host_paths:
            yield _refusal(role, f"{path} of their node (hostPath of volume {volume['name']})", f"{template}.hostPaths")


def _refusal(role: str, what: str, value: str) -> str:
    return (
        f"{role} pods may not have {what}: remove it from spec.podTemplates, or have an admin of the cluster allow "
        f"it by nodes.access.{value} in the values of the operator's chart"
    )
