"""This module lists what a local cluster could leave on the machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
    "net/ipv4/ip_forward",
    "net/ipv4/ip_unprivileged_port_start",
)


class Process(NamedTuple):
    """One process for all times: a number may be given again, but not at the same tick of the clock."""

    pid: int
    started: int
    words: str


def traces(directory: Path) -> dict[str, object]:
    """All but processes that the directory's name tells nothing of (`family`), and the port (`listens`)."""
    tag = hashlib.sha256(str(directory).encode()).hexdigest()[:8]
    return {
        "settings": {name: Path("/proc/sys", name).read_text() for name in SETTINGS},
        "mounts": [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(directory) in line],
        "interfaces": sorted(path.name for path in Path("/sys/class/net").iterdir()),
        "processes": sorted(one.words for one in _processes() if str(directory) in one.words),
        "cgroups": list(Path("/sys/fs/cgroup").glob(f"**/localcluster-{tag}")),
        "places": [Path(path).exists() for path in ("/var/lib/kubelet", "/var/log/pods", "/var/log/containers")],
    }


def family(pid: int) -> set[Process]:
    """The process and all below it, in whatever namespaces."""
    everyone = _processes()
    found = {pid}
    while grown := {one.pid for one, parent in everyone.items() if parent in found} - found:
        found |= grown
    return {one for one in everyone if one.pid in found}


def living(processes: set[Process]) -> set[Process]:
    return processes & _processes().keys()


def send(processes: set[Process], number: signal.Signals) -> None:
    """Send a signal to those that have not ended."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def listens(directory: Path) -> bool:
    """Return whether the port of a cluster's API server is open."""
    port = json.loads((directory / "state.json").read_text())["Options"]["Port"]
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(what: str, holds: Callable[[], bool], *, deadline_s: float, explain: Callable[[], str] = str) -> None:
    until = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < until, f"not within {deadline_s:.0f} s: {what}\n{explain()}"
        time.sleep(0.05)


def _processes() -> dict[Process, int]:
    """Each with its parent; not those that have ended and only wait to be asked how."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            state, parent, *rest = (place / "stat").read_text().rpartition(") ")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        if state != "Z":
            found[Process(int(place.name), int(rest[17]), words)] = int(parent)
    return found
