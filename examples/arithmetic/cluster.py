"""A local cluster and its command line tools, as processes: up for as long as whoever made it, and gone with it.

The supervisor holds the other end of a pipe of this process and ends when that closes: with `down()`, with the
interpreter, and with a kill -9 of it. Nothing here knows what runs in the cluster. The standard library is all that it
needs. Each wait has a deadline, past which it says what was wanted and what was seen instead.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

READY_DEADLINE_S = 200.0  # past the supervisor's own, which then says why
DOWN_DEADLINE_S = 30.0
COMMAND_DEADLINE_S = 120.0
POLL_S = 0.1
LOG = "supervisor.log"
NOT_RUNNING = 3  # exit code of `localcluster status`


class ClusterError(Exception):
    """ClusterError
    ├─ ClusterNotStarted  the binary is missing, or the supervisor ended or hung before the cluster was ready
    ├─ ClusterLost        the supervisor ended later, and all of the cluster with it
    └─ CommandFailed      kubectl or helm said no, or did not answer in time
    """


class ClusterNotStarted(ClusterError):
    """The message ends with what the supervisor said. Not worth a retry."""


class ClusterLost(ClusterError):
    """Somebody killed it, or it failed: the message ends with what it said."""


class CommandFailed(ClusterError):
    """The message holds the command and its error output; `code` is None when it was ended at its deadline."""

    def __init__(self, message: str, *, code: int | None) -> None:
        super().__init__(message)
        self.code = code


def binary() -> Path:
    """Return the program that LOCALCLUSTER names, or the one that this checkout's set-up has built."""
    named = os.environ.get("LOCALCLUSTER")
    path = Path(named) if named else Path(__file__).parents[2] / ".build/bin/localcluster"
    if not path.exists():
        raise ClusterNotStarted(f"no cluster binary at {path}: `make setup` builds it, or LOCALCLUSTER names one")
    return path.absolute()


def remove_old(directory: Path) -> None:
    """Remove a directory that a cluster of before has left, with what its pods wrote. Raises ClusterError."""
    tool = (binary(), "--dir", directory)
    if not directory.exists():
        return
    if subprocess.run((*tool, "status"), capture_output=True, check=False).returncode != NOT_RUNNING:
        raise ClusterNotStarted(f"a cluster runs in {directory}: end what uses it first, it ends seconds after that")
    done = subprocess.run((*tool, "down", "--delete"), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterNotStarted(f"what an earlier cluster left in {directory} is not removed: {done.stderr.strip()}")


class LocalCluster:
    """A cluster that is up. Made by `up`; as a context manager it ends with the block."""

    def __init__(self, directory: Path, supervisor: subprocess.Popen[bytes], program: Path) -> None:
        self.directory = directory
        self.supervisor = supervisor
        self._program = program

    @classmethod
    def up(cls, directory: Path, *, images: Path | None = None, options: Iterable[str] = ()) -> Self:
        """Start a cluster in a directory, new or used before, and return when pods can run.

        images: the file of image names; None: every name is the machine's own root. options: more words for
        `localcluster up`. Raises ClusterNotStarted.
        """
        program = binary()
        words = [*options, "--stop-on-eof"]
        if images is not None:
            words.append(f"--images={images}")
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / LOG).open("wb") as log:
            supervisor = subprocess.Popen(
                [program, "--dir", directory, "up", *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the cluster
            )
        cluster = cls(directory, supervisor, program)
        try:
            cluster._wait_until_ready()
        except BaseException:  # also an interrupt: nobody else knows of this cluster
            cluster.down()
            raise
        return cluster

    @property
    def is_lost(self) -> bool:
        return self.supervisor.poll() is not None

    def refuse_lost(self) -> None:
        """Raises ClusterLost."""
        if self.is_lost:
            raise ClusterLost(f"{self._end()} while it was in use: start again\n{self._said()}")

    def _wait_until_ready(self) -> None:
        # A kubeconfig of before may still be there for a moment; the supervisor removes it before it writes its state.
        # Only its own last word counts.
        until = time.monotonic() + READY_DEADLINE_S
        while "\nready after" not in "\n" + self._said():
            if self.is_lost:
                raise ClusterNotStarted(f"{self._end()}:\n{self._said()}")
            if time.monotonic() > until:
                raise ClusterNotStarted(
                    f"the cluster in {self.directory} is not ready after {READY_DEADLINE_S:.0f} s:\n{self._said()}"
                )
            time.sleep(POLL_S)

    def _end(self) -> str:
        return f"the cluster in {self.directory} ended with code {self.supervisor.returncode}"

    def _said(self) -> str:
        """The last part of what the supervisor said."""
        return (self.directory / LOG).read_text(errors="replace")[-3000:]

    @property
    def kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    def command(self, *words: str | Path) -> list[str]:
        """The command line of kubectl or helm for this cluster, for a process that goes on."""
        return [str(self._program), "--dir", str(self.directory), *map(str, words)]

    def kubectl(self, *words: str | Path, stdin: str | None = None, deadline_s: float = COMMAND_DEADLINE_S) -> str:
        """Standard output. Raises CommandFailed."""
        return self._run("kubectl", *words, stdin=stdin, deadline_s=deadline_s)

    def helm(self, *words: str | Path, deadline_s: float = COMMAND_DEADLINE_S) -> str:
        """Standard output. Raises CommandFailed."""
        return self._run("helm", *words, stdin=None, deadline_s=deadline_s)

    def down(self) -> None:
        """End the cluster in order, and return when nothing of it is left but its directory. May be called again."""
        stdin = self.supervisor.stdin
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                stdin.close()
        try:
            self.supervisor.wait(DOWN_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.supervisor.kill()  # its processes end with it
            self.supervisor.wait(DOWN_DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def _run(self, *words: str | Path, stdin: str | None, deadline_s: float) -> str:
        line = " ".join(map(str, words))
        try:
            done = subprocess.run(
                self.command(*words), input=stdin, capture_output=True, text=True, timeout=deadline_s, check=False
            )
        except subprocess.TimeoutExpired as late:
            raise CommandFailed(f"{line}: no answer within {deadline_s:.0f} s", code=None) from late
        if done.returncode != 0:
            raise CommandFailed(f"{line}: {done.stderr.strip() or done.stdout.strip()}", code=done.returncode)
        return done.stdout
