"""Rollout alone records, and training alone trains what was recorded: two jobs, neither of which has both sides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.conftest import CommandLine, apply
from e2e.running_job import Kubectl, RunningJob

from colocated_rl_api import names

RECORD_S = 300  # an engine starts on two cores
TRAIN_S = 180


@pytest.fixture(scope="module")
def recorded(kubectl: Kubectl) -> Iterator[RunningJob]:
    running = apply(kubectl, "rollout-only.yaml")
    running.wait_for_condition("Complete", deadline_s=RECORD_S)
    yield running
    running.kubectl("delete", names.PLURAL, running.name, "--wait=false")


@pytest.fixture(scope="module")
def trained(recorded: RunningJob, kubectl: Kubectl, command_line: CommandLine) -> Iterator[RunningJob]:
    recorded.kubectl("apply", "-f", "-", stdin=command_line("train-only", recorded.name))
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
