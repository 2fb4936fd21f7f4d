"""The default trainer on recorded batches: what two replays of one recording leave is the same, bit by bit.

With more or fewer ranks from some step on it is the same but for rounding.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from contract.trainer_in_process import RankInProcess
from contract.trainer_ranks_in_process import UnwatchedTrainer, in_ranks

from colocated_rl_rollout.store.batches import shard_path, take_places
from colocated_rl_rollout.store.recording import deal_anew, take_batch
from colocated_rl_trainer.conformance.shards import Example, write_shards
from colocated_rl_trainer.state.sharding import whole
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
            samples.append(Example(prompt, response, logp, chance.random(), number // 4, token_step=0))
        for shard, file in enumerate(write_shards(folder, samples, step=step, split=2)):
            file.rename(shard_path(folder, step, shard))
    return folder


def replay(folder: Path, recording: Path, model: Path) -> dict[str, torch.Tensor]:
    """Replay the recording with one rank, which takes the place of two."""
    folder.mkdir()
    trainer = RankInProcess(folder, model, learningRate=1e-3)
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


# ------------------------------------------------------------------------------------------------- more or fewer ranks
def train_to(trainer: UnwatchedTrainer, last: int) -> dict[str, torch.Tensor]:
    """Train to a step on the files of the trainer's job. Returns whole parameters and moments."""
    batches = trainer._settings.checkpoints.parent / "batches"
    for step in range(trainer.step + 1, last + 1):
        trainer.train(step, shard_path(batches, step, trainer.rank), trainer)
        trainer.offload()
        trainer.save(step, 2)
        trainer.onload()
    return {name: whole(tensor).clone() for name, tensor in trainer._state.saved().items()}


def train_one(trainer: UnwatchedTrainer) -> None:
    train_to(trainer, 1)


def train_all(trainer: UnwatchedTrainer) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in train_to(trainer, STEPS).items()}


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_job_goes_on_with_another_number_of_ranks_as_it_would_have_with_the_former(
    model: Path, tmp_path: Path, before: int, after: int
) -> None:
    """The job continues after step 1, with batches that were sealed for the former number."""
    recording, config = record(tmp_path / "recording", seed=1), {"learningRate": 1e-3}
    taken = {}
    for name in ("undisturbed", "resized"):
        (tmp_path / name).mkdir()
        for step in range(1, STEPS + 1):
            taken[step] = take_batch(recording, tmp_path / name / "batches", step=step, shards=before).record
    expected, *_ = in_ranks(before, tmp_path / "undisturbed", model, train_all, **config)

    in_ranks(before, tmp_path / "resized", model, train_one, **config)
    for step in range(2, STEPS + 1):
        dealt = deal_anew(tmp_path / "resized/batches", taken[step], shards=after)
        take_places(tmp_path / "resized/batches", dealt)
    found, *_ = in_ranks(after, tmp_path / "resized", model, train_all, **config)

    assert expected.keys() == found.keys()
    for name in expected:
        ours, theirs = torch.tensor(found[name]), torch.tensor(expected[name])
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm(), name
