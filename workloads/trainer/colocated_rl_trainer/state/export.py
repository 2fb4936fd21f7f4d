"""Write a model as files in Hugging Face format, for engines and into checkpoints.

All files but the weights (config, tokenizer, chat template) are copied from the model's own directory, byte by byte, so
that the engine reads what the person gave; only `dtype` is adjusted. Tied tensors are written once, under the name that
loaders look for. The rank server adds the manifest last: a manifest in the model's directory, which is then an export
or a checkpoint of another job, is not copied.

The ranks of a pod divide the files among themselves and write at once; each gets the whole tensors of its own files.
Several threads write, because a core fills memory more slowly than a device empties it.

Where the model is the text part of another, the other parts are copied from the model's own files, byte by byte, too.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import CHAT_TEMPLATE_DIR

from colocated_rl_api.checkpoint import CONTENTS
from colocated_rl_api.weights import MANIFEST, Digest
from colocated_rl_trainer.protocol.manifest import tensor_entries
from colocated_rl_trainer.state.checkpoint import OPTIMIZER
from colocated_rl_trainer.state.lora import CONFIG, TENSORS, Adapters, is_of_adapter
from colocated_rl_trainer.state.sharding import is_part, whole_on
from colocated_rl_trainer.state.tensor_file import write_tensors
from colocated_rl_trainer.state.weights import INDEX, WEIGHT_FILES, StoredTensor, kept_in_float32, tensors_beside

ADAPTERS = "adapter"  # directory in an export
FILE_BYTES = 128 * 1024**2  # most of one safetensors file, unless one tensor is larger
AT_ONCE = 4  # most files that a pod writes at a time, unless it has more ranks
_OURS = (MANIFEST, CONTENTS, OPTIMIZER)

Written = dict[str, Digest]  # by file name
_Kept = Callable[[str], object]  # whether a tensor of this name keeps its dtype


@dataclass(frozen=True)
class Writers:
    """Says which ranks write. rank: this one. pods: the ranks that write into one directory, for each directory."""

    rank: int = 0
    pods: Sequence[Sequence[int]] = ((0,),)

    @property
    def of_pod(self) -> Sequence[int]:
        """Return the ranks that write into this rank's directory; none if nobody does."""
        return next((ranks for ranks in self.pods if self.rank in ranks), ())

    @property
    def threads(self) -> int:
        """Return how many files this rank writes at once."""
        return max(1, min(AT_ONCE, os.cpu_count() or 1) // max(1, len(self.of_pod)))

    def assign(self, files: Sequence[_File]) -> Iterator[tuple[_File, set[int]]]:
        """Yield the files in the order in which they are gathered, each with the ranks that write it, one of each pod.

        The ranks of a pod have equally much to write. The largest files come first: all would wait for one at the end.
        """
        loads = [dict.fromkeys(ranks, 0) for ranks in self.pods]
        for file in sorted(files, key=lambda file: -file.size):
            ranks = [min(load, key=load.__getitem__) for load in loads]
            for load, rank in zip(loads, ranks, strict=True):
                load[rank] += file.size
            yield file, set(ranks)


def write_model(
    model: PreTrainedModel,
    directory: Path,
    *,
    origin: Path,
    dtype: torch.dtype,
    adapters: Adapters | None = None,
    file_bytes: int = FILE_BYTES,
) -> Written:
    """Write the weights of a model that this rank has whole, in `dtype`, and the other files of `origin`.

    directory: empty. adapters: are merged, tensor by tensor, and written by themselves into the directory `ADAPTERS`.
    Returns the digests of the weights. Raises OSError if there is no space.
    """
    written = write_files(
        model,
        directory,
        origin=origin,
        dtype=dtype,
        writers=Writers(),
        beside=tensors_beside(model, origin),
        adapters=adapters,
        file_bytes=file_bytes,
    )
    write_index(directory)
    return written


def write_files(
    model: PreTrainedModel,
    directory: Path,
    *,
    origin: Path,
    dtype: torch.dtype,
    writers: Writers,
    beside: Mapping[str, StoredTensor] | None = None,
    adapters: Adapters | None = None,
    file_bytes: int = FILE_BYTES,
) -> Written:
    """Write this rank's part of what `write_model` writes, all but the index, and return the digests of its files.

    beside: tensors of the origin's files to copy, by name.

    Collective where ranks share the model. A rank that writes nothing only gives its part, and so does one whose write
    has failed, until it raises OSError at the end. Besides the files that it writes at the time, and which are whole
    only where ranks share the model, a rank holds one whole tensor.
    """
    tensors, kept = _tensors_of(model, adapters), kept_in_float32(model, dtype)
    may_hold = threading.Semaphore(writers.threads)
    writes: list[Future[Written]] = []
    set_device = (torch.cuda.set_device, (model.device,)) if model.device.type == "cuda" else (None, ())
    with ThreadPoolExecutor(writers.threads, "write weights", *set_device) as pool:
        if writers.rank in writers.of_pod[:1]:
            writes.append(pool.submit(_write_others, directory, origin, dtype, adapters))
        files = _divide(tensors, dtype, file_bytes, kept, _parts_of_one(model, tensors), beside or {})
        for file, ranks in writers.assign(files):
            if writers.rank not in ranks or any(map(_has_failed, writes)):
                _gather(tensors, file.tensors, dtype, ranks, kept)
                continue
            may_hold.acquire()
            gathered = _gather(tensors, file.tensors, dtype, ranks, kept, adapters)
            named = revert_weight_conversion(model, gathered)
            if file.copies:
                write = pool.submit(_copy_tensors, directory / file.name, file.copies)
            else:
                write = pool.submit(_write_file, directory / file.name, named, dtype, kept)
            write.add_done_callback(lambda _: may_hold.release())
            writes.append(write)
            del gathered, named  # before the next ones are gathered
    return {name: digest for write in writes for name, digest in write.result().items()}


def write_index(directory: Path) -> None:
    """Write the index of a model of several files, from their headers. Raises OSError."""
    found = {file.name: tensor_entries(file) for file in sorted(directory.glob("*.safetensors"))}
    if len(found) > 1:
        size = sum(entry.size_bytes for entries in found.values() for entry in entries.values())
        weight_map = {name: file for file, entries in found.items() for name in entries}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


@dataclass(frozen=True)
class _File:
    """Describes a file of weights. tensors: by their names in the model. size: in bytes. copies: or what it copies."""

    name: str
    tensors: Sequence[str]
    size: int
    copies: Mapping[str, StoredTensor] = field(default_factory=dict)  # by name


def _tensors_of(model: PreTrainedModel, adapters: Adapters | None) -> Mapping[str, Tensor]:
    """Return the tensors to write, by their names in the model: no tied duplicate, and nothing of adapters."""
    tied = model.all_tied_weights_keys
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name not in tied and not (adapters is not None and is_of_adapter(name))
    }


def _parts_of_one(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> Mapping[str, str]:
    """Return, by the names of tensors that files hold as one with others (HRM-Text), the name of that one."""
    conversions = getattr(model, "_weight_conversions", None) or ()
    if all(len(each.target_patterns) == 1 for each in conversions):
        return {}
    outlines = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    return {name: next(iter(revert_weight_conversion(model, {name: each}))) for name, each in outlines.items()}


def _divide(
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    file_bytes: int,
    kept: _Kept,
    parts_of_one: Mapping[str, str],
    beside: Mapping[str, StoredTensor],
) -> Sequence[_File]:
    """Divide the tensors among files, in the model's order, and those beside them among files of their own.

    parts_of_one: names that are equal are in one file.
    """
    sizes: dict[str, dict[str, int]] = {}
    for name, tensor in tensors.items():
        size = tensor.numel() * (tensor.dtype if kept(name) else dtype).itemsize
        sizes.setdefault(parts_of_one.get(name, name), {})[name] = size
    own = _fill(sizes.values(), file_bytes)
    copied = _fill([{name: each.size_bytes} for name, each in beside.items()], file_bytes) if beside else []
    count = len(own) + len(copied)
    files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        files = ["model.safetensors"]
    return [
        *(_File(file, names, size) for file, (names, size) in zip(files, own, strict=False)),
        *(
            _File(file, (), size, {name: beside[name] for name in names})
            for file, (names, size) in zip(files[len(own) :], copied, strict=True)
        ),
    ]


def _fill(sizes: Iterable[Mapping[str, int]], file_bytes: int) -> Sequence[tuple[Sequence[str], int]]:
    """Return the names of each file, in order, and its size. sizes: of tensors that are in one file together."""
    parts: list[tuple[list[str], int]] = [([], 0)]
    for together in sizes:
        size = sum(together.values())
        names, filled = parts[-1]
        if names and filled + size > file_bytes:
            parts.append(([*together], size))
        else:
            parts[-1] = ([*names, *together], filled + size)
    return parts


def _gather(
    tensors: Mapping[str, Tensor],
    names: Sequence[str],
    dtype: torch.dtype,
    ranks: Collection[int],
    kept: _Kept,
    adapters: Adapters | None = None,
) -> dict[str, Tensor]:
    """Return the whole tensors on these ranks, merged with adapters. Collective where they are divided.

    Those that had to be made are in `dtype`; those that are there already stay as they are until they are written.
    """
    gathered = {}
    for name in names:
        part = tensors[name]
        if is_part(part) and part.is_floating_point() and not kept(name):
            part = part.to(dtype)  # so that fewer bytes are gathered; frozen weights are in it already
        tensor = whole_on(ranks, part)
        if tensor is not None:
            merged = tensor if adapters is None else adapters.merge(name, tensor)
            gathered[name] = tensor if merged is tensor else merged.to(dtype)
            del merged
        del part, tensor  # before the next one is gathered
    return gathered


def _has_failed(write: Future[Written]) -> bool:
    return write.done() and write.exception() is not None


def _write_file(file: Path, tensors: dict[str, Tensor], dtype: torch.dtype, kept: _Kept) -> Written:
    try:
        return {file.name: write_tensors(file, tensors, dtype=dtype, kept=kept)}
    finally:
        tensors.clear()  # the pool keeps its arguments for a moment longer


def _copy_tensors(file: Path, copies: Mapping[str, StoredTensor]) -> Written:
    written = {file.name: write_tensors(file, {name: each[...] for name, each in copies.items()})}
    for each in copies.values():
        each.files.close()  # what is mapped counts as memory of the process
    return written


def _write_others(directory: Path, origin: Path, dtype: torch.dtype, adapters: Adapters | None) -> Written:
    """Write everything but the model's weights and their index."""
    for file in sorted(origin.iterdir()):
        if file.is_file() and not file.name.endswith(WEIGHT_FILES) and file.name not in _OURS:
            shutil.copyfile(file, directory / file.name)
    for file in sorted((origin / CHAT_TEMPLATE_DIR).glob("*.jinja")):
        (directory / CHAT_TEMPLATE_DIR).mkdir(exist_ok=True)
        shutil.copyfile(file, directory / CHAT_TEMPLATE_DIR / file.name)
    _set_dtype(directory / "config.json", dtype)
    if adapters is not None:
        tensors, config = adapters.files()
        (directory / ADAPTERS).mkdir()
        write_tensors(directory / ADAPTERS / TENSORS, tensors)
        (directory / ADAPTERS / CONFIG).write_text(json.dumps(config, indent=2))
    return {}


def _set_dtype(config_file: Path, dtype: torch.dtype) -> None:
    config = json.loads(config_file.read_bytes())
    wanted = str(dtype).removeprefix("torch.")
    said = json.dumps(config)
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part["torch_dtype" if "torch_dtype" in part else "dtype"] = wanted
    if json.dumps(config) != said:
        config_file.write_text(json.dumps(config, indent=2))
