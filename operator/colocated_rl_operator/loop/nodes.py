"""Cache the notice of each node that has given one. Without a sign to look for, no node is watched or read."""

from __future__ import annotations

from dataclasses import replace

from colocated_rl_operator.clients.kube import Body
from colocated_rl_operator.planner.notices import NodeSigns, Notice


class Nodes:
    """The cache holds notices by the name of the node."""

    def __init__(self, signs: NodeSigns) -> None:
        self._signs = signs
        self._notices: dict[str, Notice] = {}

    def put(self, node: Body, *, now: float) -> bool:
        """Take the newest state of a node. Return whether it gives another notice than before, or none any more."""
        name, found = node["metadata"]["name"], self._signs.read(node)
        if found is None:
            return self.remove(name)
        before = self._notices.get(name)
        if before is not None and replace(before, since=found.since) == found:
            return False
        self._notices[name] = replace(found, since=now)
        return True

    def remove(self, name: str) -> bool:
        """Forget a node. Return whether it had given notice."""
        return self._notices.pop(name, None) is not None

    def notice_of(self, node: str | None) -> Notice | None:
        return None if node is None else self._notices.get(node)
