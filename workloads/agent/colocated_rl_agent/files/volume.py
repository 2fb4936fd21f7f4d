"""This module calls file systems that may never answer: an unreachable network volume blocks its callers.

So the agent's loop makes no such call. Each call has a thread of its own, which is awaited only while it makes progress
and does not hold up the end of the process. An abandoned call goes on, and may even take effect later; no other begins
until all of those have ended, so threads don't pile up behind an unreachable volume.
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
Beat = Callable[[], None]  # called from within a long call to report progress

SILENT_S = 30.0  # a call without progress for so long is abandoned


class VolumeSilent(Exception):
    """A call got no answer. Whether it took effect is unknown; trying again later is safe for reads and removals."""


class VolumeDirectory:
    """A VolumeDirectory is one directory of a volume with its calls in progress."""

    def __init__(self, place: Path, *, silent_s: float = SILENT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.place = place
        self._silent_s = silent_s
        self._clock = clock
        self._given_up: dict[Future[Any], str] = {}

    async def call(self, what: str, work: Callable[[Beat], T]) -> T:
        """Return the result of `work`, or raise its error. what: verb phrase for the message. Raises VolumeSilent."""
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
    """Run `work` in a daemon thread: the end of a process waits for the threads of the standard library's pools."""
    result = Future[T]()
    result.set_running_or_notify_cancel()  # a waiter may leave, the call can't be cancelled

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - of whoever waits for it
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


def in_threads(name: str, work: Callable[[U], T], items: Iterable[U], *, at_once: int) -> list[T]:
    """Return the results for all items, in order, with `at_once` threads. Raises the error of a failed one."""
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
