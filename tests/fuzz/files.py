"""Files that an agent reads: its journal, and exports that trainers wrote."""

from __future__ import annotations

import tempfile
from pathlib import Path

import xxhash

from colocated_rl_agent.files.exports import INDEX, ExportTorn, read_tensor_file, verify_export
from colocated_rl_agent.files.journal import FILE, Journal, JournalUnreadable
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.weights import MANIFEST
from colocated_rl_trainer.protocol.manifest import NotAnExport, tensor_entries

VERSION = WeightVersion(1, 1)
WEIGHTS = "model.safetensors"
DIGEST = b"DIGEST"  # in a manifest it stands for that of the file
BETWEEN = b"\0\0\0\0\0\0"  # manifest, index, and the file of tensors


def journal(data: bytes) -> None:
    """A journal is refused, or read; then it can be read again and again, and is no longer each time."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        (directory / FILE).write_bytes(data)
        try:
            read = Journal(directory)
        except JournalUnreadable:
            return
        read.close()
        lengths = []
        for _ in range(2):
            again = Journal(directory)
            again.close()
            assert again.memory.epoch == read.memory.epoch
            lengths.append(len(again.memory.records()))
        assert lengths == sorted(lengths, reverse=True)


def export(data: bytes) -> None:
    """An export is torn or whole; both readers of tensor files find the same in one that is whole."""
    manifest, _, rest = data.partition(BETWEEN)
    index, _, weights = rest.partition(BETWEEN)
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made, str(VERSION))
        directory.mkdir()
        digest = f"xxh3-128:{xxhash.xxh3_128(weights).hexdigest()}".encode()
        (directory / MANIFEST).write_bytes(manifest.replace(DIGEST, digest))
        (directory / WEIGHTS).write_bytes(weights)
        if index:
            (directory / INDEX).write_bytes(index)
        try:
            entries = tensor_entries(directory / WEIGHTS)
        except NotAnExport:
            entries = None
        try:
            whole, digests = verify_export(Path(made), VERSION)
        except ExportTorn as torn:
            str(torn).encode()
        else:
            assert whole.version == VERSION
            assert whole.tensors == entries
            assert digests.keys() == entries.keys()
        try:
            file = read_tensor_file(directory / WEIGHTS)
        except ExportTorn:
            return
        assert file.digest.encode() == digest
        assert file.tensors == entries
