"""Read what a node gives notice of: a condition by which its devices are bad, or a taint by which it is about to go.

Which of them count is a setting, because every cloud and every node-problem-detector has its own. The module is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from colocated_rl_api.failure import FailureCause

MAX_WORDS = 200
NOTICE_S = 30.0  # for a checkpoint, from the notice of a node or of a pod that is about to go


@dataclass(frozen=True)
class Notice:
    """A node gives notice: its devices are bad (BadDevice), or it is about to go (PodEvicted). since: first seen."""

    cause: FailureCause
    message: str
    since: float = 0.0


@dataclass(frozen=True)
class NodeSigns:
    """Holds the signs by which a node gives notice.

    bad_conditions: types, each with a status with which a node's devices are bad. leaving_taints: keys.
    """

    bad_conditions: frozenset[tuple[str, str]] = frozenset()
    leaving_taints: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.bad_conditions or self.leaving_taints)

    def read(self, node: Mapping[str, Any]) -> Notice | None:
        """Return the notice that the node gives. Bad devices come first: what they have computed last is in doubt."""
        for condition in node.get("status", {}).get("conditions", ()):
            kind, status = condition["type"], condition["status"]
            if (kind, status) in self.bad_conditions:
                words = f"condition {kind} is {status}: {condition.get('message') or condition.get('reason', '')}"
                return Notice(FailureCause.BAD_DEVICE, words.rstrip(": ")[:MAX_WORDS])
        for taint in node.get("spec", {}).get("taints", ()):
            if taint["key"] in self.leaving_taints:
                return Notice(FailureCause.POD_EVICTED, f"taint {taint['key']}")
        return None
