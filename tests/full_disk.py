"""A disk that is full, as far as this process can see."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Writes beyond so many bytes of a file fail: of any, a test's own output too, so only around the call."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def no_room_in(file: int) -> Iterator[None]:
    """Let writes to an open file find no room, as reported by the kernel."""
    kept, full = os.dup(file), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file)
    try:
        yield
    finally:
        os.dup2(kept, file)
        os.close(kept)
        os.close(full)
