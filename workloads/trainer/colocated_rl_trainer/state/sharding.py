"""Divide a model among the ranks by torch's FSDP2, and make each rank's part whole again.

Every rank holds a part of each tensor, of its gradient and of its moments. A layer is whole on every rank while it
computes, forward and again backward, and no longer, and then in the dtype of the computation; so all ranks make the
same passes, also one that has nothing to compute. The gradient arrives divided and summed in float32, not averaged:
normalizers are of all ranks.

A tensor that is not divided is its own part, so callers need not know which kind they have.
Checkpoints are torch's distributed ones: each rank writes and reads its part, and the number of ranks may change.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from enum import Enum, EnumType
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from colocated_rl_api.file_names import names_a_file
from colocated_rl_trainer.protocol.rank import Refused

METADATA = ".metadata"  # as torch names it
DESCRIBES_TENSORS = {  # what torch's description of tensors is made of, of each module
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # of Python 3.13
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
        *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}


class CheckpointBroken(Exception):
    """A checkpoint can't be written or read, and the volume is not at fault. The message names the rank."""


def divide(model: PreTrainedModel, device: torch.device, *, ranks: int, dtype: torch.dtype = torch.float32) -> None:
    """Keep only this rank's part of the model's parameters, on `device`. Collective.

    dtype: in which parameters are gathered and layers compute. Parameters and sums of gradients stay float32.
    """
    mesh = _mesh(device.type, ranks)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in _gathered_alone(model):
        # also parameters in no layer: kept whole after a forward pass without a backward one, they would miss an update
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction


def _gathered_alone(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules whose parameters are whole only while that module computes: the model itself is the last.

    Embeddings that are tied to the head belong to the model: they are whole during a pass.
    """
    modules: list[nn.Module] = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is not embedding.weight:
        modules += [embedding, head]
    return [*modules, model]


def computing_in(dtype: torch.dtype, model: nn.Module, device: torch.device) -> AbstractContextManager[object]:
    """Return a context for passes that compute in `dtype`, as a divided model and one of that dtype do by themselves.

    No cast of a weight outlives the operation that needs it, unless the backward pass needs it too: none is cached.
    """
    if is_divided(model) or next(model.parameters()).dtype is dtype:
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16, cache_enabled=False)


def take_over_parts(model: nn.Module) -> None:
    """Let FSDP2 know that the parts of a divided model were replaced by others, which were read."""
    model._apply(lambda tensor: tensor)  # noqa: SLF001 - what `to` calls, and where FSDP2 looks at its parts again


def leaves_a_rank_empty(parameters: Iterable[Tensor]) -> bool:
    """Return True if some rank has no part of some tensor: parts are of one length, as long as there is something."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            ranks, length = parameter.device_mesh.size(), len(parameter)
            if -(-length // ranks) * (ranks - 1) >= length:
                return True
    return False


def device_of(model: nn.Module) -> torch.device:
    """Return where a divided model's parts will be."""
    part = next(parameter for parameter in model.parameters() if isinstance(parameter, DTensor))
    kind = part.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def is_divided(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def is_part(tensor: Tensor) -> bool:
    """Return True for a tensor of which this rank holds a part."""
    return isinstance(tensor, DTensor)


def part_of(tensor: Tensor) -> Tensor:
    """Return this rank's part, in the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_part(part: Tensor, of: Tensor) -> Tensor:
    """Return `part` as this rank's part of a tensor divided like `of`; it may be on the host, and `of` on a device."""
    if not isinstance(of, DTensor):
        return part
    mesh = _mesh(part.device.type, of.device_mesh.size())
    return DTensor.from_local(part, mesh, of.placements, run_check=False, shape=of.shape, stride=of.stride())


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, on every rank. Collective if it is divided."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_on(ranks: Collection[int], tensor: Tensor) -> Tensor | None:
    """Return the whole tensor on these ranks, None on the others. Collective if it is divided.

    On the host, parts are sent to those ranks alone, into their place: it takes a fraction of an all-gather's time.
    Devices gather on all ranks: they do it fast, and for messages between two of them NCCL would keep further buffers.
    """
    tensor = tensor.detach()
    if isinstance(tensor, DTensor) and tensor.device.type == "cpu":
        return _collected(ranks, tensor)
    found = whole(tensor)
    return found if not isinstance(tensor, DTensor) or dist.get_rank() in ranks else None


def _collected(ranks: Collection[int], tensor: DTensor) -> Tensor | None:
    assert tensor.placements == (Shard(0),), "as FSDP2 divides"
    rank, mine, collected = dist.get_rank(), tensor.to_local(), None
    under_way = [dist.isend(mine, other) for other in ranks if other != rank and mine.numel()]
    if rank in ranks:
        collected = torch.empty(tensor.shape, dtype=tensor.dtype)
        for other, place in enumerate(collected.split(-(-len(tensor) // tensor.device_mesh.size()))):
            if other == rank:
                place.copy_(mine)
            else:
                under_way.append(dist.irecv(place, other))
    for each in under_way:
        if each is not None:
            each.wait()
    return collected


def write_parts(parts: Mapping[str, Tensor], directory: Path) -> None:
    """Write this rank's parts into `directory`, which exists. Collective.

    Tensors that are not divided are the same on every rank, and each is written by one of them.
    Raises OSError or CheckpointBroken, on every rank or on none.
    """
    with _one_error():
        dcp.save(dict(parts), storage_writer=_Writer(directory))


def shapes_in(directory: Path) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each whole tensor that was written to `directory`, by name. Raises OSError, Refused."""
    stored = _TensorReader(directory).read_metadata().state_dict_metadata
    return {name: tuple(getattr(tensor, "size", ())) for name, tensor in stored.items()}


def read_parts(parts: Mapping[str, Tensor], directory: Path) -> None:
    """Fill this rank's parts in place. Collective. Raises OSError or CheckpointBroken."""
    with _one_error():
        dcp.load(dict(parts), storage_reader=_TensorReader(directory))


@contextlib.contextmanager
def pretended_mesh(ranks: int) -> Iterator[None]:
    """Let a model of this process be divided on the CPU among ranks of a group that ends with the context."""
    _mesh("cpu", ranks)  # now: a mesh can't be made of tensors without content
    try:
        yield
    finally:
        _mesh.cache_clear()


@functools.cache
def _mesh(device_type: str, ranks: int) -> DeviceMesh:
    # torch keeps what it worked out for a mesh by its name, rank and all: one of pretended ranks has to have its own
    names = ("pretended",) if dist.get_backend() == "fake" else None
    return init_device_mesh(device_type, (ranks,), mesh_dim_names=names)


_Unpickler: Any = pickle._Unpickler  # noqa: SLF001 - the one in C lets a pickle set attributes of what it names


class _Description(_Unpickler):  # type: ignore[misc]  # typeshed has a part of it
    """Reads what describes tensors, and nothing else: a pickle may call anything, and a checkpoint may be others'.

    Nor does it set an attribute of a class, which would last for the whole process.
    """

    dispatch = _Unpickler.dispatch.copy()

    def load_build(self) -> None:
        *_, target, _ = self.stack
        if callable(target) or isinstance(target, Enum):
            raise _not_tensors(f"an attribute of {target}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in DESCRIBES_TENSORS.get(module, ()):
            raise _not_tensors(f"{module}.{name}")
        return super().find_class(module, name)


def _member(kind: object, name: str) -> Enum:
    """Return a member of an enum, which some Python 3.11 (3.11.2 of Debian 12) pickles as an attribute of it."""
    if not isinstance(kind, EnumType) or name not in kind.__members__:
        raise _not_tensors(f"an attribute of {kind}")
    member: Enum = kind.__members__[name]
    return member


def _not_tensors(found: str) -> Refused:
    return Refused(f"the checkpoint's {METADATA} has something else in it than tensors: {found}")


class _TensorReader(dcp.FileSystemReader):
    """Reads tensors alone. What else a checkpoint could have (torch: BytesStorageMetadata) is a pickle of its own."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as stream:
            read: Metadata = _Description(stream).load()
        for place in (read.storage_data or {}).values():
            name = getattr(place, "relative_path", None)
            if not (isinstance(name, str) and names_a_file(name)):
                raise Refused(f"the checkpoint's {METADATA} names a file that is not beside it: {name!a:.100}")
        return read


class _Writer(dcp.FileSystemWriter):
    """Writes the files of this rank, and says so where the volume is at fault.

    torch.save completes its archive although a write of it has failed, and then complains of the archive alone.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    """Raise one OSError or CheckpointBroken for the failures that torch gathers from all ranks."""
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
