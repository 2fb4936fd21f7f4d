"""Mixtures of experts: ranks train them alike, and each token goes to the experts that a batch names for it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from contract.test_trainer_weights import ARCHITECTURES, EXPERTS, SMALL
from contract.trainer_in_process import RankInProcess
from contract.trainer_ranks_in_process import UnwatchedTrainer, in_ranks
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from colocated_rl_api.batch import HEADER_KEY, BatchHeader
from colocated_rl_trainer.conformance.shards import Example, write_shards
from colocated_rl_trainer.grpo.batch import BadShard
from colocated_rl_trainer.protocol.settings import ConfigError
from colocated_rl_trainer.state.experts import RouterReplay
from colocated_rl_trainer.state.sharding import whole
from fakes.tiny_model import write_tiny_model

NUMBER, OF_TOKEN = EXPERTS["num_experts"], EXPERTS["num_experts_per_tok"]
LAYERS = SMALL["num_hidden_layers"]
CONFIG: dict[str, object] = {"optimizer": "SGD", "learningRate": 1.0, "gradientClip": 1e9, "advantage": "Mean"}
UNKNOWN_EVERY = 5  # tokens; the last of a sample too, which an engine draws and does not read


def samples() -> list[Example]:
    """Eight of two prompts; their tokens are as likely as the engine says, so ratios are not cut off."""
    random = torch.Generator().manual_seed(3)
    return [
        Example(
            [2 + number % 2, 9, 4],
            torch.randint(2, 48, (4 + number % 3,), generator=random).tolist(),
            [-3.9] * (4 + number % 3),
            float(number % 4),
            number % 2,
        )
        for number in range(8)
    ]


def choices(ids: list[int]) -> Tensor:
    """Return two experts for each token, a pair that routers seldom choose, and -1 here and there."""
    first = torch.tensor([[(token * 7 + layer) % NUMBER for layer in range(LAYERS)] for token in ids])
    chosen = torch.stack([first, (first + 1) % NUMBER], dim=-1).flatten(1)
    chosen[::UNKNOWN_EVERY] = -1
    chosen[-1] = -1
    return chosen.to(torch.int16)


def name_experts(shard: Path, chosen: Mapping[int, Tensor] | None = None) -> None:
    """Add the column to a shard. chosen: of each sample of it; `choices` when absent."""
    with safe_open(shard, framework="pt") as file:
        columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        header = BatchHeader.model_validate_json(file.metadata()[HEADER_KEY])
    ends = columns["sample_end"].tolist()
    of_each = [
        chosen[number] if chosen else choices(columns["tokens"][start:end].tolist())
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    columns["experts"] = torch.cat([*of_each, torch.empty(0, LAYERS * OF_TOKEN, dtype=torch.int16)])
    header_text = header.model_copy(update={"has_experts": True}).model_dump_json(by_alias=True)
    save_file(columns, shard, metadata={HEADER_KEY: header_text})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mixture")
    config = transformers.Qwen3MoeConfig(
        **SMALL, **EXPERTS, head_dim=8, initializer_range=0.3, norm_topk_prob=True, tie_word_embeddings=True
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def expected_gradient(model: Path, *, replays: bool) -> dict[str, Tensor]:
    """Return the gradient of the step's loss from transformers, with routers whose
    softmax covers the chosen experts alone.
    """
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    now: dict[str, Tensor] = {}

    def route(router: Any, _: object, output: tuple[Tensor, ...], *, layer: int) -> tuple[Tensor, ...]:
        logits, _, own = output
        chosen = now["chosen"].unflatten(1, (LAYERS, OF_TOKEN))[:, layer].long()
        chosen = torch.where(chosen < 0, own, chosen)
        outside = torch.ones_like(logits, dtype=torch.bool).scatter(1, chosen, False)
        weights = logits.masked_fill(outside, -torch.inf).softmax(-1).gather(1, chosen)
        assert router.norm_topk_prob
        return logits, weights, chosen

    if replays:
        for layer, block in enumerate(plain.model.layers):
            block.mlp.gate.register_forward_hook(partial(route, layer=layer))
    batch = samples()
    rewards = {group: [each.reward for each in batch if each.group == group] for group in (0, 1)}
    loss = torch.zeros(())
    for each in batch:
        ids = [*each.prompt, *each.response]
        now["chosen"] = choices(ids)
        logits = plain(torch.tensor([ids])).logits[0, len(each.prompt) - 1 : -1]
        logp = logits.log_softmax(-1).gather(1, torch.tensor(each.response)[:, None])[:, 0]
        importance = (logp.detach() - torch.tensor(each.logp)).exp().clamp(max=2.0)
        loss = loss - ((each.reward - sum(rewards[each.group]) / 4) * importance * logp).sum()
    (loss / sum(len(each.response) for each in batch)).backward()
    return {name: tensor.grad for name, tensor in plain.named_parameters() if tensor.grad is not None}


def train_once(trainer: UnwatchedTrainer, *, named: bool) -> dict[str, Tensor]:
    """The gradient, by how far SGD has gone."""
    folder = trainer._settings.checkpoints.parent / f"rank-{trainer.rank}"
    folder.mkdir()
    begin = {name: whole(tensor).clone() for name, tensor in trainer.model.named_parameters()}
    shard = write_shards(folder, samples(), step=1, split=trainer._settings.world_size)[trainer.rank]
    if named:
        name_experts(shard)
    trainer.train(1, shard, trainer)
    moved = {name: begin[name] - whole(tensor) for name, tensor in trainer.model.named_parameters()}
    return {name: tensor.clone() for name, tensor in moved.items()}


def require_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    size = sum(float(tensor.square().sum()) for tensor in expected.values()) ** 0.5
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() < 1e-5 * size, name


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("named", [True, False], ids=["experts of the batch", "experts of the router"])
def test_ranks_train_a_mixture_alike_with_the_experts_of_the_batch_where_it_names_them(
    model: Path, tmp_path: Path, ranks: int, named: bool
) -> None:
    for found in in_ranks(ranks, tmp_path, model, partial(train_once, named=named), replays=True, **CONFIG):
        require_same(found, expected_gradient(model, replays=named))


@pytest.mark.parametrize(
    "options",
    [
        {"packing": True},
        {"activationCheckpointing": True},
        {"microBatchTokens": 1},
        {"minibatches": 1, "bypass": False},
    ],
    ids=str,
)
def test_how_a_batch_is_divided_changes_no_choice(model: Path, tmp_path: Path, options: dict[str, object]) -> None:
    trainer = RankInProcess(tmp_path, model, replays=True, **CONFIG | options)
    begin = trainer.weights

    trainer.train(samples(), finish=name_experts)

    require_same(
        {name: begin[name] - tensor for name, tensor in trainer.weights.items()}, expected_gradient(model, replays=True)
    )


def test_choices_are_replayed_before_the_first_update_too(model: Path, tmp_path: Path) -> None:
    """Two minibatches: log-probabilities of the second are computed without gradients before the first update."""

    def mismatch(folder: str, *, minibatches: int, named: bool) -> float:
        (tmp_path / folder).mkdir()
        trainer = RankInProcess(tmp_path / folder, model, replays=True, **CONFIG | {"minibatches": minibatches})
        return trainer.train(samples(), finish=name_experts if named else lambda shard: None)["mismatch_mean"]

    expected = mismatch("at once", minibatches=1, named=True)
    assert mismatch("in two", minibatches=2, named=True) == pytest.approx(expected, rel=1e-5)
    assert mismatch("of the router", minibatches=2, named=False) != pytest.approx(expected, rel=1e-3)


def test_a_job_without_replay_leaves_named_experts_alone(model: Path, tmp_path: Path) -> None:
    trainer = RankInProcess(tmp_path, model, **CONFIG)
    begin = trainer.weights

    trainer.train(samples(), finish=name_experts)

    moved = {name: begin[name] - tensor for name, tensor in trainer.weights.items()}
    require_same(moved, expected_gradient(model, replays=False))


def test_the_reference_chooses_its_own_experts(model: Path, tmp_path: Path) -> None:
    """It is another policy. At the start it has the same weights, and differs by the replayed choice alone."""
    config = CONFIG | {"klCoefficient": 0.1, "learningRate": 0.0}
    trainer = RankInProcess(tmp_path, model, has_reference=True, replays=True, **config)

    assert trainer.train(samples())["kl"] == pytest.approx(0, abs=1e-6)
    assert trainer.train(samples(), finish=name_experts)["kl"] > 1e-3


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (torch.full((1, LAYERS * OF_TOKEN), NUMBER), "experts must be 4 of each token, each below 4"),
        (torch.full((1, LAYERS * OF_TOKEN), -2), "experts must be 4 of each token, each below 4"),
        (torch.full((1, LAYERS * OF_TOKEN + 2), 0), "experts must be 4 of each token, each below 4"),
    ],
)
def test_experts_that_the_model_has_not_are_refused(model: Path, tmp_path: Path, chosen: Tensor, message: str) -> None:
    trainer = RankInProcess(tmp_path, model, replays=True, **CONFIG)

    def spoil(shard: Path) -> None:
        name_experts(shard)
        with safe_open(shard, framework="pt") as file:
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            metadata = file.metadata()
        columns["experts"] = chosen.to(torch.int16).repeat(len(columns["tokens"]), 1)
        save_file(columns, shard, metadata=metadata)

    with pytest.raises(BadShard, match=message):
        trainer.train(samples(), finish=spoil)
    assert [] == trainer.updates


# -------------------------------------------------------------------------------------------------------- which routers
MIXTURES: dict[str, PreTrainedConfig] = {
    "qwen3": transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=8, norm_topk_prob=True),
    "qwen3, weights as they are": transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=8, norm_topk_prob=False),
    "qwen2": transformers.Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=16),
    "olmoe": transformers.OlmoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_router_that_gets_its_own_choice_computes_the_same(name: str) -> None:
    torch.manual_seed(0)
    mixture = AutoModelForCausalLM.from_config(MIXTURES[name]).eval()
    ids = torch.arange(2, 12)[None]
    chosen: list[Tensor] = []
    routers = [module for module in mixture.modules() if type(module).__name__.endswith("Router")]
    hooks = [router.register_forward_hook(lambda _, __, output: chosen.append(output[2])) for router in routers]
    with torch.no_grad():
        expected = mixture(ids).logits
        for hook in hooks:
            hook.remove()
        replay = RouterReplay(mixture)
        own = torch.stack(chosen, dim=1).flatten(1)
        with replay.of(own.to(torch.int16)):
            torch.testing.assert_close(mixture(ids).logits, expected)
        with replay.of(((own + 1) % 4).to(torch.int16)):
            assert not torch.allclose(mixture(ids).logits, expected, atol=1e-6)
        torch.testing.assert_close(mixture(ids).logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "Qwen3ForCausalLM has no router of experts: leave it out"),
        (
            transformers.DeepseekV3Config(
                **SMALL, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=0,
                moe_intermediate_size=16, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
                v_head_dim=8, n_shared_experts=1,
            ),
            "Router chooses experts in a way that can't be replayed yet",
        ),
    ],
)  # fmt: skip
def test_a_model_whose_choice_cannot_be_replayed_is_refused(
    tmp_path: Path, config: PreTrainedConfig | None, message: str
) -> None:
    if config is None:
        write_tiny_model(tmp_path / "model")
    else:
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")

    with pytest.raises(ConfigError, match=message):
        RankInProcess(tmp_path, tmp_path / "model", replays=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_biases_by_which_experts_are_chosen_are_no_weights(tmp_path: Path, ranks: int) -> None:
    """ERNIE 4.5 has them as parameters that are not trained, which weight decay drew to zero all the same."""
    origin = tmp_path / "model"
    model = AutoModelForCausalLM.from_config(ARCHITECTURES["ernie moe"])
    (name,) = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    with torch.no_grad():
        model.get_parameter(name).copy_(torch.linspace(4, 4.01, 4))  # which bfloat16 would make equal
    model.save_pretrained(origin)

    config: dict[str, object] = {"learningRate": 0.1, "weightDecay": 0.5, "dtype": "bfloat16"}
    for found in in_ranks(ranks, tmp_path, origin, partial(train_and_look_up, name=name), **config):
        assert torch.equal(model.get_parameter(name), found)


def train_and_look_up(trainer: UnwatchedTrainer, *, name: str) -> Tensor:
    """Return a tensor as layers see it after a step."""
    ranks = trainer._settings.world_size
    (folder := trainer.folder / f"rank-{trainer.rank}").mkdir()
    trainer.train(1, write_shards(folder, samples(), step=1, split=ranks)[trainer.rank], trainer)
    seen: list[Tensor] = []
    owner = trainer.model.get_submodule(name.rpartition(".")[0])
    owner.register_forward_hook(lambda module, *_: seen.append(getattr(module, name.rpartition(".")[2]).clone()))
    trainer._keep_up(with_gradient=False)
    return seen[0]
