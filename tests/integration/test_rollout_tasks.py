"""The process of a task with the real reasoning-gym, as an image has it: without pycosat."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from colocated_rl_api.job import ReasoningGym
from colocated_rl_rollout.rewards import COMMAND, TaskProcesses, TaskUnusable

DEADLINE_S = 60.0
WITHOUT_PYCOSAT = (
    "import sys; sys.modules['pycosat'] = None; from colocated_rl_rollout.task_process import main; main()"
)


@asynccontextmanager
async def processes(task: ReasoningGym, cache: Path) -> AsyncIterator[TaskProcesses]:
    """Of `task`, whether or not this environment has pycosat."""
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_PYCOSAT]
    made = TaskProcesses(task, count=1, cache=cache, command=command)
    running = asyncio.create_task(made.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield made
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_a_sum_is_asked_and_scored_without_pycosat(tmp_path: Path) -> None:
    task = ReasoningGym(name="chain_sum", config={"min_terms": 2, "max_terms": 2}, size=10, answer_after="Answer:")
    async with processes(task, tmp_path) as made:
        (question,) = await made.questions(3, 1)
        right = eval(question.partition(":")[2].rstrip(" ="))
        assert [1.0, 0.0, 0.0] == [
            await made.score(3, answer) for answer in (f"Answer: {right}", f"Answer: {right + 1}", f"{right}")
        ]


async def test_a_process_says_nothing_that_nobody_needs(tmp_path: Path) -> None:
    """A library of one of the tasks warned that its directory can't be written, and while it made its list of fonts."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, stdin=PIPE, stdout=PIPE, stderr=PIPE, env={"MPLCONFIGDIR": "/proc/nowhere", "HOME": "/proc/nowhere"}
    )
    async with asyncio.timeout(DEADLINE_S):
        out, said = await process.communicate(ReasoningGym(name="chain_sum", size=10).model_dump_json().encode())
    assert (b'{"value": 10}\n', b"") == (out, said)


async def test_the_task_that_needs_pycosat_says_what_the_image_lacks(tmp_path: Path) -> None:
    async with processes(ReasoningGym(name="zebra_puzzles", size=10), tmp_path) as made:
        with pytest.raises(TaskUnusable, match=r"reasoningGym 'zebra_puzzles'.*needs pycosat.*add it.*another task"):
            await made.questions(0, 1)
