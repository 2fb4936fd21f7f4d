"""A job saves its last export as its final model, whole or not at all, and once."""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from full_disk import no_file_above

from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.weights import MANIFEST, Algorithm, finished_model
from colocated_rl_trainer.protocol.finished import save_final_model
from colocated_rl_trainer.protocol.manifest import (
    Exported,
    NotAnExport,
    digest_of,
    write_manifest,
)
from colocated_rl_trainer.state.checkpoint import Checkpoints

TENSOR = 4096  # bytes


def make_export(
    directory: Path, *, lineage: int = 1, fill: bytes = b"a", algorithm: Algorithm = Algorithm.XXH3_128
) -> Path:
    (directory / "parts").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "parts" / "template.jinja").write_text("{{ messages }}")
    for name in ("model-1.safetensors", "model-2.safetensors"):
        head = json.dumps({name: {"dtype": "U8", "shape": [TENSOR], "data_offsets": [0, TENSOR]}}).encode()
        (directory / name).write_bytes(struct.pack("<Q", len(head)) + head + fill * TENSOR)
    digests = {file.name: digest_of(file, algorithm) for file in directory.glob("*.safetensors")}
    write_manifest(directory, WeightVersion(3, lineage), Exported(digests=digests))
    return directory


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return make_export(tmp_path / "weights" / "3-1")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / finished_model(3)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def put(export: Path, model: Path) -> int:
    """Return how many times progress was reported."""
    calls: list[None] = []
    save_final_model(export, model, progress=lambda: calls.append(None))
    return len(calls)


def test_model_is_the_export_and_no_checkpoint(export: Path, model: Path) -> None:
    assert len([*export.rglob("*")]) == put(export, model)

    assert contents(export) == contents(model)
    assert ["model-00000003"] == [path.name for path in model.parent.iterdir()]
    checkpoints = Checkpoints(model.parent, lineage=1, keep=1)
    assert checkpoints.newest() is None
    checkpoints.write(4, keep=1, fill=lambda draft: (draft / "state").touch())
    assert contents(export) == contents(model), "clean-up of checkpoints does not touch it"


def test_digests_of_a_loop_may_be_of_either_algorithm(model: Path, tmp_path: Path) -> None:
    export = make_export(tmp_path / "weights" / "3-1", algorithm=Algorithm.SHA256)

    assert put(export, model) > 0
    assert 0 == put(export, model), "recognized"


def test_model_that_is_there_is_not_written_again(export: Path, model: Path, tmp_path: Path) -> None:
    """Trainers that start again from the last checkpoint export the same weights as another version."""
    put(export, model)
    inode = model.stat().st_ino

    assert 0 == put(export, model)
    assert 0 == put(make_export(tmp_path / "weights" / "3-2", lineage=2), model)
    assert inode == model.stat().st_ino


def _damage(model: Path) -> None:
    with (model / "model-1.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")


def _lose(model: Path) -> None:
    (model / "model-2.safetensors").unlink()


def _forget(model: Path) -> None:
    (model / MANIFEST).unlink()


def _be_other_weights(model: Path) -> None:
    other = make_export(model.parent / "other", fill=b"b")
    put(other, model)


@pytest.mark.parametrize("harm", [_damage, _lose, _forget, _be_other_weights])
def test_model_that_is_not_this_export_is_replaced(export: Path, model: Path, harm: Callable[[Path], None]) -> None:
    put(export, model)
    harm(model)

    put(export, model)

    assert contents(export) == contents(model)


def test_copy_that_was_cut_off_is_begun_again(export: Path, model: Path) -> None:
    draft = model.with_name(f".{model.name}.draft")
    draft.mkdir(parents=True)
    (draft / "left.safetensors").write_bytes(b"torn")

    put(export, model)

    assert contents(export) == contents(model)
    assert [model] == [*model.parent.iterdir()]


@pytest.mark.parametrize("harm", [_damage, _lose, _forget])
def test_export_that_is_torn_is_no_model(export: Path, model: Path, harm: Callable[[Path], None]) -> None:
    harm(export)

    with pytest.raises(NotAnExport, match=r"model-[12].safetensors was copied|no export to leave"):
        put(export, model)

    assert not [*model.parent.glob("*")], "no draft either"


def test_full_volume_leaves_what_was_there_and_no_draft(export: Path, model: Path) -> None:
    checkpoint = model.parent / "step-00000003"
    checkpoint.mkdir(parents=True)

    with no_file_above(TENSOR), pytest.raises(OSError, match="File too large") as failure:
        put(export, model)

    assert errno.EFBIG == failure.value.errno
    assert [checkpoint] == [*model.parent.iterdir()]
