"""A manifest names what is in an export, and is there only when the export is whole."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import xxhash

from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.weights import MANIFEST, Manifest, Probe, TensorEntry
from colocated_rl_trainer.protocol.manifest import (
    Exported,
    NotAnExport,
    tensor_entries,
    write_manifest,
)

VERSION = WeightVersion(3, 1)


def test_manifest_names_tensors_and_hashes_of_all_files(tmp_path: Path) -> None:
    _write_tensors(tmp_path / "model-00001-of-00002.safetensors", {"a": [2, 3]})
    _write_tensors(tmp_path / "model-00002-of-00002.safetensors", {"b": []})
    (tmp_path / "config.json").write_text("{}")

    write_manifest(tmp_path, VERSION, Exported(Probe(input_ids=(1, 2), logp=(-0.5,))))

    read = Manifest.model_validate_json((tmp_path / MANIFEST).read_bytes())
    assert VERSION == read.version
    assert {"a": TensorEntry(dtype="F32", shape=(2, 3)), "b": TensorEntry(dtype="F32", shape=())} == read.tensors
    assert {
        file.name: f"xxh3-128:{xxhash.xxh3_128_hexdigest(file.read_bytes())}" for file in tmp_path.glob("*.safetensors")
    } == read.digests
    assert Probe(input_ids=(1, 2), logp=(-0.5,)) == read.probe


def test_directory_without_tensors_gets_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")

    with pytest.raises(NotAnExport, match="holds no tensors"):
        write_manifest(tmp_path, VERSION, Exported())

    assert not (tmp_path / MANIFEST).exists()


def test_same_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    _write_tensors(tmp_path / "one.safetensors", {"a": [1]})
    _write_tensors(tmp_path / "two.safetensors", {"a": [1]})

    with pytest.raises(NotAnExport, match="tensor a stands in two files"):
        write_manifest(tmp_path, VERSION, Exported())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 100) + b'{"a"',
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 8) + b'{"a": 1}',
    ],
)
def test_file_that_is_not_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)

    with pytest.raises(NotAnExport, match=r"model\.safetensors is not a safetensors file"):
        tensor_entries(file)


def _write_tensors(file: Path, shapes: dict[str, list[int]]) -> None:
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    head = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head)
