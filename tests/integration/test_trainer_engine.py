"""Trainer and engine agree on log-probabilities: of tokens the real engine has just sampled, at every version.

One loop as a job has it, without the job: SGLang samples, the default trainer takes a step and exports, SGLang loads.
Also of a sample that goes on over several of these, each of its tokens with the weights that it names. And of a mixture
of experts, and of merged adapters, with which the engine says what peft does.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import torch
from contract.test_engine_experts import NOTHING_TO_PIN
from contract.test_trainer_experts import name_experts
from contract.test_trainer_lora import ask_peft
from contract.trainer_in_process import RankInProcess
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from colocated_rl_agent.drivers.sglang import SGLang
from colocated_rl_agent.files.exports import verify_export
from colocated_rl_agent.lanes.probe import ProbeDisagrees, require_agreement
from colocated_rl_api.job import ROUTED_EXPERTS
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.weights import Probe, finished_model
from colocated_rl_rollout.rules.resume import join, read_answer, read_experts
from colocated_rl_rollout.rules.samples import Tokens
from colocated_rl_trainer.conformance.shards import Example
from colocated_rl_trainer.grpo.loss import token_logp
from colocated_rl_trainer.protocol.finished import save_final_model
from colocated_rl_trainer.protocol.manifest import Exported, write_manifest
from colocated_rl_trainer.state.export import ADAPTERS, write_model
from colocated_rl_trainer.state.weights import load_model
from engines import ADMIN_KEY, engine_process
from fakes.engine_model import write_engine_export

TEMPERATURE = 0.8
PROMPTS = [[5, 6, 7, 8], [40, 41], [100, 3, 100, 3, 100, 3], [250, 251, 252]]
STEPS = 3
CONTINUED = 16  # tokens


@pytest.fixture
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A mixture of experts where the test asks for one."""
    is_mixture = getattr(request, "param", "dense") == "mixture"
    return write_engine_export(tmp_path / "model", version=WeightVersion(0, 1), seed=0, mixture=is_mixture)


@pytest.fixture
async def engine(model: Path, tmp_path: Path) -> AsyncIterator[SGLang]:
    """The real one on the starting weights."""
    start = WeightVersion(0, 1)
    with engine_process(model, version=start, root=tmp_path, flags=("--max-total-tokens", "8192")) as it:
        await asyncio.to_thread(it.wait_until_up)
        async with aiohttp.ClientSession() as session:
            yield SGLang(session, url=it.url, admin_key=ADMIN_KEY, call_s=60)


async def attempt(engine: SGLang, input_ids: list[int], *, new_tokens: int) -> Tokens:
    """Make an attempt, and read it as the rollout controller does."""
    limits = {"max_new_tokens": new_tokens, "temperature": TEMPERATURE, "ignore_eos": True}
    body = {"input_ids": input_ids, "return_logprob": True, "sampling_params": limits}
    async with aiohttp.ClientSession() as session, session.post(f"{engine.url}/generate", json=body) as answer:
        answer.raise_for_status()
        tokens, _ = read_answer(await answer.json())
    return tokens


async def rollout(engine: SGLang, *, token_step: int) -> list[Example]:
    """Four samples of each prompt; even tokens are worth something."""
    async with aiohttp.ClientSession() as session:

        async def one(group: int) -> Example:
            limits = {"max_new_tokens": 12, "temperature": TEMPERATURE, "ignore_eos": True}
            body = {"input_ids": PROMPTS[group], "return_logprob": True, "sampling_params": limits}
            async with session.post(f"{engine.url}/generate", json=body) as answer:
                answer.raise_for_status()
                content = await answer.json()
            tokens: list[int] = content["output_ids"]
            logp = [entry[0] for entry in content["meta_info"]["output_token_logprobs"]]
            reward = sum(token % 2 == 0 for token in tokens) / len(tokens)
            return Example(PROMPTS[group], tokens, logp, reward, group, token_step)

        return await asyncio.gather(*(one(number % len(PROMPTS)) for number in range(4 * len(PROMPTS))))


@pytest.mark.parametrize("model", ["dense", "mixture"], indirect=True)
async def test_trainer_and_engine_agree_at_every_version(engine: SGLang, model: Path, tmp_path: Path) -> None:
    """They agree on fresh samples, on the probe, and on each token of a sample that spans all versions, by the one that
    it names; they no longer do once an export that is whole has two tensors under each other's names.

    The engine computed such a token behind a prefix that other weights had made; torch says the same of it.
    """
    trainer = RankInProcess(tmp_path, model, learningRate=1e-2, minibatches=2)
    weights = tmp_path / "weights"
    logps = exported(trainer, weights / "0-1")
    prompt = PROMPTS[0]
    spanning = await attempt(engine, prompt, new_tokens=5)
    for step in range(1, STEPS + 1):
        metrics = trainer.train(await rollout(engine, token_step=step - 1), temperature=TEMPERATURE)
        assert metrics["mismatch_mean"] < 1e-4
        assert metrics["mismatch_max"] < 1e-3

        stale, version = logps, WeightVersion(step, 1)
        logps = exported(trainer, weights / str(version))
        await engine.update(weights / str(version), version)
        found = await engine.input_logprobs(logps.input_ids)
        assert require_agreement(logps.logp, found, noise_nats=None, is_exact=True) < 1e-4
        with pytest.raises(ProbeDisagrees):
            require_agreement(stale.logp, found, noise_nats=None, is_exact=True)
        spanning = join(spanning, await attempt(engine, [*prompt, *map(int, spanning.ids)], new_tokens=5))

    versions = [WeightVersion(step, 1) for step in range(STEPS + 1)]
    assert versions == [span.version for span in spanning.spans]
    for span in spanning.spans:
        sampled = torch.from_numpy(spanning.logp[span.start : span.end])
        apart = {
            version: float(
                (recomputed(weights / str(version), prompt, spanning)[span.start : span.end] - sampled).abs().max()
            )
            for version in versions
        }
        assert span.version is not None
        assert apart.pop(span.version) < 1e-3
        assert min(apart.values()) > 1e-2, "other weights say something else of these tokens"

    left = tmp_path / finished_model(STEPS)
    write_manifest(weights / str(version), version, Exported(logps))
    save_final_model(weights / str(version), left, progress=lambda: None)
    await engine.update(left, version)
    found = await engine.input_logprobs(logps.input_ids)
    assert require_agreement(logps.logp, found, noise_nats=None, is_exact=True) < 1e-4, (
        "what a job leaves is what it served"
    )

    mixed_up = tmp_path / "mixed up" / str(version)
    mix_up(left, mixed_up)
    write_manifest(mixed_up, version, Exported(logps))
    verify_export(mixed_up.parent, version)  # every digest, name and shape is right
    await engine.update(mixed_up, version)
    found = await engine.input_logprobs(logps.input_ids)
    with pytest.raises(ProbeDisagrees):
        require_agreement(logps.logp, found, noise_nats=None, is_exact=True)


async def test_engine_says_with_merged_adapters_what_peft_says_with_adapters(
    engine: SGLang, model: Path, tmp_path: Path
) -> None:
    trainer = RankInProcess(tmp_path, model, learningRate=1e-2, minibatches=2, lora={"rank": 4, "alpha": 8})
    weights = tmp_path / "weights"
    for step in range(1, STEPS):
        metrics = trainer.train(await rollout(engine, token_step=step - 1), temperature=TEMPERATURE)
        assert metrics["mismatch_mean"] < 1e-4

        version = WeightVersion(step, 1)
        logps = exported(trainer, weights / str(version))
        await engine.update(weights / str(version), version)
        assert (
            require_agreement(logps.logp, await engine.input_logprobs(logps.input_ids), noise_nats=None, is_exact=True)
            < 1e-4
        )

    batch = await rollout(engine, token_step=STEPS - 1)
    adapters = weights / str(version) / ADAPTERS
    theirs = ask_peft(
        tmp_path / "peft", model, adapters, batch, prompts=PROMPTS, tokens=CONTINUED, temperature=TEMPERATURE
    )
    ours = [await greedy(engine, prompt, tokens=CONTINUED) for prompt in PROMPTS]
    assert [theirs[f"continuation.{number}"].tolist() for number in range(len(PROMPTS))] == ours
    drawn = torch.tensor([logp for sample in batch for logp in sample.logp])
    torch.testing.assert_close(drawn, theirs["logp"], rtol=0, atol=1e-3)


async def test_replaying_the_engines_choice_of_experts_brings_the_trainer_nearer_to_it(tmp_path: Path) -> None:
    """In bfloat16 the two now and then choose other experts for a token, before a switch and after it.

    Both trainers compute the same but for that, so without a replay the two numbers are equal.
    """
    origin = write_engine_export(tmp_path / "origin", version=WeightVersion(0, 1), seed=0, mixture=True)
    model, weights, root = (tmp_path / name for name in ("model", "weights", "engine"))
    model.mkdir()
    root.mkdir()
    write_model(load_model(origin), model, origin=origin, dtype=torch.bfloat16)
    (root / "sitecustomize.py").write_text(NOTHING_TO_PIN)
    seeded = ("--random-seed", "0")  # so that the samples are the same in each run
    flags, variables = ("--max-total-tokens", "8192", ROUTED_EXPERTS, *seeded), {"PYTHONPATH": str(root)}
    config: dict[str, object] = {"learningRate": 1e-3, "dtype": "bfloat16"}
    with engine_process(model, version=WeightVersion(0, 1), root=root, flags=flags, variables=variables) as it:
        await asyncio.to_thread(it.wait_until_up)
        async with aiohttp.ClientSession() as session:
            engine = SGLang(session, url=it.url, admin_key=ADMIN_KEY, call_s=60)
            for step in (1, 2):
                samples, chosen = await routed_rollout(engine, token_step=step - 1)
                mismatch = {}
                for replays in (False, True):  # each goes on from the checkpoint, and the last one is saved
                    trainer = RankInProcess(tmp_path, model, replays=replays, **config)
                    assert step - 1 == trainer.step
                    metrics = trainer.train(samples, finish=partial(name_experts, chosen=dict(enumerate(chosen))))
                    mismatch[replays] = metrics["mismatch_mean"]
                # The rest is rounding, by the kernels that this processor has: from 0.5 to 0.75 of it is left.
                assert mismatch[True] < 0.9 * mismatch[False]
                trainer.save()
                version = WeightVersion(step, 1)
                exported(trainer, weights / str(version))
                await engine.update(weights / str(version), version)


async def routed_rollout(engine: SGLang, *, token_step: int) -> tuple[list[Example], list[torch.Tensor]]:
    """Samples, and of each the experts of its tokens: [tokens, layers * experts], as a batch has them."""
    limits = {"max_new_tokens": 48, "temperature": 1.0, "ignore_eos": True}
    samples, experts = [], []
    async with aiohttp.ClientSession() as session:
        for number in range(12):
            prompt = PROMPTS[number % len(PROMPTS)]
            request = {"input_ids": prompt, "return_logprob": True, "return_routed_experts": True}
            async with session.post(f"{engine.url}/generate", json=request | {"sampling_params": limits}) as answer:
                answer.raise_for_status()
                content = await answer.json()
            tokens, _ = read_answer(content)
            ids = tokens.ids.tolist()
            read = read_experts(content, rows=len(prompt) + len(ids) - 1)
            experts.append(torch.nn.functional.pad(torch.from_numpy(read.astype("int16")), (0, 0, 0, 1), value=-1))
            samples.append(Example(prompt, ids, tokens.logp.tolist(), float(number % 2), number % 3, token_step))
    return samples, experts


async def greedy(engine: SGLang, prompt: list[int], *, tokens: int) -> list[int]:
    limits = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        body = {"input_ids": prompt, "sampling_params": limits}
        async with session.post(f"{engine.url}/generate", json=body) as answer:
            answer.raise_for_status()
            ids: list[int] = (await answer.json())["output_ids"]
            return ids


def recomputed(weights: Path, prompt: list[int], sample: Tokens) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *map(int, sample.ids)]])
    model = AutoModelForCausalLM.from_pretrained(weights, local_files_only=True)
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    logp, _ = token_logp(logits, ids[0, len(prompt) :], temperature=TEMPERATURE)
    return logp


def mix_up(export: Path, copy: Path) -> None:
    """Copy an export, with one weight of two layers under each other's names."""
    shutil.copytree(export, copy)
    (file,) = copy.glob("*.safetensors")
    tensors = load_file(file)
    one, other = (f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(2))
    tensors[one], tensors[other] = tensors[other], tensors[one]
    save_file(tensors, file, metadata={"format": "pt"})


def exported(trainer: RankInProcess, directory: Path) -> Probe:
    directory.mkdir(parents=True)
    logps = trainer.loop.export(directory)
    assert logps is not None
    assert logps.probe is not None
    return logps.probe
