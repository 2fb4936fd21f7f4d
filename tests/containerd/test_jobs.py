"""A whole job of two pods with real engines and trainers, in containers of the images that users build."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster
from containerd.conftest import CACHE_MIB, NEXT, NODES, kill, runs_anew, values
from documents.blocks import under
from e2e.conftest import HELM_S, NAMESPACE, OPERATOR_NAMESPACE, CommandLine
from e2e.running_job import RunningJob, wait_for
from e2e.terminal import RecordedTerminal
from podman import REPOSITORY, TAG

from colocated_rl_api import names
from colocated_rl_api.rungs import Rung
from setup.layout import CHECKOUT

START_S = 900  # two engines and two trainers start on two cores
STEPS_S = 400  # a few steps
SEEN_S = 120
BACK_S = 60.0
TESTS_S = 1500  # whole jobs of other tests

IN_CONTAINER = """
import json, os, resource
shm = os.statvfs("/dev/shm")
print(json.dumps({
    "ids": [os.getuid(), os.getgid(), os.getgroups()],
    "written": [path for path in ("/", "/opt/colocated-rl", "/model") if os.access(path, os.W_OK)],
    "shm is more than a container's default": shm.f_blocks * shm.f_frsize > 64 << 20,
    "files": len(set(resource.getrlimit(resource.RLIMIT_NOFILE))),
}))
"""


@pytest.fixture(scope="module")
def job(two: RunningJob) -> RunningJob:
    """Has done two steps without a fault."""
    two.wait_for_step(2, deadline_s=START_S)
    return two


def test_a_job_trains_on_two_nodes_in_containers_of_its_images(job: RunningJob, images: dict[str, str]) -> None:
    pods = job.pods(names.ROLE_GPU)
    assert {*NODES} == {pod["spec"]["nodeName"] for pod in pods}
    assert {images["gpu"]} == {pod["spec"]["containers"][0]["image"] for pod in pods}
    [ran] = {each["imageID"] for pod in pods for each in pod["status"]["containerStatuses"]}
    assert ran.startswith(f"{REPOSITORY}/gpu-cpu@sha256:")


def test_a_job_whose_image_has_another_digest_says_so_and_is_deleted_like_any_other(elsewhere: RunningJob) -> None:
    image = elsewhere.get()["spec"]["gpus"]["image"]
    wanted = f'ImagePullBackOff: Back-off pulling image "{image}"'

    def is_reported() -> bool:
        return any(wanted in condition["message"] for condition in elsewhere.status.get("conditions", ()))

    wait_for("the cause", is_reported, deadline_s=SEEN_S, explain=elsewhere.describe)
    elsewhere.delete()
    wait_for("no pods", lambda: [] == elsewhere.gpu_pods, deadline_s=SEEN_S, explain=elsewhere.describe)


def test_processes_of_a_job_have_what_the_restricted_standard_leaves_them(job: RunningJob) -> None:
    found = json.loads(job.python(job.gpu_pods[0], names.GPU_CONTAINER, IN_CONTAINER))
    assert {
        "ids": [65532, 65532, [65532]],
        "written": [],
        "shm is more than a container's default": True,
        "files": 1,
    } == found


def test_a_person_looks_at_it_with_kubectl(job: RunningJob, command_line: CommandLine) -> None:
    """Logs and exec are how all of these tests look; the rest is port-forward, and what the kubelet measures."""
    assert all(pod in command_line("top", job.name, "--once") for pod in job.gpu_pods)
    assert json.loads(command_line("samples", job.name, "--output", "json"))
    [pod, _] = job.pods(names.ROLE_GPU)
    measured = json.loads(job.kubectl("get", "--raw", f"/api/v1/nodes/{pod['spec']['nodeName']}/proxy/stats/summary"))
    [found] = [each for each in measured["pods"] if each["podRef"]["name"] == pod["metadata"]["name"]]
    memory = {each["name"]: each["memory"]["workingSetBytes"] for each in found["containers"]}
    assert memory[names.GPU_CONTAINER] > memory[names.AGENT_CONTAINER] > 0


@pytest.mark.parametrize("component", ["containerd", "kubelet"])
def test_a_node_agent_that_dies_in_the_middle_of_a_switch_ends_no_container(
    job: RunningJob, cluster: Cluster, component: str
) -> None:
    """The node agents of both nodes die at once, while the trainers hold the devices."""
    before = containers(job)
    step = job.step
    wait_for("a switch", lambda: job.status.get("phase") == "Training", deadline_s=STEPS_S, explain=job.describe)
    killed = {name: kill(cluster, name) for name in (f"{component}-{node}" for node in NODES)}
    for name, pid in killed.items():
        cluster.wait_for(f"another {name}", partial(runs_anew, cluster, name, instead_of=pid), BACK_S)
    job.wait_for_step(step + 2, deadline_s=STEPS_S)
    assert before == containers(job)
    assert 0 == job.status["restarts"]


def containers(job: RunningJob) -> dict[str, str]:
    """Each container of the job's GPU pods, and which start of it runs."""
    statuses = [
        status
        for pod in working(job)
        for status in (*pod["status"]["initContainerStatuses"], *pod["status"]["containerStatuses"])
    ]
    return {status["containerID"]: status["restartCount"] for status in statuses}


def test_a_pod_that_is_evicted_after_an_upgrade_is_made_again_of_the_images_of_its_peers(
    job: RunningJob, cluster: Cluster, tmp_path: Path
) -> None:
    """Images have another tag then, until a rollback. What pods run is known by the digests that containerd tells."""
    upgraded = tmp_path / "values.yaml"
    upgraded.write_text(yaml.safe_dump(values(NEXT)))
    before, peers = containers(job), working(job)
    of_helm = ("--namespace", OPERATOR_NAMESPACE, "--wait")
    chart = CHECKOUT.root / "charts/colocated-rl"
    cluster.helm("upgrade", "colocated-rl", chart, *of_helm, "--values", upgraded, deadline_s=HELM_S)
    job.wait_for_step(job.step + 1, deadline_s=STEPS_S)
    assert before == containers(job), "an upgrade changes no pod"

    much = f"open('/cache/much', 'wb').write(bytes({2 * CACHE_MIB} << 20))"
    job.python(peers[1]["metadata"]["name"], names.GPU_CONTAINER, much)
    wait_until_replaced(job, peers[1])
    digests = job.status["start"]["digests"]
    [made] = [pod for pod in working(job) if pod["metadata"]["uid"] not in uids(peers)]
    ran = {each["image"] for each in (*made["spec"]["initContainers"], *made["spec"]["containers"])}
    assert ran == {digests[f"{REPOSITORY}/{kind}:{TAG}"] for kind in ("agent", "gpu-cpu")}

    cluster.helm("rollback", "colocated-rl", *of_helm, deadline_s=HELM_S)
    job.wait_for_step(job.step + 2, deadline_s=START_S)


def wait_until_replaced(job: RunningJob, pod: dict[str, Any]) -> None:
    """Another one is there, perhaps of its name. The first may stay, as failed: who evicts a pod deletes nothing."""
    uid = pod["metadata"]["uid"]
    wait_for(
        f"another pod instead of {pod['metadata']['name']}",
        lambda: uid not in (found := uids(working(job))) and len(found) == len(NODES),
        deadline_s=SEEN_S,
        explain=job.describe,
    )


def working(job: RunningJob) -> list[dict[str, Any]]:
    """GPU pods that have not failed, by name."""
    return [pod for pod in job.pods(names.ROLE_GPU) if pod["status"]["phase"] != "Failed"]


def uids(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def test_a_node_is_drained_and_the_job_goes_on_after_it(job: RunningJob, cluster: Cluster, tmp_path: Path) -> None:
    """The commands of the runbook drain it, and nothing suspends the job before.

    The rollout pod is on the other one: here it would wait for a successor of the GPU pod, which finds no node.
    """
    [rollout] = job.pods(names.ROLE_ROLLOUT)
    [node] = {*NODES} - {rollout["spec"]["nodeName"]}
    terminal = RecordedTerminal.opened(tmp_path, cluster.kubeconfig)
    _, drain, back = under("docs/runbooks/operations.md", "Preemption, maintenance, spot nodes")
    [evicted] = [pod for pod in working(job) if pod["spec"]["nodeName"] == node]
    restarts = job.status["restarts"]
    terminal(drain, NODE=node)
    terminal(back.partition(";")[0], NODE=node)
    wait_until_replaced(job, evicted)
    job.wait_for_step(job.step + 2, deadline_s=START_S)
    assert restarts == job.status["restarts"]


def test_it_completes_after_its_last_step(job: RunningJob) -> None:
    job.end_soon()
    job.wait_for_condition("Complete", deadline_s=STEPS_S)
    assert {Rung.TRAINED, Rung.EXPORTED} <= {Rung(line.fields["rung"]) for line in job.rungs(job.step)}
    job.delete()


def test_helm_test_passes_as_the_page_says(cluster: Cluster) -> None:
    words = ("test", "colocated-rl", "--namespace", OPERATOR_NAMESPACE, "--logs")
    assert "Phase:          Succeeded" in cluster.helm(*words, deadline_s=HELM_S)


def test_whole_jobs_of_other_tests_run_as_on_any_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """Two at a time, as there: one loads libraries while another computes."""
    for tool in ("kubectl", "helm"):
        (tmp_path / tool).symlink_to(cluster.command()[0])
    search = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    words = ("-q", "-x", "-c", "tests/pyproject.toml", "--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder")
    files = [f"tests/e2e/{name}.py" for name in ("test_disaggregated", "test_environment", "test_own_prompts")]
    environment = {**os.environ, "PATH": search, "KUBECONFIG": str(cluster.kubeconfig)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *files],
        cwd=CHECKOUT.root, env=environment, capture_output=True, text=True, timeout=TESTS_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_engines_in_pods_of_their_own_served_from_another_node_than_one_of_the_trainers(cluster: Cluster) -> None:
    """These engines belong to the job of the test before, whose weights lie on a claim of both nodes."""
    events = cluster.get("events", "--namespace", NAMESPACE, "--field-selector=reason=Scheduled")["items"]
    placed = (
        re.fullmatch(r"Successfully assigned e2e/(disaggregated-\S+) to (\S+)", each["message"]) for each in events
    )
    nodes = {found[1]: found[2] for found in placed if found}
    assert {*NODES} == {*nodes.values()}, nodes
