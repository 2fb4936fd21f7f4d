"""Each container of a running job runs out of the memory that its control group has, and the job goes on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import Cluster, CommandFailed
from e2e.oracle import Witness, judge
from e2e.running_job import KubectlCall, RunningJob, wait_for
from e2e.test_kills import NEXT_STEP_S, await_rung, under_faults

from colocated_rl_api import names
from colocated_rl_api.rungs import Rung

ENDS = (
    (names.AGENT_CONTAINER, Rung.RELEASED),
    (names.REWARDS_CONTAINER, Rung.SERVING),
    (names.ROLLOUT_CONTAINER, Rung.SEALED),
    (names.GPU_CONTAINER, Rung.SERVING),  # an engine's memory
    (names.GPU_CONTAINER, Rung.RELEASED),  # a trainer rank's
)
TAKES_MEMORY = "held = []\nwhile True: held.append(bytearray(b'x') * (64 << 20))"
CONCURRENCY = 24  # groups under way


@pytest.fixture(scope="module")
def witness(
    cluster: Cluster | None, kubectl: KubectlCall, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Witness]:
    """Its job's back-off is the default, in which kubelet's report comes, after a peer's death."""
    with under_faults(cluster, kubectl, "memory", with_limits, exports=tmp_path_factory.mktemp("exports")) as witness:
        yield witness


def with_limits(spec: dict[str, Any]) -> None:
    rollout = spec["rollout"]
    for part, most in ((spec["gpus"], "6Gi"), (rollout, "2Gi"), (rollout["prompts"], "2Gi")):
        part["resources"] = {"requests": {"memory": "1Gi"}, "limits": {"memory": most}}


@pytest.mark.release
def test_a_container_that_runs_out_of_memory_costs_no_batch_and_trains_no_sample_twice(
    cluster: Cluster, witness: Witness
) -> None:
    """The kernel ends all of the container together, at the limit of its control group, as Kubernetes has it."""
    for container, rung in ENDS:
        run_out_of_memory(cluster, witness.job, container, rung)
    judge(witness, world=2, given_up=CONCURRENCY)


def run_out_of_memory(cluster: Cluster, job: RunningJob, container: str, rung: Rung) -> None:
    is_rollouts = container in (names.ROLLOUT_CONTAINER, names.REWARDS_CONTAINER)
    pod = job.rollout_pod if is_rollouts else job.gpu_pods[0]
    await_rung(cluster, job, rung)
    answered = answers(job)
    step, restarts = job.step, state_of(job, pod, container)["restartCount"]
    assert "memory" in limits_of(job, pod, container), container
    with contextlib.suppress(CommandFailed):  # it ends with its container
        job.python(pod, container, TAKES_MEMORY)

    def has_ended() -> bool:
        state = state_of(job, pod, container)
        ended = state.get("lastState", {}).get("terminated", {})
        return (state["restartCount"], ended.get("reason")) == (restarts + 1, "OOMKilled")

    wait_for(f"the end of {container}", has_ended, deadline_s=NEXT_STEP_S, explain=job.describe)
    if container == names.GPU_CONTAINER:  # after the back-off
        wait_for("an answer to it", lambda: answers(job) > answered, deadline_s=NEXT_STEP_S, explain=job.describe)
    job.wait_for_step(step + 2, deadline_s=NEXT_STEP_S)
    if container == names.GPU_CONTAINER:
        assert "OutOfMemory" == job.status["failures"]["cause"]


def answers(job: RunningJob) -> int:
    """Return how often the job's failures were answered by another start of its trainers."""
    failures = job.status.get("failures", {})
    return int(failures.get("podRestarts", 0) + failures.get("stepRetries", 0))


def limits_of(job: RunningJob, pod: str, container: str) -> dict[str, str]:
    spec = json.loads(job.kubectl("get", "pod", pod, "-o", "json"))["spec"]
    found: dict[str, str] = next(
        each.get("resources", {}).get("limits", {})
        for each in [*spec.get("initContainers", []), *spec["containers"]]
        if each["name"] == container
    )
    return found


def state_of(job: RunningJob, pod: str, container: str) -> dict[str, Any]:
    """The kubelet's status of one container."""
    status = json.loads(job.kubectl("get", "pod", pod, "-o", "json"))["status"]
    every = [*status.get("initContainerStatuses", []), *status["containerStatuses"]]
    found: dict[str, Any] = next(each for each in every if each["name"] == container)
    return found
