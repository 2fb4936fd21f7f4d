"""Trainer and engine agree on log-probabilities: of tokens the real engine has just sampled, at every version.

One loop as a job has it, without the job: SGLang samples, the reference trainer takes a step and exports, SGLang loads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from contract.trainer_in_process import OneRank

from colocated_rl_agent.drivers.sglang import SGLang
from colocated_rl_agent.probe import ProbeDisagrees, require_agreement
from colocated_rl_api.ladder import WeightVersion
from colocated_rl_api.weights import Probe
from colocated_rl_trainer.conformance.shards import Sample
from engines import ADMIN_KEY, engine_process
from fakes.engine_model import write_engine_export

TEMPERATURE = 0.8
PROMPTS = [[5, 6, 7, 8], [40, 41], [100, 3, 100, 3, 100, 3], [250, 251, 252]]
STEPS = 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_engine_export(tmp_path / "model", version=WeightVersion(0, 1), seed=0)


@pytest.fixture
async def engine(model: Path, tmp_path: Path) -> AsyncIterator[SGLang]:
    """The real one on the starting weights."""
    start = WeightVersion(0, 1)
    with engine_process(model, version=start, root=tmp_path, flags=("--max-total-tokens", "8192")) as it:
        await asyncio.to_thread(it.wait_until_up)
        async with aiohttp.ClientSession() as session:
            yield SGLang(session, url=it.url, admin_key=ADMIN_KEY, call_s=60)


async def rollout(engine: SGLang, *, token_step: int) -> list[Sample]:
    """Four samples of each prompt; even tokens are worth something."""
    async with aiohttp.ClientSession() as session:

        async def one(group: int) -> Sample:
            limits = {"max_new_tokens": 12, "temperature": TEMPERATURE, "ignore_eos": True}
            body = {"input_ids": PROMPTS[group], "return_logprob": True, "sampling_params": limits}
            async with session.post(f"{engine.url}/generate", json=body) as answer:
                answer.raise_for_status()
                content = await answer.json()
            tokens: list[int] = content["output_ids"]
            logp = [entry[0] for entry in content["meta_info"]["output_token_logprobs"]]
            reward = sum(token % 2 == 0 for token in tokens) / len(tokens)
            return Sample(PROMPTS[group], tokens, logp, reward, group, token_step)

        return await asyncio.gather(*(one(number % len(PROMPTS)) for number in range(4 * len(PROMPTS))))


async def test_trainer_and_engine_agree_at_every_version(engine: SGLang, model: Path, tmp_path: Path) -> None:
    trainer = OneRank(tmp_path, model, learningRate=1e-2, minibatches=2)
    told = exported(trainer, tmp_path / "weights/0-1")
    for step in range(1, STEPS + 1):
        metrics = trainer.train(await rollout(engine, token_step=step - 1), temperature=TEMPERATURE)
        assert metrics["mismatch_mean"] < 1e-4
        assert metrics["mismatch_max"] < 1e-3

        stale, version = told, WeightVersion(step, 1)
        told = exported(trainer, tmp_path / "weights" / str(version))
        await engine.update(tmp_path / "weights" / str(version), version)
        found = await engine.input_logprobs(told.input_ids)
        assert require_agreement(told.logp, found, dtype="float32") < 1e-4
        with pytest.raises(ProbeDisagrees):
            require_agreement(stale.logp, found, dtype="float32")


def exported(trainer: OneRank, directory: Path) -> Probe:
    directory.mkdir(parents=True)
    told = trainer.loop.export(directory)
    assert told is not None
    assert told.probe is not None
    return told.probe
