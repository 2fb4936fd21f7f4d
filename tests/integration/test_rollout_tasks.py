"""The process of a source of prompts: the real reasoning-gym, as an image has it, and a file of one's own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from waiting import DEADLINE_S, until

from colocated_rl_api.facts import Problem
from colocated_rl_api.job import EvaluationSet
from colocated_rl_api.logs import SHOW_MESSAGES
from colocated_rl_api.member_wire import JobFile
from colocated_rl_api.prompts import (
    Environment,
    HttpReward,
    HuggingFace,
    MathReward,
    Mix,
    PromptFile,
    PromptFunction,
    Prompts,
    ReasoningGym,
    Reward,
    Source,
    WeightedSource,
)
from colocated_rl_rollout.rewards.reward_endpoint import RewardEndpoint
from colocated_rl_rollout.rewards.rewards import RewardFailed, TaskProcesses
from colocated_rl_rollout.rewards.task_connection import ProcessLost, TaskConnection, TaskUnusable
from colocated_rl_rollout.tasks import keeper
from colocated_rl_rollout.tasks.gym import GymTask
from colocated_rl_rollout.tasks.hub import fetch
from colocated_rl_rollout.tasks.rows import Row, RowsUnusable
from colocated_rl_rollout.tasks.task_server import COMMAND
from colocated_rl_rollout.tasks.task_wire import Greeting, PromptContent, RewardAnswer
from examples.own_prompts.judge import JudgeHandler
from fakes.hub import FakeHub
from fakes.rollout import make_spec
from fakes.serving import listening
from fakes.tasks import task_processes, task_server
from setup.layout import CHECKOUT

EXAMPLE = CHECKOUT.root / "examples/own_prompts"
MEMORY_BYTES = 2**30
PROGRAM = "import sys; sys.modules['pycosat'] = None; from colocated_rl_rollout.tasks.task_process import main; main()"
WITHOUT_PYCOSAT = [sys.executable, "-W", "ignore", "-c", PROGRAM]  # whether or not this environment has it
REWARDS = """
import os, pathlib; KEPT = []

def score(response, row):
    if response == "print":
        print("of the function")
    if response == "much":
        return len(bytes(2**30))
    if response == "text":
        return "much"
    if response.startswith("number"):
        return float(response)
    if response == "huge":
        return 1e38
    if response == "quoted":
        return type("Score", (str, ), {"__float__": lambda score: float(str(score))})("secret")
    if response.startswith("numpy"):
        import numpy
        return eval(response)
    if response.startswith("{"):
        return eval(response)
    if response == "leak":
        KEPT.append(bytearray(2**27))
    if response == "fork":
        os.fork()
    if response == "wordless":
        raise type("Wordless", (Exception, ), {"__str__": lambda error: error.lacking})
    if response == "exit":
        raise SystemExit("with words")
    return len(response) / 4 if row["answer"] in response else -1

def of_another_library(data_source, solution_str, ground_truth, extra_info=None): return 1.0
async def later(response, row): return 1.0
"""


def write_file(directory: Path, *rows: object, **fields: Any) -> PromptFile:
    folder = directory / "mine/math"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "large.py").write_text("MODEL = bytearray(2**31)")
    return prompt_file(**fields)


def prompt_file(**fields: Any) -> PromptFile:
    given = {"claim_name": "mine", "path": "math/train.jsonl", "reward": {"function": "rewards:score"}, "seed": 3}
    return PromptFile(**{**given, **fields})


@asynccontextmanager
async def processes(
    source: Source, directory: Path, command: Sequence[str] = COMMAND, count: int = 1
) -> AsyncIterator[TaskProcesses]:
    match source:
        case PromptFile():
            prompts = Prompts(file=source)
        case HuggingFace():
            prompts = Prompts(hugging_face=source)
        case PromptFunction():
            prompts = Prompts(function=source)
        case ReasoningGym():
            prompts = Prompts(reasoning_gym=source)
        case Environment():
            prompts = Prompts(environment=source)
    patient = prompts.model_copy(update={"reward_deadline_seconds": int(DEADLINE_S)})
    async with (
        asyncio.timeout(DEADLINE_S),
        task_processes(patient, directory, count=count, command=command, container_bytes=count * MEMORY_BYTES) as made,
    ):
        yield made


async def test_a_sum_is_asked_and_scored_without_pycosat(tmp_path: Path) -> None:
    task = ReasoningGym(name="chain_sum", config={"min_terms": 2, "max_terms": 2}, size=10, answer_after="Answer:")
    async with processes(task, tmp_path, WITHOUT_PYCOSAT) as made:
        (asked,) = await made.prompts(3, 1)
        assert isinstance(asked.prompt, str)
        right = eval(asked.prompt.partition(":")[2].rstrip(" ="))
        assert [1.0, 0.0, 0.0] == [
            await made.score(3, answer) for answer in (f"Answer: {right}", f"Answer: {right + 1}", f"{right}")
        ]


@pytest.mark.parametrize("name", ["ransom_note", "list_functions"])
async def test_each_process_makes_the_same_problems(tmp_path: Path, name: str) -> None:
    """Some tasks draw from sets of texts, or from Python's own generator: the process that scored an answer had another
    problem than the one that was asked, and held out others. Of the first task each process had problems of its own.
    """
    asked = []
    for _ in range(2):
        async with processes(ReasoningGym(name=name, size=12), tmp_path, COMMAND) as made:
            asked.append(await made.prompts(0, 12))
            assert asked[0] == await made.prompts(0, 12)
    assert asked[0] == asked[1]


def test_a_problem_has_the_same_answer_each_time() -> None:
    """The process that scored a response had another answer: one in thirty problems of this task draws from numpy's own
    generator.
    """
    task = GymTask(ReasoningGym(name="codeio", size=40))
    assert [task.row(index) for index in range(40)] == [task.row(index) for index in range(40)]


async def test_a_process_says_nothing_that_nobody_needs(tmp_path: Path) -> None:
    """A library of one of the tasks warned that its directory can't be written, and while it made its list of fonts."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *("/", str(tmp_path)),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, "MPLCONFIGDIR": "/proc/nowhere", "HOME": "/proc/nowhere"},
    )
    prompts = Prompts(reasoning_gym=ReasoningGym(name="chain_sum", size=10))
    async with asyncio.timeout(DEADLINE_S):
        out, output = await process.communicate(Greeting(prompts=prompts, processes=1).model_dump_json().encode())
    assert (10, b"") == (json.loads(out)["value"]["size"], output)


async def test_an_image_without_verifiers_is_reported_with_what_to_do(tmp_path: Path) -> None:
    """This environment has none: verifiers is in one of its own."""
    message = (
        "spec.rollout.prompts.environment 'us/stockroom' can't be used: the image lacks verifiers: set "
        "spec.rollout.prompts.image to one made from the rollout controller's with verifiers 0.4.0 and the "
        "environment's package in it"
    )
    async with processes(Environment(name="us/stockroom"), tmp_path) as made:
        with pytest.raises(TaskUnusable, match=f"^{re.escape(message)}$"):
            await made.data()


FAMILY = """
import subprocess, sys
sys.stdin.readline()
sleeper = "subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=subprocess.DEVNULL).pid"
orphan = subprocess.check_output([sys.executable, "-c", f"import subprocess; print({sleeper})"], text=True)
print(f'{{"error": "{eval(sleeper)} {orphan.strip()}"}}', flush=True)
sys.stdin.readline()
"""


CHILDREN = """
import os, subprocess, sys
sys.stdin.readline()
for _ in range(20):  # they end, and so do their parents, who take no note
    subprocess.run(["sh", "-c", "true & true &"])
hidden = (
    "import os; os.setsid(); os.fork() and os._exit(0); print(os.getpid(), flush=True); "
    "os.execve('/bin/sleep', ['sleep', '600'], {})"
)
read, write = os.pipe()
process = subprocess.Popen([sys.executable, "-c", hidden], env={}, stdout=write)
process.wait()
pid = os.read(read, 100).decode().strip()
print(f'{{"error": "{pid} {os.getpid()}"}}', flush=True)
sys.stdin.readline()
os.kill(os.getppid(), KILLS)
print('{"error": "done"}', flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("kills", [0, int(signal.SIGKILL), int(signal.SIGSTOP)], ids=["", "kills", "stops"])
async def test_whoever_clears_its_environment_and_goes_to_a_session_of_its_own_ends_too(
    tmp_path: Path, kills: int
) -> None:
    """It was looked for by a mark in its environment, and ended processes waited for the server, which took no note."""
    path = tmp_path / "tasks.sock"
    program = CHILDREN.replace("KILLS", str(kills))
    main = f"from colocated_rl_rollout.tasks import task_server as it; it.COMMAND = {(sys.executable, '-c', program)!r}"
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", f"{main}; it.main()", "--socket", str(path))
    try:
        await until(lambda: path.exists() and stat.S_IMODE(path.stat().st_mode) == 0o660)
        for _ in range(3):
            async with asyncio.timeout(DEADLINE_S), TaskConnection.open(path) as connection:
                await connection.send(b"\n", deadline_s=DEADLINE_S)
                error = (await connection.receive(deadline_s=DEADLINE_S)).error or ""
                hidden, own = (Path("/proc", pid) for pid in error.split())
                assert hidden.exists()
                assert 5 >= len([pid for pid in descendants(server.pid) if _is_gone(Path("/proc", str(pid)))])
                await connection.send(b"\n", deadline_s=DEADLINE_S)
                with suppress(ProcessLost):  # at once, where its keeper was killed
                    await connection.receive(deadline_s=DEADLINE_S)
            await until(lambda: not hidden.exists() and not own.exists())  # noqa: B023 - it waits here
        await until(lambda: not descendants(server.pid))
    finally:
        server.kill()
        await server.wait()


def descendants(root: int) -> set[int]:
    """Return the descendants of a process, from each process's parent as the system names it."""
    parents = {}
    for path in (place / "stat" for place in Path("/proc").glob("[0-9]*")):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


PRIORITY = """
import os, time
while not (priority := os.nice(0)):
    time.sleep(0.01)
print(priority)
"""


def test_a_program_leaves_its_keeper_the_time_to_end_it_and_is_not_starved_itself() -> None:
    """On two cores a thousand busy processes ended in 1.2 s, and at the keeper's priority not within a minute.

    At the lowest priority, an environment beside busy tests did not begin within four.
    """
    command = [sys.executable, "-I", "-S", keeper.__file__, sys.executable, "-c", PRIORITY]
    program = subprocess.run(command, stdout=PIPE, timeout=DEADLINE_S, check=True)
    assert 0 < int(program.stdout) < 10


@pytest.mark.parametrize("ends_by_itself", [False, True])
async def test_what_a_process_started_in_other_sessions_ends_with_it(tmp_path: Path, ends_by_itself: bool) -> None:
    """Environments start programs and servers of tools, which outlived the process that did."""
    with task_server(tmp_path, command=[sys.executable, "-c", FAMILY]) as path:
        async with asyncio.timeout(DEADLINE_S), TaskConnection.open(path) as connection:
            with pytest.raises(TaskUnusable) as answer:
                await connection.greet(Prompts(reasoning_gym=ReasoningGym(name="chain_sum")), count=1)
            started = [Path("/proc", pid) for pid in str(answer.value).rpartition(".")[2].split()]
            assert [True, True] == [each.exists() for each in started]
            if ends_by_itself:
                await connection.send(b"\n", deadline_s=DEADLINE_S)
                with pytest.raises(ProcessLost):
                    await connection.receive(deadline_s=DEADLINE_S)
        await until(lambda: all(_is_gone(each) for each in started))


WORDY = """
import sys
sys.stdin.readline()
for size in (100_000, 10_000_000):
    print('{"error": "' + "x" * size + '"}', flush=True)
sys.stdin.readline()
"""


async def test_a_process_has_the_words_that_a_reward_takes_and_no_more(tmp_path: Path) -> None:
    """Each might fill 64 MiB of the controller, for a number."""
    with task_server(tmp_path, command=[sys.executable, "-c", WORDY]) as path:
        async with asyncio.timeout(DEADLINE_S), TaskConnection.open(path) as connection:
            await connection.send(b"\n", deadline_s=DEADLINE_S)
            rows = await connection.receive(deadline_s=DEADLINE_S, most_bytes=100_100)
            assert 100_000 == len(rows.error or "")
            with pytest.raises(ProcessLost, match="wrote a line of more than 65536 bytes"):
                await connection.receive(deadline_s=DEADLINE_S)
        await asyncio.sleep(0)  # the connection is closed in the loop's next turn, and the server waits for that


def _is_gone(process: Path) -> bool:
    """Return whether it is gone, or waits for its parent, here no first process of a container, to take note."""
    try:
        return ") Z " in (process / "stat").read_text()
    except OSError:
        return True


async def test_the_server_ends_at_once_when_it_is_asked_to_with_a_process_under_way(tmp_path: Path) -> None:
    """A container's first process would otherwise be spared by a signal that it has no handler for."""
    path = tmp_path / "tasks.sock"
    program = (sys.executable, "-m", "colocated_rl_rollout.tasks.task_server", "--socket", str(path))
    server = await asyncio.create_subprocess_exec(*program, "--cache", str(tmp_path))
    async with asyncio.timeout(DEADLINE_S):
        await until(lambda: path.exists() and stat.S_IMODE(path.stat().st_mode) == 0o660)
        made = TaskProcesses(Prompts(reasoning_gym=ReasoningGym(name="chain_sum", size=10)), count=1, socket=path)
        running = asyncio.create_task(made.run())
        assert 10 == (await made.data()).size
        server.terminate()
        assert 0 == await server.wait()
        running.cancel()
        await asyncio.wait([running])


async def test_the_task_that_needs_pycosat_says_what_the_image_lacks(tmp_path: Path) -> None:
    async with processes(ReasoningGym(name="zebra_puzzles", size=10), tmp_path, WITHOUT_PYCOSAT) as made:
        with pytest.raises(TaskUnusable, match=r"reasoningGym 'zebra_puzzles'.*needs pycosat.*add it.*another task"):
            await made.prompts(0, 1)


async def test_rows_of_a_file_come_once_in_each_pass_and_in_the_same_order_after_a_restart(tmp_path: Path) -> None:
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": "[2, 2]"}}
    conversation = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "tool_calls": [call]},  # a call needs no words beside it
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    rows = [{"prompt": f"{number} + 1?", "answer": "1"} for number in range(40)]
    source = write_file(tmp_path, *rows, {"prompt": conversation, "answer": "4"})
    async with processes(source, tmp_path) as made:
        asked = [(each.row, each.prompt) for each in await made.prompts(0, 82)]
        assert 41 == (await made.data()).size
    first, second = asked[:41], asked[41:]
    assert (
        sorted(first, key=str)
        == sorted(second, key=str)
        == sorted([*((n, f"{n} + 1?") for n in range(40)), (40, conversation)], key=str)
    )
    assert first != second
    assert [index for index, _ in first] != list(range(41))
    async with processes(source, tmp_path) as made:
        assert asked[50:60] == [(each.row, each.prompt) for each in await made.prompts(50, 10)]


async def test_rows_that_are_too_long_for_one_reply_come_in_several(tmp_path: Path) -> None:
    """The process that was to answer with them died, whoever took its place did too, and the job never began."""
    rows = [{"prompt": f"{number} " + "x" * 2**22, "answer": ""} for number in range(20)]
    found: list[int] = []
    async with processes(write_file(tmp_path, *rows), tmp_path) as made:
        while len(found) < len(rows):
            found += [each.row for each in await made.prompts(len(found), len(rows) - len(found))]
    assert [*range(20)] == sorted(found)


async def test_a_function_of_ones_own_gives_any_reward_that_float32_can_be_trained_with(tmp_path: Path) -> None:
    source = write_file(tmp_path, {"prompt": "a", "answer": "x"}, {"prompt": "b", "answer": "y"})
    async with processes(source, tmp_path) as made:
        assert [0.25, -1.0, 0.5] == [await made.score(*asked) for asked in ((0, "x"), (1, "x"), (1, "yy"))]
        assert -1.0 == await made.score(0, "print"), "what it prints is no reply"
        with pytest.raises(RewardFailed, match="a str is no reward: return a finite number"):
            await made.score(0, "text")
        with pytest.raises(RewardFailed, match="1e\\+38 is no reward"):
            await made.score(0, "huge")


async def test_numbers_of_any_library_are_rewards(tmp_path: Path) -> None:
    """A float32 was none, though trainers know no other."""
    given = {"numpy.float32(0.5)": 0.5, "numpy.int64(-2)": -2.0, "numpy.True_": 1.0, "numpy.array(0.25)": 0.25}
    async with processes(write_file(tmp_path, {"prompt": "a", "answer": "x"}), tmp_path) as made:
        assert [*given.values()] == [await made.score(0, response) for response in given]
        for none in ("numpy.float32('nan')", "numpy.float16('inf')", "numpy.zeros(2)"):
            with pytest.raises(RewardFailed) as failed:
                await made.score(0, none)
            assert "VerifierFailed" == failed.value.reason


async def test_a_function_may_give_figures_beside_its_reward(tmp_path: Path) -> None:
    """Numbers of any library, under names that may stand in a batch. What is refused is not quoted."""
    async with processes(write_file(tmp_path, {"prompt": "a", "answer": "x"}), tmp_path) as made:
        given = "{'reward': 0.5, 'figures': {'format': True, 'judge/length': 7}}"
        found = await made.score_with_figures(0, given)
        assert RewardAnswer(reward=0.5, figures={"format": 1.0, "judge/length": 7.0}) == found
        assert RewardAnswer(reward=2.0) == await made.score_with_figures(0, "{'reward': 2}")
        assert RewardAnswer(reward=0.25) == await made.score_with_figures(0, "x"), "a number has none"
        for refused, words in (
            ("{'score': 0.5}", "another dict than"),
            ("{'reward': 0.5, 'my secret': 1}", "another dict than"),
            ("{'reward': 0.5, 'figures': {'format': 'my secret'}}", "a str is no figure"),
            ("{'reward': 0.5, 'figures': {'my secret': 1}}", "its figures have other names, or are too many"),
            ("{'reward': 0.5, 'figures': {f'n{i}': i for i in range(33)}}", "its figures have other names"),
        ):
            with pytest.raises(RewardFailed, match=words) as failed:
                await made.score(0, refused)
            assert "secret" not in str(failed.value)


async def test_a_function_that_forks_or_exits_answers_for_itself_alone(tmp_path: Path) -> None:
    """A fork that came back answered too, and each later reward went to the response before its own."""
    async with processes(write_file(tmp_path, {"prompt": "a", "answer": "x"}), tmp_path) as made:
        responses = ["x", "fork", "xx", "exit", "xxx", "fork", "xxxx"]
        found = await asyncio.gather(*(made.score(0, each) for each in responses), return_exceptions=True)
        (failed,) = [each for each in found if isinstance(each, RewardFailed)]
        assert [0.25, -1.0, 0.5, failed, 0.75, -1.0, 1.0] == found
        assert ("VerifierFailed", True) == (failed.reason, str(failed).startswith("SystemExit at "))
        assert "words" not in str(failed)


async def test_an_error_that_raises_another_one_when_it_is_described_costs_no_process(tmp_path: Path) -> None:
    async with processes(write_file(tmp_path, {"prompt": "a", "answer": "x"}), tmp_path) as made:
        with pytest.raises(RewardFailed, match=r"^Wordless at .*rewards\.py:\d+") as failed:
            await made.score(0, "wordless")
    assert "VerifierFailed" == failed.value.reason


async def test_a_function_that_leaks_gets_another_process(tmp_path: Path) -> None:
    """It had no memory for the rest of the job."""
    async with processes(write_file(tmp_path, {"prompt": "a", "answer": "x"}), tmp_path) as made:
        for _ in range(2):
            with pytest.raises(RewardFailed, match="MemoryError"):
                [await made.score(0, "leak") for _ in range(100)]
        assert [-1.0, 0.25] == [await made.score(0, response) for response in ("leak", "x")]


async def test_a_function_that_fails_is_reported_by_place_and_not_by_words_that_quote_a_response(
    tmp_path: Path,
) -> None:
    """Its exception came into logs, events and the job's status: `float(response)` quotes the response."""
    async with processes(write_file(tmp_path, {"prompt": "a", "answer": "x"}), tmp_path) as made:
        with pytest.raises(RewardFailed, match=r"^ValueError at .*rewards\.py:12, called at ") as failed:
            await made.score(0, "number: my secret")
        assert "secret" not in str(failed.value)
        with pytest.raises(RewardFailed, match=r"is no reward") as failed:  # its float() would quote it
            await made.score(0, "quoted")
        assert "secret" not in str(failed.value)


async def test_an_author_who_asks_for_it_finds_the_whole_traceback_in_the_log_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for value, is_shown in (("0", False), ("1", True)):
        monkeypatch.setenv(SHOW_MESSAGES, value)
        claims = tmp_path / value
        async with processes(write_file(claims, {"prompt": "a", "answer": "x"}), claims) as made:
            with pytest.raises(RewardFailed) as failed:
                await made.score(0, "number: my secret")
        assert is_shown is ("could not convert string to float: 'number: my secret'" in capfd.readouterr().err)
        assert "secret" not in str(failed.value)


async def test_the_example_of_a_mix_is_asked_and_scored(tmp_path: Path) -> None:
    (tmp_path / "my-prompts").symlink_to(EXAMPLE)
    prompts = Prompts.model_validate(yaml.safe_load((EXAMPLE / "mix.yaml").read_text()), by_alias=True)
    async with asyncio.timeout(DEADLINE_S), task_processes(prompts, tmp_path) as made:
        asked = {str(each.prompt)[:12]: each.row for each in await made.prompts(0, (await made.data()).size)}
        assert 6 == len(asked)
        assert 1.0 == await made.score(asked["Solve $2x = "], "It is \\boxed{0.5}.")
        assert 0.1 == await made.score(asked["A box holds "], "#### 47")


async def test_the_example_of_an_endpoint_answers(tmp_path: Path) -> None:
    job = JobFile(name="job", namespace="us", uid="-", created=datetime.now(UTC), spec=make_spec())
    with ThreadingHTTPServer(("127.0.0.1", 0), JudgeHandler) as server:
        JudgeHandler.log_message = lambda *_: None  # type: ignore[method-assign]
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        async with aiohttp.ClientSession(trust_env=False) as session:
            reward = HttpReward(url=f"http://127.0.0.1:{server.server_port}/score")
            endpoint = RewardEndpoint(reward, job, session, tokens=tmp_path)
            found = [await endpoint.score("2 + 2?", {"answer": 4}, text) for text in ("it is 4", "5")]
            assert [1.0, 0.0] == [each.reward for each in found]
        server.shutdown()
        serving.join()


async def test_the_example_is_asked_and_scored(tmp_path: Path) -> None:
    claim = tmp_path / EXAMPLE.name
    shutil.copytree(EXAMPLE, claim, ignore=shutil.ignore_patterns("__pycache__"))
    source = prompt_file(claim_name=claim.name, path="sums.jsonl")
    async with processes(source, tmp_path) as made:
        assert 4 == (await made.data()).size
        assert [1.0, 0.1, 0.0] == [await made.score(0, text) for text in ("3 + 5 = 8 #### 8", "#### 9", "8")]
    assert not (claim / "__pycache__").exists(), "a claim is mounted read-only"


async def test_a_function_that_takes_too_much_memory_fails_its_sample_alone(tmp_path: Path) -> None:
    """It ended the whole pod, and with it everything in flight."""
    async with processes(write_file(tmp_path, {"prompt": "a", "answer": "x"}), tmp_path) as made:
        with pytest.raises(RewardFailed, match=r"MemoryError at .*rewards.py.*may have 1024 MiB: raise spec"):
            await made.score(0, "much")
        assert 0.25 == await made.score(0, "x")


async def test_mathematics_is_compared_by_what_it_means(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a half?", "answer": "\\frac{1}{2}"},
        {"prompt": "72?", "answer": "48 / 2 = 24, and 24 more\n#### 72"},
        {"prompt": "square?", "answer": "x^2 + 2x + 1"},
        {"prompt": "1000?", "answer": 1000},
        {"prompt": "again?", "answer": "1,000"},
        {"prompt": "who knows?", "answer": "$$"},
    ]
    async with processes(write_file(tmp_path, *rows, reward={"math": {}}), tmp_path) as made:
        for index, response, reward in (
            (0, "It is $0.5$.", 1.0),
            (0, "First $0.5$, no: \\boxed{0.25}", 0.0),
            (0, "\\boxed{\\frac{2}{4}}", 1.0),
            (0, "\\frac{1}{", 0.0),
            (0, "", 0.0),
            (2, "$(x+1)^2$", 1.0),
            (3, "about 1,000", 1.0),
            (4, "$1000$", 1.0),
        ):
            assert reward == await made.score(index, response), response
        with pytest.raises(RewardFailed, match="'answer' of its row is no mathematics: 2 characters"):
            await made.score(5, "7")
        for endless in ("$9^{9^{9^{9^9}}}$", "$\\binom{10000000}{5000000}$"):
            with pytest.raises(RewardFailed, match="math-verify came to no end within 5 s") as failed:
                await made.score(0, endless)
            assert "RewardTimedOut" == failed.value.reason
    marked = prompt_file(reward={"math": {"answerAfter": "####"}}, path="math/gsm.jsonl")
    (tmp_path / "mine/math/gsm.jsonl").write_text(json.dumps(rows[1]))
    async with processes(marked, tmp_path) as made:
        assert [1.0, 0.0] == [await made.score(0, response) for response in ("#### 72", "24")]
    nested = prompt_file(
        reward={"math": {"answerField": "reward_model.ground_truth"}},
        prompt_field="data.prompt",
        path="math/verl.jsonl",
    )
    row: Row = {
        "data": {"prompt": [{"role": "user", "content": "?"}]},
        "reward_model": {"ground_truth": "72", "style": "rule"},
    }
    (tmp_path / "mine/math/verl.jsonl").write_text(json.dumps(row))
    async with processes(nested, tmp_path) as made:
        assert row["data"]["prompt"] == (await made.prompts(0, 1))[0].prompt
        assert [1.0, 0.0] == [await made.score(0, response) for response in ("$72$", "24")]


async def test_a_dataset_comes_from_the_hub_at_one_commit_and_once(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(
        [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(5)]
    )
    parquet = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, parquet)
    card = {"configs": [{"config_name": "main", "data_files": [{"split": "train", "path": "main/train-*"}]}]}
    files = {"README.md": b"-", "main/train-0.parquet": parquet.getvalue().to_pybytes(), "main/test-0.parquet": b""}
    hub = FakeHub("us/sums", files, card=card)
    async with listening(hub.application()) as endpoint:
        source = HuggingFace(
            name="us/sums", revision="v1", endpoint=endpoint, prompt_field="question", reward=Reward(math=MathReward())
        )
        async with processes(source, tmp_path, count=2) as made:
            asked = await made.prompts(0, 5)
            assert {f"{number} + 1?" for number in range(5)} == {each.prompt for each in asked}
            assert [1.0, 0.0] == [await made.score(3, answer) for answer in ("$4$", "$5$")]
        assert ["main/train-0.parquet"] == hub.downloads
        assert {"v1"} == set(hub.revisions)
        async with processes(source.model_copy(update={"split": "dev"}), tmp_path) as made:
            with pytest.raises(TaskUnusable, match=r"huggingFace 'us/sums'.*no file of us/sums belongs to split 'dev'"):
                await made.data()
        async with processes(source.model_copy(update={"name": "us/other"}), tmp_path) as made:
            with pytest.raises(TaskUnusable, match=r"us/other at v1 can't be fetched from http.*404 Not Found"):
                await made.data()


async def test_the_hubs_own_conversion_to_parquet_is_read(tmp_path: Path) -> None:
    """A dataset that has only CSV, or is a script, has it on a branch without a card."""
    parquet = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1 + 1?"], "answer": [2]}), parquet)
    files = {f"default/{split}/0000.parquet": parquet.getvalue().to_pybytes() for split in ("train", "test")}
    hub = FakeHub("us/sums", files)
    async with listening(hub.application()) as endpoint:
        source = HuggingFace(
            name="us/sums", revision="refs/convert/parquet", endpoint=endpoint, reward=Reward(math=MathReward())
        )
        (path,) = await asyncio.to_thread(fetch, source, cache=tmp_path)
    assert (["refs/convert/parquet"], ["default/train/0000.parquet"]) == (hub.revisions, hub.downloads)
    assert files[hub.downloads[0]] == path.read_bytes()


async def test_a_hub_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    hub = FakeHub("us/sums", {"train.jsonl": b'{"prompt": "1 + 1?", "answer": 2}'}, failures=2)
    async with listening(hub.application()) as endpoint:
        source = HuggingFace(name="us/sums", endpoint=endpoint, reward=Reward(math=MathReward()))
        (path,) = await asyncio.to_thread(fetch, source, cache=tmp_path)
        assert 3 == len(hub.revisions)
    assert {"prompt": "1 + 1?", "answer": 2} == json.loads(path.read_bytes())
    with pytest.raises(RowsUnusable, match=f"can't be fetched from {endpoint}: ConnectError"):
        await asyncio.to_thread(fetch, source, cache=tmp_path / "another pod's", patience_s=0)


async def test_a_process_that_takes_over_asks_no_hub_for_the_rows_that_are_there(tmp_path: Path) -> None:
    """A hub that was away for ten minutes, or a branch that had moved on, left the job without rewards for good."""
    hub = FakeHub("us/sums", {"train.jsonl": b'{"prompt": "1 + 1?", "answer": 2}'})
    async with listening(hub.application()) as endpoint:
        source = HuggingFace(name="us/sums", endpoint=endpoint, reward=Reward(math=MathReward()))
        first = await asyncio.to_thread(fetch, source, cache=tmp_path)
    assert first == await asyncio.to_thread(fetch, source, cache=tmp_path, patience_s=0)
    other = source.model_copy(update={"split": "test"})
    with pytest.raises(RowsUnusable, match="ConnectError"):
        await asyncio.to_thread(fetch, other, cache=tmp_path, patience_s=0)


async def test_a_mix_scores_each_row_as_its_source_says(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}?", "answer": str(number)} for number in range(3)]
    file = write_file(tmp_path, *rows, held_out_percent=0)
    judged = prompt_file(reward={"http": {"url": "http://judge/"}}, held_out_percent=100)
    endpoint = RowKeeper()
    prompts = Prompts(mix=Mix(seed=5, sources=[WeightedSource(file=file, weight=2), WeightedSource(file=judged)]))
    async with asyncio.timeout(DEADLINE_S), task_processes(prompts, tmp_path, endpoints={1: endpoint}) as made:
        asked = await made.prompts(0, 9)
        assert {False: 6, True: 3} == Counter(each.held_out for each in asked)
        for each in asked:
            prompt = str(each.prompt)
            assert (7.0 if each.held_out else 0.25) == await made.score(each.row, prompt[0])
    assert [(f"{n}?", str(n)) for n in range(3)] == sorted(endpoint.asked)


async def test_a_set_of_an_evaluation_has_its_own_rows_and_rewards(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}?", "answer": str(number)} for number in range(3)]
    trained = write_file(tmp_path, *rows, {"prompt": "4?", "answer": "4"}, held_out_percent=0)
    sets = [
        EvaluationSet(name="judged", file=prompt_file(reward={"http": {"url": "http://judge/"}})),
        EvaluationSet(name="sums", reasoning_gym=ReasoningGym(name="chain_sum", size=5)),
    ]
    endpoint = RowKeeper()
    async with (
        asyncio.timeout(DEADLINE_S),
        task_processes(Prompts(file=trained), tmp_path, sets=sets, endpoints={1: endpoint}) as made,
    ):
        data = await made.data()
        assert (4, 8, 13) == data.ends
        assert {False} == {each.held_out for each in await made.prompts(0, data.size)}
        judged = await made.prompts(0, 4, source=1)
        assert {True} == {each.held_out for each in judged}, "all of them serve the evaluation"
        assert {4, 5, 6, 7} == {each.row for each in judged}
        assert [7.0] * 4 == [await made.score(each.row, str(each.prompt)[0]) for each in judged]
        (first,) = await made.prompts(0, 1, source=2)
        assert 8 == first.row
        assert 0.0 == await made.score(first.row, "no number")
    assert 4 == len(endpoint.asked)


async def test_a_set_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    sets = [EvaluationSet(name="aime", file=prompt_file(path="none.jsonl"))]
    prompts = Prompts(reasoning_gym=ReasoningGym(name="chain_sum", size=10))
    async with asyncio.timeout(DEADLINE_S), task_processes(prompts, tmp_path, sets=sets) as made:
        with pytest.raises(TaskUnusable, match=r"^spec.evaluation.sets, aime: file 'none.jsonl' can't be used"):
            await made.data()


async def test_a_module_that_another_of_its_name_hides_is_not_mistaken_for_it(tmp_path: Path) -> None:
    """Two sources with a rewards.py each were both rewarded by the first."""
    first = write_file(tmp_path, {"prompt": "a", "answer": "x"})
    shutil.copytree(tmp_path / "mine", tmp_path / "yours")
    second = first.model_copy(update={"claim_name": "yours"})
    prompts = Prompts(mix=Mix(sources=[WeightedSource(file=first), WeightedSource(file=second)]))
    async with asyncio.timeout(DEADLINE_S), task_processes(prompts, tmp_path) as made:
        with pytest.raises(TaskUnusable, match=r"mix\.sources\[1\]\.file .*beside the rows is hidden by .*mine"):
            await made.data()


MAKING = """
import datetime, itertools, sys
import numpy

CALLS = itertools.count()

def problem(number):
    if number == 33:
        raise ValueError(f"row {number} is secret")
    more = {"on": datetime.date(2026, 1, 1), "of": numpy.arange(2)}
    return {"prompt": f"{number} + 1?", "answer": numpy.int64(number + 1), **more}

def score(response, row):
    return float(int(response) == row["answer"] and row["on"] == "2026-01-01" and row["of"] == [0, 1])

def drawn(number): return {"prompt": f"{next(CALLS)}?"}
def text(number): return "1 + 1?"
def question(number): return {"question": "1 + 1?"}
def of_sets(number): return {"prompt": "1 + 1?", "of": {1}}
def half(number): return {"prompt": "\\ud83d"}
def no_key(number): sys.exit("KEY is not set")
"""


def made_by(directory: Path, name: str = "making:problem", **fields: Any) -> PromptFunction:
    (directory / "mine").mkdir(exist_ok=True)
    (directory / "mine/making.py").write_text(MAKING)
    given = {"claim_name": "mine", "size": 30, "reward": {"function": "making:score"}, "seed": 3}
    return PromptFunction(**{"name": name, **given, **fields})


async def test_rows_that_a_function_makes_are_as_those_of_a_file(tmp_path: Path) -> None:
    """Each once in a pass, in an order that comes back, plain, and another function says what responses are worth."""
    source = made_by(tmp_path)
    async with processes(source, tmp_path, count=2) as made:
        asked = [(each.row, each.prompt) for each in await made.prompts(0, 60)]
        assert [1.0, 0.0] == [await made.score(7, response) for response in ("8", "9")]
    every = sorted((number, f"{number} + 1?") for number in range(30))
    assert [every, every] == [sorted(asked[:30]), sorted(asked[30:])]
    assert asked[:30] not in (every, asked[30:])
    async with processes(source, tmp_path) as made:
        assert asked[20:50] == [(each.row, each.prompt) for each in await made.prompts(20, 30)]


async def test_a_row_that_a_function_does_not_make_is_reported_by_place(tmp_path: Path) -> None:
    async with processes(made_by(tmp_path, size=40), tmp_path) as made:
        with pytest.raises(RewardFailed, match=r"^ValueError at .*making\.py:9, called at ") as failed:
            await made.prompts(0, 40)
        assert "secret" not in str(failed.value)


async def test_a_job_is_not_continued_over_what_another_function_makes(tmp_path: Path) -> None:
    async with processes(made_by(tmp_path), tmp_path) as made:
        first = (await made.data()).digest
    (tmp_path / "mine/other.py").write_text(MAKING.replace("+ 1?", "+ 2?"))
    async with processes(made_by(tmp_path, "other:problem"), tmp_path) as made:
        assert first != (await made.data()).digest


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "making:drawn",
            "function 'making:drawn' can't be used: row 0 is another one each time: make it of its number",
        ),
        ("making:text", "row 0: no JSON object"),
        ("making:question", "row 0: has no 'prompt', only 'question': set promptField"),
        ("making:of_sets", "a value of type set can't be written in JSON"),
        ("making:half", "row 0: half of a character"),
        ("making:no_key", "function 'making:no_key' can't be used: SystemExit at "),
        ("making:nothing", "module making has no function nothing"),
        ("making:score", "making:score can't be called with a number: missing a required argument: 'row'"),
        ("elsewhere:problem", "No module named 'elsewhere'"),
    ],
)
async def test_what_is_wrong_with_a_function_is_said_before_the_job_begins(
    tmp_path: Path, name: str, message: str
) -> None:
    async with processes(made_by(tmp_path, name), tmp_path) as made:
        with pytest.raises(TaskUnusable, match=re.escape(message)):
            await made.prompts(0, 1)


async def test_the_example_of_a_function_is_asked_and_scored(tmp_path: Path) -> None:
    (tmp_path / "my-prompts").symlink_to(EXAMPLE)
    prompts = Prompts.model_validate(yaml.safe_load((EXAMPLE / "function.yaml").read_text()), by_alias=True)
    async with asyncio.timeout(DEADLINE_S), task_processes(prompts, tmp_path) as made:
        (asked,) = await made.prompts(0, 1)
        left, _, right = str(asked.prompt).partition(" = ")[0].partition(" + ")
        assert [1.0, 0.1] == [await made.score(asked.row, f"#### {int(left) + int(right) + more}") for more in (0, 1)]


class RowKeeper:
    """An endpoint that keeps what it was asked."""

    def __init__(self) -> None:
        self.problem: Problem | None = None
        self.asked: list[tuple[str, str]] = []

    async def score(self, prompt: PromptContent, fields: Mapping[str, Any], response: str) -> RewardAnswer:
        assert {"prompt": prompt, "answer": response} == fields
        self.asked.append((str(prompt), response))
        return RewardAnswer(reward=7.0)


@pytest.mark.parametrize(
    ("lines", "changes", "message"),
    [
        (b"", {}, "file 'math/train.jsonl' can't be used: train.jsonl: no rows"),
        (b'{"prompt": "a"}\n\n[1]', {}, "line 3 of train.jsonl: no JSON object"),
        (b'{"prompt": "a"}\n{"prompt": "b}', {}, "line 2 of train.jsonl: no JSON: Unterminated string"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}', {}, "line 2 of train.jsonl: no UTF-8: byte 0xff at place 13"),
        (b'{"prompt": "a"}\n{"prompt": "\\ud83d"}', {}, "line 2 of train.jsonl: half of a character, '\\ud83d'"),
        (b"[" * 100_000, {}, "line 1 of train.jsonl: no JSON: maximum recursion depth"),
        (b'{"question": "a", "answer": 1}', {}, "has no 'prompt', only 'question', 'answer': set promptField"),
        (b'{"prompt": "a"}\n{"prompt": 7}', {}, "line 2 of train.jsonl: 'prompt' should be a text, or a list of"),
        (b'{"prompt": [{"text": "a"}]}', {}, "should be a text, or a list of messages with role and content"),
        (b'{"prompt": [{"role": "user"}]}', {}, "should be a text, or a list of messages with role and content"),
        (b'{"prompt": "a"}', {"path": "math/other.jsonl"}, "file 'math/other.jsonl' can't be used: there is no file"),
        (b'{"prompt": "a"}', {"path": "math/rewards.py"}, "rewards.py: a file of prompts ends with one of .jsonl"),
        (b'{"prompt": "a"}', {"path": "math"}, "math is a directory that datasets.save_to_disk did not write"),
        (b'{"prompt": "a"}', {"reward": {"function": "rewards:scores"}}, "module rewards has no function scores"),
        (b'{"prompt": "a"}', {"reward": {"function": "rewarding:score"}}, "No module named 'rewarding'"),
        (
            b'{"prompt": "a"}',
            {"reward": {"function": "rewards:of_another_library"}},
            "rewards:of_another_library can't be called with a response and its row: missing a required argument",
        ),
        (b'{"prompt": "a"}', {"reward": {"function": "rewards:later"}}, "rewards:later is async: write it with def"),
        (
            b'{"prompt": "a"}',
            {"reward": {"function": "large:score"}},
            "; its process may have 1024 MiB: raise spec.rollout.prompts.resources.limits.memory",
        ),
        (
            b'{"prompt": "a"}',
            {"reward": {"function": "large:score"}},
            "file 'math/train.jsonl' can't be used: MemoryError at ",
        ),
        (b'{"prompt": "a"}', {"reward": {"math": {}}}, "line 1 of train.jsonl: has no 'answer', only 'prompt': set"),
        (b'{"prompt": "a", "answer": []}', {"reward": {"math": {}}}, "'answer' should be a number or a text"),
        (
            b'{"a": {"b": "c"}}',
            {"promptField": "a.c"},
            "line 1 of train.jsonl: has no 'a.c', only 'a': set promptField",
        ),
        (
            b'{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}',
            {},
            "content, which is text or parts of it",
        ),
        (
            b'{"prompt": "a", "level": {"of": [NaN]}}',
            {"reward": {"http": {"url": "http://judge/"}}},
            "line 1 of train.jsonl: 'level' has a number that is NaN or infinite, which no endpoint can be sent",
        ),
        (b'{"prompt": "a", "answer": " "}', {"reward": {"math": {}}}, "'answer' has no answer in it"),
        (b'{"prompt": "a", "answer": "7"}', {"reward": {"math": {"answerAfter": "####"}}}, "has no '####' in it"),
    ],
)
async def test_what_is_wrong_with_a_file_is_said_before_the_job_begins(
    tmp_path: Path, lines: bytes, changes: dict[str, Any], message: str
) -> None:
    write_file(tmp_path)
    (tmp_path / "mine/math/train.jsonl").write_bytes(lines)
    async with processes(prompt_file(**changes), tmp_path) as made:
        with pytest.raises(TaskUnusable, match=re.escape(message)):
            await made.prompts(0, 1)
