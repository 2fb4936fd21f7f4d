"""A limit of processes and threads, as a node sets one for each pod."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")  # of version 1, and 2


@contextmanager
def few_processes(most: int) -> Iterator[Callable[[], None]]:
    """Yield a function that a child calls before its program, so that it and its descendants are at most so many.

    By a cgroup where one may be made, as root; else by a limit of this user's processes, which root does not have.
    """
    for parent in CGROUPS:
        group = parent / f"few-processes-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
        limit = group / "pids.max"
        if limit.exists():
            limit.write_text(str(most))
            try:
                yield lambda members=group / "cgroup.procs": members.write_text(str(os.getpid()))  # type: ignore[misc]
            finally:
                _end_all(group)
                group.rmdir()
            return
        with suppress(OSError):
            group.rmdir()
    assert os.getuid() != 0, "root needs a cgroup of its own: none can be made here"
    ceiling = _threads_of(os.getuid()) + most
    yield lambda: resource.setrlimit(resource.RLIMIT_NPROC, (ceiling, ceiling))


def _end_all(group: Path) -> None:
    """Kill what a test that failed has left behind: all of it is stopped first, so that nothing is born meanwhile."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        before: set[str] = set()
        while found := set((group / "cgroup.procs").read_text().split()) - before:
            before |= found if number == signal.SIGSTOP else set()
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), number)


def _threads_of(user: int) -> int:
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if process.stat().st_uid == user:
                total += len(list((process / "task").iterdir()))
    return total
