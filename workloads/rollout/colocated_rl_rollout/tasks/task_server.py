"""Starts a task process for each connection to a socket, and ends it with its connection.

    python -m colocated_rl_rollout.tasks.task_server

Runs beside the rollout controller in a container of its own, because what it starts is other people's code: here are no
keys, no token, no store, and none of the controller's processes. The volumes are the socket's, one for caches, and the
claims that the job names for prompts. The controller decides when a process has taken too long: it hangs up.

The limit of a pod's processes is the node's, and all of the pod's together: whoever uses it up leaves none to the
others. So each process is counted with all that descends from it, and ended with that when it is too much.
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
from collections.abc import Sequence
from pathlib import Path

from colocated_rl_api import descriptors, logs, names
from colocated_rl_rollout.tasks import keeper

LOG = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-W", "ignore", "-m", "colocated_rl_rollout.tasks.task_process")
BACKLOG = 16
AGAIN_S = 0.1  # after an accept for which there was no descriptor
END_S = 5.0  # for a keeper to end its family
MAX_FAMILY = 2048  # processes and threads of a process and of all that descends from it
COUNT_S = 1.0  # between two counts
FEW = 64  # a family of no more is never the one that leaves no process to others
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # or a library starts one for each core of the node
ONE_ORDER = {"PYTHONHASHSEED": "0"}  # of sets of texts: one process scores what another one asked
FEW_ARENAS = {"MALLOC_ARENA_MAX": "2"}  # of 64 MiB of address space each, which is what the limit of a process counts


def listen(path: Path) -> socket.socket:
    """Return a socket that the pod's group may connect to."""
    path.unlink(missing_ok=True)  # left by the container's former run
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(BACKLOG)
    path.chmod(0o660)  # last: whoever may connect is answered
    return listener


class Families:
    """Holds each process with all that descends from it. A process starts behind a `keeper`, which ends them together.

    adopts: what is left of a family whose keeper was killed comes to this process, which ends it: then all children of
    this process have to be those of these families.
    """

    def __init__(self, command: Sequence[str], *, adopts: bool) -> None:
        self._command = [sys.executable, "-I", "-S", keeper.__file__, *command]
        self._adopts = adopts
        self._keepers: dict[int, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()

    def begin(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        with self._lock:
            process = subprocess.Popen(
                self._command,
                stdin=connection.fileno(),
                stdout=connection.fileno(),
                env={**os.environ, **ONE_THREAD, **ONE_ORDER, **FEW_ARENAS},
                start_new_session=True,
            )
            self._keepers[process.pid] = process
        return process

    def count(self, *, most: int = MAX_FAMILY) -> None:
        """Ask the largest family to end if it has more than `most` processes and threads."""
        with self._lock:
            sizes = keeper.sizes_of(self._keepers)
            largest = max(sizes, key=lambda pid: sizes[pid], default=0)
            if sizes.get(largest, 0) > most:
                reason = f"{sizes[largest]} processes and threads, of which {most} are allowed now"
                logs.log(LOG, "task process asked to end", logging.WARNING, reason=reason)
                self._ask_to_end(self._keepers[largest])

    def make_room(self) -> None:
        """Ask the family to end that has left no process to others."""
        self.count(most=FEW)

    def watch(self, stopped: threading.Event) -> None:
        """Count from time to time until it is stopped."""
        while not stopped.wait(COUNT_S):
            self.count()

    @staticmethod
    def _ask_to_end(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        process.send_signal(signal.SIGCONT)  # in case that it was stopped

    def end(self, process: subprocess.Popen[bytes]) -> int:
        """End a family, and return the exit code of its process. Nothing of it is left then."""
        self._ask_to_end(process)
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:  # it has very many to end, or is stopped again and again
            keeper.end_descendants(process.pid)
            process.kill()
            code = process.wait()
        with self._lock:
            self._keepers.pop(process.pid, None)
            while self._adopts and (left := keeper.children_of(os.getpid()) - self._keepers.keys()):
                keeper.end_descendants(os.getpid(), but=self._keepers)
                for pid in left:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, 0)
        return code


def serve(listener: socket.socket, command: Sequence[str], *, adopts: bool = False) -> None:
    """Serve until the socket is shut down and all connections are closed."""
    attending: list[threading.Thread] = []
    families = Families(command, adopts=adopts)
    troubled = descriptors.Seldom()
    stopped = threading.Event()
    counting = threading.Thread(target=families.watch, args=(stopped,), daemon=True)
    counting.start()
    with listener:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if not descriptors.is_exhausted(error):
                    break
                troubled.log(LOG, "connections refused", reason=logs.in_words(error))
                time.sleep(AGAIN_S)
                continue
            attending = [each for each in attending if each.is_alive()]
            thread = threading.Thread(target=_attend, args=(connection, families, troubled), daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # there is none, nor a process
                connection.close()
                _make_room(families, troubled, error)
                time.sleep(AGAIN_S)
            else:
                attending.append(thread)
    stopped.set()
    for each in [*attending, counting]:
        each.join()


def _make_room(families: Families, troubled: descriptors.Seldom, error: Exception) -> None:
    troubled.log(LOG, "task process not started", reason=logs.in_words(error))
    families.make_room()


def _attend(connection: socket.socket, families: Families, troubled: descriptors.Seldom) -> None:
    """Run one process until it or the connection ends."""
    with connection:
        try:
            process = families.begin(connection)
        except OSError as error:
            _make_room(families, troubled, error)
            return
        ended = os.pidfd_open(process.pid)
        try:
            either = select.poll()
            either.register(connection, select.POLLRDHUP)
            either.register(ended, select.POLLIN)
            by_itself = ended in dict(either.poll())
        finally:
            os.close(ended)
            code = families.end(process)
    if by_itself:
        logs.log(LOG, "task process ended", logging.WARNING, reason=f"code {code}")


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
    keeper.become_reaper()  # as the first process of a container is without
    serve(listen(given.socket), [*COMMAND, given.claims, given.cache], adopts=True)


if __name__ == "__main__":
    main()
