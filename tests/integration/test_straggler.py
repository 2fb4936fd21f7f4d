"""One of two pods is slow in each step, on a cluster: a person, Prometheus and the alert find it.

Pods are of the real agent, runner and rollout controller; engines and trainers are the fakes of these tests.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster import Cluster
from e2e.conftest import NAMESPACE, installed, simulated_gpu_image, with_images
from e2e.running_job import KubectlCall, RunningJob

from colocated_rl_api import names
from fakes.trainer import SLOW_STEP_S

pytestmark = [pytest.mark.cluster, pytest.mark.release]  # a minute and a half

START_S = 600
SLOW, OTHER = "sums-gpu-1-0", "sums-gpu-0-0"
WAITED = re.compile(r"^colocate_barrier_wait_seconds_total ([0-9.e+-]+)$", re.MULTILINE)

JOB = """
apiVersion: rl.colocate.dev/v1alpha1
kind: ColocatedRLJob
metadata: {name: sums}
spec:
  steps: 100000
  replicas: 2
  model: {claim: {name: arithmetic-model}}
  gpus: {count: 0, image: "colocated-rl/simulated:dev", resources: {limits: {memory: 1Gi}}}
  rollout:
    prompts: {reasoningGym: {name: chain_sum}}
    maxPromptTokens: 64
    maxResponseTokens: 16
    batchSize: 4
    groupSize: 2
  trainer: {command: [python3, -m, fakes.trainer]}
  podTemplates:
    gpu: {spec: {containers: [{name: gpu, env: [{name: FAKE_SLOW_RANK, value: "1"}]}]}}
  checkpoint: {volume: {size: 1Gi}}
  storage: {volume: {size: 1Gi}}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("straggler")
    (folder / "site").mkdir()
    images = folder / "images.yaml"
    images.write_text(with_images({"colocated-rl/simulated:dev": simulated_gpu_image(folder / "site")}))
    with (
        tempfile.TemporaryDirectory(prefix="slow-") as place,  # short, as the cluster's sockets lie in it
        installed(Path(place), images=images) as cluster,
    ):
        yield cluster


@pytest.fixture
def kubectl(cluster: Cluster) -> KubectlCall:
    return cluster.kubectl


def explained(cluster: Cluster) -> str:
    command = [sys.executable, "-m", "colocated_rl_cli", "explain", "sums", "--namespace", NAMESPACE]
    environment = os.environ | {"KUBECTL": shlex.join(cluster.command("kubectl"))}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout


def waited_s(kubectl: KubectlCall, pod: str) -> float:
    """Return the seconds that a pod has waited for others, as Prometheus would read them."""
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}:{names.METRICS_PORT}/proxy/metrics"
    found = WAITED.search(kubectl("get", "--raw", path))
    assert found is not None
    return float(found[1])


def test_the_pod_that_is_slow_in_each_step_is_named_to_people_and_by_what_the_alert_asks_for(
    cluster: Cluster, kubectl: KubectlCall
) -> None:
    kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=JOB)
    job = RunningJob(kubectl, namespace=NAMESPACE, name=yaml.safe_load(JOB)["metadata"]["name"])
    job.wait_for_step(1, deadline_s=START_S)
    began, before = job.step, [waited_s(kubectl, pod) for pod in (SLOW, OTHER)]  # as its start may be uneven otherwise
    job.wait_for_step(began + 10, deadline_s=START_S)

    text = explained(cluster)
    assert re.search(rf"{SLOW}.*Straggler|Straggler.*{SLOW}", text), text
    assert not re.search(rf"{OTHER}.*Straggler|Straggler.*{OTHER}", text), text
    slow, other = (waited_s(kubectl, pod) - former for pod, former in zip((SLOW, OTHER), before, strict=True))
    assert slow < 0.25 * other, "ColocatedRLStraggler compares these"
    assert other > 9 * SLOW_STEP_S * 0.8, "it waited in each whole step for as long as the slow one took more"
