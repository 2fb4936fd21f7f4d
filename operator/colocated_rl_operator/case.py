"""What this process holds of a job between passes, and of every pod; and who wakes a job's loop.

Status is written by the operator alone, so after the first look what was written last is known without reading it
again. Pods come from the watch and from our own calls, whichever is newer.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from dataclasses import dataclass, field

from colocated_rl_api import names
from colocated_rl_api.job import ColocatedRLJobStatus
from colocated_rl_operator.errors import NotFound
from colocated_rl_operator.kube import Body, Kube
from colocated_rl_operator.observation import Memory
from colocated_rl_operator.status import Stall


class Pods:
    """The newest known state of each pod, by job and pod UID. Fed by the watch and by our own calls."""

    def __init__(self) -> None:
        self._pods: dict[str, dict[str, Body]] = {}

    def put(self, pod: Body) -> None:
        """An older state than the known one changes nothing: the watch may lag behind our own calls."""
        if (job_uid := job_of(pod)) is None:
            return
        pods, uid = self._pods.setdefault(job_uid, {}), pod["metadata"]["uid"]
        if uid not in pods or _version(pods[uid]) <= _version(pod):
            pods[uid] = pod

    def remove(self, pod: Body) -> None:
        self._pods.get(job_of(pod) or "", {}).pop(pod["metadata"]["uid"], None)

    def of(self, job_uid: str) -> list[Body]:
        return list(self._pods.get(job_uid, {}).values())

    def forget(self, job_uid: str) -> None:
        self._pods.pop(job_uid, None)


class Wakeups:
    """One event for each job: set by whoever has something new, cleared by the job's loop before it observes."""

    def __init__(self) -> None:
        self._events: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def of(self, job_uid: str) -> asyncio.Event:
        return self._events[job_uid]

    def wake(self, job_uid: str) -> None:
        self._events[job_uid].set()

    def forget(self, job_uid: str) -> None:
        self._events.pop(job_uid, None)


@dataclass
class Case:
    """One job, as this process knows it. `status` is what was written last; None before the first look."""

    namespace: str
    name: str
    uid: str
    status: ColocatedRLJobStatus | None = None
    resource_version: str = ""
    written_at: float = 0.0
    memory: Memory = field(default_factory=Memory)
    objects_of: int | None = None  # generation whose objects were applied
    stall: Stall | None = None

    def forget(self) -> None:
        """Look at the job again as for the first time."""
        self.status, self.memory, self.objects_of = None, Memory(), None


async def look(case: Case, kube: Kube, pods: Pods) -> None:
    """The first look: status and pods as the server has them now. The watch may not have listed them yet."""
    job = await kube.read_job(case.namespace, case.name)
    if job["metadata"]["uid"] != case.uid:
        raise NotFound(f"job {case.namespace}/{case.name} is another one now: this one is gone")
    for pod in await kube.list_pods(case.namespace, case.uid):
        pods.put(pod)
    take_status(case, job)


def take_status(case: Case, job: Body) -> None:
    """Remember the status that the server has, and the version it has it at."""
    case.status = read_status(job)
    case.resource_version = job["metadata"]["resourceVersion"]


def read_status(job: Body) -> ColocatedRLJobStatus:
    return ColocatedRLJobStatus.model_validate_json(json.dumps(job.get("status") or {}))


def job_of(pod: Body) -> str | None:
    """UID of the job that controls the pod; None for a pod that merely looks like one of ours."""
    metadata = pod["metadata"]
    job_uid: str | None = metadata.get("labels", {}).get(names.JOB_UID_LABEL)
    owners = (owner["uid"] for owner in metadata.get("ownerReferences", ()) if owner.get("controller"))
    return job_uid if job_uid in owners else None


def _version(pod: Body) -> int:
    return int(pod["metadata"]["resourceVersion"])
