"""Things timed in turns, so that all of them see the same machine, and lines that say how each did beside another."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

TURNS = 3
GIB = 1 << 30


def in_turns(what: dict[str, Callable[[], object]], before: Callable[[], object] = lambda: None) -> dict[str, float]:
    """Median seconds of each; one after another, several times, the first of which does not count."""
    took: dict[str, list[float]] = {name: [] for name in what}
    for turn in range(TURNS + 1):
        for name, do in what.items():
            before()
            began = time.perf_counter()
            do()
            if turn:
                took[name].append(time.perf_counter() - began)
    return {name: median(times) for name, times in took.items()}


def show(name: str, size: int, took_s: float, *, beside: float | None = None) -> None:
    """Print one row. size: in bytes. beside: seconds that something else took for as many."""
    ratio = f"  {beside / took_s:5.2f}" if beside is not None else ""
    print(f"  {name:42} {size / took_s / GIB:7.2f} GiB/s{ratio}")
