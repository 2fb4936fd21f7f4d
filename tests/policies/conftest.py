"""A cluster of one node on which kube-router enforces NetworkPolicies, with the chart's strictest setting for jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Cluster
from e2e.conftest import installed
from e2e.running_job import KubectlCall

from setup.layout import CHECKOUT

KUBE_ROUTER = CHECKOUT.build / "policies/bin/kube-router"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    place = tmp_path_factory.mktemp("cluster") / "c"
    options = (f"--policies={KUBE_ROUTER}",)
    with installed(place, options=options, values=("networkPolicy.jobEgress=Named",)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kubectl(cluster: Cluster) -> KubectlCall:
    return cluster.kubectl
