"""The cluster of these tests is of the release of Kubernetes that they take it for."""

from __future__ import annotations

import json

import pytest
from cluster import Cluster, kubernetes_release

pytestmark = pytest.mark.cluster


def test_api_server_and_kubelet_are_of_the_release_that_was_asked_for(plain_cluster: Cluster) -> None:
    """Else `make test-kubernetes` would show of one release what was seen on another."""
    server = json.loads(plain_cluster.kubectl("get", "--raw", "/version"))["gitVersion"]
    [node] = plain_cluster.get("nodes")["items"]
    expected = "v" + ".".join(map(str, kubernetes_release()))
    assert (expected, expected) == (server, node["status"]["nodeInfo"]["kubeletVersion"])
