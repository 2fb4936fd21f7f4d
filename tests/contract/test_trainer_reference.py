"""The frozen reference of the trainer: what it says of a batch, that it says it once, and that nothing else says it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from contract.trainer_in_process import RankInProcess, only_rank
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from colocated_rl_trainer.conformance.ranks import Launch, TrainerGroup, TrainerKind, scores_beside
from colocated_rl_trainer.conformance.shards import Example, write_shards
from colocated_rl_trainer.grpo.batch import Shard
from colocated_rl_trainer.grpo.loop import GRPOTrainer
from colocated_rl_trainer.protocol.settings import ConfigError, TrainerConfig
from colocated_rl_trainer.state.weights import load_model
from fakes.tiny_model import VOCABULARY, write_tiny_model
from fakes.watched_trainer import fork

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def make_samples(seed: int) -> list[Example]:
    """The first group's rewards are all the same: it teaches nothing, unless there is a penalty."""
    chance = random.Random(seed)
    samples = []
    for group in range(6):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(2, 5))]
        for number in range(4):
            response = [chance.randrange(VOCABULARY) for _ in range(chance.randint(3, 8))]
            written = [not (number == 1 and place == 1) for place in range(len(response))]
            logp = [-chance.uniform(2.5, 5.0) if by_policy else 0.0 for by_policy in written]
            samples.append(Example(prompt, response, logp, chance.random() if group else 0.5, group, 0, written))
    return samples


def own_forward(model: torch.nn.Module, shard: Shard) -> torch.Tensor:
    """Return the log-probability of each token to be trained, sample by sample: [T], NaN elsewhere."""
    logp = torch.full_like(shard.behaviour_logp, torch.nan)
    for start, end in zip(shard.start.tolist(), shard.end.tolist(), strict=True):
        with torch.no_grad():
            logits = model(input_ids=shard.tokens[None, start:end]).logits[0, :-1] / TEMPERATURE
        every = torch.log_softmax(logits, -1).gather(-1, shard.tokens[start + 1 : end, None]).squeeze(-1)
        logp[start + 1 : end] = every
    return torch.where(shard.loss_mask, logp, torch.nan)


def scored(trainer: RankInProcess, samples: list[Example]) -> torch.Tensor:
    """Score the next step's batch now, and return the scores that are kept."""
    step = trainer.step + 1
    (file,) = write_shards(trainer.folder, samples, step=step, split=1, temperature=TEMPERATURE)
    trainer.loop.score(step, file, scores_beside(file), trainer)
    return load_file(scores_beside(file))["reference_logp"].clone()  # no view of the file


@pytest.mark.parametrize("config", [{}, {"packing": True}], ids=["padded", "packed"])
def test_scores_are_those_of_the_trainers_own_forward_over_the_starting_weights(
    model: Path, tmp_path: Path, config: dict[str, object]
) -> None:
    """They are the same after the policy has left these weights."""
    trainer = RankInProcess(
        tmp_path, model, has_reference=True, learningRate=1e-2, klCoefficient=0.1, microBatchTokens=40, **config
    )
    for seed in (1, 2):
        found = scored(trainer, make_samples(seed))
        (file,) = tmp_path.glob(f"step-{seed}-*.safetensors")
        shard = Shard.read(file, step=seed, shard=0, shards=1)
        torch.testing.assert_close(found, own_forward(load_model(model), shard), rtol=1e-5, atol=1e-5, equal_nan=True)
        trainer.train(make_samples(seed), temperature=TEMPERATURE)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found, own_forward(trainer.loop.model, shard), rtol=1e-3, atol=1e-3, equal_nan=True)


def test_samples_that_teach_nothing_are_not_scored(model: Path, tmp_path: Path) -> None:
    """The scores would not be used without a penalty."""
    found = scored(RankInProcess(tmp_path, model, has_reference=True), make_samples(1))

    (file,) = tmp_path.glob("step-1-*.safetensors")
    shard = Shard.read(file, step=1, shard=0, shards=1)
    computed = ~torch.isnan(found)
    assert bool(torch.isnan(found[: shard.end[3]]).all()), "of the first group"
    assert int(shard.loss_tokens[4:].sum()) == int(computed.sum())


def test_scores_that_are_there_after_a_restart_cost_no_second_pass(model: Path, tmp_path: Path) -> None:
    config: dict[str, object] = {"learningRate": 1e-2, "klCoefficient": 0.1}
    first = RankInProcess(tmp_path, model, has_reference=True, **config)
    first.train(make_samples(1))
    passes = first.progressed
    again = RankInProcess(tmp_path, model, has_reference=True, **config)

    again.train(make_samples(1))

    assert (2, 1) == (passes, again.progressed), "of one pass of each model"
    for name, tensor in first.weights.items():
        assert torch.equal(tensor, again.weights[name]), name


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def of_another_shard(file: Path) -> None:
    save_file(load_file(file), file, metadata={"shard": "xxh3-128:" + "0" * 32})


def too_few(file: Path) -> None:
    with safe_open(file, framework="pt") as content:
        metadata, logp = content.metadata(), content.get_tensor("reference_logp")
    logp[-1] = torch.nan
    save_file({"reference_logp": logp}, file, metadata=metadata)


@pytest.mark.parametrize("harm", [Path.unlink, damage, of_another_shard, too_few])
def test_scores_that_are_not_whole_or_not_of_this_batch_are_made_again(
    model: Path, tmp_path: Path, harm: object
) -> None:
    assert callable(harm)
    trainer = RankInProcess(tmp_path, model, has_reference=True, klCoefficient=0.1)
    right = scored(trainer, make_samples(1))
    (file,) = tmp_path.glob("*.scores")
    harm(file)

    again = scored(RankInProcess(tmp_path, model, has_reference=True, klCoefficient=0.1), make_samples(1))

    torch.testing.assert_close(again, right, rtol=0, atol=0, equal_nan=True)
    assert [file] == [path for path in tmp_path.iterdir() if "scores" in path.name], "no draft is left"


def test_penalty_without_a_reference_is_refused_at_the_start(model: Path, tmp_path: Path) -> None:
    settings = only_rank(tmp_path, model, {"klCoefficient": 0.1})

    with pytest.raises(ConfigError, match=r"klCoefficient in spec\.trainer\.config .* add spec\.reference to the job"):
        GRPOTrainer(settings, TrainerConfig.read(settings.config))


def test_a_pass_of_the_reference_is_every_ranks_or_nobodys(model: Path, tmp_path: Path) -> None:
    """A rank whose pod was replaced has lost its scores: a model that is spread over ranks needs all of them."""
    kind = TrainerKind("grpo", [], model, {"klCoefficient": 0.1, "threads": 1}, has_reference=True)
    files = write_shards(tmp_path, make_samples(1), step=1, split=2)
    kept = [scores_beside(file) for file in files]

    def launch(environment: dict[str, str], log: Path) -> Launch:
        return fork(environment, log)

    made = []
    for lineage in (1, 2):
        with TrainerGroup(kind, tmp_path, size=2, lineage=lineage, launch=launch) as group:
            group.wait_loaded()
            group.onload()
            assert [1, 1] == [status.scored for status in group.score(1, files)]
        made.append(kept[0].stat().st_mtime_ns)
        kept[1].unlink()

    assert made[0] < made[1], "the other rank's were still there"
