"""Runs one program, and ends with it all that descends from it.

    python -I -S keeper.py PROGRAM [ARGUMENT...]

What a program leaves behind is taken on by the nearest of its ancestors that asks for it (a subreaper), wherever it has
gone: a session of its own or an empty environment change nothing about whom it descends from. So this process is that
ancestor: it reaps what ends, and when the program has ended, or it is asked to end (SIGTERM), all the rest is killed.
It is a program of its own, with nothing but Python's own modules, because it lives beside each process of other
people's code, and because that code must not be able to change it. It can be killed, by code of the same user: then the
first process of the container takes on what is left, and ends it (`task_server`). The program runs at a lower priority
than this process, so that a thousand of it leave it the time to end them. It is not the lowest, at which the program
would hardly advance where processors are not divided among containers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection, Iterable

PR_SET_CHILD_SUBREAPER = 36
LOWER = 5  # as nice counts priorities: a third of the time that a process at 0 has


class AskedToEnd(Exception):
    """Somebody asks this process to end."""


def become_reaper() -> None:
    """Take on what descendants of this process leave behind. Raises OSError."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), *[ctypes.c_ulong(0)] * 3):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def children_of(pid: int) -> set[int]:
    """Return the processes that have this parent now, also those that wait to be reaped."""
    return {child for child, (parent, _) in _processes().items() if parent == pid}


def sizes_of(roots: Iterable[int]) -> dict[int, int]:
    """Return the number of processes and threads that descend from each of these, as a limit of pids counts them."""
    processes = _processes()
    return {root: sum(processes[pid][1] for pid in _descendants(root, (), processes)) for root in roots}


def end_descendants(root: int, *, but: Collection[int] = ()) -> None:
    """Kill all that descends from a process. All is stopped first, so that nothing is born meanwhile.

    but: children that stay, with what descends from them.
    """
    stopped: set[int] = set()
    while found := _descendants(root, but, _processes()) - stopped:
        for pid in found:
            _signal(pid, signal.SIGSTOP)
        stopped |= found
    for pid in stopped:
        _signal(pid, signal.SIGKILL)


def _descendants(root: int, but: Collection[int], processes: dict[int, tuple[int, int]]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in processes.items():
        if pid not in but:
            children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    more = [root]
    while more:
        born = children.get(more.pop(), [])
        found.update(born)
        more += born
    return found


def _processes() -> dict[int, tuple[int, int]]:
    """Return parent and number of threads of every process that this one can see."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib takes longer to load than all of the rest
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                words = file.read().rpartition(b")")[2].split()  # a name may have any character
                found[int(name)] = int(words[1]), max(1, int(words[17]))
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def keep(command: list[str]) -> int:
    """Run the program until it or this process is asked to end; return its exit code, once nothing of it is left."""
    become_reaper()

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise AskedToEnd

    signal.signal(signal.SIGTERM, end)
    code = 0
    try:
        worker = os.posix_spawn(command[0], command, os.environ)
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, worker, LOWER)
        nothing = os.open(os.devnull, os.O_RDWR)
        for handle in (0, 1):  # the connection is the program's: it ends with it
            os.dup2(nothing, handle)
        ended = 0
        while ended != worker:
            ended, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
    except AskedToEnd:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_all()
    return code if code >= 0 else 128 - code


def _end_all() -> None:
    with contextlib.suppress(ChildProcessError):  # there is none any more
        while True:
            end_descendants(os.getpid())
            os.wait()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
