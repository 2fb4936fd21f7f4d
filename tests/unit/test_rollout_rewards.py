"""Processes of other people's code: what a verifier is shown, and what happens when a process misbehaves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from colocated_rl_api.job import Prompts, ReasoningGym
from colocated_rl_rollout.prompts import is_held_out
from colocated_rl_rollout.rewards import RewardFailed, TaskProcesses, TaskUnusable
from colocated_rl_rollout.tasks import answer_in

PROMPTS = Prompts(reasoning_gym=ReasoningGym(name="chain_sum", size=100))
PROCESS = """
import json, os, sys, time
json.loads(sys.stdin.readline())
print(json.dumps({"value": 100}), flush=True)
for line in sys.stdin:
    index, text = json.loads(line)["score"]
    if text == "hang":
        time.sleep(600)
    if text == "die":
        os._exit(3)
    if text == "raise":
        print(json.dumps({"error": "ValueError: no"}), flush=True)
    else:
        print(json.dumps({"value": float(index)}), flush=True)
"""


@asynccontextmanager
async def processes(directory: Path, program: str = PROCESS) -> AsyncIterator[TaskProcesses]:
    command = [sys.executable, "-c", program]
    made = TaskProcesses(PROMPTS, count=1, cache=directory, directory=directory, command=command, reply_deadline_s=0.5)
    running = asyncio.create_task(made.run())
    try:
        async with asyncio.timeout(20):
            yield made
    finally:
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize(
    ("response", "mark", "expected"),
    [
        ("7-8=-1\nAnswer: -1", "Answer: ", "-1"),
        ("Answer: 3, no: Answer: 4 ", "Answer: ", "4"),
        ("it is 4", "Answer: ", None),
        ("Answer: ", "Answer: ", ""),
        (" 4\n", None, "4"),
    ],
)
def test_the_verifier_sees_what_follows_the_last_mark(response: str, mark: str | None, expected: str | None) -> None:
    assert expected == answer_in(response, mark)


def test_a_question_is_held_out_by_its_hash_alone() -> None:
    questions = [
        f"State the final answer to the following arithmetic problem: {number} + 1 =" for number in range(4000)
    ]
    held_out = [question for question in questions if is_held_out(question, percent=10)]
    assert 300 < len(held_out) < 500
    assert set(held_out) < {question for question in questions if is_held_out(question, percent=20)}
    assert not any(is_held_out(question, percent=0) for question in questions)
    # sha256 in hex, the first eight digits, modulo 100: others divide the data the same way
    assert is_held_out("a", percent=95)
    assert not is_held_out("a", percent=int("ca978112", 16) % 100)


async def test_many_requests_are_answered_in_order(tmp_path: Path) -> None:
    async with processes(tmp_path) as made:
        assert [float(index) for index in range(100)] == await asyncio.gather(
            *(made.score(index, "ok") for index in range(100))
        )


async def test_a_verifier_that_raises_fails_one_sample(tmp_path: Path) -> None:
    async with processes(tmp_path) as made:
        good, bad = await asyncio.gather(made.score(1, "ok"), made.score(2, "raise"), return_exceptions=True)
        assert 1.0 == good
        assert isinstance(bad, RewardFailed)
        assert "VerifierFailed" == bad.reason


@pytest.mark.parametrize(("text", "reason"), [("hang", "RewardTimedOut"), ("die", "RewardProcessDied")])
async def test_a_process_that_hangs_or_dies_costs_one_sample_and_is_replaced(
    tmp_path: Path, text: str, reason: str
) -> None:
    async with processes(tmp_path) as made:
        answers = await asyncio.gather(
            made.score(1, "ok"), made.score(2, text), made.score(3, "ok"), return_exceptions=True
        )
        assert [1.0, 3.0] == [answers[0], answers[2]]
        assert isinstance(answers[1], RewardFailed)
        assert reason == answers[1].reason
        assert 4.0 == await made.score(4, "ok")
        assert made.problem is None


async def test_a_task_that_cannot_be_made_is_said_to_whoever_asks(tmp_path: Path) -> None:
    async with processes(tmp_path, """print('{"error": "no dataset of this name"}')""") as made:
        for _ in range(2):
            with pytest.raises(TaskUnusable, match=r"chain_sum.*no dataset of this name"):
                await made.questions(0, 1)
        with pytest.raises(TaskUnusable):
            await made.size()
