"""A job of two pods that releases the KV cache alone, and whose engines are compared by checksum; with real ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from e2e.conftest import apply
from e2e.running_job import Kubectl, RunningJob, wait_for

from colocated_rl_api import names
from colocated_rl_api.member_wire import TagState

START_S = 300  # two engines and trainers start on two cores
STEPS_S = 180


@pytest.fixture(scope="module")
def job(kubectl: Kubectl) -> Iterator[RunningJob]:
    running = apply(kubectl, "kept-weights.yaml")
    yield running
    running.kubectl("delete", names.PLURAL, running.name, "--timeout=60s")


def started_engine(job: RunningJob) -> dict[str, Any] | None:
    """What is known of one. It is looked for as soon as there may be one: a complete job has none."""
    pods = [pod["metadata"]["name"] for pod in job.pods(names.ROLE_GPU) if pod["status"].get("phase") == "Running"]
    engines = [engine for pod in pods for engine in job.member(pod)["facts"]["engines"]]
    return next((engine for engine in engines if engine["incarnation"]), None)


def test_its_engines_keep_their_weights_and_the_job_completes(job: RunningJob) -> None:
    engine = wait_for("an engine", partial(started_engine, job), deadline_s=START_S, explain=job.describe)
    assert (TagState.KEPT, TagState.KEPT) == (engine["weights"], engine["cudaGraph"])
    job.wait_for_condition("Complete", deadline_s=START_S + STEPS_S)
    assert ("TimeSliced", "3-1", 0) == tuple(job.status[field] for field in ("placement", "weightVersion", "restarts"))
    actions = [line.fields["action"] for line in job.agent_lines("action ended")]
    assert (2, 6, 6, 6) == tuple(actions.count(name) for name in ("StartEngine", "Release", "Resume", "Update"))


def test_its_engines_held_the_same_weights_in_each_version(job: RunningJob) -> None:
    held: dict[str, set[str]] = {}
    for line in job.agent_lines("weights added up"):
        held.setdefault(line.fields["version"], set()).add(line.fields["checksum"])
    assert ["0-1", "1-1", "2-1", "3-1"] == sorted(held)
    assert [1, 1, 1, 1] == [len(checksums) for checksums in held.values()]
    assert 4 == len(set.union(*held.values())), "training changed them"
