"""What this process holds of a job between passes, of every pod and of the queue; and who wakes a job's loop.

Status is written by the operator alone, so after the first look it is known without reading it again. Pods come from
the watch and from our own calls, whichever is newer. What went while a watch was broken, it never says: once a member
has been missing for RELIST_S, pods are listed again now and then. No sooner: the list of a thousand takes longer than a
member that comes back, and others may be in the middle of a switch.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime

from colocated_rl_api import names
from colocated_rl_api.job_status import ColocatedRLJobStatus
from colocated_rl_operator.clients.errors import JobGone, NotFound
from colocated_rl_operator.clients.events import About
from colocated_rl_operator.clients.kube import Body, Kube
from colocated_rl_operator.clients.members import Address, MemberReport
from colocated_rl_operator.loop.record import Record
from colocated_rl_operator.planner.observation import Job, Member, Memory
from colocated_rl_operator.planner.status import Stall

RELIST_S = 30.0


class Pods:
    """The newest known state of each pod of the jobs that are known, by job and pod UID."""

    def __init__(self) -> None:
        self._pods: dict[str, dict[str, Body | None]] = {}  # None: gone, and a late answer does not bring it back

    def know(self, job_uid: str) -> None:
        self._pods.setdefault(job_uid, {})

    def forget(self, job_uid: str) -> None:
        self._pods.pop(job_uid, None)

    def put(self, pod: Body) -> None:
        """An older state than the known one changes nothing: the watch may lag behind our own calls."""
        pods, uid = self._pods.get(job_of(pod) or ""), pod["metadata"]["uid"]
        if pods is None:
            return
        known = pods.get(uid, pod)
        if known is not None and version_of(known) <= version_of(pod):
            pods[uid] = pod

    def remove(self, job_uid: str, uid: str) -> None:
        if job_uid in self._pods:
            self._pods[job_uid][uid] = None

    def of(self, job_uid: str) -> list[Body]:
        return [pod for pod in self._pods.get(job_uid, {}).values() if pod is not None]


class Wakeups:
    """Two events for each job: something is new, and it can't wait. Cleared by the job's loop before it observes."""

    def __init__(self) -> None:
        self._events: dict[str, tuple[asyncio.Event, asyncio.Event]] = {}

    def of(self, job_uid: str) -> asyncio.Event:
        return self._both(job_uid)[0]

    def hurry(self, job_uid: str) -> asyncio.Event:
        return self._both(job_uid)[1]

    def wake(self, job_uid: str, *, hurry: bool = True) -> None:
        """Nothing, for a job that has no loop."""
        if job_uid in self._events:
            woken, hurried = self._events[job_uid]
            woken.set()
            if hurry:
                hurried.set()

    def clear(self, job_uid: str) -> None:
        for event in self._both(job_uid):
            event.clear()

    def forget(self, job_uid: str) -> None:
        self._events.pop(job_uid, None)

    def _both(self, job_uid: str) -> tuple[asyncio.Event, asyncio.Event]:
        return self._events.setdefault(job_uid, (asyncio.Event(), asyncio.Event()))


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


@dataclass
class PodRecord:
    """What follows from one pod and its member's answer; looked at again when either is another one."""

    pod: Body
    name: str
    seat: str
    attempt: int
    address: Address | None  # of its member, if that should answer
    answer: MemberReport | None = None
    member: Member | None = None


@dataclass
class JobState:
    """One job, as this process knows it."""

    record: Record
    job: Job | None = None  # of the newest generation whose spec could be read
    looks: dict[str, PodRecord] = field(default_factory=dict)  # by pod UID
    reported_at: float = 0.0  # when its status was noted last
    memory: Memory = field(default_factory=Memory)
    is_waiting: bool = False  # for a member to come or to go
    thought_s: float = 0.0  # that the last look at all members took
    listed_at: float = 0.0  # when its pods were, or had no need to be
    first_seen: dict[str, float] = field(default_factory=dict)  # of each pod UID
    ending_since: dict[str, float] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)  # of its containers, when its member answered last
    tried_of: int | None = None  # generation whose pods the server took when it was asked
    objects_of: int | None = None  # generation whose objects were applied
    applied_at: float = 0.0  # when they were
    failure: str = ""  # of the API server, in its words, that ended the last pass
    failing_since: float | None = None  # each pass has ended by that failure
    stall: Stall | None = None

    @property
    def about(self) -> About:
        return self.record.about

    @property
    def status(self) -> ColocatedRLJobStatus:
        assert self.record.status is not None, "look first"
        return self.record.status

    def failing_s(self, now: float) -> float:
        return 0.0 if self.failing_since is None else now - self.failing_since

    def forget(self) -> None:
        """Look at the job again as for the first time."""
        self.record.forget()
        self.memory, self.objects_of = Memory(), None


async def refresh_pods(case: JobState, kube: Kube, pods: Pods, *, now: float) -> None:
    """At the whole job the first time, and at its pods again while a member stays away."""
    if case.record.status is None:
        await _look_for_the_first_time(case, kube, pods)
    elif case.is_waiting and now >= case.listed_at + RELIST_S:
        await list_again(case, kube, pods)
    elif case.is_waiting:
        return
    case.listed_at = now


async def _look_for_the_first_time(case: JobState, kube: Kube, pods: Pods) -> None:
    about = case.about
    try:
        job = await kube.read_job(about.namespace, about.name)
    except NotFound as error:
        if not error.is_kind_known:
            raise
        raise JobGone(str(error)) from error
    if job["metadata"]["uid"] != about.uid:
        raise JobGone(f"job {about.namespace}/{about.name} is another one now: this one is gone")
    pods.know(about.uid)
    await list_again(case, kube, pods)
    case.record.take(job)


async def list_again(case: JobState, kube: Kube, pods: Pods) -> None:
    """The pods as the server lists them now."""
    about = case.about
    known = {pod["metadata"]["uid"] for pod in pods.of(about.uid)}
    listed = await kube.list_pods(about.namespace, about.uid)
    for pod in listed:
        pods.put(pod)
    for uid in known - {pod["metadata"]["uid"] for pod in listed}:
        pods.remove(about.uid, uid)


def job_of(pod: Body) -> str | None:
    """UID of the job that controls the pod; None for a pod that merely looks like one of ours."""
    metadata = pod["metadata"]
    job_uid: str | None = metadata.get("labels", {}).get(names.JOB_UID_LABEL)
    owners = (owner["uid"] for owner in metadata.get("ownerReferences", ()) if owner.get("controller"))
    return job_uid if job_uid in owners else None


def version_of(item: Body) -> int:
    """Of an object; of two states of one the newer has the higher."""
    return int(item["metadata"]["resourceVersion"])
