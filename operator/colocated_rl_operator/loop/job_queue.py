"""Jobs of this process that are queued, by age."""

from __future__ import annotations

from datetime import datetime

from colocated_rl_operator.planner.observation import Job


class Queue:
    """Jobs of this process that are queued, by age."""

    def __init__(self) -> None:
        self._ages: dict[str, tuple[datetime, str]] = {}  # by job UID, which decides within one second

    def note(self, job: Job, *, is_queued: bool) -> None:
        if is_queued:
            self._ages[job.uid] = (job.created, job.uid)
        else:
            self.forget(job.uid)

    def forget(self, job_uid: str) -> None:
        self._ages.pop(job_uid, None)

    def has_elder(self, job: Job) -> bool:
        """Whether an older one than this is queued."""
        return any(age < (job.created, job.uid) for age in self._ages.values())
