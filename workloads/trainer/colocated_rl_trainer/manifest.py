"""The manifest that makes a directory of safetensors files an export: names, dtypes, shapes and hashes, written last.

Standard library only, so that a trainer of any kind gets it for free. The other side is `colocated_rl_api.weights`.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from colocated_rl_api.ladder import WeightVersion
from colocated_rl_api.weights import MANIFEST, Manifest, Probe, TensorEntry

MAX_THREADS = 8  # that hash
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, by its specification


class NotAnExport(ValueError):
    """The directory holds no tensors, or a file that is not safetensors: a fault of what was written into it."""


def write_manifest(directory: Path, version: WeightVersion, probe: Probe | None) -> Manifest:
    """Name everything in `directory`; from here on it is whole. Raises NotAnExport."""
    tensors: dict[str, TensorEntry] = {}
    files = sorted(directory.glob("*.safetensors"))
    for file in files:
        entries = tensor_entries(file)
        if twice := tensors.keys() & entries.keys():
            raise NotAnExport(f"tensor {min(twice)} stands in two files of {directory}")
        tensors |= entries
    if not tensors:
        raise NotAnExport(f"{directory} holds no tensors: write at least one *.safetensors file")
    manifest = Manifest(version=version, tensors=tensors, sha256=hashes_of(files), probe=probe)
    draft = directory / f".{MANIFEST}.draft"
    draft.write_text(manifest.model_dump_json(by_alias=True))
    draft.replace(directory / MANIFEST)
    return manifest


def tensor_entries(file: Path) -> dict[str, TensorEntry]:
    """Names, dtypes and shapes, from the header alone. Raises NotAnExport."""
    with file.open("rb") as stream:
        start = stream.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= size <= MAX_HEADER_BYTES:
            raise NotAnExport(f"{file} is not a safetensors file: its header would have {size} bytes")
        try:
            header = json.loads(stream.read(size))
            return {
                name: TensorEntry(dtype=entry["dtype"], shape=tuple(entry["shape"]))
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise NotAnExport(f"{file} is not a safetensors file: {error}") from error


def hashes_of(files: Sequence[Path]) -> dict[str, str]:
    """Digest by file name, of several files at once: a core hashes slower than memory is written."""
    with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1, MAX_THREADS) or 1) as pool:
        return dict(zip((file.name for file in files), pool.map(sha256_of, files), strict=True))


def sha256_of(file: Path) -> str:
    """Hexadecimal digest of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
