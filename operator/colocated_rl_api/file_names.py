"""Judge names of files that others wrote, such as those in a checkpoint, before anything is opened by them."""

from __future__ import annotations

from pathlib import Path


def names_a_file(name: str) -> bool:
    """Return whether the name can be that of a file of one directory, and leads nowhere else."""
    return name not in ("", "..") and Path(name).name == name
