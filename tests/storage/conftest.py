"""A cluster of two nodes, with the chart, whose volumes are file systems of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Cluster
from e2e.conftest import installed
from e2e.running_job import KubectlCall


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with installed(tmp_path_factory.mktemp("cluster") / "c", options=("--nodes=2",)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kubectl(cluster: Cluster) -> KubectlCall:
    return cluster.kubectl
