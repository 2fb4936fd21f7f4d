"""A reference on devices of its own: it says what the trainer's own forward says, for ever.

What it answers, to whom, is in `test_reference_contract.py`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from contract.test_trainer_reference import TEMPERATURE, make_samples, own_forward, scored
from contract.trainer_in_process import RankInProcess, only_rank
from contract.trainer_ranks_in_process import ANSWER_S
from numpy.typing import NDArray
from real_reference import START_S, RunningReference

from colocated_rl_api import names
from colocated_rl_api.member_wire import JobFile
from colocated_rl_trainer.conformance.shards import Example, write_shards
from colocated_rl_trainer.grpo.batch import BadShard, Shard
from colocated_rl_trainer.protocol.settings import TrainerConfig
from colocated_rl_trainer.ref_policy.score_queue import QueuedSample
from colocated_rl_trainer.ref_policy.scorer import Scorer
from colocated_rl_trainer.state.sharding import divide
from colocated_rl_trainer.state.weights import load_model, probe
from fakes.authority import FakeAuthority
from fakes.tiny_model import write_tiny_model
from fakes.watched_trainer import forking

TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def start(folder: Path, model: Path, config: dict[str, object]) -> RunningReference:
    settings = only_rank(folder, model, {"threads": 1} | config, has_reference=True, is_apart=True)
    job = JobFile.read(settings.job.read_bytes())
    tls = FakeAuthority().member_directory(folder / "tls", job_uid=job.uid, token=TOKEN)
    return RunningReference(folder, settings.job, model=model, config=settings.config, tls=tls)


def score(reference: RunningReference, sample: Example) -> NDArray[np.float32]:
    ids = np.array([*sample.prompt, *sample.response], "<i4").tobytes()
    status, body = reference.ask(f"/v1/score?start={len(sample.prompt)}&temperature={TEMPERATURE}", ids)
    assert 200 == status, body
    return np.frombuffer(body, "<f4")


def queued(sample: Example) -> QueuedSample:
    return QueuedSample(np.array([*sample.prompt, *sample.response], np.int32).data, len(sample.prompt), TEMPERATURE)


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningReference]:
    running = start(tmp_path_factory.mktemp("reference"), model, {"microBatchTokens": 40})
    with running:
        running.await_ready()
        yield running
    assert -15 == running.process.returncode, "there is nothing to tidy"


def test_answers_are_those_of_the_trainers_own_forward_whoever_else_asks(
    model: Path, reference: RunningReference, tmp_path: Path
) -> None:
    """Twenty-four at once: which of them a device takes together changes nothing but rounding."""
    samples = make_samples(1)
    with ThreadPoolExecutor(len(samples)) as callers:
        answers = list(callers.map(partial(score, reference), samples))
    (file,) = write_shards(tmp_path, samples, step=1, split=1, temperature=TEMPERATURE)
    shard = Shard.read(file, step=1, shard=0, shards=1)
    scores = torch.full_like(shard.behaviour_logp, torch.nan)
    for sample, end, answer in zip(samples, shard.end.tolist(), answers, strict=True):
        scores[end - len(sample.response) : end] = torch.tensor(answer)
    scores = torch.where(shard.loss_mask, scores, torch.nan)

    torch.testing.assert_close(scores, own_forward(load_model(model), shard), rtol=1e-5, atol=1e-5, equal_nan=True)
    trainers = scored(RankInProcess(tmp_path, model, has_reference=True, klCoefficient=0.1), samples)
    torch.testing.assert_close(scores, trainers, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("config", [{"packing": True}, {"microBatchTokens": 1}], ids=["packed", "one by one"])
def test_how_passes_are_made_changes_nothing_but_rounding(model: Path, config: dict[str, object]) -> None:
    def answers(config: dict[str, object]) -> list[torch.Tensor]:
        scorer = Scorer(model, "cpu", TrainerConfig.model_validate({"threads": 1} | config))
        questions = [queued(sample) for sample in make_samples(2)]
        return [torch.frombuffer(bytearray(answer), dtype=torch.float32) for answer in scorer.score(questions)]

    for padded, other in zip(answers({}), answers(config), strict=True):
        torch.testing.assert_close(padded, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("more", [{}, {"lora": {}}], ids=["all weights", "adapters"])
def test_policy_that_is_still_the_reference_has_no_divergence_from_it(
    model: Path, tmp_path: Path, dtype: str, more: dict[str, Any]
) -> None:
    """A policy with adapters holds its frozen weights in bfloat16: to compute in bfloat16 with float32 weights rounds
    in other places.
    """
    config = {"dtype": dtype, "learningRate": 0.0, "microBatchTokens": 1, **more}
    samples = make_samples(2)
    scorer = Scorer(model, "cpu", TrainerConfig.model_validate({"threads": 1} | config))
    answers = scorer.score([queued(sample) for sample in samples])
    with_scores = [
        dataclasses.replace(sample, reference_logp=np.where(sample.mask, np.frombuffer(answer, "<f4"), 0).tolist())
        for sample, answer in zip(samples, answers, strict=True)
    ]

    trainer = RankInProcess(tmp_path, model, reference_apart=True, **config)

    assert 0.0 == trainer.train(with_scores, temperature=TEMPERATURE)["kl"]


def _logps_in_parts(model: Path) -> tuple[float, ...]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shared = load_model(model, share=lambda whole: divide(whole, torch.device("cpu"), ranks=1, dtype=torch.bfloat16))
    return probe(shared, torch.bfloat16).logp


@pytest.mark.parametrize("of_shared", [True, False])
def test_reference_of_trainers_that_divide_the_model_rounds_where_they_do(model: Path, of_shared: bool) -> None:
    """They had a divergence from themselves before the first step."""
    with ProcessPoolExecutor(1, mp_context=forking) as pool:
        policy = pool.submit(_logps_in_parts, model).result(ANSWER_S)
    scorer = Scorer(model, "cpu", TrainerConfig.model_validate({"dtype": "bfloat16"}), of_shared=of_shared)
    assert of_shared is (policy == probe(scorer._model, torch.bfloat16).logp)


def test_batch_that_was_sealed_with_scores_is_trained_as_one_that_the_trainer_scores_itself(
    model: Path, reference: RunningReference, tmp_path: Path
) -> None:
    # AdamW would divide what little of some gradients is no rounding by itself.
    config: dict[str, object] = {"optimizer": "SGD", "learningRate": 1.0, "klCoefficient": 0.5}
    samples = make_samples(3)
    for place in ("own", "apart"):
        (tmp_path / place).mkdir()
    own = RankInProcess(tmp_path / "own", model, has_reference=True, **config)
    apart = RankInProcess(tmp_path / "apart", model, reference_apart=True, **config)
    none = own.weights
    with_trainers_scores = own.train(samples, temperature=TEMPERATURE)

    with_scores = [
        dataclasses.replace(sample, reference_logp=np.where(sample.mask, score(reference, sample), 0).tolist())
        for sample in samples
    ]
    with_own_scores = apart.train(with_scores, temperature=TEMPERATURE)

    assert with_trainers_scores["kl"] == pytest.approx(with_own_scores["kl"], abs=1e-6)
    assert any(not torch.equal(tensor, own.weights[name]) for name, tensor in none.items())
    for name, tensor in own.weights.items():
        torch.testing.assert_close(tensor, apart.weights[name], rtol=1e-5, atol=1e-6)
    assert apart.loop._state._reference is None, "it keeps no copy"


def test_batch_without_the_scores_that_the_job_has_is_refused(model: Path, tmp_path: Path) -> None:
    apart = RankInProcess(tmp_path, model, reference_apart=True, klCoefficient=0.5)

    with pytest.raises(BadShard, match="sealed without scores of the job's reference"):
        apart.train(make_samples(1))


def test_what_it_does_is_on_its_metrics_port(reference: RunningReference) -> None:
    score(reference, make_samples(1)[0])

    assert (200, "ok\n") == reference.seen("/healthz")
    status, text = reference.seen("/metrics")
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert 200 == status
    assert float(figures["colocate_reference_samples_total"]) >= 1
    assert 0 == float(figures["colocate_reference_waiting"])
    assert 404 == reference.seen("/v1/score")[0], "nothing is computed for those without a token"


def test_model_that_is_not_whole_ends_the_process_with_its_name(model: Path, tmp_path: Path) -> None:
    """Its last words are in the pod's status."""
    (tmp_path / "model").mkdir()
    running = start(tmp_path, tmp_path / "model", {})

    assert 2 == running.process.wait(timeout=START_S)
    last = json.loads(running.log.read_text().splitlines()[-1])
    assert ("reference start failed", names.ROLE_REFERENCE) == (last["event"], last["role"])
    assert str(tmp_path / "model") in last["reason"]
