"""Wake a job's loop, with or without hurry."""

from __future__ import annotations

import asyncio

from colocated_rl_api.names import JobUid


class Wakeups:
    """Each job has two events: something is new, and it can't wait. The job's loop clears both before it observes."""

    def __init__(self) -> None:
        self._events: dict[JobUid, tuple[asyncio.Event, asyncio.Event]] = {}

    def of(self, job_uid: JobUid) -> asyncio.Event:
        return self._both(job_uid)[0]

    def hurry(self, job_uid: JobUid) -> asyncio.Event:
        return self._both(job_uid)[1]

    def wake(self, job_uid: JobUid, *, hurry: bool = True) -> None:
        """Wake the job's loop; do nothing for a job without a loop."""
        if job_uid in self._events:
            woken, hurried = self._events[job_uid]
            woken.set()
            if hurry:
                hurried.set()

    def clear(self, job_uid: JobUid) -> None:
        for event in self._both(job_uid):
            event.clear()

    def forget(self, job_uid: JobUid) -> None:
        self._events.pop(job_uid, None)

    def _both(self, job_uid: JobUid) -> tuple[asyncio.Event, asyncio.Event]:
        return self._events.setdefault(job_uid, (asyncio.Event(), asyncio.Event()))
