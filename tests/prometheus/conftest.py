"""A local cluster with the chart's monitors and rules, and Prometheus' own operator, which makes a Prometheus of them.

Both are built from their modules by `build.sh`. The operator is installed by its release's own manifests, unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from cluster import Cluster
from e2e.conftest import OPERATOR_NAMESPACE, installed, with_images
from e2e.running_job import KubectlCall

from setup.layout import CHECKOUT

PROMETHEUS = CHECKOUT.build / "prometheus"
HERE = Path(__file__).parent
STARTS_S = 120


@dataclass(frozen=True)
class Prometheus:
    """Its HTTP API, through the API server."""

    kubectl: KubectlCall

    def __call__(self, page: str, **parameters: str) -> Any:
        """The data of an answer, as Prometheus writes it."""
        path = f"/api/v1/namespaces/default/pods/prometheus-prometheus-0:9090/proxy/api/v1/{page}"
        answer = json.loads(self.kubectl("get", "--raw", f"{path}?{urlencode(parameters)}"))
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, text: str) -> list[dict[str, Any]]:
        """Return what a query finds now."""
        found: list[dict[str, Any]] = self("query", query=text)["result"]
        return found


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    place = tmp_path_factory.mktemp("cluster")
    images = place / "images.yaml"
    images.write_text(with_images(images_of_prometheus()))
    with installed(place / "c", images=images) as cluster:
        cluster.kubectl("apply", "--server-side", "-f", PROMETHEUS / "bundle.yaml")
        cluster.kubectl("wait", "deploy/prometheus-operator", "--for=condition=Available", f"--timeout={STARTS_S}s")
        cluster.helm(
            *("upgrade", "colocated-rl", CHECKOUT.root / "charts/colocated-rl", "--namespace", OPERATOR_NAMESPACE),
            *("--reuse-values", "--set", "monitoring.monitors=true,monitoring.rules=true,monitoring.dashboard=true"),
            *("--wait", "--timeout", "120s"),
        )
        cluster.kubectl("apply", "-f", HERE / "prometheus.yaml")
        cluster.kubectl("wait", "prometheus/prometheus", "--for=condition=Available", f"--timeout={STARTS_S}s")
        yield cluster


def images_of_prometheus() -> dict[str, Any]:
    """Return the images by the names that the operator's manifests give them; the
    programs lie where those images have them.
    """
    programs = ("operator", "prometheus", "prometheus-config-reloader")
    binds = [f"{PROMETHEUS}/bin/{program}:/bin/{program}:ro" for program in programs]
    released = re.findall(r"quay\.io/\S+", (PROMETHEUS / "bundle.yaml").read_text())
    program = dict.fromkeys(released, "operator") | {"prometheus": "prometheus"}  # the reloader's pods name its program
    return {name: {"binds": binds, "entrypoint": [f"/bin/{program[name]}"]} for name in program}


@pytest.fixture(scope="session")
def kubectl(cluster: Cluster) -> KubectlCall:
    return cluster.kubectl


@pytest.fixture(scope="session")
def prometheus(kubectl: KubectlCall) -> Prometheus:
    return Prometheus(kubectl)
