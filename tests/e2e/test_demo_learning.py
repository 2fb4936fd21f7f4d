"""The demo's figure can rise and can fail to: the same loop, once with the job's learning rate and once with 0.

In one process, with the trainer's loss and the demo's own model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from e2e.conftest import MODEL
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.arithmetic.loop import EvaluatedStep, Options, learn
from examples.arithmetic.verdict import ARITHMETIC

pytestmark = pytest.mark.release

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "examples/arithmetic/job.yaml"
NOISE = 0.09  # three standard errors of the difference of two evaluations of 400 answers at 0.25


def curve(*, learning_rate: float) -> list[EvaluatedStep]:
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    options = Options(steps=10, learning_rate=learning_rate, staleness=1, evaluate_every=10, held_out=400)
    return learn(model, tokenizer, options)


def test_held_out_exact_match_rises_with_the_jobs_learning_rate() -> None:
    rate = yaml.safe_load(JOB.read_text())["spec"]["trainer"]["config"]["learningRate"]
    first, last = curve(learning_rate=rate)
    assert first.exact_match <= ARITHMETIC.start_at_most
    assert last.exact_match >= ARITHMETIC.target - NOISE  # after a third of the job's steps


def test_held_out_exact_match_does_not_rise_with_learning_rate_0() -> None:
    first, last = curve(learning_rate=0.0)
    assert abs(last.exact_match - first.exact_match) < NOISE
