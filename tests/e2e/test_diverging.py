"""A job whose gradient is not finite fails at once, says what to change, and goes on once that is changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.conftest import CommandLine, apply
from e2e.running_job import KubectlCall, RunningJob

pytestmark = pytest.mark.release  # `make test-slow`
START_S, STEP_S = 600, 600  # engine and trainer start on two cores
CONFIG = {"learningRate": 1e-4, "threads": 1}
HUGE = 1e38  # the bonus' gradient overflows float32


@pytest.fixture(scope="module")
def job(kubectl: KubectlCall) -> Iterator[RunningJob]:
    running = apply(
        kubectl, "one-pod.yaml", steps=1, evaluation=None, trainer={"config": CONFIG | {"entropyCoefficient": HUGE}}
    )
    yield running
    running.delete()


def test_it_fails_at_once_with_the_trainers_words_and_goes_on_with_another_option(
    job: RunningJob, command_line: CommandLine
) -> None:
    job.wait_for_condition("Failed", deadline_s=START_S + STEP_S)
    status = job.status
    assert ("NotRetriable", "FailJob") == (status["failures"]["cause"], status["failures"]["action"])
    assert (0, 1) == (status["restarts"], status["lineage"]), "nothing was tried again"
    [failed] = [each for each in status["conditions"] if each["type"] == "Failed"]
    assert "FailurePolicy" == failed["reason"]
    assert failed["message"].startswith("a trainer ended at step 1, and would end again: gradient norm of step 1 is ")
    assert "lower learningRate or importanceCap in spec.trainer.config, or set nonFiniteGradient" in failed["message"]
    assert failed["message"].endswith("to continue it: kubectl crlj retry -n e2e one")

    command_line("suspend", job.name)
    job.change(trainer={"config": {"entropyCoefficient": None}})
    command_line("retry", job.name)
    job.wait_for_condition("Complete", deadline_s=START_S + STEP_S)
    assert (1, 2) == (job.step, job.status["lineage"])
