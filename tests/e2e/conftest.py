"""A cluster with the operator installed, and one job of two pods that the tests of a session share.

With KUBECONFIG set, that cluster is used as it is, chart and claims included. Otherwise a local one is made, with the
chart, the images and the model of this checkout, and ended with the session.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster import Cluster
from e2e.running_job import Kubectl, RunningJob

from setup.layout import CHECKOUT

NAMESPACE = "e2e"
OPERATOR_NAMESPACE = "colocated-rl-system"
MODEL = CHECKOUT.build / "models/arithmetic"
SCENARIOS = Path(__file__).parent


@pytest.fixture(scope="session")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    if "KUBECONFIG" in os.environ:
        yield _kubectl_of_environment
        return
    with Cluster.up(tmp_path_factory.mktemp("cluster"), images=CHECKOUT.images) as cluster:

        def run(*words: str, stdin: str | None = None) -> str:
            return cluster.kubectl(*words, stdin=stdin)

        chart = CHECKOUT.root / "charts/colocated-rl"
        cluster.kubectl("create", "namespace", OPERATOR_NAMESPACE)
        cluster.kubectl("create", "namespace", NAMESPACE)
        for namespace in (OPERATOR_NAMESPACE, NAMESPACE):
            cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
        cluster.helm(
            *("install", "colocated-rl", chart, "--namespace", OPERATOR_NAMESPACE, "--wait", "--timeout", "120s"),
            *("--values", chart / "ci/local-values.yaml"),
        )
        for claim, path in (("arithmetic-model", MODEL), ("own-prompts", SCENARIOS / "own_prompts")):
            cluster.kubectl("apply", "-f", "-", stdin=_volume(claim, path))
        yield run


def _kubectl_of_environment(*words: str, stdin: str | None = None) -> str:
    return subprocess.run(
        ["kubectl", *words], input=stdin, capture_output=True, text=True, timeout=120, check=True
    ).stdout


def _volume(claim_name: str, path: Path) -> str:
    """A claim like that of the demo's model, in the namespace of these tests, for a directory of this machine."""
    volume, claim = yaml.safe_load_all((CHECKOUT.root / "examples/arithmetic/model-volume.yaml").read_text())
    volume["metadata"]["name"] = volume["spec"]["claimRef"]["name"] = claim["metadata"]["name"] = claim_name
    claim["spec"]["volumeName"] = claim_name
    volume["spec"]["hostPath"]["path"] = str(path)
    volume["spec"]["claimRef"]["namespace"] = claim["metadata"]["namespace"] = NAMESPACE
    return yaml.safe_dump_all([volume, claim])


def apply(kubectl: Kubectl, file: str) -> RunningJob:
    """Create the job of a file beside the tests."""
    text = (SCENARIOS / file).read_text()
    kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=text)
    return RunningJob(kubectl, namespace=NAMESPACE, name=yaml.safe_load(text)["metadata"]["name"])
