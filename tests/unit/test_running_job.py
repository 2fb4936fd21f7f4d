"""Waits of end-to-end tests for a job, by which a job that has failed costs no further minutes."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from e2e.running_job import RunningJob

DEADLINE_S = 3600.0  # nobody waits for it


def running(*statuses: dict[str, Any], generation: int = 1) -> RunningJob:
    """Return a job that has the statuses one after the other, and keeps the last one."""
    left = list(statuses)

    def kubectl(*words: str, stdin: str | None = None) -> str:
        if words[2:4] != ("get", "colocatedrljobs"):
            return "an event"
        status = left.pop(0) if len(left) > 1 else left[0]
        return json.dumps({"metadata": {"generation": generation}, "status": {"observedGeneration": 1, **status}})

    return RunningJob(kubectl, namespace="e2e", name="sums")


def failed(message: str = "", status: str = "True") -> dict[str, Any]:
    return {"conditions": [{"type": "Failed", "status": status, "message": message}]}


COMPLETE = {"step": 3, "conditions": [{"type": "Complete", "status": "True"}]}


def test_a_wait_ends_when_the_job_has_failed_with_its_message_and_events() -> None:
    """It went on to its deadline, which is many minutes."""
    with pytest.raises(AssertionError, match=r"sums failed before Complete: out of memory[^$]*an event"):
        running(failed("out of memory")).wait_for_condition("Complete", deadline_s=DEADLINE_S)
    with pytest.raises(AssertionError, match="sums failed before step 3: out of memory"):
        running(failed("out of memory")).wait_for_step(3, deadline_s=DEADLINE_S)


def test_a_wait_for_the_failure_finds_it() -> None:
    running(failed()).wait_for_condition("Failed", deadline_s=DEADLINE_S)


def test_a_job_goes_on_that_has_not_failed_or_is_to_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    waits = failed(status="False")
    running(waits, waits, waits, COMPLETE).wait_for_condition("Complete", deadline_s=DEADLINE_S)
    running(failed(), failed(), COMPLETE, generation=2).wait_for_step(3, deadline_s=DEADLINE_S)
