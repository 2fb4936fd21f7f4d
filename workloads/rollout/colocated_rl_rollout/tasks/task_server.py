"""Starts a task process for each connection to a socket, and ends it with its connection.

    python -m colocated_rl_rollout.tasks.task_server

Runs beside the rollout controller in a container of its own, because what it starts is other people's code: here are no
keys, no token, no store, and none of the controller's processes. The volumes are the socket's, one for caches, and the
claims that the job names for prompts. The controller decides when a process has taken too long: it hangs up.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from colocated_rl_api import descriptors, logs, names

LOG = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-W", "ignore", "-m", "colocated_rl_rollout.tasks.task_process")
BACKLOG = 16
AGAIN_S = 0.1  # after an accept for which there was no descriptor
FAMILY = "COLOCATED_RL_TASK_FAMILY"  # in the environment of a process and, by inheritance, of all that it starts
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # or a library starts one for each core of the node
FEW_ARENAS = {"MALLOC_ARENA_MAX": "2"}  # of 64 MiB of address space each, which is what the limit of a process counts


def listen(path: Path) -> socket.socket:
    """Return a socket that the pod's group may connect to."""
    path.unlink(missing_ok=True)  # left by the container's former run
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o660)
    listener.listen(BACKLOG)
    return listener


def serve(listener: socket.socket, command: Sequence[str]) -> None:
    """Serve until the socket is shut down and all connections are closed."""
    attending: list[threading.Thread] = []
    troubled = descriptors.Seldom()
    with listener:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if not descriptors.is_exhausted(error):
                    break
                troubled.log(LOG, "connections are not accepted", reason=logs.in_words(error))
                time.sleep(AGAIN_S)
                continue
            attending = [each for each in attending if each.is_alive()]
            attending.append(threading.Thread(target=_attend, args=(connection, command), daemon=True))
            attending[-1].start()
    for each in attending:
        each.join()


def _attend(connection: socket.socket, command: Sequence[str]) -> None:
    """Run one process until it or the connection ends."""
    with connection:
        family = uuid.uuid4().hex
        process = subprocess.Popen(
            command,
            stdin=connection.fileno(),
            stdout=connection.fileno(),
            env={**os.environ, **ONE_THREAD, **FEW_ARENAS, FAMILY: family},
            start_new_session=True,  # its children end with it
        )
        ended = os.pidfd_open(process.pid)
        try:
            either = select.poll()
            either.register(connection, select.POLLRDHUP)
            either.register(ended, select.POLLIN)
            by_itself = ended in dict(either.poll())
        finally:
            os.close(ended)
            os.killpg(process.pid, signal.SIGKILL)
            _end_family(family)
            code = process.wait()
    if by_itself:
        logs.log(LOG, "task process ended", logging.WARNING, reason=f"code {code}")


def _end_family(family: str) -> None:
    """Kill what a process started in other sessions, such as programs and servers of tools, found by its mark. Stop all
    of them first, so that none escapes.
    """
    mark = f"{FAMILY}={family}\0".encode()
    stopped: set[int] = set()
    while found := _bearers(mark) - stopped:
        for pid in found:
            _signal(pid, signal.SIGSTOP)
        stopped |= found
    for pid in stopped:
        _signal(pid, signal.SIGKILL)


def _bearers(mark: bytes) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark in path.read_bytes():
                found.add(int(path.parent.name))
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m colocated_rl_rollout.tasks.task_server",
        description="Starts what makes prompts and computes rewards.",
    )
    parser.add_argument("--socket", type=Path, default=Path(names.TASKS_SOCKET))
    parser.add_argument("--claims", default=names.PROMPTS_DIR, help="where claims of prompts are mounted")
    parser.add_argument("--cache", default="/tmp/colocate", help="directory for copies and downloads of prompts")
    given = parser.parse_args()
    logs.configure(role=names.ROLE_ROLLOUT)
    descriptors.raise_limit()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the first process of a container is spared without
    serve(listen(given.socket), [*COMMAND, given.claims, given.cache])


if __name__ == "__main__":
    main()
