"""Sampling from the model and scoring its responses with torch alone, in one process.

For the warm-up's own probes and for the learning test without an engine. The demo samples with the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.arithmetic.task import SumQuestion, reward

MAX_RESPONSE_TOKENS = 48
ROWS_AT_ONCE = 256


class Response(NamedTuple):
    """Sampled tokens, with the end token if it came, and the log-probability of each."""

    tokens: list[int]
    logp: list[float]
    ended: bool


def encode_prompt(tokenizer: PreTrainedTokenizerFast, problem: SumQuestion) -> list[int]:
    """Token ids of the question in the chat template, ready for the answer."""
    message = [{"role": "user", "content": problem.question}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM, prompts: Sequence[Sequence[int]], *, end: int, generator: torch.Generator
) -> list[Response]:
    """One response to each prompt at temperature 1."""
    model.eval()
    ids, mask, positions = _left_padded(prompts)
    cache = DynamicCache(config=model.config)
    logits = _forward(model, ids, mask, positions, cache=cache, keep=1)[:, -1]
    rows, position = list(range(len(prompts))), positions[:, -1:]
    tokens: list[list[int]] = [[] for _ in prompts]
    logps: list[list[float]] = [[] for _ in prompts]
    for _ in range(MAX_RESPONSE_TOKENS):
        logp = logits.float().log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1, generator=generator)
        chosen = logp.gather(1, token)
        for row, one, one_logp in zip(rows, token[:, 0].tolist(), chosen[:, 0].tolist(), strict=True):
            tokens[row].append(one)
            logps[row].append(one_logp)
        going = (token[:, 0] != end).nonzero()[:, 0]
        if len(going) == 0:
            break
        if len(going) < len(rows):
            rows = [rows[place] for place in going.tolist()]
            cache.batch_select_indices(going)
            token, mask, position = token[going], mask[going], position[going]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        position = position + 1
        logits = _forward(model, token, mask, position, cache=cache, keep=1)[:, -1]
    return [Response(one, logp, one[-1] == end) for one, logp in zip(tokens, logps, strict=True)]


def response_logp(
    model: Qwen3ForCausalLM, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Log-probability of each response token under the model, [rows, longest response], and the mask of real tokens."""
    before, after = max(map(len, prompts)), max(map(len, responses))
    ids = torch.zeros(len(prompts), before + after, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        span = slice(before - len(prompt), before + len(response))
        ids[row, span] = torch.tensor([*prompt, *response])
        mask[row, span] = 1
    logits = _forward(model, ids, mask, _positions(mask), cache=None, keep=after + 1)[:, :-1]
    logp = logits.float().log_softmax(-1).gather(2, ids[:, before:, None])[:, :, 0]
    return logp, mask[:, before:].float()


def exact_match(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    asked: Sequence[SumQuestion],
    *,
    generator: torch.Generator,
) -> float:
    """Share of the problems whose one sampled response ends by itself and is right."""
    right = 0.0
    for start in range(0, len(asked), ROWS_AT_ONCE):
        part = asked[start : start + ROWS_AT_ONCE]
        prompts = [encode_prompt(tokenizer, problem) for problem in part]
        responses = sample(model, prompts, end=tokenizer.eos_token_id, generator=generator)
        right += sum(score(tokenizer, *pair) for pair in zip(responses, part, strict=True))
    return right / len(asked)


def score(tokenizer: PreTrainedTokenizerFast, response: Response, problem: SumQuestion) -> float:
    """Reward of a response: as the task's, and 0.0 if it was cut off."""
    text = str(tokenizer.decode(response.tokens, skip_special_tokens=True))
    return reward(text, problem) if response.ended else 0.0


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask, _positions(mask)


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def _forward(model: Any, ids: Tensor, mask: Tensor, positions: Tensor, *, cache: Any, keep: int) -> Tensor:
    output = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=keep)
    logits: Tensor = output.logits
    return logits
