"""These tests read from the allocator which tensors the trainer's passes hold."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from allocations import allocated_by, resident_growth
from contract.test_trainer_weights import ARCHITECTURES, EXPERTS, SMALL
from contract.trainer_ranks_in_process import ANSWER_S, UnwatchedTrainer, in_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, HrmTextConfig, OlmoHybridConfig, PreTrainedConfig, Qwen2MoeConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from colocated_rl_trainer.conformance.shards import Example, write_shards
from colocated_rl_trainer.grpo.batch import Shard, divide_into_passes
from colocated_rl_trainer.protocol.settings import ConfigError
from colocated_rl_trainer.state import weights
from colocated_rl_trainer.state.export import write_model
from colocated_rl_trainer.state.sharding import divide, whole
from colocated_rl_trainer.state.tensor_file import write_tensors
from colocated_rl_trainer.state.weights import load_model
from fakes.tiny_model import write_tiny_model
from fakes.watched_trainer import forking

BFLOAT16 = 2  # bytes
HIDDEN, LAYERS = 256, 12
OBJECTS = 12_000_000  # bytes that Python and its allocator take for themselves while they load a model, at most


# ------------------------------------------------------------------------------------------- weights while they compute
def weights_held(trainer: UnwatchedTrainer, *, with_gradient: bool) -> tuple[int, int, int]:
    """Bytes of a forward pass over six tokens at its peak; parameters of the largest layer, and of the whole model."""
    folder = trainer._settings.checkpoints.parent / f"rank-{trainer.rank}"
    folder.mkdir()
    (path,) = write_shards(folder, [Example([1, 2], [3, 4, 5, 6], [-1.0] * 4, 1.0, 0, 0)], step=1, split=1)
    shard = Shard.read(path, step=1, shard=0, shards=1)
    (micro,) = divide_into_passes(shard, [0], tokens=100, packing=False)

    def forward() -> object:
        with torch.set_grad_enabled(with_gradient):
            return trainer._logp(shard, micro)

    forward()  # what is made once has been made
    layers = [layer for layer in trainer.model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    largest = max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers)
    return allocated_by(forward).peak, largest, sum(parameter.numel() for parameter in trainer.model.parameters())


@pytest.mark.parametrize("with_gradient", [True, False], ids=["with gradient", "without"])
@pytest.mark.parametrize(
    "checkpointing",
    [pytest.param(True, marks=pytest.mark.release), False],
    ids=["recomputing activations", "keeping them"],
)
def test_forward_pass_of_ranks_that_share_a_model_has_a_layer_whole_in_bfloat16_and_two_in_transit(
    tmp_path: Path, with_gradient: bool, checkpointing: bool
) -> None:
    """Under autocast layers were gathered in float32, and their bfloat16 copies were kept until the backward pass.

    FSDP2 keeps the buffer of a gather until the next one is complete, and this rank's part of that is cast beside it.
    """
    model = write_tiny_model(tmp_path / "model", hidden=HIDDEN, layers=LAYERS, tied=False)

    held = in_ranks(
        2,
        tmp_path,
        model,
        partial(weights_held, with_gradient=with_gradient),
        dtype="bfloat16",
        activationCheckpointing=checkpointing,
    )

    for peak, layer, parameters in held:
        assert 8 * layer < parameters
        activations = 6 * HIDDEN * LAYERS * 4 * (40 if with_gradient and not checkpointing else 4)
        assert 2 * BFLOAT16 * layer < peak < 3.5 * BFLOAT16 * layer + activations


def layers_held(folder: Path, device: torch.device, *, hidden: int) -> list[float]:
    """Peaks of a forward pass of a divided model, with a gradient and without, in layers of bfloat16.

    One rank divides it, in a process of its own, as torch's FSDP2 does for any number: layers are cast one by one, and
    gathered from nobody.
    """
    with ProcessPoolExecutor(1, mp_context=forking) as pool:
        return pool.submit(_layers_held, folder, device, hidden).result(ANSWER_S)


def _layers_held(folder: Path, device: torch.device, hidden: int) -> list[float]:
    origin = write_tiny_model(folder / "model", hidden=hidden, layers=LAYERS, tied=False)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model = load_model(origin, share=lambda whole: divide(whole, device, ranks=1, dtype=torch.bfloat16))
    size = BFLOAT16 * max(sum(each.numel() for each in layer.parameters()) for layer in model.model.layers)
    ids, peaks = torch.tensor([[1, 2, 3, 4, 5, 6]], device=device), []
    for with_gradient in (True, False):

        def forward(with_gradient: bool = with_gradient) -> object:
            with torch.set_grad_enabled(with_gradient):
                return model(input_ids=ids, use_cache=False).logits

        forward()  # what is made once has been made
        peaks.append(allocated_by(forward, device).peak / size)
    return peaks


def test_divided_model_casts_a_layer_at_a_time(tmp_path: Path) -> None:
    """It has twelve. With a gradient, activations of six tokens are beside it."""
    assert all(1 < layers < 2.5 for layers in layers_held(tmp_path, torch.device("cpu"), hidden=HIDDEN))


# ------------------------------------------------------------------------------------------------------------- loading
def load_again(trainer: UnwatchedTrainer) -> tuple[int, int]:
    """Growth of this process at its highest, in bytes, pages of files included; parameters of the model."""
    grown = resident_growth(partial(load_model, trainer._settings.model, share=trainer._divide))
    return grown, sum(parameter.numel() for parameter in trainer.model.parameters())


def test_each_rank_loads_its_part_of_each_tensor_and_no_more(tmp_path: Path) -> None:
    """Each loaded the whole model in float32 and then kept its part: 70 billion parameters took 2.2 TB on eight."""
    origin = write_tiny_model(tmp_path / "origin", hidden=512, layers=16)
    (tmp_path / "model").mkdir()
    write_model(load_model(origin), tmp_path / "model", origin=origin, dtype=torch.bfloat16)

    for grown, parameters in in_ranks(3, tmp_path, tmp_path / "model", load_again):
        assert grown < 4 * parameters / 3 + 2 * parameters < 4 * parameters


def test_ranks_that_load_a_model_of_many_files_map_one_of_them_at_a_time(tmp_path: Path) -> None:
    """All were mapped until the model was loaded, so that each rank's memory held the whole model beside its part."""
    origin = write_tiny_model(tmp_path / "origin", hidden=512, layers=16)
    whole = AutoModelForCausalLM.from_pretrained(origin, dtype=torch.bfloat16)
    whole.save_pretrained(tmp_path / "model", max_shard_size="8MB")
    files = [path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors")]
    assert len(files) > 8

    for grown, parameters in in_ranks(3, tmp_path, tmp_path / "model", load_again):
        assert grown < 4 * parameters / 3 + max(files) + OBJECTS < 2 * parameters


def differing_tensors(trainer: UnwatchedTrainer, model: Path | None = None) -> list[str]:
    """Names of those that are not as one rank loads them, buffers that no file holds included."""
    alone = load_model(model or trainer._settings.model)
    wanted = dict(alone.named_parameters()) | dict(alone.named_buffers())
    found = dict(trainer.model.named_parameters()) | dict(trainer.model.named_buffers())
    same = [name for name in wanted if torch.equal(whole(found[name]), wanted[name].detach())]
    return sorted({*wanted, *found} - {*same})


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(("qwen3 moe", 2), ("qwen3 moe", 3), ("gpt2", 3), ("gemma3", 3), ("phi3", 3), ("llama tied", 3)),
        ("falcon h1", 2),  # no file holds what its layers scale by
        ("ernie moe", 2),  # biases that are parameters, and not trained
    ],
)
def test_what_ranks_load_is_the_model_also_where_its_files_have_another_form(
    tmp_path: Path, name: str, ranks: int
) -> None:
    """No tensor divides evenly among three ranks. Files of experts have one tensor for each of the four."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(ARCHITECTURES[name]).save_pretrained(tmp_path / "model")

    assert [[]] * ranks == in_ranks(ranks, tmp_path, tmp_path / "model", differing_tensors)


def load_another(trainer: UnwatchedTrainer, model: Path) -> list[str]:
    trainer.model = load_model(model, share=trainer._divide)
    return differing_tensors(trainer, model)


@pytest.mark.parametrize(
    "config",
    [
        HrmTextConfig(**SMALL, head_dim=8),  # gates, queries, keys and values are one tensor in files
        OlmoHybridConfig(  # a convolution is three there
            **SMALL,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_ranks_load_what_files_divide_otherwise(tmp_path: Path, config: PreTrainedConfig) -> None:
    """Each took its rows of what is in a file for those of the tensor: wrong weights were trained and exported."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "another")
    model = write_tiny_model(tmp_path / "model")

    assert [[]] * 2 == in_ranks(2, tmp_path, model, partial(load_another, model=tmp_path / "another"))


def load_a_part(trainer: UnwatchedTrainer) -> list[str]:
    """Load the model with no way to read all of it, and return the tensors that differ."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(weights, "_load_whole")
        trainer.model = load_model(trainer._settings.model, share=trainer._divide)
    return differing_tensors(trainer)


def test_a_tensor_of_one_row_makes_no_rank_read_the_whole_model(tmp_path: Path) -> None:
    """The gate of shared experts has one (Qwen2-MoE, Qwen3-Next): on eight ranks 80 billion parameters took 2.5 TB."""
    config = Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")

    assert [[]] * 2 == in_ranks(2, tmp_path, tmp_path / "model", load_a_part)


def test_ranks_share_a_model_in_files_of_torch(tmp_path: Path) -> None:
    """One rank trained it, and of two each said that the model should be copied again."""
    model = write_tiny_model(tmp_path / "model")
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()

    assert [[]] * 2 == in_ranks(2, tmp_path, model, differing_tensors)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("lose", r"are not whole: 1 tensors of Qwen3ForCausalLM are missing, first model\.layers\.0\.mlp\.down_proj"),
        ("cut", r"are not those of its config\.json: 1 tensors have another shape, first model\.layers\.0\.mlp"),
        ("untie", r"can be read in two ways: .* another lm_head\.weight than model\.embed_tokens\.weight"),
    ],
)
def test_what_is_no_model_is_refused_by_ranks_that_share_it_too(tmp_path: Path, spoil: str, message: str) -> None:
    model = write_tiny_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    if spoil == "lose":
        del tensors[name]
    elif spoil == "cut":
        tensors[name] = tensors[name][:-2].clone()
    else:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    write_tensors(model / "model.safetensors", tensors)

    for error in in_ranks(2, tmp_path, model, load_again):
        assert isinstance(error, ConfigError)
        assert re.search(message, str(error)), error
