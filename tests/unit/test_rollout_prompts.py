"""Prompts from a process that fails: what people are told, and that it goes on."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

import pytest
from waiting import until

from colocated_rl_api.names import PromptPosition
from colocated_rl_rollout.rewards.prompts import LeftOut, PromptSource
from colocated_rl_rollout.rules.chat import Chat
from fakes.rollout import JobOnDisk, make_spec
from fakes.tasks import task_processes

FAILS_TWICE = """
import json, sys
json.loads(sys.stdin.readline())
print(json.dumps({"value": {"size": 1000, "digest": "x"}}), flush=True)
for number, line in enumerate(sys.stdin):
    start, count = json.loads(line)["prompts"]
    made = {"value": [(place, f"{place} + 1 =", False) for place in range(start, start + count)]}
    print(json.dumps({"error": "OSError: disk"} if number < 2 else made), flush=True)
"""


async def test_questions_that_can_not_be_made_are_a_problem_until_they_can(tmp_path: Path) -> None:
    """It was tried again and again, and nobody was told why the job did not begin."""
    job = JobOnDisk.write(tmp_path, make_spec())
    command = [sys.executable, "-c", FAILS_TWICE]
    problems: list[str] = []

    def changed() -> None:
        problems.append(prompts.problem.message if prompts.problem else "")

    async with task_processes(job.spec.rollout.prompts, tmp_path, command=command) as processes:
        prompts = PromptSource(
            processes, job.chat, max_prompt_tokens=200, position=PromptPosition(0), changed=changed, retry_s=0.01
        )
        running = asyncio.create_task(prompts.run())
        await until(prompts.take)
        running.cancel()
        await asyncio.wait([running])
    assert ["OSError: disk; asked again"] * 2 + [""] == problems[:3]


REFUSING = "{{ raise_exception('roles must alternate') if 'no' in messages[0].content else messages[0].content }}"


async def test_a_prompt_that_the_models_template_refuses_is_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run stopped for one of them, when it came up, hours after its beginning."""
    job = JobOnDisk.write(tmp_path, make_spec())
    (tmp_path / "model/chat_template.jinja").write_text(REFUSING)
    counted: Counter[LeftOut] = Counter()
    command = says_rows("place, 'no' if place % 8 == 7 else 'yes', False")
    async with task_processes(job.spec.rollout.prompts, tmp_path, command=command) as processes:
        prompts = PromptSource(
            processes,
            Chat(tmp_path / "model"),
            max_prompt_tokens=200,
            position=PromptPosition(0),
            changed=lambda: None,
            count=lambda why: counted.update([why]),
        )
        running = asyncio.create_task(prompts.run())
        await until(lambda: counted[LeftOut.REFUSED] >= 16)
        running.cancel()
        await asyncio.wait([running])
        found = [prompts.take() for _ in range(9)]
    assert [0, 1, 2, 3, 4, 5, 6, 8, 9] == [prompt.position for prompt in found if prompt]
    assert prompts.problem is None
    records = [record.args for record in caplog.records if record.msg == "prompt left out"]
    assert 8 == len(records), "so many and no more"
    why = "prompt 8 of the data: the model's chat template can't be rendered: TemplateError at "
    assert isinstance(records[0], dict)
    assert records[0]["reason"].startswith(why)
    assert records[0]["reason"].endswith("<template>:1"), "with the line, and without words that may quote the prompt"


async def test_a_template_that_takes_no_prompt_stops_the_job(tmp_path: Path) -> None:
    job = JobOnDisk.write(tmp_path, make_spec())
    (tmp_path / "model/chat_template.jinja").write_text(REFUSING)
    command = says_rows("place, 'no' if place else 'yes', False")
    async with task_processes(job.spec.rollout.prompts, tmp_path, command=command) as processes:
        chat = Chat(tmp_path / "model")
        prompts = PromptSource(processes, chat, max_prompt_tokens=200, position=PromptPosition(0), changed=lambda: None)
        await prompts.run()
    assert prompts.problem is not None
    assert "PromptsUnusable" == prompts.problem.reason
    assert prompts.problem.message.startswith(
        "64 prompts in a row were refused; prompt 65 of the data: "
        "the model's chat template can't be rendered: TemplateError at "
    )
    assert prompts.problem.message.endswith("<template>:1")


@pytest.mark.parametrize(
    ("passes", "begins", "expected"),
    [(1, 0, 128), (1, 100, 28), (2, 100, 156), (3, 384, 0)],
    ids=["one", "one that is under way", "the first of two is under way", "all are over"],
)
async def test_prompts_are_over_after_so_many_passes(tmp_path: Path, passes: int, begins: int, expected: int) -> None:
    """The last row of each pass is held out. What is ready can still be taken."""
    job = JobOnDisk.write(tmp_path, make_spec())
    command = says_rows("place % 128, f'{place} + 1 =', place % 128 == 127")
    news: list[bool] = []
    async with task_processes(job.spec.rollout.prompts, tmp_path, command=command) as processes:
        prompts = PromptSource(
            processes,
            job.chat,
            max_prompt_tokens=200,
            position=PromptPosition(begins),
            passes=passes,
            changed=lambda: news.append(prompts.is_over),
        )
        unseen = prompts.is_over
        await prompts.run()
    taken = []
    while not prompts.is_over:
        prompt = prompts.take()
        assert prompt is not None
        taken.append(prompt.position)
    assert [place for place in range(begins, begins + expected) if place % 128 != 127] == taken
    assert (None, None) == (prompts.take(), prompts.problem)
    assert not unseen, "nobody had looked"
    assert news, "whoever waits for another prompt is told that none comes"


def says_rows(row: str, *, at_most: int = 64) -> list[str]:
    """A process with 128 rows; row: of a `place`. at_most: in one reply."""
    program = f"""
import json, sys
json.loads(sys.stdin.readline())
print(json.dumps({{"value": {{"size": 128, "digest": "x"}}}}), flush=True)
for line in sys.stdin:
    start, count = json.loads(line)["prompts"]
    print(json.dumps({{"value": [({row}) for place in range(start, start + min(count, {at_most}))]}}), flush=True)
"""
    return [sys.executable, "-c", program]


async def test_rows_of_which_few_fit_in_a_reply_are_each_asked_once(tmp_path: Path) -> None:
    job = JobOnDisk.write(tmp_path, make_spec())
    command = says_rows("place, f'{place % 128} + 1 =', place % 128 % 5 == 4", at_most=7)
    async with task_processes(job.spec.rollout.prompts, tmp_path, command=command) as processes:
        prompts = PromptSource(
            processes, job.chat, max_prompt_tokens=200, position=PromptPosition(0), passes=1, changed=lambda: None
        )
        await prompts.run()
        held_out = [prompt.position for prompt in await prompts.held_out(99)]
    taken = []
    while (prompt := prompts.take()) is not None:
        taken.append(prompt.position)
    assert ([*range(4, 128, 5)], [place for place in range(128) if place % 5 != 4]) == (held_out, taken)


async def test_prompts_of_the_greatest_length_are_trained_and_longer_ones_counted(tmp_path: Path) -> None:
    job = JobOnDisk.write(tmp_path, make_spec())
    longest = len(job.chat.prompt_ids("xx"))
    command = says_rows("place, 'x' * (1 + place % 4), False")
    async with task_processes(job.spec.rollout.prompts, tmp_path, command=command) as processes:
        prompts = PromptSource(
            processes, job.chat, max_prompt_tokens=longest, position=PromptPosition(0), changed=lambda: None
        )
        running = asyncio.create_task(prompts.run())
        await until(lambda: prompts.left_out[LeftOut.TOO_LONG] >= 64)
        running.cancel()
        await asyncio.wait([running])
        found = [prompts.take() for _ in range(4)]
    assert [0, 1, 4, 5] == [prompt.position for prompt in found if prompt]
    assert [longest - 1, longest] * 2 == [len(prompt.ids) for prompt in found if prompt]


async def test_a_prompt_of_no_token_is_left_out_and_not_taken_for_an_episode(tmp_path: Path) -> None:
    """Its samples waited for somebody who plays, and the batch for them."""
    job = JobOnDisk.write(tmp_path, make_spec())
    (tmp_path / "model/chat_template.jinja").write_text("{{ messages[0].content | trim }}")
    command = says_rows("place, ' ', False")
    async with task_processes(job.spec.rollout.prompts, tmp_path, command=command) as processes:
        prompts = PromptSource(
            processes, Chat(tmp_path / "model"), max_prompt_tokens=9, position=PromptPosition(0), changed=lambda: None
        )
        await prompts.run()
    assert prompts.take() is None
    assert prompts.problem
    assert prompts.problem.message.endswith("prompt 64 of the data: the model's chat template makes no token of it")


async def test_what_is_held_out_is_asked_once_however_often_it_stands_there(tmp_path: Path) -> None:
    job = JobOnDisk.write(tmp_path, make_spec())
    prompts = job.spec.rollout.prompts
    async with task_processes(prompts, tmp_path, command=says_rows("place, f'{place % 3} + 1 =', True")) as processes:
        source = PromptSource(
            processes, job.chat, max_prompt_tokens=200, position=PromptPosition(0), changed=lambda: None
        )
        assert [0, 1, 2] == [prompt.position for prompt in await source.held_out(5)]
        assert [0, 1] == [prompt.position for prompt in await source.held_out(2)]


@pytest.mark.parametrize(("known", "problem"), [(None, None), ("x", None), ("y", "PromptsUnusable")])
async def test_a_restart_over_other_data_stops_instead_of_mistaking_rows(
    tmp_path: Path, known: str | None, problem: str | None
) -> None:
    """Rows are found again by their number: of another file that is another question, and another answer."""
    job = JobOnDisk.write(tmp_path, make_spec())
    problems: list[str] = []
    changed = asyncio.Event()
    async with task_processes(job.spec.rollout.prompts, tmp_path, command=[sys.executable, "-c", FAILS_TWICE]) as made:
        prompts = PromptSource(
            made,
            job.chat,
            max_prompt_tokens=200,
            position=PromptPosition(0),
            changed=changed.set,
            known_digest=known,
            remember=problems.append,
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
    assert (set() if problem else {"x"}) == set(problems)
