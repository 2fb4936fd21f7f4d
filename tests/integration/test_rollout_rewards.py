"""Processes of other people's code: what a verifier is shown, and what happens when a process misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from waiting import DEADLINE_S, until

from bench.memory import family
from colocated_rl_api.prompts import Prompts, ReasoningGym
from colocated_rl_rollout.rewards.rewards import RewardFailed, TaskProcesses
from colocated_rl_rollout.rewards.task_connection import ProcessLost, TaskConnection, TaskUnusable
from colocated_rl_rollout.tasks.gym import answer_in
from colocated_rl_rollout.tasks.tasks import is_held_out
from fakes.tasks import task_processes, task_server

PROMPTS = Prompts(reasoning_gym=ReasoningGym(name="chain_sum", size=100), reward_deadline_seconds=60)
GARBLED = """
import json, sys
json.loads(sys.stdin.readline())
print(json.dumps({"value": {"size": 100, "digest": "x"}}), flush=True)
for line in sys.stdin:
    print(json.loads(line).get("score", [0, '{"value": [[0, {}]]}'])[1], flush=True)
"""
PROCESS = """
import json, os, pathlib, sys, time
json.loads(sys.stdin.readline())
print(json.dumps({"value": {"size": 100, "digest": "x"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "prompts" in request:  # long ones
        start, count = request["prompts"]
        rows = [[row, "x" * 16384, False] for row in range(start, start + count)]
        print(json.dumps({"value": rows}), flush=True)
        continue
    index, text = request["score"]
    if text == "hang":
        time.sleep(600)
    if text == "die":
        os._exit(3)
    if text == "meet":  # another process, at the same time
        (pathlib.Path(sys.argv[1]) / str(index)).touch()
        while len(list(pathlib.Path(sys.argv[1]).iterdir())) < 2:
            time.sleep(0.01)
    if text == "raise":
        print(json.dumps({"error": "ValueError: no"}), flush=True)
    else:
        print(json.dumps({"value": float(index)}), flush=True)
"""


@asynccontextmanager
async def processes(
    directory: Path, program: str = PROCESS, prompts: Prompts = PROMPTS
) -> AsyncIterator[TaskProcesses]:
    command = [sys.executable, "-c", program]
    async with asyncio.timeout(DEADLINE_S), task_processes(prompts, directory, command=command) as made:
        yield made


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


async def test_long_prompts_and_long_responses_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """All lines had to be taken before an answer was read, and a process that writes an answer takes no line."""
    async with processes(tmp_path) as made:
        prompts, rewards = await asyncio.gather(
            made.prompts(0, 64), asyncio.gather(*(made.score(index, "x" * 65536) for index in range(31)))
        )
    assert list(range(64)) == [prompt.row for prompt in prompts]
    assert [float(index) for index in range(31)] == rewards


async def test_a_verifier_that_raises_fails_one_sample(tmp_path: Path) -> None:
    async with processes(tmp_path) as made:
        good, bad = await asyncio.gather(made.score(1, "ok"), made.score(2, "raise"), return_exceptions=True)
        assert 1.0 == good
        assert isinstance(bad, RewardFailed)
        assert "VerifierFailed" == bad.reason


async def test_slow_rewards_are_computed_side_by_side(tmp_path: Path) -> None:
    """One process took all that waited, up to 32, and the others had nothing to do."""
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    command = [sys.executable, "-c", PROCESS, str(meeting)]
    async with asyncio.timeout(DEADLINE_S), task_processes(PROMPTS, tmp_path, count=2, command=command) as made:
        assert [0.0, 1.0] == await asyncio.gather(*(made.score(number, "meet") for number in range(2)))


@pytest.mark.parametrize(("text", "reason"), [("hang", "RewardTimedOut"), ("die", "RewardProcessDied")])
async def test_a_process_that_hangs_or_dies_costs_one_sample_and_is_replaced(
    tmp_path: Path, text: str, reason: str
) -> None:
    deadline_s = 5 if text == "hang" else 60  # on a slow machine others may be late too
    prompts = PROMPTS.model_copy(update={"reward_deadline_seconds": deadline_s})
    async with processes(tmp_path, prompts=prompts) as made:
        answers = await asyncio.gather(
            made.score(1, "ok"), made.score(2, text), made.score(3, "ok"), return_exceptions=True
        )
        assert [1.0, 3.0] == [answers[0], answers[2]]
        assert isinstance(answers[1], RewardFailed)
        assert reason == answers[1].reason
        assert text == "die" or "within 5 s (rollout.prompts.rewardDeadlineSeconds)" in str(answers[1])
        assert 4.0 == await made.score(4, "ok")
        assert made.problem is None


async def test_a_task_that_cannot_be_made_is_reported_to_whoever_asks(tmp_path: Path) -> None:
    async with processes(tmp_path, """print('{"error": "rollout.prompts.file can not be used: no rows"}')""") as made:
        for _ in range(2):
            with pytest.raises(TaskUnusable, match=r"spec\.rollout\.prompts\.file can not be used: no rows"):
                await made.prompts(0, 1)
        with pytest.raises(TaskUnusable):
            await made.data()


@pytest.mark.parametrize("text", ['{"value": "much"}', '{"value": NaN}', '{"value": null}', '{"value": [1]}'])
async def test_what_is_no_reward_fails_one_sample(tmp_path: Path, text: str) -> None:
    """Whoever runs in a task process may write what they like."""
    async with processes(tmp_path, GARBLED) as made:
        with pytest.raises(RewardFailed) as failed:
            await made.score(0, text)
        assert "ReplyGarbled" == failed.value.reason
        assert 1.0 == await made.score(0, '{"value": 1}')
        with pytest.raises(RewardFailed, match="no such answer"):
            await made.prompts(0, 1)


@pytest.mark.parametrize("text", ["}", "[" * 100_000, '{"values": 1}', "\udc80"])
async def test_a_process_that_writes_what_is_no_reply_costs_one_sample_and_is_replaced(
    tmp_path: Path, text: str
) -> None:
    async with processes(tmp_path, GARBLED) as made:
        with pytest.raises(RewardFailed) as failed:
            await made.score(0, text)
        assert "RewardProcessDied" == failed.value.reason
        assert 1.0 == await made.score(0, '{"value": 1}')


async def test_a_process_ends_with_its_connection_and_so_does_what_it_started(tmp_path: Path) -> None:
    """A verifier that hangs in code of another's is not asked to end."""
    program = "import subprocess, sys, time; subprocess.Popen(['sleep', '1000']); print(flush=True); time.sleep(1000)"
    with task_server(tmp_path, command=[sys.executable, "-c", program]) as path:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            assert b"\n" == connection.recv(1)
            started = running_in(tmp_path)
            assert 3 == len(started), "its keeper too"
        await until(lambda: not any(map(is_alive, started)))


def running_in(directory: Path) -> set[int]:
    """The processes with a directory in their command line, and all below them."""
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if str(directory).encode() in (process / "cmdline").read_bytes().split(b"\0"):
                found |= {int(each.name) for each in family(int(process.name))}
    return found


def is_alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        return stat(process)[0] not in "ZX"
    return False


def stat(process: int) -> list[str]:
    """Return the fields of the process from its state on: state, parent."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()


def test_lines_for_a_process_that_has_gone_are_lost_with_it_and_end_nothing_else(tmp_path: Path) -> None:
    """After the first one uvloop, by which the controller runs, raised RuntimeError, and that ended the controller."""

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "tasks.sock"))
            listener.listen()
            async with asyncio.timeout(DEADLINE_S), TaskConnection.open(tmp_path / "tasks.sock") as connection:
                listener.accept()[0].close()
                lost = 0
                while lost < 2:
                    try:
                        await connection.send(b"{}\n", deadline_s=DEADLINE_S)
                    except ProcessLost:
                        lost += 1

    uvloop.run(main())


async def test_a_task_server_that_is_not_there_is_reported_until_it_is(tmp_path: Path) -> None:
    path = tmp_path / "tasks.sock"
    made = TaskProcesses(PROMPTS, count=1, socket=path)
    running = asyncio.create_task(made.run())
    await until(lambda: made.problem and "look at the log of container rewards" in made.problem.message)
    with task_server(tmp_path, command=[sys.executable, "-c", PROCESS], path=path):
        assert 100 == (await made.data()).size
        assert made.problem is None
        running.cancel()
        await asyncio.wait([running])
