"""`helm test` with a model to run: a whole job, of one step, by whoever installed the chart."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster
from e2e.conftest import MODEL, OPERATOR_NAMESPACE, SCENARIOS, volume

from setup.layout import CHECKOUT

pytestmark = pytest.mark.release  # `make test-slow`
RELEASE = "colocated-rl"
HELM_S = 900
UPGRADE_S = 300
TEST = ("test", RELEASE, "--namespace", OPERATOR_NAMESPACE, "--logs", "--timeout", f"{HELM_S}s")


def tiny_job(claim: str) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((SCENARIOS / "one-pod.yaml").read_text())["spec"]
    spec |= {"steps": 1, "model": {"claim": {"name": claim}}}
    del spec["evaluation"]
    for part in ("checkpoint", "storage"):
        spec[part]["volume"]["retain"] = False
    return spec


def test_helm_test_runs_a_tiny_job_to_its_end(cluster: Cluster | None, tmp_path: Path) -> None:
    """On a cluster that is not the local one, it runs with the values that the chart was installed with."""
    if cluster is None:
        output = subprocess.run(["helm", *TEST], capture_output=True, text=True, timeout=HELM_S + 60, check=True).stdout
    else:
        cluster.kubectl("apply", "-f", "-", stdin=volume("helm-test-model", MODEL, namespace=OPERATOR_NAMESPACE))
        values = tmp_path / "values.yaml"
        values.write_text(yaml.safe_dump({"test": {"spec": tiny_job("helm-test-model"), "seconds": HELM_S - 60}}))
        chart = CHECKOUT.root / "charts/colocated-rl"
        cluster.helm(
            *("upgrade", RELEASE, chart, "--namespace", OPERATOR_NAMESPACE, "--reuse-values", "--values", values),
            *("--wait", "--timeout", f"{UPGRADE_S}s"),
            deadline_s=UPGRADE_S + 60,
        )
        output = cluster.helm(*TEST, deadline_s=HELM_S + 60)
    assert "Complete: Completed" in output
