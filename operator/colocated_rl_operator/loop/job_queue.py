"""Keep the queued jobs of this process by age."""

from __future__ import annotations

from datetime import datetime

from colocated_rl_api.names import JobUid
from colocated_rl_operator.planner.observation import Job


class Queue:
    """The queue knows the age of each queued job of this process."""

    def __init__(self) -> None:
        self._ages: dict[JobUid, tuple[datetime, JobUid]] = {}  # by job UID, which decides within one second

    def note(self, job: Job, *, is_queued: bool) -> None:
        if is_queued:
            self._ages[job.uid] = (job.created, job.uid)
        else:
            self.forget(job.uid)

    def forget(self, job_uid: JobUid) -> None:
        self._ages.pop(job_uid, None)

    def has_elder(self, job: Job) -> bool:
        """Return whether an older job than this one is queued."""
        return any(age < (job.created, job.uid) for age in self._ages.values())
