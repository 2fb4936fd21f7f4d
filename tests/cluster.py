"""A local Kubernetes cluster for tests, from the binary that tests/localcluster builds.

Owns one cluster's life and the ways to speak to it. The supervisor holds the other end of a pipe of this process, so
the cluster ends with whoever made it: with `down()`, with the interpreter, and with a kill -9 of it. The standard
library is all that it needs. Each wait has a deadline, past which it says what was wanted and what was seen instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

READY_DEADLINE_S = 200.0  # past the supervisor's own, which then says why
DOWN_DEADLINE_S = 30.0
COMMAND_DEADLINE_S = 120.0
POLL_S = 0.1

Seen = TypeVar("Seen")


class ClusterError(Exception):
    """ClusterError
    ├─ ClusterNotStarted  the binary is missing, or the supervisor ended or hung before the cluster was ready
    ├─ CommandFailed      kubectl or helm said no, or did not answer in time
    └─ NotInTime          a condition was not seen by its deadline
    """


class ClusterNotStarted(ClusterError):
    """The message ends with what the supervisor said. Not worth a retry."""


class CommandFailed(ClusterError):
    """The message holds the command and its error output; `code` is None when it was ended at its deadline."""

    def __init__(self, message: str, *, code: int | None) -> None:
        super().__init__(message)
        self.code = code


class NotInTime(ClusterError, AssertionError):
    """A test that waits in vain has failed."""


def binary() -> Path:
    """What LOCALCLUSTER names, or what this checkout's set-up has built."""
    named = os.environ.get("LOCALCLUSTER")
    path = Path(named) if named else Path(__file__).parent.parent / ".build/bin/localcluster"
    if not path.exists():
        raise ClusterNotStarted(f"no cluster binary at {path}: `make setup` builds it, or LOCALCLUSTER names one")
    return path.absolute()


class Cluster:
    """A cluster that is up. Made by `up`; as a context manager it ends with the block."""

    def __init__(self, directory: Path, supervisor: subprocess.Popen[bytes], program: Path) -> None:
        self.directory = directory
        self.supervisor = supervisor
        self._program = program

    @classmethod
    def up(
        cls,
        directory: Path,
        *,
        images: Path | None = None,
        nodes: int = 1,
        extended_resources: Mapping[str, int] | None = None,
        devices: int = 0,
        port: int = 0,
    ) -> Self:
        """Start a cluster in a directory, new or used before, and return when pods can run.

        images: the file of image names; None: every name is the machine's own root.
        extended_resources: simulated on each node. devices: fake DRA devices on each node. port: 0 is any free one.
        Raises ClusterNotStarted.
        """
        program = binary()
        words = [f"--nodes={nodes}", f"--devices={devices}", f"--port={port}", "--stop-on-eof"]
        words += [f"--extended-resource={name}={count}" for name, count in (extended_resources or {}).items()]
        if images is not None:
            words.append(f"--images={images}")
        directory.mkdir(parents=True, exist_ok=True)
        log_path = directory / "supervisor.log"
        with log_path.open("wb") as log:
            supervisor = subprocess.Popen(
                [program, "--dir", directory, "up", *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the test run, which then ends the cluster
            )
        cluster = cls(directory, supervisor, program)
        try:
            cluster._wait_until_ready(log_path)
        except BaseException:  # also an interrupt: nobody else knows of this cluster
            cluster.down()
            raise
        return cluster

    def _wait_until_ready(self, log_path: Path) -> None:
        # A kubeconfig of before may still be there for a moment; the supervisor removes it before it writes its state.
        # Only its own last word counts.
        until = time.monotonic() + READY_DEADLINE_S
        while b"\nready after" not in b"\n" + log_path.read_bytes():
            if self.supervisor.poll() is not None:
                raise ClusterNotStarted(
                    f"the cluster in {self.directory} ended with code {self.supervisor.returncode}:\n{_tail(log_path)}"
                )
            if time.monotonic() > until:
                raise ClusterNotStarted(
                    f"the cluster in {self.directory} is not ready after {READY_DEADLINE_S:.0f} s:\n{_tail(log_path)}"
                )
            time.sleep(POLL_S)

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

    def get(self, *words: str) -> dict[str, Any]:
        """An object, or a list of them. Raises CommandFailed."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *words, "-o", "json"))
        return found

    def status(self) -> dict[str, Any]:
        """What runs, as `localcluster status` knows it, also when it is not well."""
        done = subprocess.run(
            [*self.command("status"), "--json"],
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE_S,
            check=False,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def wait_for(self, description: str, predicate: Callable[[], Seen | None], deadline_s: float) -> Seen:
        """The first thing other than None and False that `predicate` sees. Raises NotInTime.

        A command that fails while waiting counts as not seen yet; the last failure is told at the deadline.
        """
        until = time.monotonic() + deadline_s
        while True:
            try:
                seen = predicate()
                last = repr(seen)
            except CommandFailed as error:
                seen, last = None, str(error)
            if seen is not None and seen is not False:
                return seen
            if time.monotonic() > until:
                raise NotInTime(f"not within {deadline_s:.0f} s: {description}\nlast seen: {last}\n{self._overview()}")
            time.sleep(POLL_S)

    def down(self) -> None:
        """End the cluster in order, and return when nothing of it is left. May be called again."""
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

    def _overview(self) -> str:
        """What a person would look at first."""
        parts: Sequence[Sequence[str]] = (
            ("get", "pods", "--all-namespaces", "-o", "wide"),
            ("get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"),
        )
        said = []
        for words in parts:
            try:
                said.append(self.kubectl(*words, deadline_s=10)[-3000:])
            except CommandFailed as error:
                said.append(str(error))
        return "\n".join(said)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]
