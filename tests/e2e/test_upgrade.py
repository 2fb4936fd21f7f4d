"""The chart is upgraded and rolled back under a job that trains: its pods stay, and it goes on under each operator."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml
from cluster import Cluster
from e2e.conftest import MODEL, OPERATOR_NAMESPACE, SCENARIOS, volume
from e2e.running_job import RunningJob, wait_for

from setup.layout import CHECKOUT

CHART = CHECKOUT.root / "charts/colocated-rl"
NAMESPACE = "default"
STEP_S = 300.0


def packed_earlier(cluster: Cluster, place: Path) -> Path:
    """A chart of a lower version, as somebody installed it once."""
    earlier = place / "colocated-rl"
    shutil.copytree(CHART, earlier)
    described = earlier / "Chart.yaml"
    described.write_text(re.sub(r"^version: .*$", "version: 0.0.1", described.read_text(), flags=re.MULTILINE))
    shutil.rmtree(earlier / "templates/tests")  # nothing of a job depends on it, and the upgrade adds it
    cluster.helm("package", earlier, "--destination", place)
    return place / "colocated-rl-0.0.1.tgz"


def pods(job: RunningJob) -> dict[str, tuple[str, int]]:
    """UID of each pod of the job, and how often its containers were started again."""
    found = {}
    for pod in job.pods("gpu") + job.pods("rollout"):
        states = pod["status"].get("initContainerStatuses", []) + pod["status"]["containerStatuses"]
        found[pod["metadata"]["name"]] = (pod["metadata"]["uid"], sum(state["restartCount"] for state in states))
    return found


def test_a_job_goes_on_through_upgrade_and_rollback_of_the_chart(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Cluster.up(tmp_path_factory.mktemp("u"), images=CHECKOUT.images) as cluster:
        values = ("--namespace", OPERATOR_NAMESPACE, "--values", CHART / "ci/local-values.yaml", "--wait")
        earlier = packed_earlier(cluster, tmp_path_factory.mktemp("packed"))
        cluster.helm("install", "rl", earlier, "--create-namespace", *values)
        cluster.kubectl("apply", "-f", "-", stdin=volume("arithmetic-model", MODEL, namespace=NAMESPACE))
        manifest = yaml.safe_load((SCENARIOS / "one-pod.yaml").read_text())
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
        job = RunningJob(cluster.kubectl, namespace=NAMESPACE, name=manifest["metadata"]["name"])
        job.wait_for_step(1, deadline_s=STEP_S)
        before = pods(job)

        def in_training() -> bool:
            return job.status.get("phase") == "Training"

        for words in (
            ("upgrade", "rl", CHART, *values, "--set", "logLevel=DEBUG"),
            ("rollback", "rl", "1", "--namespace", OPERATOR_NAMESPACE, "--wait"),
        ):
            wait_for("a step under way", in_training, deadline_s=STEP_S, explain=job.describe)
            taken_over = partial(is_led_anew, cluster, job, since=(operator(cluster), int(job.status["epoch"])))
            cluster.helm(*words)
            wait_for("another operator, and its epoch", taken_over, deadline_s=STEP_S, explain=job.describe)
            job.wait_for_step(job.step + 2, deadline_s=STEP_S)
            assert before == pods(job), "no pod and no container was started again"
        assert "0" == str(job.status.get("restarts"))
        listed = json.loads(cluster.helm("list", "--namespace", OPERATOR_NAMESPACE, "--output", "json"))
        assert ["colocated-rl-0.0.1"] == [release["chart"] for release in listed]


def operator(cluster: Cluster) -> str:
    """The replica that leads."""
    lease = cluster.get("lease", "rl-colocated-rl", "--namespace", OPERATOR_NAMESPACE)
    return str(lease["spec"].get("holderIdentity", ""))


def is_led_anew(cluster: Cluster, job: RunningJob, *, since: tuple[str, int]) -> bool:
    leader, epoch = since
    return operator(cluster) not in ("", leader) and int(job.status["epoch"]) > epoch
