"""One local cluster for the contract tests of a session: this checkout's images, two devices to claim, nothing else."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, kubernetes_release
from contract.api_server import ApiServer, Kubectl

import quick_yaml
from colocated_rl_api import names
from setup.layout import CHECKOUT

CRD_FILE = CHECKOUT.root / "crds/colocatedrljobs.yaml"


@pytest.fixture(scope="session")
def plain_cluster() -> Iterator[Cluster]:
    devices = ("--devices=2",) if kubernetes_release() >= (1, 34) else ()
    with (
        tempfile.TemporaryDirectory(prefix="cluster-") as place,  # short, as the cluster's sockets lie in it
        Cluster.up(Path(place), images=CHECKOUT.images, options=devices) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="session")
def kubectl(plain_cluster: Cluster) -> Kubectl:
    return Kubectl(CHECKOUT.localcluster, plain_cluster.kubeconfig)


@pytest.fixture(scope="session")
def api(plain_cluster: Cluster, kubectl: Kubectl) -> Iterator[ApiServer]:
    """The API server, with the CRD of this checkout."""
    kubectl("apply", "--server-side", "--force-conflicts", "-f", CRD_FILE)
    name = quick_yaml.load(CRD_FILE.read_text())["metadata"]["name"]
    # what kubectl goes by, the server's lists of kinds and of their fields, has a new one some time after it is served;
    # and `wait` fails at one that has no conditions yet
    plain_cluster.wait_for("jobs are listed", lambda: plain_cluster.kubectl("explain", names.SHORT_NAME), 60)
    kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=60s")
    server = ApiServer(kubectl.kubeconfig)
    yield server
    server.close()
