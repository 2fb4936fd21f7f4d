"""Raise a process' limit of open files and sockets at its start, and share it out between files and sockets.

Container runtimes give a soft limit of 1,024 under a hard one that is far higher. Who admits connections or requests
derives their number from the limit, so that the surplus is asked to come later, and no descriptor is missing where one
must not be: for the link to the operator, for files, for an engine's calls.
"""

from __future__ import annotations

import errno
import logging
import resource
import time

from colocated_rl_api.logs import log

LOG = logging.getLogger(__name__)

ENOUGH = 1_048_576  # some runtimes allow a thousand times that, and a program that looks at each takes minutes
RESERVED = 96  # libraries, logs, the store, calls of an engine
SELDOM_S = 60.0
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_limit() -> int:
    """Let this process have as many descriptors as it may, and log how many that are. Call it once, at its start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    log(LOG, "open files limited", limit=limit(), before=soft)
    return limit()


def limit() -> int:
    """Return the present limit of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if soft == resource.RLIM_INFINITY else min(soft, ENOUGH)


def for_sockets(most: int) -> int:
    """Return how many of the descriptors callers and their requests may take."""
    return max(0, most - RESERVED - most // 8)


def is_exhausted(error: BaseException) -> bool:
    """Return whether a descriptor was missing, here or on the whole node: that is no fault of the other side."""
    return isinstance(error, OSError) and error.errno in EXHAUSTED


class Seldom:
    """Log an event that happens thousands of times a second once in a while, with its count."""

    def __init__(self, every_s: float = SELDOM_S) -> None:
        self._every_s = every_s
        self._next = 0.0
        self._times = 0

    def log(self, logger: logging.Logger, event: str, **fields: object) -> None:
        self._times += 1
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            log(logger, event, logging.WARNING, times=self._times, **fields)
            self._times = 0
