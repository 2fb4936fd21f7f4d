"""A job of two pods that releases the KV cache alone, and whose engines are compared by checksum; with real ones.

It ends once it was looked into, however quick it is: a complete job has no engines. Its model comes from an image.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from e2e.conftest import apply
from e2e.running_job import KubectlCall, RunningJob

from colocated_rl_api import names
from colocated_rl_api.facts import TagState

pytestmark = pytest.mark.release  # `make test-slow`
START_S = 900  # two engines and trainers start on two cores
STEPS_S = 600


@pytest.fixture(scope="module")
def job(kubectl: KubectlCall) -> Iterator[RunningJob]:
    running = apply(kubectl, "kept-weights.yaml", model={"image": {"reference": "colocated-rl/arithmetic-model:dev"}})
    yield running
    running.delete()


def test_its_engines_keep_their_weights_and_the_job_completes(job: RunningJob) -> None:
    job.wait_for_step(1, deadline_s=START_S)
    (engine,) = job.member(job.gpu_pods[0])["facts"]["engines"]
    assert {"image"} == {kind for pod in job.pods(names.ROLE_GPU) for kind in of_the_model(pod) if kind != "name"}
    assert (TagState.KEPT, TagState.KEPT) == (engine["weights"], engine["cudaGraph"])
    job.end_soon()
    job.wait_for_condition("Complete", deadline_s=STEPS_S)
    status, steps = job.status, job.step
    assert ("TimeSliced", f"{steps}-1", 0) == tuple(status[name] for name in ("placement", "weightVersion", "restarts"))
    actions = [line.fields["action"] for line in job.agent_lines("action ended")]
    changes = [2 * steps] * 3
    assert [2, *changes] == [actions.count(name) for name in ("StartEngine", "Release", "Resume", "Update")]


def test_its_engines_held_the_same_weights_in_each_version(job: RunningJob) -> None:
    held = {version: {*checksums} for version, checksums in job.checksums().items()}
    assert {f"{step}-1" for step in range(job.step + 1)} == {*held}
    assert {1} == {len(checksums) for checksums in held.values()}
    assert len(held) == len(set.union(*held.values())), "training changed them"


def of_the_model(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the volume that a pod has its model from."""
    return next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "model")
