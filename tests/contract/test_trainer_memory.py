"""What the trainer's passes hold, by the allocator's own account."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from allocations import allocated_by
from contract.trainer_ranks_in_process import Watched, in_ranks
from transformers.modeling_layers import GradientCheckpointingLayer

from colocated_rl_trainer.conformance.shards import Example, write_shards
from colocated_rl_trainer.grpo.batch import Shard, divide_into_passes
from fakes.tiny_model import write_tiny_model

BFLOAT16 = 2  # bytes
HIDDEN, LAYERS = 256, 12


# ------------------------------------------------------------------------------------------- weights while they compute
def weights_held(trainer: Watched, *, with_gradient: bool) -> tuple[int, int, int]:
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
@pytest.mark.parametrize("checkpointing", [True, False], ids=["recomputing activations", "keeping them"])
def test_forward_pass_of_ranks_that_share_a_model_has_a_layer_whole_in_bfloat16_and_two_in_transit(
    tmp_path: Path, with_gradient: bool, checkpointing: bool
) -> None:
    """Under autocast layers were gathered in float32, and what they were cast to was kept until the backward pass.

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

    for peak, layer, whole in held:
        assert 8 * layer < whole
        activations = 6 * HIDDEN * LAYERS * 4 * (40 if with_gradient and not checkpointing else 4)
        assert 2 * BFLOAT16 * layer < peak < 3.5 * BFLOAT16 * layer + activations
