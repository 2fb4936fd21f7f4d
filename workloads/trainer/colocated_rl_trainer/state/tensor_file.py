"""Write safetensors files in pieces: each is converted, copied from its device, written and hashed before the next one.

So no file is copied as a whole, and its digest needs no second read: a piece is hashed while the processor's caches
hold it. From a device, pieces go through a small buffer to which it copies by itself (`pinned`).

Files are written, not mapped. The kernel clears each page of a mapping before the page is filled, which costs more than
the copy that a mapping saves; a full volume is an OSError for a write, and ends a process that stores into a mapping.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from colocated_rl_api.weights import Algorithm, Digest
from colocated_rl_trainer.state.pinned import Cuda, HostMemory

PIECE_BYTES = 1024**2  # fits into the caches of a core
_ALIGNMENT = 8  # of the first tensor in a file
_TYPES: Mapping[torch.dtype, str] = {  # as safetensors spells them
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensors(
    file: Path,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    kept: Callable[[str], object] = lambda name: None,
    metadata: Mapping[str, str] | None = None,
) -> Digest:
    """Write one safetensors file, with the bytes that safetensors itself would write, and return its digest.

    dtype: of tensors of floating-point numbers, in place of their own, but for names that are `kept`. A file that is
    there is replaced, and stays as it is for whoever has mapped it. Raises OSError when there is no space.
    """
    written = {
        name: dtype if dtype and tensor.is_floating_point() and not kept(name) else tensor.dtype
        for name, tensor in tensors.items()
    }
    names = sorted(tensors, key=lambda name: (-written[name].itemsize, name))  # so that each tensor is aligned
    file.unlink(missing_ok=True)
    digest = xxhash.xxh3_128()
    with file.open("xb") as stream:
        for piece in _pieces([(name, tensors[name], written[name]) for name in names], metadata or {}):
            stream.write(piece)
            digest.update(piece)
    return f"{Algorithm.XXH3_128}:{digest.hexdigest()}"


def _pieces(
    tensors: list[tuple[str, Tensor, torch.dtype]], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Yield the content of a file. A piece is valid until the next one is taken."""
    yield _header(tensors, metadata)
    is_on_device = any(tensor.device.type == "cuda" for _, tensor, _ in tensors)
    buffer = HostMemory(Cuda() if is_on_device else None).take(PIECE_BYTES, torch.uint8)
    for _, tensor, dtype in tensors:
        flat = tensor.detach().contiguous().view(-1)
        for part in flat.split(PIECE_BYTES // dtype.itemsize):
            if part.device.type == "cpu" and part.dtype == dtype:
                yield part.view(torch.uint8).numpy().data
            else:
                copied = buffer[: part.numel() * dtype.itemsize]
                copied.view(dtype).copy_(part)
                yield copied.numpy().data


def _header(tensors: list[tuple[str, Tensor, torch.dtype]], metadata: Mapping[str, str]) -> bytes:
    ends = list(accumulate((tensor.numel() * dtype.itemsize for _, tensor, dtype in tensors), initial=0))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"} | dict(metadata)}
    for (name, tensor, dtype), begin, end in zip(tensors, ends[:-1], ends[1:], strict=True):
        entries[name] = {"dtype": _TYPES[dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
