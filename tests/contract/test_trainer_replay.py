"""The reference trainer on recorded batches: what two replays of one recording leave is the same, bit by bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from contract.trainer_in_process import OneRank

from colocated_rl_rollout.batches import shard_path
from colocated_rl_rollout.recording import take_batch
from colocated_rl_trainer.conformance.shards import Sample, write_shards
from fakes.tiny_model import VOCABULARY, write_tiny_model

STEPS = 3


def record(folder: Path, *, seed: int) -> Path:
    """Batches of a job with two ranks."""
    folder.mkdir()
    chance = random.Random(seed)
    for step in range(1, STEPS + 1):
        samples = []
        for number in range(8):
            prompt = [chance.randrange(VOCABULARY) for _ in range(4)]
            response = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 12))]
            logp = [-chance.uniform(2.5, 5.0) for _ in response]
            samples.append(Sample(prompt, response, logp, chance.random(), number // 4, token_step=0))
        for shard, file in enumerate(write_shards(folder, samples, step=step, split=2)):
            file.rename(shard_path(folder, step, shard))
    return folder


def replay(folder: Path, recording: Path, model: Path) -> dict[str, torch.Tensor]:
    """By one rank, which takes the place of two."""
    folder.mkdir()
    trainer = OneRank(folder, model, learningRate=1e-3)
    for step in range(1, STEPS + 1):
        take_batch(recording, folder / "batches", step=step, shards=1)
        trainer.loop.train(step, shard_path(folder / "batches", step, 0), trainer)
    return trainer.weights


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("replay") / "model")


def test_two_replays_of_a_recording_leave_the_same_weights(model: Path, tmp_path: Path) -> None:
    recording = record(tmp_path / "recording", seed=1)
    first, second = (replay(tmp_path / name, recording, model) for name in ("first", "second"))
    assert dict.fromkeys(first, True) == {name: torch.equal(first[name], second[name]) for name in first}


def test_another_recording_leaves_others(model: Path, tmp_path: Path) -> None:
    one, other = (replay(tmp_path / f"{seed}", record(tmp_path / f"r{seed}", seed=seed), model) for seed in (1, 2))
    assert not all(torch.equal(one[name], other[name]) for name in one)
