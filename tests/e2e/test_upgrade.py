"""The chart is upgraded and rolled back under a job that trains: its pods stay, and it goes on under each operator.

Then its node is drained, as for maintenance. The tests run in the order of this file, on one cluster and one job.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml
from cluster import Cluster, CommandFailed
from documents.blocks import under
from e2e.conftest import HELM_S, MODEL, OPERATOR_NAMESPACE, SCENARIOS, volume
from e2e.running_job import RunningJob, wait_for
from e2e.terminal import RecordedTerminal

from colocated_rl_api import names
from setup.layout import CHECKOUT

CHART = CHECKOUT.root / "charts/colocated-rl"
NAMESPACE = "default"
STEP_S = 900.0


def packed_earlier(cluster: Cluster, place: Path) -> Path:
    """A chart of a lower version, as somebody installed it once: `helm test` and its value came later."""
    earlier = place / "colocated-rl"
    shutil.copytree(CHART, earlier)
    described = earlier / "Chart.yaml"
    described.write_text(re.sub(r"^version: .*$", "version: 0.0.1", described.read_text(), flags=re.MULTILINE))
    shutil.rmtree(earlier / "templates/tests")
    (earlier / "values.schema.json").unlink()
    values = earlier / "values.yaml"
    values.write_text(re.sub(r"^test:\n(?: .*\n)+", "", values.read_text(), flags=re.MULTILINE))
    cluster.helm("package", earlier, "--destination", place)
    return place / "colocated-rl-0.0.1.tgz"


def pods(job: RunningJob) -> dict[str, tuple[str, int]]:
    """UID of each pod of the job, and how often its containers were started again."""
    found = {}
    for pod in job.pods(names.ROLE_GPU, names.ROLE_ROLLOUT):
        states = pod["status"].get("initContainerStatuses", []) + pod["status"]["containerStatuses"]
        found[pod["metadata"]["name"]] = (pod["metadata"]["uid"], sum(state["restartCount"] for state in states))
    return found


VALUES = ("--namespace", OPERATOR_NAMESPACE, "--values", CHART / "ci/local-values.yaml", "--wait")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster.up(tmp_path_factory.mktemp("u"), images=CHECKOUT.images) as cluster:
        earlier = packed_earlier(cluster, tmp_path_factory.mktemp("packed"))
        cluster.helm("install", "rl", earlier, "--create-namespace", *VALUES, deadline_s=HELM_S)
        yield cluster


@pytest.fixture(scope="module")
def job(cluster: Cluster) -> RunningJob:
    """Has done a step under the operator of the earlier chart."""
    cluster.kubectl("apply", "-f", "-", stdin=volume("arithmetic-model", MODEL, namespace=NAMESPACE))
    manifest = yaml.safe_load((SCENARIOS / "one-pod.yaml").read_text())
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    job = RunningJob(cluster.kubectl, namespace=NAMESPACE, name=manifest["metadata"]["name"])
    job.wait_for_step(1, deadline_s=STEP_S)
    return job


def test_a_job_goes_on_through_upgrade_and_rollback_of_the_chart(cluster: Cluster, job: RunningJob) -> None:
    before = pods(job)

    def in_training() -> bool:
        return job.status.get("phase") == "Training"

    for words in (
        ("upgrade", "rl", CHART, *VALUES, "--set", "logLevel=DEBUG"),
        ("rollback", "rl", "1", "--namespace", OPERATOR_NAMESPACE, "--wait"),
    ):
        wait_for("a step under way", in_training, deadline_s=STEP_S, explain=job.describe)
        taken_over = partial(is_led_anew, cluster, job, since=(operator(cluster), int(job.status["epoch"])))
        cluster.helm(*words, deadline_s=HELM_S)
        wait_for("another operator, and its epoch", taken_over, deadline_s=STEP_S, explain=job.describe)
        job.wait_for_step(job.step + 2, deadline_s=STEP_S)
        assert before == pods(job), "no pod and no container was started again"
    assert "0" == str(job.status.get("restarts"))
    listed = json.loads(cluster.helm("list", "--namespace", OPERATOR_NAMESPACE, "--output", "json"))
    assert ["colocated-rl-0.0.1"] == [release["chart"] for release in listed]


def test_an_upgrade_with_the_defaults_of_before_misses_a_new_value_by_name(cluster: Cluster, job: RunningJob) -> None:
    """Helm's --reuse-values takes the former chart's; the page says what to write instead."""
    upgrade = ("upgrade", "rl", CHART, "--namespace", OPERATOR_NAMESPACE, "--dry-run=server")
    with pytest.raises(CommandFailed, match="missing property 'test'"):
        cluster.helm(*upgrade, "--reuse-values")
    assert "colocated-rl/gpu:dev" in cluster.helm(*upgrade, "--reset-then-reuse-values")


def test_a_node_is_drained_and_the_job_goes_on_after_it(cluster: Cluster, job: RunningJob, tmp_path: Path) -> None:
    """The commands of the runbook drain it. It is the only node, so the operator goes with it."""
    terminal = RecordedTerminal.opened(tmp_path, cluster.kubeconfig)
    [node] = cluster.get("nodes")["items"]
    leader, restarts = operator(cluster), job.status["restarts"]
    for command in under("docs/runbooks/operations.md", "Preemption, maintenance, spot nodes"):
        terminal(command, JOB=job.name, NODE=node["metadata"]["name"])
        if " drain " in command:
            placed = cluster.get("pods", "--all-namespaces", "--field-selector=spec.nodeName!=")["items"]
            assert [] == [pod["metadata"]["name"] for pod in placed]
            drained_at = job.step
    job.wait_for_step(drained_at + 1, deadline_s=STEP_S)
    assert operator(cluster) not in ("", leader)
    assert restarts == job.status["restarts"]


def operator(cluster: Cluster) -> str:
    """The replica that leads."""
    lease = cluster.get("lease", "rl-colocated-rl", "--namespace", OPERATOR_NAMESPACE)
    return str(lease["spec"].get("holderIdentity", ""))


def is_led_anew(cluster: Cluster, job: RunningJob, *, since: tuple[str, int]) -> bool:
    leader, epoch = since
    return operator(cluster) not in ("", leader) and int(job.status["epoch"]) > epoch
