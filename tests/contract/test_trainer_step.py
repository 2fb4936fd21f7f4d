"""These tests compare a step of the default trainer with a plain implementation, and show what a step may not do."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from contract.trainer_in_process import RankInProcess, only_rank
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from colocated_rl_api.batch import BatchHeader
from colocated_rl_trainer.conformance.shards import Example, columns, write_shard, write_shards
from colocated_rl_trainer.grpo.batch import (
    BadShard,
    Shard,
    Use,
    deal_minibatches,
)
from colocated_rl_trainer.grpo.loop import DeviceFull, GRPOTrainer
from colocated_rl_trainer.protocol.rank import Diverged
from colocated_rl_trainer.protocol.settings import ConfigError, TrainerConfig
from colocated_rl_trainer.state.residency import PARAMETERS
from colocated_rl_trainer.state.weights import load_model
from fakes.tiny_model import VOCABULARY, write_tiny_model

Weights = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def make_samples(seed: int, *, groups: int = 6, size: int = 4, token_step: int = 0) -> list[Example]:
    chance = random.Random(seed)
    samples = []
    for group in range(groups):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(2, 5))]
        for _ in range(size):
            response = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 8))]
            logp = [-chance.uniform(2.5, 5.0) for _ in response]
            samples.append(Example(prompt, response, logp, float(chance.random() < 0.5), group, token_step))
    return samples


def plain_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Example],
    minibatches: Sequence[frozenset[int]],
    *,
    advantages: str = "Spread",
    average: str = "Tokens",
    data_passes: int = 1,
    penalty: tuple[torch.nn.Module, float, str] | None = None,
    oldest: int = 0,
) -> float:
    """GRPO as one would write it on a blackboard: sample by sample, no padding, nothing skipped.

    The mean norm of its gradients, which the optimizer's own scaling would hide.
    """

    def logp(sample: Example, of: torch.nn.Module = model) -> torch.Tensor:
        ids = torch.tensor([[*sample.prompt, *sample.response]])
        every = torch.log_softmax(of(input_ids=ids).logits[0].double(), -1)
        start = len(sample.prompt)
        return torch.stack([every[start + i - 1, token] for i, token in enumerate(sample.response)])

    with torch.no_grad():
        proximal = [logp(sample) for sample in samples]
        reference = [logp(sample, penalty[0]) for sample in samples] if penalty else proximal
    rewards = {group: [s.reward for s in samples if s.group == group] for group in {s.group for s in samples}}
    norms = []
    for groups in list(minibatches) * data_passes:
        loss = torch.zeros((), dtype=torch.float64)
        divisor = 0
        for sample, old, frozen in zip(samples, proximal, reference, strict=True):
            if sample.group not in groups or sample.token_step < oldest:
                continue
            group = torch.tensor(rewards[sample.group], dtype=torch.float64)
            advantage = sample.reward - group.mean()
            if advantages == "Spread":
                advantage = advantage / (group.std() + 1e-4)
            now = logp(sample)
            ratio = (now - old).exp()
            importance = (old - torch.tensor(sample.logp, dtype=torch.float64)).exp().clamp(max=2.0)
            of_tokens = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage) * importance
            if penalty:
                apart = now - frozen
                estimates = {"K1": apart, "K2": apart.square() / 2, "K3": (-apart).exp() + apart - 1}
                of_tokens = of_tokens - penalty[1] * estimates[penalty[2]]
            match average:
                case "Tokens":
                    loss -= of_tokens.sum()
                    divisor += len(of_tokens)
                case "Sequences":
                    loss -= of_tokens.mean()
                    divisor += 1
                case _:
                    loss -= of_tokens.sum() / 1024  # maxResponseTokens, its default
                    divisor += 1
        (loss / divisor).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return sum(norms) / len(norms)


@pytest.mark.parametrize("advantages", ["Spread", "Mean"])
@pytest.mark.parametrize("average", ["Tokens", "Sequences", "Limit"])
def test_step_is_that_of_the_plain_implementation(model: Path, tmp_path: Path, advantages: str, average: str) -> None:
    options = {"minibatches": 2, "microBatchTokens": 60, "advantage": advantages, "average": average}
    trainer = RankInProcess(tmp_path, model, learningRate=1e-2, weightDecay=0.1, **options)
    plain, begin = load_model(model), trainer.weights
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in (1, 2, 3):
        samples = make_samples(step)
        metrics = trainer.train(samples)
        shard = Shard.read(write_shards(tmp_path, samples, step=step, split=1)[0], step=step, shard=0, shards=1)
        dealt = deal_minibatches([shard.groups()], count=2, seed=step)
        groups = [minibatch.groups for minibatch in dealt]
        norm = plain_step(plain, optimizer, samples, groups, advantages=advantages, average=average)
        assert norm == pytest.approx(metrics["gradient_norm"], rel=1e-4)

    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    assert_moved_alike(expected, trainer.weights, begin=begin)


@pytest.mark.parametrize("estimator", ["K1", "K2", "K3"])
@pytest.mark.parametrize("average", ["Tokens", "Sequences", "Limit"])
def test_penalty_old_tokens_and_further_passes_are_those_of_the_plain_implementation(
    model: Path, tmp_path: Path, average: str, estimator: str
) -> None:
    """Two steps, so that the policy has left its reference; in the second half of the samples are too old."""
    trainer = RankInProcess(
        tmp_path, model, learningRate=1e-2, minibatches=2, dataPasses=2, microBatchTokens=60, average=average,
        has_reference=True, klCoefficient=0.5, klEstimator=estimator, maxTokenAge=0,
    )  # fmt: skip
    plain, begin = load_model(model), trainer.weights
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for step in (1, 2):
        samples = [
            replace(sample, token_step=max(0, step - 1 - number % 2))
            for number, sample in enumerate(make_samples(step))
        ]
        metrics = trainer.train(samples)
        assert ("kl" in metrics, 4.0) == (True, metrics["updates"])
        (file,) = write_shards(tmp_path, samples, step=step, split=1)
        shard = Shard.read(file, step=step, shard=0, shards=1, use=Use(max_token_age=0, equal_too=True))
        groups = [minibatch.groups for minibatch in deal_minibatches([shard.groups()], count=2, seed=step)]
        norm = plain_step(
            plain, optimizer, samples, groups, average=average, data_passes=2,
            penalty=(load_model(model), 0.5, estimator), oldest=step - 1,
        )  # fmt: skip
        assert norm == pytest.approx(metrics["gradient_norm"], rel=1e-4)

    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    assert_moved_alike(expected, trainer.weights, begin=begin)


def test_reference_is_where_the_job_began_also_after_a_restart(model: Path, tmp_path: Path) -> None:
    first = RankInProcess(tmp_path, model, has_reference=True, learningRate=1e-2)
    assert 0 == pytest.approx(first.train(make_samples(1))["kl"], abs=1e-9)
    first.save()
    second = RankInProcess(tmp_path, model, has_reference=True, learningRate=1e-2)

    assert 1e-4 < second.train(make_samples(2))["kl"]


def test_progress_is_reported_with_every_micro_batch(model: Path, tmp_path: Path) -> None:
    """Two passes, and those of the reference and of the second minibatch's log-probabilities before them."""
    trainer = RankInProcess(tmp_path, model, minibatches=2, dataPasses=2, microBatchTokens=10_000, has_reference=True)

    trainer.train(make_samples(1))

    assert 2 * 2 + 2 + 1 == trainer.progressed


def test_activation_checkpointing_changes_no_gradient(model: Path, tmp_path: Path) -> None:
    one, other = _two(tmp_path, model, {}, {"activationCheckpointing": True})
    seen: list[dict[str, torch.Tensor]] = []
    layers: list[bool] = []
    other.loop.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: layers.append(torch.is_grad_enabled()))
    for trainer in (one, other):
        trainer.at_update = lambda trainer=trainer: seen.append(trainer.gradients)  # type: ignore[misc]
        trainer.train(make_samples(1))

    assert 2 == layers.count(True)  # forward, and again backward
    for name, gradient in seen[0].items():
        torch.testing.assert_close(gradient, seen[1][name])


def test_half_precision_computes_nearly_the_same_gradient(model: Path, tmp_path: Path) -> None:
    one, other = _two(tmp_path, model, {}, {"dtype": "bfloat16"})
    seen: list[dict[str, torch.Tensor]] = []
    for trainer in (one, other):
        trainer.at_update = lambda trainer=trainer: seen.append(trainer.gradients)  # type: ignore[misc]
        trainer.train(make_samples(1))

    apart = sum(float((seen[0][name] - seen[1][name]).square().sum()) for name in seen[0])
    whole = sum(float(tensor.square().sum()) for tensor in seen[0].values())
    assert {torch.float32} == {tensor.dtype for tensor in seen[1].values()}
    assert 0 < apart**0.5 < 0.05 * whole**0.5


@pytest.mark.parametrize(
    "config",
    [
        {"microBatchTokens": 10},
        {"microBatchTokens": 100_000},
        {"packing": True, "microBatchTokens": 40},
        {"packing": True, "activationCheckpointing": True},
    ],
)
def test_division_into_micro_batches_changes_nothing_but_rounding(
    model: Path, tmp_path: Path, config: dict[str, object]
) -> None:
    one, other = _two(tmp_path, model, {"microBatchTokens": 50}, config)

    begin = one.weights

    first, second = one.train(make_samples(1)), other.train(make_samples(1))

    assert {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in first.items()} == second
    assert_moved_alike(one.weights, other.weights, begin=begin)


def test_group_without_spread_counts_in_the_normalizer_and_is_not_computed(model: Path, tmp_path: Path) -> None:
    trainer = RankInProcess(tmp_path, model, learningRate=1e-3)
    samples = make_samples(1)
    same = [Example(s.prompt, s.response, s.logp, 1.0, s.group + 100, s.token_step) for s in make_samples(2)]

    alone = trainer.train(samples)
    trainer.step = 0
    together = trainer.train([*samples, *same])

    assert alone["teaching_samples"] == together["teaching_samples"]
    assert sum(len(s.response) for s in (*samples, *same)) == together["tokens"]


def test_state_that_never_fits_is_refused_before_a_weight_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There are none: two terabytes of state follow from the model's description."""
    size = {"vocab_size": 1_000_000, "hidden_size": 65_536, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
    transformers.LlamaConfig(**size, **heads).save_pretrained(tmp_path / "model")

    with caplog.at_level(logging.INFO), pytest.raises(ConfigError, match=r"take \d{4}\.\d GiB of host memory"):
        RankInProcess(tmp_path, tmp_path / "model")

    [records] = [record for record in caplog.records if record.getMessage() == "memory of a step estimated"]
    assert isinstance(records.args, dict)
    assert (
        records.args["pod_host_bytes"]
        > 16 * 2 * size["vocab_size"] * size["hidden_size"]
        > records.args["host_has_bytes"]
    )


def test_step_that_finds_no_memory_says_what_to_lower(model: Path, tmp_path: Path) -> None:
    trainer = RankInProcess(tmp_path, model, microBatchTokens=60)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB. GPU 0 has 79.11 GiB, of which 1.20 GiB are free")

    trainer.loop.model.register_forward_pre_hook(full)

    with pytest.raises(
        DeviceFull,
        match=r"step 1: the trainer's state is 0.0 GiB.* lower microBatchTokens \(it is 60\) or .* allocate 20.00 GiB",
    ):
        trainer.train(make_samples(1))


@pytest.mark.parametrize("samples", [[], [Example([1, 2], [3], [-1.0], 1.0, group, 0) for group in (0, 0, 1, 1)]])
def test_batch_that_teaches_nothing_still_ends_its_step(model: Path, tmp_path: Path, samples: list[Example]) -> None:
    trainer = RankInProcess(tmp_path, model, learningRate=1e-2, weightDecay=0.5)
    before = trainer.weights

    metrics = trainer.train(samples)

    assert (0.0, 0.0) == (metrics["updates"], metrics["teaching_samples"])
    assert [] == trainer.updates
    assert not metrics.keys() & {"loss", "entropy", "gradient_norm", "mismatch_mean"}
    assert all(torch.equal(tensor, trainer.weights[name]) for name, tensor in before.items())


def test_learning_rate_0_changes_no_weight(model: Path, tmp_path: Path) -> None:
    trainer = RankInProcess(tmp_path, model, learningRate=0, minibatches=2, weightDecay=0.5)
    before = trainer.weights

    metrics = trainer.train(make_samples(1))

    assert 2 == metrics["updates"]
    assert all(torch.equal(tensor, trainer.weights[name]) for name, tensor in before.items())


def test_learning_rate_rises_over_the_first_steps(model: Path, tmp_path: Path) -> None:
    trainer = RankInProcess(tmp_path, model, learningRate=0.4, warmupSteps=4)

    assert [0.1, 0.2, 0.3, 0.4, 0.4] == pytest.approx(
        [trainer.train([])["learning_rate"] for _ in range(5)]
    )  # fmt: skip


def test_each_pass_and_minibatch_is_an_update(model: Path, tmp_path: Path) -> None:
    trainer = RankInProcess(tmp_path, model, learningRate=1e-3, minibatches=3, dataPasses=2)

    assert 6 == trainer.train(make_samples(1))["updates"]
    assert [1] * 6 == trainer.updates


def test_agreement_with_the_engine_is_measured_on_tokens_of_the_present_weights_alone(
    model: Path, tmp_path: Path
) -> None:
    """A token of older weights has another log-probability for a good reason."""
    trainer = RankInProcess(tmp_path, model, learningRate=0, minibatches=2)
    own = [_with_own_logp(trainer, sample) for sample in make_samples(1)]
    off_by = [Example(s.prompt, s.response, [p - 0.5 for p in s.logp], s.reward, s.group, 1) for s in own]

    exact = trainer.train(own)
    fresh = trainer.train(off_by)
    stale = trainer.train(off_by)

    assert exact["mismatch_max"] < 1e-4
    assert 0.5 == pytest.approx(fresh["mismatch_mean"], abs=1e-4)
    assert 0.5 == pytest.approx(fresh["mismatch_max"], abs=1e-4)
    assert "mismatch_mean" not in stale


def test_bypass_clips_against_the_behaviour_policy(model: Path, tmp_path: Path) -> None:
    one, other = _two(tmp_path, model, {}, {"bypass": True})
    far = [
        Example(s.prompt, s.response, [p - 1.0 for p in s.logp], s.reward, s.group) for s in _own(one, make_samples(1))
    ]

    recomputed, bypassed = one.train(far), other.train(far)

    assert 0 == recomputed["clip_fraction"]  # the first update begins at ratio 1
    assert 0.2 < bypassed["clip_fraction"]  # there it begins at e
    assert 2.0 == pytest.approx(recomputed["importance_mean"])  # cut off
    assert 1.0 == pytest.approx(bypassed["importance_mean"])


def test_temperature_of_sampling_is_that_of_training(model: Path, tmp_path: Path) -> None:
    trainer = RankInProcess(tmp_path, model, learningRate=0)
    warm = [_with_own_logp(trainer, sample, temperature=0.5) for sample in make_samples(1)]

    assert trainer.train(warm, temperature=0.5)["mismatch_max"] < 1e-4


def test_run_that_was_interrupted_goes_on_to_the_same_bits(model: Path, tmp_path: Path) -> None:
    config = {"learningRate": 1e-2, "minibatches": 2, "warmupSteps": 5}
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = RankInProcess(tmp_path / "whole", model, **config)
    for step in (1, 2, 3, 4):
        whole.train(make_samples(step))

    first = RankInProcess(tmp_path / "parts", model, **config)
    first.train(make_samples(1))
    first.train(make_samples(2))
    first.save()
    first.train(make_samples(99))  # lost with its process
    second = RankInProcess(tmp_path / "parts", model, **config)
    assert 2 == second.step
    second.train(make_samples(3))
    second.train(make_samples(4))

    for name, tensor in whole.weights.items():
        assert torch.equal(tensor, second.weights[name]), name


def test_checkpoint_is_gone_on_from_with_other_options_where_it_has_what_they_need(model: Path, tmp_path: Path) -> None:
    """A volume may outlive its job: what the next one's options lack there it is told, and not in torch's words."""
    before = RankInProcess(tmp_path, model, learningRate=1e-2, optimizer="SGD")
    before.train(make_samples(1))
    before.save()
    fewer = write_tiny_model(tmp_path / "fewer", layers=1)
    for other, optimizer, first in ((model, "AdamW", "first_moment"), (fewer, "SGD", "parameters")):
        with pytest.raises(ConfigError, match=rf"step-00000001 is of another .* differ, first {first}\..*: set spec"):
            RankInProcess(tmp_path, other, optimizer=optimizer)
    config: dict[str, object] = {
        "learningRate": 1e-3,
        "minibatches": 2,
        "dtype": "bfloat16",
        "average": "Sequences",
        "packing": True,
    }
    after = RankInProcess(tmp_path, model, optimizer="SGD", **config)
    for name, tensor in before.weights.items():
        assert torch.equal(tensor, after.weights[name]), name
    after.train(make_samples(2))
    assert [2, 2] == after.updates


def test_checkpoint_is_one_that_torchs_own_tools_read(model: Path, tmp_path: Path) -> None:
    trainer = RankInProcess(tmp_path, model, learningRate=1e-2)
    trainer.train(make_samples(1))
    trainer.save()

    dcp_to_torch_save(tmp_path / "checkpoints" / "step-00000001", tmp_path / "state.pt")

    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert 1 == state["updates"]
    for name, tensor in trainer.weights.items():
        assert torch.equal(tensor, state[f"parameters.{name}"])
        assert state[f"first_moment.{name}"].shape == state[f"second_moment.{name}"].shape == tensor.shape


@pytest.mark.parametrize(
    ("offload", "stays"),
    [(["Parameters", "Gradients", "Optimizer"], set()), (["Gradients", "Optimizer"], {PARAMETERS})],
)
def test_what_the_job_does_not_offload_stays(model: Path, tmp_path: Path, offload: list[str], stays: set[str]) -> None:
    settings = only_rank(tmp_path, model, {})
    job = json.loads(settings.job.read_bytes())
    job["spec"]["trainer"] = {"offload": offload}
    settings.job.write_text(json.dumps(job))
    loop = GRPOTrainer(settings, TrainerConfig())
    loop.load()

    assert stays == loop._state.stays


def test_batch_with_a_shard_missing_is_refused(model: Path, tmp_path: Path) -> None:
    trainer = RankInProcess(tmp_path, model)
    samples = make_samples(1)
    first_half = columns(samples[:12], {group: [s.reward for s in samples if s.group == group] for group in range(6)})
    header = BatchHeader(
        step=1, shard=0, shards=1, groups=6, samples=24, loss_tokens=sum(len(s.response) for s in samples),
        temperature=1.0, seed=0,
    )  # fmt: skip
    write_shard(tmp_path / "shard", header, first_half)

    with pytest.raises(BadShard, match=f"hold .* loss tokens, not {header.loss_tokens}"):
        trainer.loop.train(1, tmp_path / "shard", trainer)


def test_gradient_that_is_not_finite_stops_the_trainer_before_the_weights_are_spoilt(
    model: Path, tmp_path: Path
) -> None:
    trainer = RankInProcess(tmp_path, model, learningRate=1e-2)
    next(trainer.loop.model.parameters()).data.fill_(float("nan"))

    with pytest.raises(Diverged, match="gradient norm of step 1 is nan"):
        trainer.train(make_samples(1))

    assert [] == trainer.updates


def _with_own_logp(trainer: RankInProcess, sample: Example, temperature: float = 1.0) -> Example:
    ids = torch.tensor([[*sample.prompt, *sample.response]])
    with torch.no_grad():
        every = torch.log_softmax(trainer.loop.model(input_ids=ids).logits[0] / temperature, -1)
    start = len(sample.prompt)
    logp = [every[start + place - 1, token].item() for place, token in enumerate(sample.response)]
    return Example(sample.prompt, sample.response, logp, sample.reward, sample.group, sample.token_step)


def _own(trainer: RankInProcess, samples: Sequence[Example]) -> list[Example]:
    return [_with_own_logp(trainer, sample) for sample in samples]


def _two(
    folder: Path, model: Path, one: dict[str, object], other: dict[str, object]
) -> tuple[RankInProcess, RankInProcess]:
    for name in ("one", "other"):
        (folder / name).mkdir()
    return (
        RankInProcess(folder / "one", model, **{"learningRate": 1e-2} | one),
        RankInProcess(folder / "other", model, **{"learningRate": 1e-2} | other),
    )


def assert_moved_alike(expected: Weights, weights: Weights, *, begin: Weights) -> None:
    """Equal but for rounding, measured against how far training has moved each tensor."""
    for name, tensor in expected.items():
        moved = (tensor - begin[name]).norm()
        assert moved > 0, name
        assert (weights[name] - tensor).norm() < 1e-3 * moved, name
