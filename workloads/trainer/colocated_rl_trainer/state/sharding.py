"""A model divided among the ranks: torch's FSDP2, and how each rank's part becomes whole again.

Every rank holds a part of each tensor, of its gradient and of its moments. A layer is whole on every rank while it
computes, forward and again backward, and nowhere longer; so all ranks make the same passes, one that has nothing to
compute included. The gradient arrives divided and summed, not averaged: normalizers are of all ranks.

A tensor that is not divided is its own part, so what calls these functions need not know which it has.
Checkpoints are torch's distributed ones: each rank writes and reads its part, whatever the number of ranks was or is.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


class CheckpointBroken(Exception):
    """A checkpoint could be neither written nor read, for no fault of the volume. The message names the rank."""


def divide(model: PreTrainedModel, device: torch.device, *, ranks: int) -> None:
    """Leave to this rank its part of the model's parameters, on `device`. Collective."""
    mesh = _mesh(device.type, ranks)
    layers: list[nn.Module] = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for module in (*layers, model):
        # also what is in no layer: kept whole after a forward pass without a backward one, it would miss an update
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction


def is_divided(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def part_of(tensor: Tensor) -> Tensor:
    """This rank's part, in the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_part(part: Tensor, of: Tensor) -> Tensor:
    """`part` as this rank's of a tensor that is divided as `of` is. On the host too, where `of` is on a device."""
    if not isinstance(of, DTensor):
        return part
    mesh = _mesh(part.device.type, of.device_mesh.size())
    return DTensor.from_local(part, mesh, of.placements, run_check=False, shape=of.shape, stride=of.stride())


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank. Collective, if it is divided."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def write_parts(parts: Mapping[str, Tensor], directory: Path) -> None:
    """Write this rank's parts into `directory`, which is there. Collective.

    Tensors that are not divided are the same on every rank, and each is written by one of them.
    Raises OSError or CheckpointBroken, on every rank or on none.
    """
    with _one_error():
        dcp.save(dict(parts), storage_writer=dcp.FileSystemWriter(directory))


def names_in(directory: Path) -> Set[str]:
    """Of the tensors that were written there. Raises OSError."""
    return set(dcp.FileSystemReader(directory).read_metadata().state_dict_metadata)


def read_parts(parts: Mapping[str, Tensor], directory: Path) -> None:
    """Fill this rank's parts in place. Collective. Raises OSError or CheckpointBroken."""
    with _one_error():
        dcp.load(dict(parts), storage_reader=dcp.FileSystemReader(directory))


@functools.cache
def _mesh(device_type: str, ranks: int) -> DeviceMesh:
    return init_device_mesh(device_type, (ranks,))


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    """Of what torch gathers from all ranks, in an exception that is not one of ours to catch."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # a group of one rank
            yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        message = f"rank {rank}: {type(cause).__name__}: {cause}"
        if isinstance(cause, OSError):
            raise OSError(cause.errno, message) from cause
        raise CheckpointBroken(message) from cause
