"""Measure how long a rank's requests go on without progress, and tell where the rank stands meanwhile.

A rank that hangs in a collective holds up all others, each of which stands still too: the one that is furthest behind,
and the functions that it is in, are what a person needs to know. Only names of functions, files and lines are told:
variables may have words of prompts in them.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath

from colocated_rl_api.trainer_wire import Standstill

STILL_S = 5.0  # a shorter one is not reported
MOST_FUNCTIONS = 16


@dataclass
class _Running:
    kind: str
    since: float  # its last progress
    longest_s: float = 0.0
    moved: int = 0


class Pace:
    """Measures the pace of the requests of one rank. The caller keeps calls from overlapping."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usual_s: dict[str, float] = {}
        self._running: _Running | None = None

    def begin(self, kind: str) -> None:
        self._running = _Running(kind, self._clock())

    def progress(self) -> None:
        """Note that the request got on."""
        if self._running is not None:
            now, running = self._clock(), self._running
            running.longest_s, running.since = max(running.longest_s, now - running.since), now
            running.moved += 1

    def end(self, *, is_done: bool) -> None:
        """Note the end of the request. is_done: it did what was asked, so its times are usual ones.

        One that is over at once without progress had nothing to do, such as a step in which no sample has an advantage.
        It says nothing about the next one.
        """
        running, self._running = self._running, None
        if running is None:
            return
        last_s = self._clock() - running.since
        had_work = running.moved > 0 or last_s >= STILL_S
        if is_done and had_work:
            running.longest_s = max(running.longest_s, last_s)
            self._usual_s[running.kind] = max(running.longest_s, self._usual_s.get(running.kind, 0.0))

    def standstill(self, thread: int) -> Standstill | None:
        """Return the present standstill, if it has lasted for STILL_S. thread: the identity of the one that works."""
        running = self._running
        if running is None or (seconds := self._clock() - running.since) < STILL_S:
            return None
        usual_s = self._usual_s.get(running.kind)
        return Standstill(seconds=seconds, usual_s=usual_s, moved=running.moved, where=where(thread))


def where(thread: int) -> str:
    """Return the functions that a thread is in, the innermost first; "" if there is no such thread."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - documented, and the one way to another thread
    if frame is None:
        return ""
    stack = list(traceback.walk_stack(frame))[:MOST_FUNCTIONS]
    return " < ".join(
        f"{each.f_code.co_name} ({PurePath(each.f_code.co_filename).name}:{line})" for each, line in stack
    )
