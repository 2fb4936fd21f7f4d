"""The parts of the set-up as tasks: each begins when what it needs is there, and says what it does and for how long.

A task that finds its work done says nothing.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from setup.session import SetupError, SetupSession

STILL_EVERY_S = 20.0  # how often a long task is mentioned


@dataclass(frozen=True)
class SetupTask:
    name: str
    doing: str  # for people, while it runs
    is_made: Callable[[], bool]  # asked once all needs are there
    make: Callable[[SetupSession], None]
    needs: tuple[str, ...] = ()
    expected_s: float = 1  # from nothing, on two cores with a fast network


class Board:
    """Begins tasks and knows which are done."""

    def __init__(self, tasks: Sequence[SetupTask], session: SetupSession) -> None:
        self._tasks: Mapping[str, SetupTask] = {task.name: task for task in tasks}
        self._session = session
        self._pool = ThreadPoolExecutor(max_workers=len(tasks))  # one each: a task waits for its needs in its thread
        self._begun: dict[str, Future[None]] = {}

    def begin(self, names: Sequence[str]) -> None:
        """Begin these tasks and all that they need."""
        for name in names:
            if name not in self._begun:
                self.begin(self._tasks[name].needs)
                self._begun[name] = self._pool.submit(self._perform, self._tasks[name])

    def finish(self, names: Sequence[str]) -> None:
        """Return when these are done. Raises what stopped the first of them that failed."""
        self.begin(names)
        futures = [self._begun[name] for name in names]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()

    def is_finished(self, names: Sequence[str]) -> bool:
        return all(name in self._begun and self._begun[name].done() for name in names)

    def _perform(self, task: SetupTask) -> None:
        self.finish(task.needs)
        if task.is_made():
            return
        began = time.monotonic()
        about = f", up to about {_spoken(task.expected_s)}" if task.expected_s >= 2 else ""
        self._session.say(f"{task.name}: {task.doing}{about}")
        ended = threading.Event()

        def remind() -> None:
            while not ended.wait(STILL_EVERY_S):
                self._session.say(f"{task.name}: {task.doing}, {time.monotonic() - began:.0f} s so far{about}")

        threading.Thread(target=remind, name=f"{task.name}/reminder", daemon=True).start()
        try:
            task.make(self._session)
        except SetupError as error:
            raise SetupError(f"{task.name}: {error}") from error
        finally:
            ended.set()
        self._session.say(f"{task.name}: ready after {time.monotonic() - began:.0f} s")


def _spoken(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
