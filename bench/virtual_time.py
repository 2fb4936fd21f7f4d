"""An event loop whose clock stands still while anything can be done, and then jumps to the next timer.

So code that waits for hours runs as fast as it computes, and takes the same turns each time. What a thread does outside
the loop (a commit, a file) takes no time on this clock: while the loop knows of such work it waits for it in earnest.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class NothingLeft(RuntimeError):
    """Everybody waits, and no timer and no thread is left that could end it."""


class VirtualTime(asyncio.SelectorEventLoop):
    """Runs a loop whose time only moves between events. now: seconds since the loop was made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._outside = 0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now

    @property
    def is_waited_for(self) -> bool:
        return self._outside > 0

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Keep virtual time from moving while a thread works for whoever enters."""
        self._outside += 1
        try:
            yield
        finally:
            self._outside -= 1

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        self._outside += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._back)
        return future

    async def shutdown_default_executor(self) -> None:
        with self.outside():
            await super().shutdown_default_executor()

    def _back(self, _: asyncio.Future[Any]) -> None:
        self._outside -= 1


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTime) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        if self._loop.is_waited_for:
            return super().select(None)
        if events := super().select(0):
            return events
        if timeout is None:
            raise NothingLeft("every task waits, and nothing is left that could wake one")
        self._loop.now += timeout
        return []


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run as asyncio.run does, on this clock."""
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(main)


def loop() -> VirtualTime:
    """The one that runs."""
    it = asyncio.get_running_loop()
    assert isinstance(it, VirtualTime)
    return it
