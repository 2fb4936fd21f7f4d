"""Directories that are there whole or not at all, after a power cut too: filled elsewhere, flushed, renamed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def flush(directory: Path) -> None:
    """Everything in it is on the disk. Raises OSError."""
    for path in (*directory.rglob("*"), directory):
        _flush(path)


def take_place(draft: Path, target: Path) -> None:
    """A flushed draft becomes `target`, in the place of what was there. Raises OSError."""
    if target.exists():
        shutil.rmtree(target)
    draft.rename(target)
    _flush(target.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
