"""These tests show what a user sees of a job while it runs, from records of a real one."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from colocated_rl_cli.draw.view import frame, plain_line
from colocated_rl_cli.evidence.records import Records

RECORDED = Path(__file__).parent / "records/run.json"


@pytest.fixture
def run() -> Records:
    return Records.read(RECORDED)


def shown(job: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(frame(job, lines, now=lines[-1]["ts"] if lines else 0.0))
    return console.export_text()


def test_the_live_view_shows_the_jobs_phase_its_pods_rungs_and_what_it_learns(run: Records) -> None:
    steps = [line["step"] for line in run.lines if line["event"] == "batch sealed"]
    half = run.lines[: next(at for at, line in enumerate(run.lines) if line.get("step") == steps[len(steps) // 2])]
    status = {"phase": "Training", "step": 17, "gpuHolder": "Trainer", "rollout": {"tokensPerSecond": 987.0}}
    text = shown({"metadata": run.job["metadata"], "spec": run.job["spec"], "status": status}, half)
    for expected in (
        "Training",
        f"step 17 of {run.job['spec']['steps']}",
        "GPU: Trainer",
        "987",
        "reward",
        "staleness",
    ):
        assert expected in text
    pods = {line["pod"] for line in half if line.get("event") == "rung reached" and line.get("role") == "gpu"}
    assert 2 == len(pods)
    for pod in pods:
        rung = [line for line in half if line.get("event") == "rung reached" and line["pod"] == pod][-1]["rung"]
        assert any(pod in row and rung in row for row in text.splitlines())


def test_a_job_whose_prompts_are_over_has_the_steps_that_they_made(run: Records) -> None:
    status = {"phase": "Training", "step": 2, "rollout": {"lastStep": 3}}
    assert "step 2 of 3" in shown({"spec": run.job["spec"], "status": status}, [])
    assert "step 2 of 2" in shown({"spec": {"steps": 2}, "status": status}, [])


def test_the_live_view_of_a_job_that_has_not_begun_makes_nothing_up() -> None:
    text = shown({}, [])
    assert "Pending" in text
    assert "no pod has answered yet" in text
    assert "None" not in text


def test_every_step_and_evaluation_is_a_line_where_there_is_no_terminal(run: Records) -> None:
    lines = [text for line in run.lines if (text := plain_line(line)) is not None]
    for event, words in (("batch sealed", "batch of"), ("evaluation ended", "held-out mean reward")):
        assert sum(words in text for text in lines) == sum(line["event"] == event for line in run.lines) > 0


def test_an_error_is_a_line_with_its_reason() -> None:
    line = {"event": "engine lost", "level": "error", "pod": "sums-gpu-0-0", "reason": "killed"}
    assert "sums-gpu-0-0: engine lost: killed" == plain_line(line)
