"""Save a job's final model: its last export is copied to `model-00000012` beside the checkpoints, whole or not at all.

The engines hold that export, and it was compared with its manifest before anybody asks for the copy: the
final model is the one that the job served. No rank gathers its weights again, no tensor is in memory, and an export of
any trainer will do. A copy that is there already and equals the export, bit by bit, is left alone: a request that is
repeated after a restart writes nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from colocated_rl_api.weights import MANIFEST, Manifest
from colocated_rl_trainer.protocol.durable import flush, take_place
from colocated_rl_trainer.protocol.manifest import NotAnExport, digests_of


def save_final_model(export: Path, directory: Path, *, progress: Callable[[], None]) -> None:
    """Make `directory` a durable copy of `export`. progress: called after each file.

    Raises NotAnExport if the export or its copy differs from the manifest, and OSError; both remove what was written.
    """
    try:
        manifest = _manifest(export)
    except (OSError, ValidationError) as error:
        raise NotAnExport(f"no export to leave: {export / MANIFEST} can't be read: {error}") from error
    if _holds(directory, manifest):
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = directory.with_name(f".{directory.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)  # left by a process that ended here
    try:
        draft.mkdir()
        for file in sorted(export.rglob("*")):
            copy = draft / file.relative_to(export)
            if file.is_dir():
                copy.mkdir()
            else:
                shutil.copyfile(file, copy)
            progress()
        if wrong := _differing(draft, manifest):
            raise NotAnExport(f"{export / wrong} was copied, and the copy does not match {MANIFEST}")
        flush(draft)
        take_place(draft, directory)
    except (OSError, NotAnExport):
        shutil.rmtree(draft, ignore_errors=True)  # it may have filled the volume
        raise


def _holds(directory: Path, manifest: Manifest) -> bool:
    try:
        found = _manifest(directory)
        return found.tensors == manifest.tensors and _differing(directory, manifest) is None
    except (OSError, ValidationError):
        return False


def _differing(directory: Path, manifest: Manifest) -> str | None:
    """Return the name of a tensor file that differs from the manifest, or None."""
    files = {file.name: file for file in directory.glob("*.safetensors")}
    found = digests_of([*files.values()], like=manifest.digests)
    names = sorted(found.keys() | manifest.digests)
    return next((name for name in names if found.get(name) != manifest.digests.get(name)), None)


def _manifest(directory: Path) -> Manifest:
    return Manifest.model_validate_json((directory / MANIFEST).read_bytes())
