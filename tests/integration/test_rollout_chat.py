"""Prompts, held-out split and rewards agree with the libraries that they stand in for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from colocated_rl_api.names import PromptPosition
from colocated_rl_rollout.rewards.prompts import NoPrompts, PromptSource
from colocated_rl_rollout.rules.chat import Chat, Unrenderable
from colocated_rl_rollout.rules.samples import Prompt
from colocated_rl_rollout.tasks.tasks import is_held_out
from fakes.rollout import CHAT_TEMPLATE, MARK, make_spec, write_model
from fakes.tasks import START_S, task_processes

QUESTION = "State the final answer: 7 - 8 + 3 =\n  «ünïcode» {{ not a template }}"
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "as large models have it": (
        "{%- if tools %}\n{{- tools | tojson }}\n{%- endif %}\n"
        "{%- set ns = namespace(last=messages|length - 1) %}\n"
        "{%- for message in messages[::-1] %}{%- if loop.index0 == 5 %}{% break %}{%- endif %}{%- endfor %}\n"
        "{%- if messages[0].role == 'system' %}{{ raise_exception('no system prompt') }}{%- endif %}\n"
        "{{- bos_token if bos_token is defined and bos_token else '' }}\n"
        "{%- for message in messages %}\n"
        "    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}\n"
        "    {% generation %}{{ '' }}{% endgeneration %}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n{{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
        "{{ messages | tojson(indent=1) }}{{ eos_token }}"
    ),
    "compact": "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}",  # as Kimi K2 has it
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_what_transformers_makes_of_them(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path)
    (model / "chat_template.jinja").write_text(TEMPLATES[name])
    tokenizer: Any = AutoTokenizer.from_pretrained(str(model))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    chat = Chat(model)
    assert expected == list(chat.prompt_ids(QUESTION))
    assert tokenizer.decode(expected, skip_special_tokens=True) == chat.text(expected)


LLAMA = (  # as Llama 3.1 asks for calls
    "{% for message in messages %}{% if 'tool_calls' in message %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}{% endif %}"
    "{{ '<' + message.role + '>' + message.content | trim }}{% endfor %}"
)


def test_a_conversation_from_a_table_is_the_same_as_without_its_nulls_and_parts(tmp_path: Path) -> None:
    """A table has every member in each message: what is null there was there for templates, which refused it."""
    model = write_model(tmp_path)
    (model / "chat_template.jinja").write_text(LLAMA)
    chat = Chat(model)
    nothing = {"tool_calls": None, "name": None}
    table: list[dict[str, Any]] = [
        {"role": "developer", "content": "Brief.", **nothing},
        {"role": "user", "content": [{"type": "text", "text": "1 +"}, {"type": "text", "text": " 1?"}], **nothing},
    ]
    plain = [{"role": "system", "content": "Brief."}, {"role": "user", "content": "1 + 1?"}]
    assert chat.prompt_ids(plain) == chat.prompt_ids(table) == chat.encode("<system>Brief.<user>1 + 1?")
    image: dict[str, Any] = {"role": "user", "content": [{"type": "image"}]}
    for broken in (image, {"role": "assistant", "content": "", "tool_calls": [1]}):
        with pytest.raises(Unrenderable, match="the model's chat template can't be rendered"):
            chat.prompt_ids([broken])


async def test_questions_rewards_and_split_come_from_the_task(tmp_path: Path) -> None:
    chat = Chat(write_model(tmp_path / "model"))
    changed = asyncio.Event()

    def source(position: int = 0, max_prompt_tokens: int = 200) -> PromptSource:
        return PromptSource(
            processes, chat, max_prompt_tokens=max_prompt_tokens, position=PromptPosition(position), changed=changed.set
        )

    async with task_processes(make_spec().rollout.prompts, tmp_path) as processes, asyncio.timeout(START_S):
        questions = [str(asked.prompt) for asked in await processes.prompts(0, 200)]
        first = questions[0]
        value = eval(first.partition("problem: ")[2].removesuffix("="))  # digits, plus and minus
        for response, reward in (
            (f"{MARK}{value}", 1.0),
            (f"{MARK}0{MARK}{value}\n", 1.0),
            (f"{MARK}{value + 1}", 0.0),
            (f"{value}", 0.0),  # no mark
            (f"{MARK}{value} I think", 0.0),  # the verifier gives it less than full marks
        ):
            assert reward == await processes.score(0, response), response
        held_out = await source().held_out(12)
        expected = dict.fromkeys(question for question in questions if is_held_out(question, percent=10))
        assert [chat.prompt_ids(question) for question in expected][:12] == [prompt.ids for prompt in held_out]
        with pytest.raises(NoPrompts, match="were longer than maxPromptTokens"):
            await source(max_prompt_tokens=3).held_out(1)
        assert 1000 == (await processes.data()).size
        assert (0, questions[0]) == (await processes.prompts(999, 2))[1][:2], "the data begins again"

        going, again = source(), source(position=990)
        makers = [asyncio.create_task(each.run()) for each in (going, again)]
        taken = [await _next(going, changed) for _ in range(100)]
        trained = [question for question in questions if not is_held_out(question, percent=10)]
        assert [chat.prompt_ids(question) for question in trained[:100]] == [prompt.ids for prompt in taken]
        round_the_end = [await _next(again, changed) for _ in range(30)]
        assert taken[0].ids in [prompt.ids for prompt in round_the_end if prompt.position >= 1000]
        assert [prompt.position % 1000 for prompt in round_the_end] == [prompt.index for prompt in round_the_end]
        for maker in makers:
            maker.cancel()
        await asyncio.wait(makers)


async def _next(source: PromptSource, changed: asyncio.Event) -> Prompt:
    while (prompt := source.take()) is None:
        changed.clear()
        await changed.wait()
    return prompt
