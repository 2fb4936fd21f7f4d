"""The head in float32 on both sides: the real engine's `--enable-fp32-lm-head` beside the trainer's `fp32LmHead`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from colocated_rl_agent.drivers.sglang import SGLang
from colocated_rl_agent.lanes.probe import require_agreement
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_trainer.state.weights import load_model, probe
from engines import ADMIN_KEY, engine_process
from fakes.engine_model import write_engine_export

VERSION = WeightVersion(0, 1)
SPREAD = 30.0  # of logits, about: a rounding of logits to bfloat16 then shows
GRID = 2.0**-3  # of a number between 16 and 32 in bfloat16; larger ones have a coarser one
FLAGS = ("--dtype", "bfloat16", "--enable-fp32-lm-head", "--max-total-tokens", "4096")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16 whose last norm makes logits large."""
    directory = write_engine_export(tmp_path_factory.mktemp("model") / str(VERSION), version=VERSION, seed=0)
    made = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        made.model.norm.weight.fill_(SPREAD)
    made.to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture
async def engine(model: Path, tmp_path: Path) -> AsyncIterator[SGLang]:
    with engine_process(model, version=VERSION, root=tmp_path, flags=FLAGS) as process:
        process.wait_until_up()
        async with aiohttp.ClientSession() as session:
            yield SGLang(session, url=process.url, admin_key=ADMIN_KEY, call_s=120.0)


async def test_engine_and_trainer_with_a_head_in_float32_agree_better_than_with_one_that_rounds(
    engine: SGLang, model: Path, record_property: Callable[[str, object], None]
) -> None:
    right, rounding = (probe(load_model(model), torch.bfloat16, float32_head=each) for each in (True, False))
    found = await engine.input_logprobs(right.input_ids)
    near, far = (require_agreement(each.logp, found, noise_nats=None, is_exact=False) for each in (right, rounding))
    record_property("nats", (near, far))
    assert near < far
    assert 0.5 > await share_on_the_grid(engine, right.input_ids)


async def share_on_the_grid(engine: SGLang, ids: Sequence[int]) -> float:
    """Return at how many places the two likeliest tokens differ as numbers in bfloat16 do; all, if logits are those."""
    limits = {"max_new_tokens": 1, "temperature": 1.0}
    asked = {"input_ids": list(ids), "sampling_params": limits, "return_logprob": True, "logprob_start_len": 0}
    answer = await engine._call("POST", "/generate", asked | {"top_logprobs_num": 2})
    tops: list[tuple[float, float]] = [
        (first[0], second[0]) for first, second in filter(None, answer["meta_info"]["input_top_logprobs"])
    ]
    assert len(tops) > 50
    steps: list[float] = [(first - second) / GRID for first, second in tops]
    return sum(abs(step - round(step)) < 0.01 for step in steps) / len(steps)
