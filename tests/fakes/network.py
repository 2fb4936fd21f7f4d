"""A model judges what NetworkPolicies let through, by their documentation, where no plugin enforces them.

A pod that no policy of a direction selects is open in that direction; else a connection passes if any rule of any of
those policies has both its port and its peer. An empty rule, and one without peers or ports, has them all.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Policy = Mapping[str, Any]
NAMESPACE_LABEL = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class NetworkEnd:
    """An end of a connection is a pod with its labels, or an address outside the cluster."""

    address: str
    labels: Mapping[str, str] | None = None  # None: no pod
    namespace: str = "default"
    port: int = 0
    protocol: str = field(default="TCP", kw_only=True)


def passes(policies: Sequence[Policy], *, source: NetworkEnd, target: NetworkEnd) -> bool:
    """Return whether the connection passes policies of both ends."""
    leaves = _lets(policies, "Egress", "egress", "to", of=source, peer=target, port=target)
    return leaves and _lets(policies, "Ingress", "ingress", "from", of=target, peer=source, port=target)


def _lets(
    policies: Sequence[Policy], kind: str, rules: str, peers: str, *, of: NetworkEnd, peer: NetworkEnd, port: NetworkEnd
) -> bool:
    ours = [
        policy
        for policy in policies
        if kind in policy["spec"]["policyTypes"] and policy["metadata"]["namespace"] == of.namespace
        if of.labels is not None and _selects(policy["spec"]["podSelector"], of.labels)
    ]
    return not ours or any(
        _has_port(rule.get("ports"), port) and _has_peer(rule.get(peers), peer, policy["metadata"]["namespace"])
        for policy in ours
        for rule in policy["spec"].get(rules, ())
    )


def _has_port(ports: Sequence[Mapping[str, Any]] | None, wanted: NetworkEnd) -> bool:
    return not ports or any(
        each.get("protocol", "TCP") == wanted.protocol
        and ("port" not in each or each["port"] <= wanted.port <= each.get("endPort", each["port"]))
        for each in ports
    )


def _has_peer(peers: Sequence[Mapping[str, Any]] | None, wanted: NetworkEnd, home: str) -> bool:
    return not peers or any(_is_peer(each, wanted, home) for each in peers)


def _is_peer(peer: Mapping[str, Any], wanted: NetworkEnd, home: str) -> bool:
    if "ipBlock" in peer:
        address, block = ipaddress.ip_address(wanted.address), peer["ipBlock"]
        inside = address in ipaddress.ip_network(block["cidr"])
        return inside and not any(address in ipaddress.ip_network(each) for each in block.get("except", ()))
    if wanted.labels is None:
        return False
    is_there = wanted.namespace == home
    if "namespaceSelector" in peer:
        is_there = _selects(peer["namespaceSelector"], {NAMESPACE_LABEL: wanted.namespace})
    return is_there and _selects(peer.get("podSelector", {}), wanted.labels)


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    has_all = selector.get("matchLabels", {}).items() <= labels.items()
    return has_all and all(_meets(each, labels) for each in selector.get("matchExpressions", ()))


def _meets(wanted: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(wanted["key"])
    match wanted["operator"]:
        case "In":
            return value in wanted["values"]
        case "NotIn":
            return value not in wanted["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case other:
            raise AssertionError(other)
