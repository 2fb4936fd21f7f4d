"""Prompts from a process that fails: what people are told, and that it goes on."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from colocated_rl_rollout.prompts import PromptSource
from fakes.rollout import JobOnDisk, make_spec, until
from fakes.tasks import task_processes

FAILS_TWICE = """
import json, sys
json.loads(sys.stdin.readline())
print(json.dumps({"value": {"size": 1000, "digest": "x"}}), flush=True)
for number, line in enumerate(sys.stdin):
    start, count = json.loads(line)["questions"]
    made = {"value": [(place, f"{place} + 1 =", False) for place in range(start, start + count)]}
    print(json.dumps({"error": "OSError: disk"} if number < 2 else made), flush=True)
"""


async def test_questions_that_can_not_be_made_are_a_problem_until_they_can(tmp_path: Path) -> None:
    """It was tried again and again, and nobody was told why the job did not begin."""
    job = JobOnDisk.write(tmp_path, make_spec())
    command = [sys.executable, "-c", FAILS_TWICE]
    told: list[str] = []

    def changed() -> None:
        told.append(prompts.problem.message if prompts.problem else "")

    async with task_processes(job.spec.rollout.prompts, tmp_path, command=command) as processes:
        prompts = PromptSource(processes, job.chat, max_prompt_tokens=200, position=0, changed=changed, retry_s=0.01)
        running = asyncio.create_task(prompts.run())
        await until(prompts.take)
        running.cancel()
        await asyncio.wait([running])
    assert ["OSError: disk; asked again"] * 2 + [""] == told[:3]


@pytest.mark.parametrize(("known", "problem"), [(None, None), ("x", None), ("y", "PromptsUnusable")])
async def test_a_restart_over_other_data_stops_instead_of_mistaking_rows(
    tmp_path: Path, known: str | None, problem: str | None
) -> None:
    """Rows are found again by their number: of another file that is another question, and another answer."""
    job = JobOnDisk.write(tmp_path, make_spec())
    told: list[str] = []
    changed = asyncio.Event()
    async with task_processes(job.spec.rollout.prompts, tmp_path, command=[sys.executable, "-c", FAILS_TWICE]) as made:
        prompts = PromptSource(
            made,
            job.chat,
            max_prompt_tokens=200,
            position=0,
            changed=changed.set,
            known_digest=known,
            remember=told.append,
            retry_s=0.01,
        )
        running = asyncio.create_task(prompts.run())
        if problem:
            await running
        else:
            await until(prompts.take)
        running.cancel()
        await asyncio.wait([running])
    assert problem == (prompts.problem and prompts.problem.reason)
    assert (set() if problem else {"x"}) == set(told)
