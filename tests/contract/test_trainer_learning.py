"""The default trainer learns from rewards alone, also on samples of older weights; with learning rate 0 it does not.

The task: write the prompt's token, three times. A random model is right once in `VOCABULARY`; torch itself samples.
"""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from contract.trainer_in_process import RankInProcess

from colocated_rl_trainer.conformance.shards import Example
from fakes.tiny_model import VOCABULARY, write_tiny_model

GROUPS, GROUP_SIZE, RESPONSE = 16, 16, 3
BEGINNING = 2  # of every prompt
FIRST_PROMPT, PROMPTS = 3, 8
STEPS = 30
CONFIG: dict[str, object] = {"learningRate": 1e-2, "warmupSteps": 3, "minibatches": 2, "seed": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def test_it_learns_from_rewards(model: Path, tmp_path: Path) -> None:
    rewards = run(tmp_path, model, CONFIG)

    assert rewards[0] < 0.1
    assert 0.9 < rewards[-1]


def test_it_learns_from_samples_that_are_a_step_old(model: Path, tmp_path: Path) -> None:
    assert 0.9 < run(tmp_path, model, CONFIG, staleness=1)[-1]


def test_without_learning_rate_nothing_is_learned(model: Path, tmp_path: Path) -> None:
    rewards = run(tmp_path, model, CONFIG | {"learningRate": 0})

    assert max(rewards) < 0.1


def run(folder: Path, model: Path, config: dict[str, object], *, staleness: int = 0) -> list[float]:
    """Mean reward of each step's batch."""
    trainer = RankInProcess(folder, model, **config)
    policies = deque([deepcopy(trainer.loop.model)], maxlen=staleness + 1)
    chance = torch.Generator().manual_seed(0)
    rewards = []
    for step in range(1, STEPS + 1):
        samples = sample(policies[0], chance, token_step=max(0, step - 1 - staleness))
        rewards.append(trainer.train(samples)["reward"])
        policies.append(deepcopy(trainer.loop.model))
    return rewards


@torch.no_grad()
def sample(policy: torch.nn.Module, chance: torch.Generator, *, token_step: int) -> list[Example]:
    asked = torch.randint(FIRST_PROMPT, FIRST_PROMPT + PROMPTS, (GROUPS,), generator=chance).repeat_interleave(
        GROUP_SIZE
    )
    ids = torch.stack([torch.full_like(asked, BEGINNING), asked], dim=1)
    logps = []
    for _ in range(RESPONSE):
        logp = torch.log_softmax(policy(input_ids=ids).logits[:, -1], -1)
        token = torch.multinomial(logp.exp(), 1, generator=chance)
        logps.append(logp.gather(1, token))
        ids = torch.cat([ids, token], dim=1)
    right = (ids[:, 2:] == asked[:, None]).float().mean(1)
    return [
        Example(row[:2], row[2:], logp, reward, number // GROUP_SIZE, token_step)
        for number, (row, logp, reward) in enumerate(
            zip(ids.tolist(), torch.cat(logps, dim=1).tolist(), right.tolist(), strict=True)
        )
    ]


assert FIRST_PROMPT + PROMPTS <= VOCABULARY
