"""The manifest that makes a directory of safetensors files an export: names, dtypes, shapes and hashes, written last.

Standard library only, so that a trainer of any kind gets it for free. The other side is `colocated_rl_api.weights`.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from colocated_rl_api.ladder import WeightVersion
from colocated_rl_api.weights import MANIFEST, Manifest, Probe, TensorEntry

MAX_THREADS = 8  # that hash
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, by its specification


class NotAnExport(ValueError):
    """The directory holds no tensors, or a file that is not safetensors: a fault of what was written into it."""


@dataclass(frozen=True)
class Exported:
    """What a loop says of what it has written."""

    probe: Probe | None = None
    sha256: Mapping[str, str] = field(default_factory=dict)  # of files that it has hashed, by name


def write_manifest(directory: Path, version: WeightVersion, exported: Exported) -> Manifest:
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
    known = {file.name: exported.sha256[file.name] for file in files if file.name in exported.sha256}
    sha256 = known | hashes_of([file for file in files if file.name not in known])
    manifest = Manifest(version=version, tensors=tensors, sha256=sha256, probe=exported.probe)
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


class Hashing:
    """Hashes files beside whatever comes next, several at once: a core hashes slower than memory is written."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS))
        self._under_way: dict[str, Future[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def begin(self, file: Path) -> None:
        """It is complete, and stays as it is."""
        self._under_way[file.name] = self._pool.submit(sha256_of, file)

    def wait(self) -> dict[str, str]:
        """Digest by file name."""
        return {name: digest.result() for name, digest in self._under_way.items()}


def hashes_of(files: Sequence[Path]) -> dict[str, str]:
    """Digest by file name."""
    with Hashing() as hashing:
        for file in files:
            hashing.begin(file)
        return hashing.wait()


def sha256_of(file: Path) -> str:
    """Hexadecimal digest of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
