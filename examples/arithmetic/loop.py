"""The demo's learning without the system around it: one process, no engine, no switch; the trainer's own loss.

For choosing the job's options and for the test that shows that the figure can fail: with learning rate 0 it stays
where it is. It is not what the demo runs, and no figure of the demo comes from here.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from colocated_rl_trainer.grpo.loss import group_advantage, importance_ratio, policy_loss
from examples.arithmetic.sampling import Response, encode_prompt, exact_match, response_logp, sample, score
from examples.arithmetic.task import SumQuestion, problems


@dataclass(frozen=True)
class Options:
    """Options as in `job.yaml`. `staleness` is the age of every sample's weights, the highest that a job allows."""

    steps: int = 40
    batch_size: int = 32
    group_size: int = 8
    learning_rate: float = 1e-4
    warmup_steps: int = 5
    minibatches: int = 2
    clip_low: float = 0.2
    clip_high: float = 0.28
    importance_cap: float = 2.0
    gradient_clip: float = 1.0
    staleness: int = 0
    seed: int = 0
    evaluate_every: int = 10
    held_out: int = 512


@dataclass(frozen=True)
class BatchRow:
    """One row of a batch."""

    prompt: list[int]
    response: Response
    advantage: float
    reward: float


@dataclass(frozen=True)
class EvaluatedStep:
    step: int
    exact_match: float


Report = Callable[[str], None]


def learn(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, options: Options, report: Report = lambda _: None
) -> list[EvaluatedStep]:
    """Train the model in place; its held-out exact match before the first step, every few steps and after the last."""
    generator = torch.Generator().manual_seed(options.seed)
    held_out = problems(options.held_out, seed=5, held_out=True)
    prompts = _prompts(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    past = deque([copy.deepcopy(model.state_dict())], maxlen=options.staleness + 1)
    sampler = copy.deepcopy(model)
    curve: list[EvaluatedStep] = []

    def evaluate(step: int) -> None:
        share = exact_match(model, tokenizer, held_out, generator=torch.Generator().manual_seed(step))
        curve.append(EvaluatedStep(step, share))
        report(f"step {step:3d}: held-out exact match {share:.3f}")

    evaluate(0)
    for step in range(1, options.steps + 1):
        sampler.load_state_dict(past[0])
        batch = _sample_batch(sampler, tokenizer, next(prompts), options, generator)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, step / max(1, options.warmup_steps))
        _train(model, optimizer, batch, options)
        past.append(copy.deepcopy(model.state_dict()))
        report(f"step {step:3d}: reward {sum(one.reward for one in batch) / len(batch):.3f}")
        if step % options.evaluate_every == 0 or step == options.steps:
            evaluate(step)
    return curve


def _prompts(options: Options) -> Iterator[list[SumQuestion]]:
    pool = problems(options.steps * options.batch_size, seed=50_000_000 + 1_000_000 * options.seed)
    for start in range(0, len(pool), options.batch_size):
        yield pool[start : start + options.batch_size]


def _sample_batch(
    sampler: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    chosen: list[SumQuestion],
    options: Options,
    generator: torch.Generator,
) -> list[BatchRow]:
    rows = [problem for problem in chosen for _ in range(options.group_size)]
    prompts = [ids for problem in chosen for ids in [encode_prompt(tokenizer, problem)] * options.group_size]
    responses = sample(sampler, prompts, end=tokenizer.eos_token_id, generator=generator)
    rewards = torch.tensor([score(tokenizer, *pair) for pair in zip(responses, rows, strict=True)])
    groups = rewards.view(-1, options.group_size)
    mean = groups.mean(1, keepdim=True).expand_as(groups).flatten()
    spread = groups.std(1, keepdim=True, unbiased=False).expand_as(groups).flatten()
    advantages = group_advantage(rewards, mean, spread, torch.full_like(rewards, options.group_size))
    return [BatchRow(*row) for row in zip(prompts, responses, advantages.tolist(), rewards.tolist(), strict=True)]


def _train(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, batch: list[BatchRow], options: Options) -> None:
    """One step: one pass over the batch, groups dealt to the minibatches in turn."""
    model.train()
    proximal = _token_logp(model, batch)[0].detach()
    groups = [number // options.group_size for number in range(len(batch))]
    for minibatch in range(options.minibatches):
        mine = [number for number, group in enumerate(groups) if group % options.minibatches == minibatch]
        rows = [batch[number] for number in mine]
        policy, behaviour, mask, advantage = _token_logp(model, rows)
        began = proximal[torch.tensor(mine), : policy.shape[1]]
        real = mask.bool()
        importance = importance_ratio(began[real], behaviour[real], cap=options.importance_cap)
        loss = policy_loss(
            policy[real],
            began[real],
            advantage.expand_as(mask)[real],
            importance,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss.total / mask.sum())
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.gradient_clip)
        optimizer.step()


def _token_logp(model: Qwen3ForCausalLM, rows: list[BatchRow]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Policy and behaviour log-probabilities, mask of real tokens, [rows, tokens]; advantages, [rows, 1]."""
    logp, mask = response_logp(model, [row.prompt for row in rows], [row.response.tokens for row in rows])
    behaviour = torch.zeros_like(logp)
    for place, row in enumerate(rows):
        behaviour[place, : len(row.response.logp)] = torch.tensor(row.response.logp)
    return logp, behaviour, mask, torch.tensor([[row.advantage] for row in rows])
