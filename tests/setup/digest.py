"""Decides whether something made earlier was made from the same inputs.

A thing and the digest of its inputs are kept side by side: the digest is written last, so that a thing without one,
cut off half-way, is made again.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

BYPRODUCTS = {"__pycache__", "build", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


def sources(folder: Path) -> Iterator[Path]:
    """All files of a folder that somebody wrote, in a fixed order; not those of another package that lies in it."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not (name in BYPRODUCTS or name.endswith(".egg-info") or Path(place, name, "pyproject.toml").exists())
        )
        for name in sorted(files):
            yield Path(place) / name


def digest(*, files: Iterable[Path] = (), words: Iterable[str] = ()) -> str:
    """Changes when a file's path or content changes, or a word."""
    total = hashlib.sha256()
    for word in words:
        total.update(f"{word}\n".encode())
    for file in files:
        total.update(f"{file}\n".encode())
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:16]


def is_made_from(thing: Path, inputs: str) -> bool:
    stamp = _stamp(thing)
    return thing.exists() and stamp.exists() and stamp.read_text() == inputs


def forget(thing: Path) -> None:
    """Forget a thing before it is changed in place: until `remember`, it counts as unknown."""
    _stamp(thing).unlink(missing_ok=True)


def remember(thing: Path, inputs: str) -> None:
    _stamp(thing).write_text(inputs)


def _stamp(thing: Path) -> Path:
    return thing.with_name(f".{thing.name}.inputs")
