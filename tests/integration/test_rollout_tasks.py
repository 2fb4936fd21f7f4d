"""The process of a source of prompts: the real reasoning-gym, as an image has it, and a file of one's own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from colocated_rl_api.job import PromptFile, Prompts, ReasoningGym
from colocated_rl_rollout.rewards import RewardFailed, TaskProcesses, TaskUnusable
from colocated_rl_rollout.task_server import COMMAND
from colocated_rl_rollout.task_wire import Greeting
from fakes.tasks import task_processes
from setup.layout import CHECKOUT

DEADLINE_S = 60.0
MEMORY_BYTES = 2**30
PROGRAM = "import sys; sys.modules['pycosat'] = None; from colocated_rl_rollout.task_process import main; main()"
WITHOUT_PYCOSAT = [sys.executable, "-W", "ignore", "-c", PROGRAM]  # whether or not this environment has it
REWARDS = """
import pathlib

def score(response, row):
    if response == "print":
        print("of the function")
    if response == "much":
        return len(bytes(2**30))
    if response == "text":
        return "much"
    return len(response) / 4 if row["answer"] in response else -1
"""


def write_file(directory: Path, *rows: object) -> PromptFile:
    (directory / "math").mkdir()
    (directory / "math" / "train.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    (directory / "math" / "rewards.py").write_text(REWARDS)
    return PromptFile(claim_name="mine", path="math/train.jsonl", reward="rewards:score", seed=3)


@asynccontextmanager
async def processes(
    source: ReasoningGym | PromptFile, directory: Path, command: Sequence[str] = COMMAND
) -> AsyncIterator[TaskProcesses]:
    prompts = Prompts(file=source) if isinstance(source, PromptFile) else Prompts(reasoning_gym=source)
    async with (
        asyncio.timeout(DEADLINE_S),
        task_processes(prompts, directory, command=command, container_bytes=MEMORY_BYTES) as made,
    ):
        yield made


async def test_a_sum_is_asked_and_scored_without_pycosat(tmp_path: Path) -> None:
    task = ReasoningGym(name="chain_sum", config={"min_terms": 2, "max_terms": 2}, size=10, answer_after="Answer:")
    async with processes(task, tmp_path, WITHOUT_PYCOSAT) as made:
        ((_, question),) = await made.questions(3, 1)
        assert isinstance(question, str)
        right = eval(question.partition(":")[2].rstrip(" ="))
        assert [1.0, 0.0, 0.0] == [
            await made.score(3, answer) for answer in (f"Answer: {right}", f"Answer: {right + 1}", f"{right}")
        ]


async def test_a_process_says_nothing_that_nobody_needs(tmp_path: Path) -> None:
    """A library of one of the tasks warned that its directory can't be written, and while it made its list of fonts."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "/",
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, "MPLCONFIGDIR": "/proc/nowhere", "HOME": "/proc/nowhere"},
    )
    prompts = Prompts(reasoning_gym=ReasoningGym(name="chain_sum", size=10))
    async with asyncio.timeout(DEADLINE_S):
        out, said = await process.communicate(Greeting(prompts=prompts, processes=1).model_dump_json().encode())
    assert (b'{"value": 10}\n', b"") == (out, said)


async def test_the_task_that_needs_pycosat_says_what_the_image_lacks(tmp_path: Path) -> None:
    async with processes(ReasoningGym(name="zebra_puzzles", size=10), tmp_path, WITHOUT_PYCOSAT) as made:
        with pytest.raises(TaskUnusable, match=r"reasoningGym 'zebra_puzzles'.*needs pycosat.*add it.*another task"):
            await made.questions(0, 1)


async def test_rows_of_a_file_come_once_in_each_pass_and_in_the_same_order_after_a_restart(tmp_path: Path) -> None:
    conversation = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2?"}]
    rows = [{"prompt": f"{number} + 1?", "answer": "1"} for number in range(40)]
    source = write_file(tmp_path, *rows, {"prompt": conversation, "answer": "4"})
    async with processes(source, tmp_path) as made:
        asked = await made.questions(0, 82)
        assert 41 == await made.size()
    first, second = asked[:41], asked[41:]
    assert (
        sorted(first, key=str)
        == sorted(second, key=str)
        == sorted([*((n, f"{n} + 1?") for n in range(40)), (40, conversation)], key=str)
    )
    assert first != second
    assert [index for index, _ in first] != list(range(41))
    async with processes(source, tmp_path) as made:
        assert asked[50:60] == await made.questions(50, 10)


async def test_a_function_of_ones_own_gives_any_finite_reward(tmp_path: Path) -> None:
    source = write_file(tmp_path, {"prompt": "a", "answer": "x"}, {"prompt": "b", "answer": "y"})
    async with processes(source, tmp_path) as made:
        assert [0.25, -1.0, 0.5] == [await made.score(*asked) for asked in ((0, "x"), (1, "x"), (1, "yy"))]
        assert -1.0 == await made.score(0, "print"), "what it prints is no reply"
        with pytest.raises(RewardFailed, match="'much' is no reward: return a finite number"):
            await made.score(0, "text")


async def test_the_example_is_asked_and_scored() -> None:
    directory = CHECKOUT.root / "examples/own_prompts"
    source = PromptFile(claim_name="mine", path="sums.jsonl", reward="rewards:score")
    async with processes(source, directory) as made:
        assert 4 == await made.size()
        assert [1.0, 0.1, 0.0] == [await made.score(0, text) for text in ("3 + 5 = 8 #### 8", "#### 9", "8")]
    assert not (directory / "__pycache__").exists(), "a claim is mounted read-only"


async def test_a_function_that_takes_too_much_memory_fails_its_sample_alone(tmp_path: Path) -> None:
    """It ended the whole pod, and with it everything in flight."""
    async with processes(write_file(tmp_path, {"prompt": "a", "answer": "x"}), tmp_path) as made:
        with pytest.raises(RewardFailed, match="MemoryError"):
            await made.score(0, "much")
        assert 0.25 == await made.score(0, "x")


@pytest.mark.parametrize(
    ("rows", "changes", "said"),
    [
        ([], {}, "train.jsonl has no lines"),
        ([{"prompt": "a"}, [1]], {}, "line 3 of train.jsonl: no JSON object"),
        ([{"question": "a", "answer": 1}], {}, "has no 'prompt', only 'question', 'answer': set promptField"),
        ([{"prompt": 7}], {}, "'prompt' should be a text, or a list of messages with role and content"),
        ([{"prompt": [{"text": "a"}]}], {}, "should be a text, or a list of messages"),
        ([{"prompt": "a"}], {"path": "math/other.jsonl"}, "file 'math/other.jsonl' can't be used: FileNotFoundError"),
        ([{"prompt": "a"}], {"reward": "rewards:scores"}, "module rewards has no function scores"),
        ([{"prompt": "a"}], {"reward": "rewarding:score"}, "No module named 'rewarding'"),
    ],
)
async def test_what_is_wrong_with_a_file_is_said_before_the_job_begins(
    tmp_path: Path, rows: list[object], changes: dict[str, str], said: str
) -> None:
    source = write_file(tmp_path, *rows).model_copy(update=changes)
    async with processes(source, tmp_path) as made:
        with pytest.raises(TaskUnusable, match=re.escape(said)):
            await made.questions(0, 1)
