"""A job on a cluster, as a person with kubectl sees it: status, pods, logs, exec.

Nothing here knows how a cluster is made, so the end-to-end tests run unchanged on any.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from cluster import CommandFailed

from colocated_rl_api import names
from colocated_rl_api.ladder import TIME_SLICED
from colocated_rl_api.rungs import Rung
from colocated_rl_cli.evidence.records import read_line

POLL_S = 1.0  # each look starts a kubectl
T = TypeVar("T")


class KubectlCall(Protocol):
    """Runs kubectl and returns its standard output; raises when it fails."""

    def __call__(self, *args: str, stdin: str | None = None) -> str: ...


@dataclass(frozen=True)
class Line:
    """One JSON log line of a member."""

    ts: float
    event: str
    pod: str
    fields: dict[str, Any]

    @property
    def began(self) -> float:
        """Return when the work began whose duration this line reports."""
        return self.ts - float(self.fields.get("took_s", 0.0))


def wait_for(
    what: str,
    look: Callable[[], T | None],
    *,
    deadline_s: float,
    explain: Callable[[], str] = str,
    every_s: float = POLL_S,
) -> T:
    """The first thing that `look` finds. Fails at the deadline with what was wanted and what is seen instead.

    A command that fails has found nothing yet: a container starts, or a busy machine did not answer it in time.
    """
    until = time.monotonic() + deadline_s
    while True:
        found: T | None = None
        trouble = ""
        try:
            found = look()
        except (CommandFailed, subprocess.SubprocessError) as error:
            trouble = f"{error}\n"
        if found is not None and found is not False:
            return found
        if time.monotonic() > until:
            raise AssertionError(f"not within {deadline_s:.0f} s: {what}\n{trouble}{explain()}")
        time.sleep(every_s)  # kubectl has no event for a condition over several objects


class RunningJob:
    def __init__(self, kubectl: KubectlCall, *, namespace: str, name: str) -> None:
        self._kubectl = kubectl
        self.namespace = namespace
        self.name = name
        self._seen: dict[str, Any] | None = None  # when it was last asked for

    # ------------------------------------------------------------------------------------------------------- objects
    def get(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", names.PLURAL, self.name, "-o", "json"))
        self._seen = found
        return found

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get().get("status", {})
        return found

    @property
    def step(self) -> int:
        return int(self.status.get("step") or 0)

    @property
    def uid(self) -> str:
        return str(self.get()["metadata"]["uid"])

    def condition(self, kind: str) -> str | None:
        return next((c["status"] for c in self.status.get("conditions", []) if c["type"] == kind), None)

    def pods(self, *roles: str) -> list[dict[str, Any]]:
        """Return the pods of these roles: those of the first before those of the next, each sorted by name."""
        selector = f"{names.JOB_NAME_LABEL}={self.name},{names.ROLE_LABEL} in ({','.join(roles)})"
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]

        def place(pod: dict[str, Any]) -> tuple[int, str]:
            return roles.index(pod["metadata"]["labels"][names.ROLE_LABEL]), pod["metadata"]["name"]

        return sorted(found, key=place)

    @property
    def gpu_pods(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.pods(*names.GPU_ROLES)]

    @property
    def nodes(self) -> dict[str, str]:
        """Return the nodes of the pods with trainers that exist and have not ended."""
        return {
            pod["metadata"]["name"]: pod["spec"].get("nodeName", "")
            for pod in self.pods(names.ROLE_GPU)
            if pod["status"].get("phase") in ("Pending", "Running") and not pod["metadata"].get("deletionTimestamp")
        }

    @property
    def rollout_pod(self) -> str:
        return str(self.pods(names.ROLE_ROLLOUT)[0]["metadata"]["name"])

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        return self._kubectl("-n", self.namespace, *args, stdin=stdin)

    def change(self, **spec: Any) -> None:
        self.kubectl("patch", names.PLURAL, self.name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def end_soon(self) -> None:
        """Two more steps, or a few if it is quicker than this: it ends with the one that it is at by then."""
        self.change(steps=self.step + 2)

    def delete(self) -> None:
        self.kubectl("delete", names.PLURAL, self.name, "--wait=false", "--ignore-not-found")

    # ------------------------------------------------------------------------------------------------------- waiting
    def wait_for_step(self, step: int, *, deadline_s: float) -> None:
        self.wait_for(f"step {step}", lambda: self.step >= step, deadline_s=deadline_s)

    def wait_for_condition(self, kind: str, *, deadline_s: float) -> None:
        self.wait_for(kind, lambda: self.condition(kind) == "True", deadline_s=deadline_s)

    def wait_for(self, what: str, look: Callable[[], T | None], *, deadline_s: float) -> T:
        """Return the first thing that `look` finds. Fails at the deadline, and as soon as the job has failed."""

        def found_or_failed() -> T | None:
            self._seen = None
            found = look()
            if not found and (failure := self._failure()):
                raise AssertionError(f"{self.name} failed before {what}: {failure}\n{self.describe()}")
            return found

        return wait_for(f"{what} of {self.name}", found_or_failed, deadline_s=deadline_s, explain=self.describe)

    def _failure(self) -> str | None:
        """Return why the job has failed; None if it has not, or if the operator has not seen its newest spec yet.

        A look that has just asked for the job is not followed by another: each starts a kubectl.
        """
        job = self._seen or self.get()
        status = job.get("status", {})
        if status.get("observedGeneration") != job["metadata"]["generation"]:
            return None  # a retry may be asked for
        conditions = status.get("conditions", [])
        return next((c["message"] for c in conditions if (c["type"], c["status"]) == ("Failed", "True")), None)

    def describe(self) -> str:
        """Return the output that a person would look at first."""
        pods = self.kubectl("get", "pods", "-o", "wide")
        events = self.kubectl("get", "events", "--sort-by=.lastTimestamp")
        return f"status: {json.dumps(self.status, indent=1)}\n{pods}\n{events[-3000:]}"

    # ---------------------------------------------------------------------------------------------------------- logs
    def lines(self, pod: str, container: str) -> list[Line]:
        """JSON lines of a member's container, oldest first; without one that is just being written."""
        read = map(read_line, self.kubectl("logs", pod, "-c", container).splitlines())
        return [Line(line["ts"], line["event"], pod, line) for line in read if line is not None and "event" in line]

    def agent_lines(self, event: str | None = None) -> list[Line]:
        """Return the lines of all agents, ordered by time."""
        found = [line for pod in self.gpu_pods for line in self.lines(pod, names.AGENT_CONTAINER)]
        return sorted((line for line in found if event in (None, line.event)), key=lambda line: line.ts)

    def checksums(self) -> dict[str, list[str]]:
        """Return the checksums of their weights that engines gave, by version."""
        held: dict[str, list[str]] = {}
        for line in self.agent_lines("weights checksummed"):
            held.setdefault(line.fields["version"], []).append(line.fields["checksum"])
        return held

    def rollout_lines(self, event: str) -> list[Line]:
        return [line for line in self.lines(self.rollout_pod, names.ROLLOUT_CONTAINER) if line.event == event]

    def rungs(self, step: int) -> Iterator[Line]:
        """Each pod's arrivals at rungs on the way to one step."""
        for line in self.agent_lines("rung reached"):
            if line.fields.get("step") == step:
                yield line

    # ---------------------------------------------------------------------------------------------------------- exec
    def python(self, pod: str, container: str, code: str, *args: str) -> str:
        """Runs code in a container's own Python."""
        return self.kubectl("exec", "-i", pod, "-c", container, "--", "python3", "-", *args, stdin=code)

    def member(self, pod: str) -> dict[str, Any]:
        """`/v1/state` of a member: hello, target, facts."""
        container = names.ROLLOUT_CONTAINER if pod == self.rollout_pod else names.AGENT_CONTAINER
        code = (
            "import urllib.request as u\n"
            f"print(u.urlopen('http://127.0.0.1:{names.PAGES_PORT}/v1/state', timeout=60).read().decode())"
        )
        found: dict[str, Any] = json.loads(self.python(pod, container, code))
        return found

    def signal(self, pod: str, container: str, *, command_contains: str, signal: str) -> int:
        """Send a signal to every process of a container whose command line contains a text; how many there were."""
        code = (
            "import os, pathlib, signal, sys\n"
            "want, number, hit = sys.argv[1].encode(), getattr(signal, sys.argv[2]), 0\n"
            "for path in pathlib.Path('/proc').glob('[0-9]*'):\n"
            "    try:\n"
            "        if int(path.name) not in (1, os.getpid()) and want in (path / 'cmdline').read_bytes():\n"
            "            os.kill(int(path.name), number); hit += 1\n"
            "    except (FileNotFoundError, ProcessLookupError):\n"
            "        pass\n"
            "print(hit)"
        )
        return int(self.python(pod, container, code, command_contains, signal))


def reached(lines: list[Line], pod: str, rung: Rung) -> float:
    """Return when a pod first stood at a rung or above, among these lines."""
    times = [line.ts for line in lines if line.pod == pod and TIME_SLICED.reaches(Rung(line.fields["rung"]), rung)]
    if not times:
        raise AssertionError(f"{pod} never reached {rung}: {[(line.pod, line.fields['rung']) for line in lines]}")
    return min(times)
