"""A local cluster as tests speak to it: the demo's, with a look at its state and waits that fail a test."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from traces import Process, family, living, send

from examples.arithmetic.cluster import COMMAND_DEADLINE_S, CommandFailed, LocalCluster, binary
from setup.layout import CHECKOUT

__all__ = ["Cluster", "CommandFailed", "NotInTime", "binary"]

POLL_S = 0.5  # most looks start a kubectl, for a quarter of a second of a processor

Seen = TypeVar("Seen")


@functools.cache
def kubernetes_release() -> tuple[int, ...]:
    """Return the release of Kubernetes in clusters of tests: what LOCALCLUSTER_KUBERNETES names, or the binary's."""
    if programs := os.environ.get("LOCALCLUSTER_KUBERNETES"):
        command = [f"{programs}/kubelet", "--version"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S, check=True).stdout
    else:
        text = (CHECKOUT.root / "tests/localcluster/go.mod").read_text()
    release = re.search(r"^(?:Kubernetes|require k8s.io/kubernetes) v(\d+)\.(\d+)\.(\d+)$", text, re.MULTILINE)
    assert release is not None, text
    return tuple(map(int, release.groups()))


class NotInTime(AssertionError):
    """A condition was not seen by its deadline: a test that waits in vain has failed."""


class Cluster(LocalCluster):
    def get(self, *words: str) -> dict[str, Any]:
        """An object, or a list of them. Raises CommandFailed."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *words, "-o", "json"))
        return found

    def status(self) -> dict[str, Any]:
        """Return the state as `localcluster status` knows it, also when the cluster is not well."""
        done = subprocess.run(
            [*self.command("status"), "--json"],
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE_S,
            check=False,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def processes(self) -> dict[str, int]:
        """Return the process of each component that runs."""
        return {part["name"]: part["pid"] for part in self.status()["components"]}

    @contextmanager
    def silenced(self, node: str) -> Iterator[None]:
        """Let everything of a node stand still: connections stay open, and nobody answers."""
        pids = self.processes()
        stopped: set[Process] = set()
        while more := (family(pids[f"kubelet-{node}"]) | family(pids[f"cri-{node}"])) - stopped:
            send(more, signal.SIGSTOP)
            stopped |= more
        try:
            yield
        finally:
            send(living(stopped), signal.SIGCONT)

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

    def _overview(self) -> str:
        """Return the output that a person would look at first."""
        parts: Sequence[Sequence[str]] = (
            ("get", "pods", "--all-namespaces", "-o", "wide"),
            ("get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"),
        )
        outputs = []
        for words in parts:
            try:
                outputs.append(self.kubectl(*words, deadline_s=10)[-3000:])
            except CommandFailed as error:
                outputs.append(str(error))
        return "\n".join(outputs)
