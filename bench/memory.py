"""Memory of the processes of a run, by what they are, as the kernel accounts for it."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EVERY_S = 2.0
KINDS = {  # what a command line of each kind contains, first match
    "engine": ("sglang", "multiprocessing"),
    "trainer rank": ("-m colocated_rl_trainer",),
    "agent": ("-m colocated_rl_agent",),
    "runner": ("/run/colocate/bin/runner",),
    "task process of the rollout controller": ("-m colocated_rl_rollout.",),
    "rollout controller": ("-m colocated_rl_rollout",),
    "operator": ("-m colocated_rl_operator",),
    "kubectl": (" kubectl ",),
    "API server": ("kube-apiserver",),
    "other processes of the local cluster": ("localcluster",),
    "the demo itself": ("examples.arithmetic.demo",),
}
ALL = "all of them"


@dataclass
class Peak:
    """Peaks of the processes of one kind: their number, the largest of them, and their sum at one time, in bytes."""

    processes: int = 0
    largest: int = 0
    together: int = 0

    def rise(self, sizes: list[int]) -> None:
        self.processes = max(self.processes, len(sizes))
        self.largest = max([self.largest, *sizes])
        self.together = max(self.together, sum(sizes))


def kind_of(words: str) -> str | None:
    return next((kind for kind, marks in KINDS.items() if any(mark in words for mark in marks)), None)


def share_bytes(process: Path) -> int:
    """Proportional set size: shared pages count for their part, so sizes may be added. 0: it has ended."""
    with contextlib.suppress(OSError):
        for line in (process / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def family(pid: int) -> list[Path]:
    """The directories in /proc of a process and of all below it, in whatever namespaces."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in (place / "stat" for place in Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):  # it has ended
            children[int(stat.read_text().rpartition(") ")[2].split()[1])].append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children[one]
    return [Path(f"/proc/{one}") for one in found]


def sizes(pid: int) -> dict[str, list[int]]:
    """Bytes of each process of the family, by kind, now."""
    found: dict[str, list[int]] = defaultdict(list)
    for process in family(pid):
        with contextlib.suppress(OSError):  # it has ended
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if (kind := kind_of(words)) is not None:
                found[kind].append(share_bytes(process))
    return found


@contextlib.contextmanager
def peaks(pid: int) -> Iterator[dict[str, Peak]]:
    """Yield the peaks of the process and all below it, by kind; they are complete once the block has ended."""
    seen: dict[str, Peak] = defaultdict(Peak)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(EVERY_S):
            now = sizes(pid)
            for kind, each in now.items():
                seen[kind].rise(each)
            seen[ALL].rise([size for each in now.values() for size in each])

    watching = threading.Thread(target=watch, name="memory")
    watching.start()
    try:
        yield seen
    finally:
        ended.set()
        watching.join()
