"""The base of a person's own loop: what it does besides the step that they write."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from contract.trainer_in_process import only_rank
from safetensors.torch import load_file
from torch.optim import AdamW, Optimizer

from colocated_rl_trainer.conformance.ranks import TrainerGroup, TrainerKind
from colocated_rl_trainer.conformance.shards import Example, write_shards
from colocated_rl_trainer.protocol.rank import Rank
from colocated_rl_trainer.protocol.settings import ConfigError
from colocated_rl_trainer.state.weights import load_model
from examples.own_trainer.trainer import Reinforce
from fakes.tiny_model import VOCABULARY, write_tiny_model
from setup.layout import CHECKOUT

EXAMPLE = CHECKOUT.root / "examples/own_trainer/trainer.py"


class WithMoments(Reinforce):
    def make_optimizer(self) -> Optimizer:
        return AdamW(self.model.parameters(), lr=1e-3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def make_samples(step: int) -> list[Example]:
    chance = random.Random(step)
    samples = []
    for number in range(12):
        prompt, response = ([chance.randrange(VOCABULARY) for _ in range(chance.randint(2, 8))] for _ in range(2))
        samples.append(Example(prompt, response, [-3.0] * len(response), chance.random(), number // 4, step - 1))
    return samples


def train(loop: Reinforce, folder: Path, step: int) -> None:
    (shard,) = write_shards(folder, make_samples(step), step=step, split=1)
    loop.train(step, shard, Rank(rank=0, lineage=1, writes_weights=True))


@pytest.mark.parametrize(
    ("offload", "moves"), [(["Parameters", "Gradients", "Optimizer"], 1), (["Optimizer", "Gradients"], 0)]
)
def test_model_leaves_the_device_if_the_job_says_so(
    model: Path, tmp_path: Path, offload: list[str], moves: int
) -> None:
    settings = only_rank(tmp_path, model, {})
    job = json.loads(settings.job.read_bytes())
    job["spec"]["trainer"] = {"offload": offload}
    settings.job.write_text(json.dumps(job))
    loop = Reinforce(settings)
    loop.load()
    moved: list[torch.device] = []
    loop.model.to = moved.append  # recorded, and not moved

    loop.offload()

    assert [torch.device("cpu")] * moves == moved


def test_example_does_the_step_that_it_says(model: Path, tmp_path: Path) -> None:
    loop = Reinforce(only_rank(tmp_path, model, {}))
    assert 0 == loop.load()
    train(loop, tmp_path, 1)

    plain = load_model(model)
    samples = make_samples(1)
    rewards = {s.group: torch.tensor([t.reward for t in samples if t.group == s.group]) for s in samples}
    loss = torch.zeros(())
    for sample in samples:
        ids = torch.tensor([[*sample.prompt, *sample.response]])
        logp = torch.log_softmax(plain(input_ids=ids).logits[0], -1)
        spread = rewards[sample.group].std() + 1e-4
        for place, token in enumerate(sample.response, start=len(sample.prompt)):
            loss -= (sample.reward - rewards[sample.group].mean()) / spread * logp[place - 1, token]
    (loss / sum(len(sample.response) for sample in samples)).backward()
    for expected, moved in zip(plain.parameters(), loop.model.parameters(), strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(moved, expected - 0.01 * expected.grad)


def test_optimizer_goes_on_from_its_checkpoint(model: Path, tmp_path: Path) -> None:
    settings = only_rank(tmp_path, model, {})
    undisturbed = WithMoments(settings)
    undisturbed.load()
    for step in (1, 2):
        train(undisturbed, tmp_path, step)
        undisturbed.save(step, keep=1) if step == 1 else None

    again = WithMoments(settings)
    assert 1 == again.load()
    train(again, tmp_path, 2)

    for expected, parameter in zip(undisturbed.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(expected, parameter)


def test_checkpoint_of_another_model_is_refused_with_both_sizes(model: Path, tmp_path: Path) -> None:
    """The message could not be made of what was counted, and the trainer ended with that error."""
    settings = only_rank(tmp_path, model, {})
    loop = WithMoments(settings)
    loop.load()
    loop.save(1, keep=1)
    larger = write_tiny_model(tmp_path / "larger", layers=3)
    with pytest.raises(ConfigError, match=r"is of a model of \d+,\d+ parameters, and spec\.model has \d+,\d+: name"):
        WithMoments(replace(settings, model=larger)).load()


def test_the_split_among_ranks_changes_nothing_but_rounding(model: Path, tmp_path: Path) -> None:
    alone = Reinforce(only_rank(tmp_path, model, {}))
    alone.load()
    train(alone, tmp_path, 1)

    with TrainerGroup(TrainerKind("own", [sys.executable, str(EXAMPLE)], model, {}), tmp_path, size=2) as group:
        group.wait_loaded()
        group.onload()
        group.train(1, write_shards(tmp_path, make_samples(1), step=1, split=[0] * 11 + [1]))
        exported = [load_file(folder / "model.safetensors") for folder in group.export(1)]

    for name, expected in alone.model.named_parameters():
        torch.testing.assert_close(exported[0][name], expected.detach())
        assert torch.equal(exported[0][name], exported[1][name])
