"""A job that plays an environment of verifiers by itself, in an image that has it."""

from __future__ import annotations

import pytest
from e2e.conftest import apply
from e2e.running_job import KubectlCall

pytestmark = pytest.mark.release  # `make test-slow`

DONE_S = 1200  # an engine and a trainer start, two steps of episodes


def test_job_plays_its_environment_trains_its_episodes_and_evaluates_it(kubectl: KubectlCall) -> None:
    job = apply(kubectl, "environment.yaml")
    job.wait_for_condition("Complete", deadline_s=DONE_S)
    sealed = job.rollout_lines("batch sealed")
    assert [(1, 8), (2, 8)] == [(line.fields["step"], line.fields["samples"]) for line in sealed]
    [evaluation] = job.status["evaluations"]
    assert (2, 4) == (evaluation["step"], evaluation["samples"])
    assert 0 <= evaluation["mean"] <= 1
    job.delete()
