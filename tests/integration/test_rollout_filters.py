"""Functions of a job decide which groups are trained: real task processes, and the rollout controller over them."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from integration.test_rollout_controller import BATCH, V0, ControllerScene, running, with_rollout

from colocated_rl_api.prompts import PromptFile, Prompts, ReasoningGym
from colocated_rl_rollout.rewards.rewards import FILTER_FAILED, RewardFailed, TaskProcesses
from colocated_rl_rollout.rewards.task_connection import TaskUnusable
from colocated_rl_rollout.rules.samples import SampleState
from colocated_rl_rollout.tasks.task_wire import JudgedSample
from fakes.tasks import task_processes
from setup.layout import CHECKOUT

EXAMPLE = CHECKOUT.root / "examples/own_prompts"
SUMS = [*range(11, 100, 7), *range(101, 200, 7), *range(1001, 1100, 7)]  # the engine is wrong about one length
GROUPS = 12  # in a batch, where it takes more than a few
FUNCTIONS = """
import os, pathlib, sys, time
HERE = pathlib.Path(__file__).parent

def score(response, row):
    return {"reward": float(response.endswith(str(row["sum"]))), "figures": {"characters": len(response)}}

def even(samples, row):
    for sample in samples:
        assert {"response", "tokens", "truncated", "reward", "figures"} == {*sample}
        assert sample["figures"] == ({} if sample["truncated"] else {"characters": len(sample["response"])})
        assert sample["tokens"] >= len(sample["response"])
    return row["sum"] % 2 == 0

def right(samples, row):
    import numpy
    return numpy.mean([sample["reward"] for sample in samples]) > 0.5

def none(samples, row):
    return False

def opened(samples, row):
    while not (HERE / "open").exists():
        time.sleep(0.01)
    return True

def faulty(samples, row):
    if row["sum"] % 3 == 0 or not (HERE / "open").exists():
        raise ValueError("my secret: " + samples[0]["response"])
    return True

def odd_answers(samples, row):
    match samples[0]["response"]:
        case "None": return None
        case "number": return 1
        case "numpy": return __import__("numpy").True_
        case "exit": raise SystemExit("my secret")
        case "late": raise TimeoutError("my secret")
        case "hang": time.sleep(600)
        case "die": os._exit(3)
        case "much": return len(bytes(2**30)) > 0
    return not samples[0]["response"].startswith("drop")

async def later(samples, row): return True
def of_one(samples): return True
"""


def claim(directory: Path) -> Path:
    folder = directory / "mine"
    folder.mkdir()
    rows = [{"prompt": f"problem: {total - 1} + 1 =", "sum": total} for total in SUMS]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "my_filters.py").write_text(FUNCTIONS)
    return folder


def prompts(**more: Any) -> Prompts:
    file = {"claim_name": "mine", "path": "sums.jsonl", "reward": {"function": "my_filters:score"}, "seed": 3}
    return Prompts(file=PromptFile.model_validate(file), **more)


def sample(response: str = "4", reward: float = 0.0, *, truncated: bool = False) -> JudgedSample:
    return {"response": response, "tokens": 1, "truncated": truncated, "reward": reward, "figures": {}}


@asynccontextmanager
async def scene_of(directory: Path, functions: list[str], **rollout: Any) -> AsyncIterator[ControllerScene]:
    """A job on those rows; its claim may be there from before."""
    if not (directory / "mine").exists():
        claim(directory)
    source = prompts().model_dump(by_alias=True, exclude_none=True)
    job = with_rollout(directory, prompts=source, filterFunctions=functions, **rollout)
    async with (
        task_processes(job.spec.rollout.prompts, directory, filters=functions, count=2) as processes,
        running(job, processes) as scene,
    ):
        await scene.target()
        await scene.open(V0)
        yield scene


async def reasons(scene: ControllerScene, state: SampleState) -> dict[str, list[int]]:
    """Return the sums of the prompts of samples in a state, by reason."""
    found: dict[str, list[int]] = {}
    for each in (await scene.page(f"/v1/samples?state={state}"))["samples"]:
        found.setdefault(each["reason"], []).append(SUMS[each["prompt_index"]])
    return found


# -------------------------------------------------------------------------------------------------- the whole chain
async def test_only_groups_that_every_function_lets_pass_are_trained_and_the_others_are_counted(tmp_path: Path) -> None:
    functions = ["my_filters:even", "my_filters:right"]
    async with scene_of(tmp_path, functions, batchSize=GROUPS, maxStaleness=0, maxFilteredPerBatch=1000) as scene:
        await scene.sealed(1)
        batch = await scene.batch(1)
        assert {1.0} == {reward for shard in batch.columns for reward in shard["reward"].tolist()}
        trained = (await reasons(scene, SampleState.SEALED))[""]
        assert [0] * 2 * GROUPS == [total % 2 for total in trained]
        dropped = await reasons(scene, SampleState.FILTERED)
        assert {*functions} == {*dropped}
        assert {1} == {total % 2 for total in dropped["my_filters:even"]}
        assert {0} == {total % 2 for total in dropped["my_filters:right"]}, "the second is asked after the first"
        counts = {name: len(totals) for name, totals in dropped.items()}
        facts = await scene.operator.until(lambda facts: facts.filtered == counts)
        assert (sum(counts.values()), None) == (facts.samples["filtered"], facts.problem)
        text = await scene.figures()
        for name, count in counts.items():
            assert f'colocate_rollout_samples_ended{{reason="{name}",state="filtered"}} {count}.0\n' in text
            assert f'colocate_rollout_discarded_tokens_total{{reason="{name}"}} ' in text


async def test_a_group_on_which_a_function_fails_is_replaced_and_reported_without_its_words(tmp_path: Path) -> None:
    async with scene_of(tmp_path, ["my_filters:faulty"], batchSize=GROUPS, maxStaleness=0) as scene:
        facts = await scene.operator.until(lambda facts: facts.problem and facts.problem.reason == FILTER_FAILED)
        assert facts.problem
        assert "given up: prompt " in facts.problem.message
        assert " of the data: ValueError at " in facts.problem.message
        assert "my_filters.py:" in facts.problem.message
        assert "secret" not in facts.problem.message
        (tmp_path / "mine/open").touch()  # until now it fails on every group, so that nothing hides the problem
        await scene.sealed(1)
        assert 0 not in {total % 3 for total in (await reasons(scene, SampleState.SEALED))[""]}
        assert {FILTER_FAILED} == {*await reasons(scene, SampleState.FAILED)}
        facts = await scene.operator.until(lambda facts: not facts.problem)
        assert not facts.filtered, "a group that was not judged was not dropped"


async def test_past_the_bound_of_a_batch_groups_are_trained_as_they_are(tmp_path: Path) -> None:
    async with scene_of(tmp_path, ["my_filters:none"], maxFilteredPerBatch=4) as scene:
        await scene.sealed(1)
        facts = await scene.operator.until(lambda facts: facts.problem and facts.problem.reason == "NoLearningSignal")
        assert facts.problem
        assert "4 groups were left out since the last batch, and now one for my_filters:none" in facts.problem.message
        assert facts.filtered["my_filters:none"] >= 8


async def test_no_group_is_in_a_batch_before_its_verdict_which_is_asked_for_again_after_a_restart(
    tmp_path: Path,
) -> None:
    async with scene_of(tmp_path, ["my_filters:opened"], maxConcurrency=6) as scene:
        facts = await scene.samples(completed=4 * BATCH, sealed=0)
        assert facts.sealed is None
    (tmp_path / "mine/open").touch()
    async with scene_of(tmp_path, ["my_filters:opened"], maxConcurrency=6) as scene:
        await scene.sealed(1)
        assert {*range(1, 2 * BATCH + 1)} > {*(await scene.batch(1)).groups}, "nothing was generated anew"


# -------------------------------------------------------------------------------------------------- a process
@asynccontextmanager
async def judging(directory: Path, *functions: str, asked: Prompts | None = None) -> AsyncIterator[TaskProcesses]:
    claim(directory)
    async with task_processes(asked or prompts(), directory, filters=[*functions], container_bytes=2**30) as processes:
        yield processes


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("None", r"^filter function my_filters:odd_answers returned a NoneType: return True to keep the group, or F"),
        ("number", "returned a int: return True"),
        ("exit", r"^SystemExit at .*my_filters\.py:\d+"),
        ("late", r"^TimeoutError at .*my_filters\.py:\d+"),
        ("much", r"MemoryError at .*may have 1024 MiB: raise spec\.rollout\.prompts\.resources\.limits\.memory"),
        ("hang", r"^nothing within 5 s \(rollout\.prompts\.rewardDeadlineSeconds\)$"),
        ("die", "^the process that works on it died, twice$"),
    ],
)  # fmt: skip
async def test_whatever_a_function_does_costs_its_group_alone(tmp_path: Path, response: str, words: str) -> None:
    asked = prompts(reward_deadline_seconds=5 if response == "hang" else 60)
    async with judging(tmp_path, "my_filters:odd_answers", asked=asked) as processes:
        with pytest.raises(RewardFailed, match=words) as failed:
            await processes.dropped_by(0, [sample(response)])
        assert FILTER_FAILED == failed.value.reason
        assert "secret" not in str(failed.value)
        verdicts = [await processes.dropped_by(0, [sample(each)]) for each in ("fine", "drop it", "numpy")]
        assert [None, "my_filters:odd_answers", None] == verdicts


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("my_filters:gone", "module my_filters has no function gone"),
        ("nowhere:keep", "ModuleNotFoundError: No module named 'nowhere'"),
        ("my_filters:later", "my_filters:later is async"),
        ("my_filters:of_one", "can't be called with the samples of a group and their row"),
    ],
)
async def test_a_function_that_cannot_be_called_is_named_before_the_job_begins(
    tmp_path: Path, function: str, words: str
) -> None:
    async with judging(tmp_path, function) as processes:
        with pytest.raises(TaskUnusable) as unusable:
            await processes.data()
    assert str(unusable.value).startswith(f"spec.rollout.filterFunctions, {function}, can't be used: ")
    assert words in str(unusable.value)


async def test_a_process_that_names_another_functions_verdict_is_not_believed(tmp_path: Path) -> None:
    """Its name would become a label of metrics and a key of the status."""
    reply = '{"value": {"size": 9, "digest": "x"}}\\n'
    program = (
        f"import sys; print('{reply}', end='', flush=True)\nfor line in sys.stdin: print('{{\"value\": \"mine\"}}')"
    )
    command = [sys.executable, "-u", "-c", program.replace("for line", "sys.stdin.readline()\nfor line")]
    async with task_processes(prompts(), tmp_path, filters=["a:b"], command=command) as processes:
        with pytest.raises(RewardFailed, match="named a filter function that the job does not have"):
            await processes.dropped_by(0, [])


async def test_a_function_may_be_in_the_image_and_gets_the_row_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of reasoning-gym has a row; groups of clients' sessions have none."""
    (tmp_path / "of_the_image.py").write_text("def keep(samples, row): return row is not None and 'answer' in row\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    task = Prompts(reasoning_gym=ReasoningGym(name="chain_sum", size=10))
    async with task_processes(task, tmp_path, filters=["of_the_image:keep"]) as processes:
        assert await processes.dropped_by(9, [sample()]) is None
        assert "of_the_image:keep" == await processes.dropped_by(None, [sample()])


async def test_functions_of_the_example_keep_what_their_words_say(tmp_path: Path) -> None:
    (tmp_path / "my-prompts").symlink_to(EXAMPLE)
    file = {"claim_name": "my-prompts", "path": "sums.jsonl", "reward": {"function": "rewards:score"}}
    asked = Prompts(file=PromptFile.model_validate(file))
    cases: dict[str, list[tuple[str | None, list[JudgedSample]]]] = {
        "group_filters:medium": [
            (None, [sample(reward=1.0), sample(reward=0.0)]),
            ("group_filters:medium", [sample(reward=1.0), sample(reward=1.0)]),
            ("group_filters:medium", [sample(reward=0.1), sample(reward=0.1)]),
        ],
        "group_filters:rewards_differ": [
            (None, [sample(reward=1.0), sample(reward=0.1)]),
            ("group_filters:rewards_differ", [sample(reward=0.1), sample(reward=0.1)]),
        ],
        "group_filters:several_answers": [
            (None, [sample("4"), sample("5")]),
            ("group_filters:several_answers", [sample("4"), sample("4")]),
            ("group_filters:several_answers", [sample("4"), sample("4 and", truncated=True)]),
        ],
    }
    for function, groups in cases.items():
        async with task_processes(asked, tmp_path, filters=[function]) as processes:
            assert [verdict for verdict, _ in groups] == [await processes.dropped_by(0, each) for _, each in groups]
            assert groups[0][0] == await processes.dropped_by(None, groups[0][1]), "a group of sessions has no row"
