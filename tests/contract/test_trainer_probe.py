"""The trainer's probe beside another implementation in bfloat16: transformers' eager attention on the weights exported.

What an engine would be in its place, for models whose logits are small and large, with tied and with untied embeddings.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from colocated_rl_agent.lanes.probe import ProbeDisagrees, require_agreement
from colocated_rl_api.weights import Probe
from colocated_rl_trainer.state.weights import load_model, probe
from fakes.tiny_model import write_tiny_model
from setup.layout import CHECKOUT

HIDDEN = 64


def make(directory: Path, *, seed: int, tied: bool, spread: float) -> Any:
    """Make a model whose logits have about this standard deviation, and return it."""
    write_tiny_model(directory, seed=seed, tied=tied, hidden=HIDDEN, layers=4, vocabulary=512)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head.mul_(spread / HIDDEN**0.5 / head.std())
    model.save_pretrained(directory)
    return model


def take_a_step(model: Any, directory: Path) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-3 * parameter.std() * torch.randn_like(parameter))
    model.save_pretrained(directory)


def both(directory: Path) -> tuple[Probe, Any]:
    """Return the trainer's probe of a model, and the other implementation with the same weights."""
    other = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="eager").eval()
    return probe(load_model(directory), torch.bfloat16), other


def judged(right: Probe, other: torch.nn.Module, noise_nats: float | None) -> float:
    """Return how far the other implementation is from the trainer, if it agrees. Raises ProbeDisagrees."""
    return require_agreement(right.logp, answered(other, right), noise_nats=noise_nats, is_exact=False)


def answered(model: torch.nn.Module, asked: Probe) -> list[float]:
    ids = torch.tensor([asked.input_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].float()
    found: list[float] = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    return found


LARGE_AND_UNTIED = (10.0, False)


@pytest.mark.parametrize(
    ("spread", "tied", "seeds"),
    [
        (*LARGE_AND_UNTIED, range(20)),
        pytest.param(*LARGE_AND_UNTIED, range(20, 100), marks=pytest.mark.release),
        *(
            pytest.param(*case, range(100), marks=pytest.mark.release)
            for case in itertools.product([0.5, 3.0, 10.0], [True, False])
            if case != LARGE_AND_UNTIED
        ),
    ],
)
def test_in_bfloat16_what_is_right_is_accepted_for_every_seed_and_two_layers_exchanged_for_none(
    tmp_path: Path, spread: float, tied: bool, seeds: Iterable[int]
) -> None:
    """The test leaves out where layers of a random model hardly matter: its head is its embeddings, and large."""
    layers_matter = not (tied and spread == 10.0)
    for seed in seeds:
        directory = tmp_path / str(seed)
        model = make(directory, seed=seed, tied=tied, spread=spread)
        noise = judged(*both(directory), None)
        take_a_step(model, directory)
        right, other = both(directory)
        noise = judged(right, other, noise)
        if layers_matter:
            layers = other.model.layers
            layers[1], layers[2] = layers[2], layers[1]
            with pytest.raises(ProbeDisagrees):
                judged(right, other, noise)


@pytest.mark.release
def test_a_trained_model_is_accepted_in_every_version_and_two_of_its_layers_exchanged_in_none(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """COLOCATED_RL_SEEDS is the number of versions. Each is a step of 1e-6 to 1e-3 an element away from the model."""
    shutil.copytree(CHECKOUT.trained_model, tmp_path / "model")
    noise, found = judged(*both(tmp_path / "model"), None), []
    for seed in range(int(os.environ.get("COLOCATED_RL_SEEDS", "5"))):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(CHECKOUT.trained_model, dtype=torch.float32)
        size = float(10 ** (-6 + 3 * torch.rand(())))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(size * torch.randn_like(parameter).sign())
        model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
        right, other = both(tmp_path / "model")
        noise = judged(right, other, noise)
        found.append(noise)
        layers = other.model.layers
        layers[9], layers[10] = layers[10], layers[9]
        with pytest.raises(ProbeDisagrees):
            judged(right, other, noise)
    record_property("nats", (min(found), max(found)))
