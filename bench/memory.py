"""Memory of the processes of a run, by what they are, as the kernel accounts for it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

EVERY_S = 2.0
KINDS = {  # what a command line of each kind contains, first match
    "engine": ("sglang", "multiprocessing"),
    "trainer rank": ("-m colocated_rl_trainer",),
    "agent": ("-m colocated_rl_agent",),
    "runner": ("/run/colocate/bin/runner",),
    "rollout controller": ("-m colocated_rl_rollout",),
    "operator": ("-m colocated_rl_operator",),
    "local cluster": ("localcluster",),
}


def share_bytes(process: Path) -> int:
    """Proportional set size: shared pages count for their part, so sizes may be added. 0: it has ended."""
    with contextlib.suppress(OSError):
        for line in (process / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def by_kind() -> dict[str, int]:
    """Bytes of all processes of each kind on this machine, now."""
    found: dict[str, int] = defaultdict(int)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            kind = next((kind for kind, marks in KINDS.items() if any(mark in words for mark in marks)), None)
            if kind is not None and process.name != str(os.getpid()):
                found[kind] += share_bytes(process)
    return found


@contextlib.contextmanager
def peaks() -> Iterator[dict[str, int]]:
    """Largest sum of each kind while the block runs; whole once it has ended."""
    largest: dict[str, int] = defaultdict(int)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(EVERY_S):
            for kind, size in by_kind().items():
                largest[kind] = max(largest[kind], size)

    watching = threading.Thread(target=watch, name="memory")
    watching.start()
    try:
        yield largest
    finally:
        ended.set()
        watching.join()
