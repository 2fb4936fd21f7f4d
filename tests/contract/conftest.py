"""One local cluster for the contract tests of a session: this checkout's images, two devices to claim, nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from cluster import Cluster
from contract.api_server import ApiServer, Kubectl

from setup.layout import CHECKOUT

CRD_FILE = CHECKOUT.root / "crds/colocatedrljobs.yaml"


@pytest.fixture(scope="session")
def plain_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    place = tmp_path_factory.mktemp("cluster")
    with Cluster.up(place, images=CHECKOUT.images, options=("--devices=2",)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kubectl(plain_cluster: Cluster) -> Kubectl:
    return Kubectl(CHECKOUT.localcluster, plain_cluster.kubeconfig)


@pytest.fixture(scope="session")
def api(kubectl: Kubectl) -> Iterator[ApiServer]:
    """The API server, with the CRD of this checkout."""
    kubectl("apply", "--server-side", "--force-conflicts", "-f", CRD_FILE)
    name = yaml.safe_load(CRD_FILE.read_text())["metadata"]["name"]
    kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=30s")
    server = ApiServer(kubectl.kubeconfig)
    yield server
    server.close()
