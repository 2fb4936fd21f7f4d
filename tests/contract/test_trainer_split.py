"""However a batch is split, among 1, 2 or 4 ranks and into forward passes of any size: the gradient is the same.

Every loss is compared, at the gradient before the optimizer and at the parameters after one step of SGD at learning
rate 1, which are the parameters before it less the gradient.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from colocated_rl_trainer.conformance.ranks import Launch, TrainerGroup, TrainerKind
from colocated_rl_trainer.conformance.shards import Example, write_shards
from fakes.tiny_model import VOCABULARY, write_tiny_model
from fakes.watched_trainer import fork

SAMPLES = 32
SAME = 1e-5  # of the norm
CONFIG: dict[str, object] = {"optimizer": "SGD", "learningRate": 1.0, "gradientClip": 1e9, "threads": 1}
LOSSES: dict[str, dict[str, object]] = {
    "grpo": {"average": "Sequences"},
    "dapo": {"average": "Tokens", "klCoefficient": 0.2, "maxTokenAge": 1},
    "dr-grpo": {"average": "Limit", "advantage": "Mean"},
}
Tensors = Mapping[str, torch.Tensor]


def make_samples() -> list[Example]:
    chance = random.Random(11)
    samples = []
    for number in range(SAMPLES):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(2, 8))]
        response = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 20))]
        logp = [-chance.uniform(2.5, 5.0) for _ in response]
        samples.append(Example(prompt, response, logp, chance.random(), number // 4, chance.randrange(3)))
    return samples


class DividedSteps:
    """One step of each division, done once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_tiny_model(folder / "model")
        self._done: dict[str, tuple[Tensors, Tensors]] = {}

    def of(self, loss: str, *, ranks: int, split: str = "in turn", **config: object) -> tuple[Tensors, Tensors]:
        """Gradient, and weights afterwards."""
        name = "-".join([loss, str(ranks), split, *(f"{key}{value}" for key, value in config.items())])
        if name not in self._done:
            folder = self.folder / name
            folder.mkdir()
            self._done[name] = self._train(folder, ranks, split, CONFIG | LOSSES[loss] | config)
        return self._done[name]

    def _train(self, folder: Path, ranks: int, split: str, config: Mapping[str, object]) -> tuple[Tensors, Tensors]:
        def launch(environment: dict[str, str], log: Path) -> Launch:
            return fork(environment, log, gradients=folder)

        dealt = [number % ranks for number in range(SAMPLES)]
        if split == "uneven":
            dealt = [min(number // 3, ranks - 1) for number in range(SAMPLES)]
        files = write_shards(folder, make_samples(), step=3, split=dealt)
        kind = TrainerKind("grpo", [], self.model, config, has_reference="klCoefficient" in config)
        with TrainerGroup(kind, folder, size=ranks, launch=launch) as group:
            group.wait_loaded()
            group.onload()
            for step in (1, 2):  # of nothing, so that tokens of the third may be old
                group.train(step, write_shards(folder, [], step=step, split=ranks))
            group.train(3, files)
            (weights, *_) = group.export(3)
            gradients = [load_file(folder / f"step-3-update-1-rank-{rank}.safetensors") for rank in range(ranks)]
            for other in gradients[1:]:
                assert all(torch.equal(tensor, other[name]) for name, tensor in gradients[0].items())
            return gradients[0], load_file(weights / "model.safetensors")


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> DividedSteps:
    return DividedSteps(tmp_path_factory.mktemp("split"))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "division",
    [
        {"ranks": 1, "microBatchTokens": 20},
        {"ranks": 2, "microBatchTokens": 100, "trainingState": "Replicated"},
        {"ranks": 2, "split": "uneven"},
        {"ranks": 4, "microBatchTokens": 40},
        {"ranks": 1, "packing": True, "microBatchTokens": 90},
    ],
    ids=lambda division: " ".join(map(str, division.values())),
)
def test_gradient_and_step_are_those_of_one_rank_and_one_pass(
    steps: DividedSteps, loss: str, division: dict[str, object]
) -> None:
    gradient, weights = steps.of(loss, **division)  # type: ignore[arg-type]

    expected_gradient, expected_weights = steps.of(loss, ranks=1)
    begin = load_file(steps.model / "model.safetensors")
    assert _norm(expected_gradient) > 1e-3
    assert _apart(gradient, expected_gradient) < SAME * _norm(expected_gradient)
    assert _apart(weights, expected_weights) < SAME * _apart(begin, expected_weights)
    assert _norm(expected_gradient) == pytest.approx(_apart(begin, expected_weights), rel=1e-4)


def _apart(tensors: Tensors, others: Tensors) -> float:
    assert tensors.keys() == others.keys()
    return _norm({name: tensor.double() - others[name].double() for name, tensor in tensors.items()})


def _norm(tensors: Tensors) -> float:
    return float(sum(float(tensor.double().square().sum()) for tensor in tensors.values()) ** 0.5)
