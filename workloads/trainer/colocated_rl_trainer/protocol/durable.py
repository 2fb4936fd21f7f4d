"""Write directories that are there whole or not at all, also after a power cut: filled elsewhere, flushed, renamed."""

from __future__ import annotations

import shutil
from pathlib import Path

from colocated_rl_api.durable import sync


def flush(directory: Path) -> None:
    """Return when the directory and everything in it is on the disk. Raises OSError."""
    for path in (*directory.rglob("*"), directory):
        sync(path)


def take_place(draft: Path, target: Path) -> None:
    """Rename a flushed draft to `target`, in the place of what was there. Raises OSError."""
    if target.exists():
        shutil.rmtree(target)
    draft.rename(target)
    sync(target.parent)
