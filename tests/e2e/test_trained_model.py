"""A trained public model in bfloat16, SmolLM2-135M-Instruct: a real engine and trainer, and nothing set for it.

With a limit that was measured on small random models, the check of new weights killed the right engine, for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from e2e.conftest import apply
from e2e.running_job import KubectlCall, RunningJob

pytestmark = pytest.mark.slow

COMPLETE_S = 1200  # two steps of 16 samples and switches of 270 MB, on two slow cores
Collected = dict[int, list[int]]
"""Numbers of completed samples as the status had them one after the other, by the step whose batch was collected."""


@pytest.fixture(scope="module")
def collected() -> Collected:
    return {}


@pytest.fixture(scope="module")
def job(kubectl: KubectlCall, collected: Collected) -> Iterator[RunningJob]:
    running = apply(kubectl, "trained-model.yaml")

    def is_complete() -> bool:
        samples = running.status.get("rollout", {}).get("samples", {})
        if not samples.get("sealed"):
            collected.setdefault(samples.get("trained", 0), []).append(samples.get("completed", 0))
        return running.condition("Complete") == "True"

    running.wait_for("Complete", is_complete, deadline_s=COMPLETE_S)
    yield running
    running.delete()


def test_it_trains_and_every_version_reaches_the_first_engine(job: RunningJob) -> None:
    status = job.status
    assert (2, "2-1", 0) == (job.step, status["weightVersion"], status["restarts"])
    actions = [line.fields["action"] for line in job.agent_lines("action ended")]
    assert [1, 2] == [actions.count(name) for name in ("StartEngine", "Update")]
    assert [] == job.agent_lines("engine lost")


def test_f13_its_status_shows_how_far_a_batch_is_while_it_is_collected(job: RunningJob, collected: Collected) -> None:
    """The first one, which is not sealed before the status has its progress, every ten seconds: minRolloutSeconds."""
    assert any(before < after for before, after in pairwise(collected[0])), (job.step, collected)


def test_its_engine_answered_the_probe_of_each_version_and_the_status_has_how_near_it_was(job: RunningJob) -> None:
    passed = job.agent_lines("probe passed")
    assert ["0-1", "1-1", "2-1"] == [line.fields["version"] for line in passed]
    found = job.status["weightSync"]
    assert found["differenceNats"] == pytest.approx(passed[-1].fields["apart_nats"], rel=0.05)
    assert found["limitNats"] == pytest.approx(3 * found["differenceNats"], rel=0.05)
    assert 1e-3 < found["differenceNats"] < 0.5, "the noise of bfloat16"


def test_it_answers_as_a_trained_model_does(job: RunningJob) -> None:
    """About a third of its answers end with the right sum, often all or none to a question: there are 16 of them.

    A random model would never write one.
    """
    rewards = [line.fields["reward_mean"] for line in job.rollout_lines("batch sealed")]
    assert len(rewards) >= job.step
    assert max(rewards) > 0
