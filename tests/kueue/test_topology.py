"""Jobs in a queue whose nodes stand in racks: Kueue's topology-aware scheduling, on nodes of two devices each.

Pods have images that nobody has: they are placed and never run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
import yaml
from e2e.conftest import NAMESPACE, SCENARIOS
from e2e.running_job import KubectlCall, RunningJob, wait_for
from kueue.conftest import DEVICE, RACKS
from racks import RACK

from colocated_rl_api import names

SOON_S = 120  # for Kueue to admit, and for the scheduler to follow

Racked = Callable[..., RunningJob]


@pytest.fixture
def racked(kubectl: KubectlCall) -> Iterator[Racked]:
    """Creates a job of pods that take a node each. Afterwards it is gone."""
    made: list[RunningJob] = []

    def create(name: str, *, replicas: int, **topology: str) -> RunningJob:
        job = yaml.safe_load((SCENARIOS / "resident.yaml").read_text())
        job["metadata"] |= {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "racks"}}
        gpus = {"count": 2, "resourceName": DEVICE, "image": "nobody/has:it"}
        job["spec"] |= {"replicas": replicas, "gpus": gpus, "scheduling": {"topology": topology} if topology else {}}
        job["spec"]["model"] = {"image": {"reference": "nobody/has:it"}}
        kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=json.dumps(job))
        made.append(RunningJob(kubectl, namespace=NAMESPACE, name=name))
        return made[-1]

    yield create
    for job in made:
        job.kubectl("delete", names.PLURAL, job.name, "--timeout=110s")


def open_nodes(kubectl: KubectlCall, *nodes: str) -> None:
    """Let pods come to these nodes of racks alone."""
    for node in RACKS:
        kubectl("uncordon" if node in nodes else "cordon", node)


def racks_of(job: RunningJob) -> list[str] | None:
    """Return the racks of the pods with devices, in the order of their ranks; None until all are placed."""
    pods = sorted(job.pods(names.ROLE_GPU), key=lambda pod: int(pod["metadata"]["labels"][names.REPLICA_LABEL]))
    nodes = [pod["spec"].get("nodeName") for pod in pods]
    return [RACKS[node] for node in nodes] if len(pods) == job.get()["spec"]["replicas"] and all(nodes) else None


def wait_for_racks(job: RunningJob) -> list[str]:
    return wait_for("all pods have nodes", lambda: racks_of(job), deadline_s=SOON_S, explain=job.describe)


def test_neighbouring_ranks_are_side_by_side(kubectl: KubectlCall, racked: Racked) -> None:
    """A rack has room for two of four."""
    open_nodes(kubectl, *RACKS)
    first, second, third, fourth = wait_for_racks(racked("side-by-side", replicas=4, preferred=RACK))
    assert first == second != third == fourth


def test_a_job_waits_until_one_rack_has_room_for_all_of_it(kubectl: KubectlCall, racked: Racked) -> None:
    """One node of each rack would do, and takes nothing, until another of the second is there."""
    open_nodes(kubectl, "node2", "node3")
    job = racked("together", replicas=2, required=RACK)

    def is_told() -> bool:
        workloads = json.loads(kubectl("-n", NAMESPACE, "get", "workloads", "-o", "json"))["items"]
        said = [each["message"] for item in workloads for each in item.get("status", {}).get("conditions", ())]
        return any("topology" in message for message in said)

    wait_for("Kueue says why it waits", is_told, deadline_s=SOON_S, explain=job.describe)
    assert [None, None] == [pod["spec"].get("nodeName") for pod in job.pods(names.ROLE_GPU)]
    open_nodes(kubectl, "node2", "node3", "node5")
    assert ["b", "b"] == wait_for_racks(job)


def test_without_a_topology_a_gang_takes_whatever_is_there(kubectl: KubectlCall, racked: Racked) -> None:
    """The case that a topology is for."""
    open_nodes(kubectl, "node2", "node3")
    assert ["a", "b"] == sorted(wait_for_racks(racked("anywhere", replicas=2)))
