"""The operator remembers which nodes give notice, and since when."""

from __future__ import annotations

from typing import Any

from colocated_rl_api.failure import FailureCause
from colocated_rl_operator.loop.nodes import Nodes
from colocated_rl_operator.planner.notices import NodeSigns, Notice

SIGNS = NodeSigns(frozenset({("GPUHealthy", "False")}), frozenset({"spot-notice"}))


def node(*, is_leaving: bool = False, health: str = "True") -> dict[str, Any]:
    taints = [{"key": "spot-notice", "effect": "NoSchedule"}] if is_leaving else []
    conditions = [{"type": "GPUHealthy", "status": health}]
    return {"metadata": {"name": "node-1"}, "spec": {"taints": taints}, "status": {"conditions": conditions}}


def test_a_notice_counts_from_when_it_was_first_seen() -> None:
    nodes = Nodes(SIGNS)
    assert not nodes.put(node(), now=10.0)
    assert nodes.put(node(is_leaving=True), now=20.0)
    assert not nodes.put(node(is_leaving=True), now=30.0), "a node reports itself again and again"
    leaving = Notice(FailureCause.POD_EVICTED, "taint spot-notice", since=20.0)
    assert [leaving, None, None] == [nodes.notice_of(name) for name in ("node-1", "node-2", None)]
    assert nodes.put(node(is_leaving=True, health="False"), now=40.0), "another one"
    found = nodes.notice_of("node-1")
    assert found is not None
    assert (FailureCause.BAD_DEVICE, 40.0) == (found.cause, found.since)


def test_a_notice_ends_with_its_sign_or_its_node() -> None:
    nodes = Nodes(SIGNS)
    nodes.put(node(is_leaving=True), now=10.0)
    assert nodes.put(node(), now=20.0)
    assert nodes.notice_of("node-1") is None
    nodes.put(node(is_leaving=True), now=30.0)
    assert nodes.remove("node-1")
    assert not nodes.remove("node-1")
    assert nodes.notice_of("node-1") is None
