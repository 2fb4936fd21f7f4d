"""Make what must survive a power cut durable: a file's contents, or a directory's entries after a change."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Return when the file or directory is on the disk; of a directory, its entries alone. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
