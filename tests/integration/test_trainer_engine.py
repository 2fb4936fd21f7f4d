"""Trainer and engine agree on log-probabilities: of tokens the real engine has just sampled, at every version.

One loop as a job has it, without the job: SGLang samples, the reference trainer takes a step and exports, SGLang loads.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from contract.trainer_in_process import OneRank

from colocated_rl_agent.drivers.base import OutcomeUnknown
from colocated_rl_agent.drivers.sglang import SGLang, engine_command, engine_config
from colocated_rl_agent.probe import ProbeDisagrees, require_agreement
from colocated_rl_api.ladder import WeightVersion
from fakes.engine_model import write_engine_export
from fakes.pod import free_ports
from fakes.shards import Sample
from setup.layout import CHECKOUT

ADMIN_KEY = "admin-key-of-an-integration-test"
START_S = 300.0
TEMPERATURE = 0.8
PROMPTS = [[5, 6, 7, 8], [40, 41], [100, 3, 100, 3, 100, 3], [250, 251, 252]]
STEPS = 3
CPU_FLAGS = (
    "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--disable-overlap-schedule",
    "--max-total-tokens", "8192", "--log-level", "warning",
)  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_engine_export(tmp_path / "model", version=WeightVersion(0, 1), seed=0)


@dataclass(frozen=True)
class Server:
    url: str
    process: subprocess.Popen[bytes]
    output: Path


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Server]:
    """The real engine on the starting weights, as the agent starts it; perhaps not up yet."""
    (port,) = free_ports(1)
    config, output = tmp_path / "engine.yaml", tmp_path / "output"
    config.write_text(engine_config(ADMIN_KEY))
    command = engine_command(
        model=model, version=WeightVersion(0, 1), port=port, config=config, gpus=0, extra=CPU_FLAGS
    )
    environment = {
        "PATH": f"{CHECKOUT.environment('gpu') / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HOME": str(tmp_path),
        **{name: value for name, value in command.env.items() if value is not None},
    }
    with output.open("wb") as stream:
        process = subprocess.Popen(command.argv, env=environment, stdout=stream, stderr=stream, start_new_session=True)
    try:
        yield Server(f"http://127.0.0.1:{port}", process, output)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@pytest.fixture
async def engine(server: Server) -> AsyncIterator[SGLang]:
    async with aiohttp.ClientSession() as session:
        driver = SGLang(session, url=server.url, admin_key=ADMIN_KEY, call_s=60)
        async with asyncio.timeout(START_S):
            while not await _answers(driver):
                assert server.process.poll() is None, server.output.read_text()[-4000:]
                await asyncio.sleep(0.2)
        yield driver


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
    told = trainer.loop.export(_folder(tmp_path / "weights/0-1"))
    for step in range(1, STEPS + 1):
        metrics = trainer.train(await rollout(engine, token_step=step - 1), temperature=TEMPERATURE)
        assert metrics["mismatch_mean"] < 1e-4
        assert metrics["mismatch_max"] < 1e-3

        stale, version = told, WeightVersion(step, 1)
        told = trainer.loop.export(_folder(tmp_path / "weights" / str(version)))
        assert told is not None
        assert stale is not None
        await engine.update(tmp_path / "weights" / str(version), version)
        found = await engine.input_logprobs(told.input_ids)
        assert require_agreement(told.logp, found, dtype="float32") < 1e-4
        with pytest.raises(ProbeDisagrees):
            require_agreement(stale.logp, found, dtype="float32")


async def _answers(engine: SGLang) -> bool:
    try:
        return await engine.is_up()
    except OutcomeUnknown:  # does not listen yet
        return False


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path
