"""One local cluster for all contract tests of a session."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from contract.api_server import ApiServer, Kubectl

from setup.layout import CHECKOUT

START_DEADLINE_S = 90


@pytest.fixture(scope="session")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """Command lines against a cluster that has the images of this checkout and nothing installed."""
    folder = tmp_path_factory.mktemp("cluster")
    kubeconfig = folder / "kubeconfig"
    command: list[str | Path] = [CHECKOUT.localcluster, "up", "--dir", folder, "--images", CHECKOUT.images]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as supervisor:
        try:
            assert supervisor.stdout is not None
            said = []
            for line in supervisor.stdout:  # it says so when the node is ready, or ends
                said.append(line)
                if kubeconfig.exists():
                    break
            else:
                pytest.fail("the local cluster did not start:\n" + "".join(said))
            yield Kubectl(CHECKOUT.localcluster, kubeconfig)
        finally:
            supervisor.terminate()
            supervisor.wait(START_DEADLINE_S)


@pytest.fixture(scope="session")
def api(kubectl: Kubectl) -> Iterator[ApiServer]:
    """The API server, with the CRD of this checkout."""
    kubectl("apply", "--server-side", "-f", CHECKOUT.root / "crds/colocatedrljobs.yaml")
    name = yaml.safe_load((CHECKOUT.root / "crds/colocatedrljobs.yaml").read_text())["metadata"]["name"]
    kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=30s")
    assert kubectl.kubeconfig is not None
    server = ApiServer(kubectl.kubeconfig)
    yield server
    server.close()
