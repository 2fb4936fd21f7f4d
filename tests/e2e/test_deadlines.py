"""A rung that takes longer than `spec.switch` allows ends as its job's rules say: a real engine and a real trainer.

The operator's deadline of a rung, because a gate stays shut; then the agent's, because a trainer stands still. Each has
a rule that does something else than what is usual, and the job goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from e2e.conftest import CommandLine, apply
from e2e.running_job import KubectlCall, RunningJob

from colocated_rl_api import names

pytestmark = pytest.mark.release  # `make test-slow`
START_S = 900  # an engine and a trainer start on two cores
ANSWERED_S = 300  # a deadline, and what follows
SHUT_S = 3600  # beyond any deadline
PROGRESS_S = 20
SWITCH = {"engineCallSeconds": 10, "trainerProgressSeconds": PROGRESS_S}
STANDSTILL = "RungDeadlineExceeded"
RULES: list[dict[str, Any]] = [
    {"onCauses": [STANDSTILL], "atRungs": ["Updated"], "action": "FailJob"},
    {"onCauses": [STANDSTILL], "atRungs": ["Restored"], "action": "RestartPod"},
    {"onCauses": ["TrainerDied"], "action": "RollBack"},
]


@pytest.fixture(scope="module")
def job(kubectl: KubectlCall) -> Iterator[RunningJob]:
    policy = {"rules": RULES, "backoffSeconds": 1}
    running = apply(kubectl, "one-pod.yaml", suffix="-late", switch=SWITCH, failurePolicy=policy)
    yield running
    running.delete()


def wait_for_answer(job: RunningJob, cause: str, *, rule: int) -> None:
    """Wait until the operator has done what a rule says about a cause."""
    expected = (cause, RULES[rule]["action"], rule)

    def is_answered() -> bool:
        failures = job.status.get("failures", {})
        return expected == (failures.get("cause"), failures.get("action"), failures.get("rule"))

    job.wait_for(f"an answer to {cause} by rule {rule}", is_answered, deadline_s=ANSWERED_S)


def test_f81_past_the_deadline_of_a_rung_the_rule_for_that_rung_is_applied(
    job: RunningJob, command_line: CommandLine
) -> None:
    """All but the gate is done: the pod stands at Restored."""
    job.wait_for_step(1, deadline_s=START_S)
    shut, step = job.gpu_pods, job.step
    command_line("fault", job.name, "gate-closed", "--seconds", str(SHUT_S))
    wait_for_answer(job, STANDSTILL, rule=1)
    job.wait_for_step(step + 2, deadline_s=START_S)
    assert not {*shut} & {*job.gpu_pods}


def test_f81_a_trainer_that_hangs_is_stopped_at_its_deadline_and_the_rule_for_it_is_applied(job: RunningJob) -> None:
    [pod], before = job.gpu_pods, job.status
    assert job.signal(pod, names.GPU_CONTAINER, command_contains="colocated_rl_trainer", signal="SIGSTOP") > 0
    wait_for_answer(job, "TrainerDied", rule=2)
    job.wait_for_step(before["step"] + 2, deadline_s=START_S)
    assert [pod] == job.gpu_pods
    assert before["lineage"] < job.status["lineage"]
    stopped = [line.fields["reason"] for line in job.agent_lines("trainers stopped")]
    assert any(reason.endswith(f"no progress for {PROGRESS_S} s") for reason in stopped), stopped


def test_it_completes_and_both_failures_count(job: RunningJob) -> None:
    job.end_soon()
    job.wait_for_condition("Complete", deadline_s=START_S)
    assert (2, 1, 1) == (
        job.status["restarts"],
        job.status["failures"]["podRestarts"],
        job.status["failures"]["stepRetries"],
    )
