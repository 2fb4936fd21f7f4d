"""A node of three falls silent under two jobs, and elsewhere there is room for one of them. It is then short of memory.

Kubelet, runtime and all pods of the node stand still: connections stay open, nobody answers. Pods are of the real
agent, runner and rollout controller; engines and trainers are the fakes of these tests, which compute nothing.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster, CommandFailed
from e2e.conftest import NAMESPACE, OPERATOR_NAMESPACE, installed, simulated_gpu_image, with_images
from e2e.running_job import KubectlCall, RunningJob, wait_for
from traces import Process, family, living, send

from colocated_rl_api import names
from colocated_rl_api.seats import FIRST_SPARE

pytestmark = pytest.mark.cluster

HOME, LOST, SPARE = "node1", "node2", "node3"
JOBS = ("first", "second")
START_S = 600
SILENCE_S = 300  # until the loss is noticed and a pod stands elsewhere
QUEUED_S = 300
ENDED_S = 300  # grace, and half a minute
KILLED_S = 300  # until kubelet has said so, and the agent has found the container again
OPERATOR_LOG = ("-n", OPERATOR_NAMESPACE, "logs", "deploy/colocated-rl", "--since=20s")

OTHER_TENANT = f"""
apiVersion: v1
kind: Pod
metadata: {{name: other-tenant}}
spec:
  nodeName: {SPARE}
  securityContext: {{runAsNonRoot: true, runAsUser: 65532, seccompProfile: {{type: RuntimeDefault}}}}
  containers:
  - name: other
    image: colocated-rl/agent:dev
    command: [sleep, "100000"]
    securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
    resources: {{limits: {{nvidia.com/gpu: 1}}}}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two GPUs on each node, of which one on the spare node is taken; the operator stands at home."""
    folder = tmp_path_factory.mktemp("lost")
    (folder / "site").mkdir()
    images = folder / "images.yaml"
    images.write_text(with_images({"colocated-rl/simulated:dev": simulated_gpu_image(folder / "site")}))
    options = ("--nodes=3", "--extended-resource=nvidia.com/gpu=2")
    with (
        tempfile.TemporaryDirectory(prefix="lost-") as place,  # short, as the cluster's sockets lie in it
        installed(Path(place), images=images, options=options, cordoned=(LOST, SPARE)) as cluster,
    ):
        cluster.kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=OTHER_TENANT)
        cluster.kubectl("uncordon", LOST)
        yield cluster


@pytest.fixture
def kubectl(cluster: Cluster) -> KubectlCall:
    return cluster.kubectl


def apply(kubectl: KubectlCall, name: str, **spec: Any) -> RunningJob:
    job = RunningJob(kubectl, namespace=NAMESPACE, name=name)
    manifest = yaml.safe_load(Path(__file__).with_name("lost-node.yaml").read_text().replace("JOB", job.name))
    manifest["spec"] |= spec
    kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=yaml.safe_dump(manifest))
    return job


def delete(job: RunningJob) -> None:
    job.kubectl("delete", names.PLURAL, job.name)
    wait_for("its pods to go", lambda: not job.pods(names.ROLE_GPU), deadline_s=ENDED_S, explain=lambda: "")


@pytest.mark.release  # two minutes
def test_an_elastic_job_goes_on_without_the_node_and_with_both_pods_once_it_is_back(
    cluster: Cluster, kubectl: KubectlCall
) -> None:
    """The other node takes no pods yet. Each batch has the samples that it should, whoever trains it."""
    job = apply(kubectl, "elastic", elasticPolicy={"minReplicas": 1}, failurePolicy={})
    job.wait_for_step(2, deadline_s=START_S)
    assert [HOME, LOST] == sorted(job.nodes.values())
    with cluster.silenced(LOST):
        step = job.step
        wait_for(
            "the job to go on with one pod",
            lambda: job.status["groupReplicas"] == 1 and job.step > step + 2,
            deadline_s=SILENCE_S,
            explain=job.describe,
        )
        lost = job.status["failures"]
        assert ("MemberSilent", "ReplacePodElsewhere", [LOST]) == (lost["cause"], lost["action"], lost["avoidedNodes"])
    wait_for(
        "the job to go on with both",
        lambda: job.status["groupReplicas"] == 2,
        deadline_s=ENDED_S,
        explain=job.describe,
    )
    job.wait_for_step(job.step + 2, deadline_s=START_S)
    assert [HOME, LOST] == sorted(job.nodes.values())
    assert 0 == job.status["restarts"]
    sealed = job.rollout_lines("batch sealed")
    assert [*range(1, len(sealed) + 1)] == [line.fields["step"] for line in sealed], "each batch once"
    assert {8} == {line.fields["samples"] for line in sealed}
    delete(job)


@pytest.mark.release  # a minute and a half
def test_a_job_goes_on_in_the_room_of_its_spare_which_comes_back_with_the_node(
    cluster: Cluster, kubectl: KubectlCall
) -> None:
    """No other node has a device left, nor takes a second pod of the job."""
    job = apply(kubectl, "spared", spares=1, failurePolicy={})
    job.wait_for_step(1, deadline_s=START_S)
    kubectl("uncordon", SPARE)
    spare = f"{job.name}-gpu-{FIRST_SPARE}"
    wait_for("its spare", lambda: job.status.get("readySpares") == 1, deadline_s=START_S, explain=job.describe)
    before = job.nodes
    assert {f"{spare}-0": SPARE} == {pod: node for pod, node in before.items() if pod.startswith(spare)}
    assert [HOME, LOST] == sorted(node for pod, node in before.items() if not pod.startswith(spare))
    with cluster.silenced(LOST):
        step = job.step
        wait_for(
            "the job to go on",
            lambda: job.status["lineage"] == 2 and job.step > step + 2,
            deadline_s=SILENCE_S,
            explain=job.describe,
        )
        assert [HOME, SPARE] == sorted(node for pod, node in job.nodes.items() if not pod.startswith(spare))
        assert (2, 0) == (job.status["groupReplicas"], job.status["readySpares"])
        assert "0 of 1 spares hold room for the group" in next(
            c["message"] for c in job.status["conditions"] if c["type"] == "PodsReady"
        )
    wait_for("another spare", lambda: job.status.get("readySpares") == 1, deadline_s=ENDED_S, explain=job.describe)
    assert [LOST] == [node for pod, node in job.nodes.items() if pod.startswith(spare)]
    assert 0 == job.status["restarts"]
    delete(job)
    kubectl("cordon", SPARE)


def test_a_job_goes_on_elsewhere_and_one_without_room_gives_its_devices_back(
    cluster: Cluster, kubectl: KubectlCall
) -> None:
    jobs = [apply(kubectl, name) for name in JOBS]
    for job in jobs:
        job.wait_for_step(2, deadline_s=START_S)
        assert [HOME, LOST] == sorted(job.nodes.values())
    who_is_away_for_a_moment_costs_nothing(cluster, jobs[0])
    kubectl("uncordon", SPARE)
    with cluster.silenced(LOST):
        before = {job.name: job.step for job in jobs}
        winner = wait_for(
            "a job to go on",
            lambda: next(
                (job for job in jobs if SPARE in job.nodes.values() and job.step > before[job.name] + 2), None
            ),
            deadline_s=SILENCE_S,
            explain=lambda: "\n".join(job.describe() for job in jobs),
        )
        [loser] = set(jobs) - {winner}
        assert [HOME, SPARE] == sorted(winner.nodes.values())
        loser.change(podsReadyDeadlineSeconds=60)  # only now: the winner had as long as it needed
        wait_for(
            "the other to give its devices back",
            lambda: loser.status.get("phase") == "Queued" and not loser.nodes,
            deadline_s=QUEUED_S,
            explain=loser.describe,
        )
    for job, cause, action in ((winner, "MemberSilent", "ReplacePodElsewhere"), (loser, "PodsNotReady", "Requeue")):
        failures = job.status["failures"]
        assert (cause, action, [LOST]) == (failures["cause"], failures["action"], failures["avoidedNodes"])
    assert (0, 1) == (winner.status["restarts"], winner.status["failures"]["podRestarts"])
    wait_for(
        "the node to come back, and to end what it still had",
        lambda: not [pod for job in jobs for pod in job.pods(names.ROLE_GPU) if pod["spec"].get("nodeName") == LOST],
        deadline_s=ENDED_S,
        explain=winner.describe,
    )
    a_container_over_its_limit_ends_the_job_by_its_rule(winner)


def who_is_away_for_a_moment_costs_nothing(cluster: Cluster, job: RunningJob) -> None:
    """F96: an agent stands still until the operator has lost it; there it is again before its pod is given up."""
    group = [pod["metadata"]["uid"] for pod in job.pods(names.ROLE_GPU)]
    pid = cluster.processes()[f"cri-{LOST}"]
    agents = {process for process in family(pid) if "-m colocated_rl_agent" in process.words and of_job(process, job)}
    send(agents, signal.SIGSTOP)
    try:
        wait_for(
            "the operator to lose the agent",
            lambda: "member lost" in cluster.kubectl(*OPERATOR_LOG),
            deadline_s=START_S,
            explain=job.describe,
        )
    finally:
        send(living(agents), signal.SIGCONT)
    job.wait_for_step(job.step + 2, deadline_s=START_S)
    status = job.status
    assert group == [pod["metadata"]["uid"] for pod in job.pods(names.ROLE_GPU)]
    assert (1, 0, None) == (status["lineage"], status["restarts"], status.get("failures"))


def of_job(process: Process, job: RunningJob) -> bool:
    return f"{names.ENV_POD_NAME}={job.name}-".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()


def a_container_over_its_limit_ends_the_job_by_its_rule(job: RunningJob) -> None:
    """The kernel ends everything in the container: engine, trainer and runner.

    The first time kubelet starts the container again at once, and its agent may find it before kubelet's word of how it
    ended is heard: then a trainer has died. The second time kubelet waits.
    """
    victim, restarts = next(pod for pod, node in job.nodes.items() if node == HOME), job.status["restarts"]
    exceed_limit(job, victim)
    wait_for(
        "an answer to it",
        lambda: job.condition("Failed") == "True" or job.status["restarts"] > restarts,
        deadline_s=KILLED_S,
        explain=job.describe,
    )
    if job.condition("Failed") != "True":
        job.wait_for_step(job.step + 1, deadline_s=START_S)
        exceed_limit(job, victim)
        job.wait_for_condition("Failed", deadline_s=KILLED_S)
    failures = job.status["failures"]
    assert ("OutOfMemory", "FailJob", 1) == (failures["cause"], failures["action"], failures["rule"])
    failed = next(each for each in job.status["conditions"] if each["type"] == "Failed")
    assert "FailurePolicy" == failed["reason"]
    assert f"{victim} (" in failed["message"]


def exceed_limit(job: RunningJob, pod: str) -> None:
    with pytest.raises(CommandFailed):
        job.python(pod, names.GPU_CONTAINER, "memory = bytearray(2 << 30)")
