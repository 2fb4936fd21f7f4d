"""Write the manifest that makes a directory of safetensors files an export: names, dtypes, shapes, digests; last.

It needs no torch, so a trainer of any kind gets it for free. Readers use `colocated_rl_api.weights`.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.weights import MANIFEST, Algorithm, Digest, Manifest, Probe, TensorEntry, algorithm_of

MAX_THREADS = 8  # for hashing
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, by its specification
_HASHES: Mapping[Algorithm, Callable[[], Any]] = {Algorithm.XXH3_128: xxhash.xxh3_128, Algorithm.SHA256: hashlib.sha256}


class NotAnExport(ValueError):
    """The directory holds no tensors, or a file that is not safetensors: a fault of what was written into it."""


@dataclass(frozen=True)
class Exported:
    """A loop reports this about an export that it has written."""

    probe: Probe | None = None
    digests: Mapping[str, Digest] = field(default_factory=dict)  # by name, of the files that the loop has hashed


def write_manifest(directory: Path, version: WeightVersion, exported: Exported) -> Manifest:
    """Describe every tensor file in `directory`, which makes the export whole. Raises NotAnExport."""
    tensors: dict[str, TensorEntry] = {}
    files = sorted(directory.glob("*.safetensors"))
    for file in files:
        entries = tensor_entries(file)
        if twice := tensors.keys() & entries.keys():
            raise NotAnExport(f"tensor {min(twice)} stands in two files of {directory}")
        tensors |= entries
    if not tensors:
        raise NotAnExport(f"{directory} holds no tensors: write at least one *.safetensors file")
    known = {file.name: exported.digests[file.name] for file in files if file.name in exported.digests}
    digests = known | digests_of([file for file in files if file.name not in known])
    manifest = Manifest(version=version, tensors=tensors, digests=digests, probe=exported.probe)
    draft = directory / f".{MANIFEST}.draft"
    draft.write_text(manifest.model_dump_json(by_alias=True))
    draft.replace(directory / MANIFEST)
    return manifest


def tensor_entries(file: Path) -> dict[str, TensorEntry]:
    """Return dtype and shape of each tensor by name, read from the header alone. Raises NotAnExport."""
    with file.open("rb") as stream:
        header = read_header(stream)
    try:
        return {
            name: TensorEntry(dtype=entry["dtype"], shape=tuple(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise NotAnExport(f"{file} is not a safetensors file: {error}") from error


def read_header(stream: BinaryIO) -> dict[str, Any]:
    """Read the header of a safetensors file; the stream then stands where the tensors begin. Raises NotAnExport."""
    start = stream.read(8)
    size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= size <= MAX_HEADER_BYTES:
        raise NotAnExport(f"{stream.name} is not a safetensors file: its header would have {size} bytes")
    try:
        header: dict[str, Any] = json.loads(stream.read(size))
    except (ValueError, RecursionError) as error:
        raise NotAnExport(f"{stream.name} is not a safetensors file: {error}") from error
    return header


def digests_of(files: Sequence[Path], *, like: Mapping[str, Digest] | None = None) -> dict[str, Digest]:
    """Return digests by file name, of several files at once.

    like: digests to compare with, by file name, which choose each algorithm.
    """

    def digest(file: Path) -> Digest:
        known = (like or {}).get(file.name)
        return digest_of(file, algorithm_of(known) if known else Algorithm.XXH3_128)

    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as pool:
        return {file.name: found for file, found in zip(files, pool.map(digest, files), strict=True)}


def digest_of(file: Path, algorithm: Algorithm = Algorithm.XXH3_128) -> Digest:
    with file.open("rb") as stream:
        return f"{algorithm}:{hashlib.file_digest(stream, _HASHES[algorithm]).hexdigest()}"
