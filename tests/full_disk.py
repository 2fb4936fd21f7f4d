"""A disk that is full, as far as this process can see."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

# run with a directory, and with how many bytes are left free of its file system: a file `filler` takes the others
FILL = """
import os, sys
directory, leave = sys.argv[1], int(sys.argv[2])
file = os.open(directory + "/filler", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
try:
    while not leave or os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize > leave:
        os.write(file, bytes(1 << 20))  # the last time as much as there is room for
except OSError as error:
    print(error.strerror)
"""


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
