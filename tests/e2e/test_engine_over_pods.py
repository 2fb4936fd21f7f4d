"""Two pods with one real engine over both, its ranks joined by gloo, and real trainers in turns in both, or one apart.

Each part of the engine is killed once. The loss of any is the loss of the engine, and costs trainers nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from e2e.conftest import SCENARIOS, apply
from e2e.running_job import KubectlCall, RunningJob, wait_for

from colocated_rl_api.facts import EngineState
from colocated_rl_api.names import GPU_CONTAINER, ROLE_ENGINE

pytestmark = pytest.mark.release  # `make test-slow`
START_S = 900  # two parts of an engine and two trainers start on two cores
STEPS_S = 900


FILE = "engine-over-pods.yaml"
APART = {"placement": "OwnDevices", "replicas": 2}  # of its two pods


@pytest.fixture(scope="module", params=["in-turns", "apart"])
def job(kubectl: KubectlCall, request: pytest.FixtureRequest) -> Iterator[RunningJob]:
    instead: dict[str, Any] = {}
    if request.param == "apart":
        rollout = yaml.safe_load((SCENARIOS / FILE).read_text())["spec"]["rollout"]
        instead = {"replicas": 1, "rollout": rollout | APART, "weightSync": {"volume": {"size": "256Mi"}}}
    running = apply(kubectl, FILE, suffix=f"-{request.param}", **instead)
    yield running
    running.delete()


def pods_of_engine(job: RunningJob) -> list[str]:
    """Return the names of the engine's pods, the first one first."""
    return [pod["metadata"]["name"] for pod in job.pods(ROLE_ENGINE)] or job.gpu_pods


def engines(job: RunningJob) -> list[dict[str, Any]]:
    """Return what each pod says of the engine."""
    return [job.member(pod)["facts"]["engines"][0] for pod in pods_of_engine(job)]


def is_whole(job: RunningJob) -> bool | None:
    first, part = engines(job)
    serves = first["state"] == part["state"] == EngineState.READY
    return (serves and part["partOf"] == first["incarnation"]) or None


def test_it_trains_on_one_engine_over_both_pods(job: RunningJob) -> None:
    job.wait_for_step(2, deadline_s=START_S)
    assert is_whole(job)


@pytest.mark.parametrize("pod", [1, 0])
def test_loss_of_any_part_is_the_loss_of_the_engine(job: RunningJob, pod: int) -> None:
    wait_for("the engine", lambda: is_whole(job), deadline_s=STEPS_S, explain=job.describe)
    before, step, lost = engines(job), job.step, len(job.agent_lines("engine lost"))
    assert job.signal(pods_of_engine(job)[pod], GPU_CONTAINER, command_contains="engine-0.yaml", signal="SIGKILL")
    wait_for(
        "the loss", lambda: len(job.agent_lines("engine lost")) > lost or None, deadline_s=STEPS_S, explain=job.describe
    )
    job.wait_for_step(step + 2, deadline_s=STEPS_S)
    wait_for("the engine", lambda: is_whole(job), deadline_s=STEPS_S, explain=job.describe)
    assert all(old["incarnation"] != new["incarnation"] for old, new in zip(before, engines(job), strict=True))
    assert 0 == job.status["restarts"]


def test_it_completes(job: RunningJob) -> None:
    job.end_soon()
    job.wait_for_condition("Complete", deadline_s=STEPS_S)
    assert (f"{job.step}-1", 0) == (job.status["weightVersion"], job.status["restarts"])


def test_it_held_one_checksum_of_each_version(job: RunningJob) -> None:
    held = {version: {*checksums} for version, checksums in job.checksums().items()}
    assert {f"{step}-1" for step in range(job.step + 1)} == {*held}
    assert {1} == {len(checksums) for checksums in held.values()}
