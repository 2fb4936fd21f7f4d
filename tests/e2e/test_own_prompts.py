"""A job on prompts and rewards of one's own, whose reward function is up to no good."""

from __future__ import annotations

import json
from typing import Any

from e2e.conftest import apply
from e2e.running_job import Kubectl, RunningJob

from colocated_rl_api import names

DONE_S = 400  # an engine and a trainer start, two steps


def test_job_trains_on_a_file_and_its_reward_function_gets_no_keys_store_or_answer(kubectl: Kubectl) -> None:
    job = apply(kubectl, "own-prompts.yaml")
    job.wait_for_condition("Complete", deadline_s=DONE_S)
    assert 0 <= job.status["rollout"]["reward"] <= 1
    found = spied(job)
    assert not found.pop("target").startswith("HTTP"), "without a certificate there is no answer"
    assert {
        "files": [],
        "writable": [],
        "processes": [],
        "variables": [],
        "batch": "HTTP/1.1 401 Unauthorized",
    } == found
    job.kubectl("delete", names.PLURAL, job.name)


def spied(job: RunningJob) -> dict[str, Any]:
    """What the reward function found, as it says in its container's log."""
    log = job.kubectl("logs", job.rollout_pod, "-c", names.REWARDS_CONTAINER)
    found: dict[str, Any] = next(json.loads(line)["spied"] for line in log.splitlines() if "spied" in line)
    return found
