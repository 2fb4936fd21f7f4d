"""Two jobs whose model their node keeps, as users of the range of their namespace, with real engines and trainers.

Both are what an admin says: the path by a profile of the chart, and the users by annotations, which the test writes in
the place of OpenShift.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import HUB_MODEL, NAMESPACE, apply, hub_in_a_pod, installed
from e2e.running_job import KubectlCall, RunningJob

from colocated_rl_api import names
from fakes.hub import COMMIT

pytestmark = pytest.mark.release  # `make test-slow`
JOB_S = 900  # an engine and a trainer start on two cores
USER, GROUP = 1000660000, 1000670000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of the node, of the namespace's first user alone."""
    path = tmp_path_factory.mktemp("models")
    os.chown(path, USER, GROUP)
    path.chmod(0o700)
    return path


@pytest.fixture(scope="module")
def kubectl(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubectlCall]:
    allowed = [f"profiles.cached.{role}.hostPaths={{{models}}}" for role in ("gpu", "rollout")]
    values = (*allowed, f"profiles.cached.namespaces={{{NAMESPACE}}}", "namespaceUsers=true")
    with installed(tmp_path_factory.mktemp("cached") / "c", values=values) as cluster:
        cluster.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=privileged", "--overwrite")
        ids = [f"openshift.io/sa.scc.uid-range={USER}/10000", f"openshift.io/sa.scc.supplemental-groups={GROUP}/10000"]
        cluster.kubectl("annotate", "namespace", NAMESPACE, *ids)
        yield cluster.kubectl


@pytest.fixture(scope="module")
def hub(kubectl: KubectlCall) -> Iterator[str]:
    with hub_in_a_pod(kubectl) as address:
        yield address


def test_a_node_fetches_a_model_once_for_all_pods_and_jobs(kubectl: KubectlCall, hub: str, models: Path) -> None:
    source = {"name": HUB_MODEL, "revision": COMMIT, "endpoint": hub, "cacheHostPath": str(models)}
    events = []
    for suffix in ("-first", "-second"):
        job = apply(kubectl, "one-pod.yaml", suffix=suffix, steps=1, model={"huggingFace": source}, profile="cached")
        job.wait_for_condition("Complete", deadline_s=JOB_S)
        pods = job.pods(names.ROLE_GPU, names.ROLE_ROLLOUT)
        assert {(USER, GROUP)} == {ids_of(pod) for pod in pods}
        events.append(sorted(event_of_the_fetch(job, pod["metadata"]["name"]) for pod in pods))
        job.delete()
    assert [["model fetched", "model found"], ["model found", "model found"]] == events
    assert {(USER, GROUP)} == {(path.stat().st_uid, path.stat().st_gid) for path in models.rglob("*.safetensors")}


def ids_of(pod: dict[str, Any]) -> tuple[int, int]:
    return pod["spec"]["securityContext"]["runAsUser"], pod["spec"]["securityContext"]["fsGroup"]


def event_of_the_fetch(job: RunningJob, pod: str) -> str:
    (line,) = job.kubectl("logs", pod, "-c", names.MODEL_CONTAINER).splitlines()
    return str(json.loads(line)["event"])
