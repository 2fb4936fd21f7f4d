"""Jobs in a queue of the real Kueue: admitted together, preempted, suspended, and out of its way when they end.

The tests run in the order of this file: the job that the second preempts is suspended by the third.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from e2e.conftest import NAMESPACE, SCENARIOS
from e2e.running_job import KubectlCall, RunningJob, wait_for

from colocated_rl_api import names
from colocated_rl_api.job_status import Phase

START_S = 600  # engines and trainers start on two cores
SOON_S = 120  # for Kueue to say what it has done
GATE = "kueue.x-k8s.io/admission"

Queued = Callable[..., RunningJob]


@pytest.fixture
def queued(kubectl: KubectlCall) -> Queued:
    """Creates a job whose pods wait in the queue."""

    def create(name: str, *, replicas: int = 1, steps: int = 2, **labels: str) -> RunningJob:
        job = yaml.safe_load((SCENARIOS / "resident.yaml").read_text())
        job["metadata"] |= {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "research", **labels}}
        job["spec"] |= {"replicas": replicas, "steps": steps}
        kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=json.dumps(job))
        return RunningJob(kubectl, namespace=NAMESPACE, name=name)

    return create


def gated(job: RunningJob) -> list[bool]:
    """Return, for each pod, whether Kueue keeps it from the scheduler."""
    pods = job.pods(names.ROLE_GPU, names.ROLE_ROLLOUT)
    gates = [pod["spec"].get("schedulingGates", []) for pod in pods]
    return [any(gate["name"] == GATE for gate in of_pod) for of_pod in gates]


def wait_until_gated(job: RunningJob, count: int) -> None:
    wait_for(
        f"{count} gated pods of {job.name}",
        lambda: gated(job) == [True] * count,
        deadline_s=SOON_S,
        explain=job.describe,
    )


def reserved(kubectl: KubectlCall) -> int | None:
    """Pods that Kueue counts against the quota; None before it has counted."""
    queue: dict[str, Any] = json.loads(kubectl("get", "clusterqueue", "lab", "-o", "json"))
    if not (flavors := queue.get("status", {}).get("flavorsReservation")):
        return None
    (flavor,) = flavors
    (total,) = (resource["total"] for resource in flavor["resources"] if resource["name"] == "pods")
    return int(total)


def wait_until_reserved(kubectl: KubectlCall, count: int, job: RunningJob) -> None:
    what = f"{count} pods counted against the quota"
    wait_for(what, lambda: reserved(kubectl) == count, deadline_s=SOON_S, explain=job.describe)


def test_a_job_waits_with_all_its_pods_and_starts_when_another_has_ended(kubectl: KubectlCall, queued: Queued) -> None:
    first = queued("first", replicas=2)
    first.wait_for_step(1, deadline_s=START_S)
    assert [False] * 3 == gated(first), "two GPU pods and the rollout pod"
    wait_until_reserved(kubectl, 3, first)
    second = queued("second")
    wait_until_gated(second, 2)
    wait_for("a phase", lambda: second.status.get("phase"), deadline_s=SOON_S, explain=second.describe)
    assert Phase.PENDING == second.status["phase"]
    first.wait_for_condition("Complete", deadline_s=START_S)
    second.wait_for_step(1, deadline_s=START_S)
    assert [False] * 2 == gated(second)
    second.wait_for_condition("Complete", deadline_s=START_S)
    assert (0, 0) == (first.status["restarts"], second.status["restarts"])
    wait_until_reserved(kubectl, 0, second)


def test_a_preempted_job_waits_at_the_gate_and_goes_on(kubectl: KubectlCall, queued: Queued) -> None:
    patient = queued("patient", replicas=2, steps=1000)
    patient.wait_for_step(1, deadline_s=START_S)
    urgent = queued("urgent", **{"kueue.x-k8s.io/priority-class": "urgent"})
    urgent.wait_for_step(1, deadline_s=START_S)
    wait_until_gated(patient, 3)
    assert [False] * 2 == gated(urgent)
    urgent.wait_for_condition("Complete", deadline_s=START_S)
    done = patient.step
    patient.wait_for_step(done + 1, deadline_s=START_S)
    assert "False" == patient.condition("Failed")


def test_a_suspended_job_gives_its_quota_back_and_gets_it_again(kubectl: KubectlCall) -> None:
    patient = RunningJob(kubectl, namespace=NAMESPACE, name="patient")
    patient.kubectl("patch", names.PLURAL, patient.name, "--type=merge", "--patch", '{"spec":{"suspend":true}}')
    wait_until_reserved(kubectl, 0, patient)
    done = patient.step
    patient.kubectl("patch", names.PLURAL, patient.name, "--type=merge", "--patch", '{"spec":{"suspend":false}}')
    patient.wait_for_step(done + 1, deadline_s=START_S)
    wait_until_reserved(kubectl, 3, patient)
    patient.kubectl("delete", names.PLURAL, patient.name, "--timeout=110s")
    wait_until_reserved(kubectl, 0, patient)
