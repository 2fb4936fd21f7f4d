"""Calls of a file system that may never answer: a network volume that is away holds whoever asks it.

So the agent's loop makes none of them. Each has a thread of its own, that nobody waits for longer than it gets on, and
that does not hold up the end of the process. A call that was given up goes on, and may even take effect later; until
all of those have ended no other begins, so threads don't pile up behind a volume that is away.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")
Beat = Callable[[], None]  # from within a long call: it gets on

SILENT_S = 30.0  # a call that got on by nothing for so long is given up


class VolumeSilent(Exception):
    """A call got no answer. Whether it took effect is unknown; trying again later is safe for reads and removals."""


class VolumeDirectory:
    """One directory of a volume, and the calls of it that are under way."""

    def __init__(self, place: Path, *, silent_s: float = SILENT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.place = place
        self._silent_s = silent_s
        self._clock = clock
        self._given_up: dict[Future[Any], str] = {}

    async def call(self, what: str, work: Callable[[Beat], T]) -> T:
        """Its result, or what it raises. what: verb phrase for the message. Raises VolumeSilent."""
        self._given_up = {call: name for call, name in self._given_up.items() if not call.done()}
        for name in self._given_up.values():
            raise VolumeSilent(self._words(name))
        heard_at = self._clock()

        def beat() -> None:
            nonlocal heard_at
            heard_at = self._clock()

        result = in_thread(what, lambda: work(beat))
        answer = asyncio.wrap_future(result)
        try:
            while not answer.done():
                left_s = heard_at + self._silent_s - self._clock()
                if left_s <= 0:
                    self._given_up[result] = what
                    raise VolumeSilent(self._words(what))
                await asyncio.wait({answer}, timeout=left_s)
            return answer.result()
        finally:
            answer.cancel()

    def _words(self, what: str) -> str:
        return (
            f"the volume at {self.place} does not answer: to {what} took over {self._silent_s:.0f} s; it is tried "
            "again once that has ended: see that the node reaches the volume's server"
        )


def in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Not in a pool of the standard library, whose threads the end of a process waits for."""
    result = Future[T]()
    result.set_running_or_notify_cancel()  # who waits may go, the call can't be taken back

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - of whoever waits for it
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


def in_threads(name: str, work: Callable[[U], T], items: Iterable[U], *, at_once: int) -> list[T]:
    """Of each item, in order; in so many threads, however many items there are. Raises what one that failed raised."""
    left, taking, made = enumerate(items), threading.Lock(), dict[int, T]()

    def take() -> tuple[int, U] | None:
        with taking:
            return next(left, None)

    def work_off() -> None:
        while (taken := take()) is not None:
            number, item = taken
            made[number] = work(item)

    for each in [in_thread(name, work_off) for _ in range(at_once)]:
        each.result()
    return [made[number] for number in range(len(made))]
