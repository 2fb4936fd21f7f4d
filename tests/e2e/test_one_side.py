"""Rollout alone records, and training alone trains what was recorded: two jobs, neither of which has both sides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from documents.blocks import under
from e2e.conftest import apply
from e2e.running_job import Kubectl, RunningJob
from e2e.terminal import Terminal

from colocated_rl_api import names

RECORD_S = 300  # an engine starts on two cores
TRAIN_S = 180
STEPS = 3


PAGE = "docs/one-side.md"


@pytest.fixture(scope="module")
def recorded(kubectl: Kubectl, terminal: Terminal) -> Iterator[RunningJob]:
    """By the commands of the page, of a job that is looked into: it has both sides, and no pods."""
    whole = apply(kubectl, "one-side.yaml")
    begin, look = under(PAGE, "Record")
    terminal(begin.replace("--steps 20", f"--steps {STEPS}"), sums=whole.name)
    running = RunningJob(kubectl, namespace=whole.namespace, name=f"{whole.name}-rollout")
    running.wait_for_step(1, deadline_s=RECORD_S)
    assert "response" in terminal(look, sums=whole.name)
    running.wait_for_condition("Complete", deadline_s=RECORD_S)
    yield running
    for job in (running, whole):
        running.kubectl("delete", names.PLURAL, job.name, "--wait=false")


@pytest.fixture(scope="module")
def trained(recorded: RunningJob, kubectl: Kubectl, terminal: Terminal) -> Iterator[RunningJob]:
    begin, of_a_claim = under(PAGE, "Replay")
    whole = recorded.name.removesuffix("-rollout")
    terminal(begin, sums=whole)
    assert "claimName: my-copies" in terminal(of_a_claim, sums=whole)
    running = RunningJob(kubectl, namespace=recorded.namespace, name=f"{recorded.name}-train")
    running.wait_for_condition("Complete", deadline_s=TRAIN_S)
    yield running
    running.kubectl("delete", names.PLURAL, running.name, "--wait=false")


def actions(job: RunningJob) -> set[str]:
    return {line.fields["action"] for line in job.agent_lines("action ended")}


def sealed(job: RunningJob) -> list[tuple[object, ...]]:
    said = ("step", "samples", "loss_tokens", "reward_mean", "staleness")
    return [tuple(line.fields[name] for name in said) for line in job.rollout_lines("batch sealed")]


def test_a_job_without_a_trainer_seals_its_batches(recorded: RunningJob) -> None:
    told = recorded.status
    assert (3, "RolloutOnly", "0-1", 0) == tuple(told[n] for n in ("step", "placement", "weightVersion", "restarts"))
    assert [1, 2, 3] == [batch[0] for batch in sealed(recorded)]
    assert "StartEngine" in actions(recorded)
    assert not {"StartTrainers", "Train", "Export", "Release"} & actions(recorded)


def test_a_job_without_an_engine_trains_them(recorded: RunningJob, trained: RunningJob) -> None:
    told = trained.status
    assert (3, "TrainOnly", "3-1", 0) == tuple(told[n] for n in ("step", "placement", "weightVersion", "restarts"))
    assert sealed(recorded) == sealed(trained)
    assert {"StartTrainers", "Train", "Export", "Save"} <= actions(trained)
    assert not {"StartEngine", "OpenGate", "Release", "Update"} & actions(trained)
