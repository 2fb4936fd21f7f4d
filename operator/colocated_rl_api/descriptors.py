"""How many files and sockets a process may have open: its limit, raised at its start, and what is left for sockets.

Container runtimes give a soft limit of 1,024 under a hard one that is far higher. Who admits connections or requests
derives their number from the limit, so that what is more is told to come later, and no descriptor is missing where one
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
    log(LOG, "limit of open files", limit=limit(), before=soft)
    return limit()


def limit() -> int:
    """Of this process, now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if soft == resource.RLIM_INFINITY else min(soft, ENOUGH)


def for_sockets(most: int) -> int:
    """Of so many descriptors those that callers and their requests may take."""
    return max(0, most - RESERVED - most // 8)


def is_exhausted(error: BaseException) -> bool:
    """Whether there was no descriptor, here or on the whole node, which says nothing about the other side."""
    return isinstance(error, OSError) and error.errno in EXHAUSTED


class Seldom:
    """What happens thousands of times a second is logged once in a while, with how often it happened."""

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
