"""Hold what this process knows of a job between passes, and refresh it.

Only the operator writes the status, so it is read once. Pods come from the watch and from our own calls. A watch never
reports which pods went while it was broken, so pods are listed again now and then once a member has been missing for
RELIST_S. They are not listed sooner: the list of a thousand pods takes longer than a member needs to come back, and
others may be in the middle of a switch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import datetime

from colocated_rl_api.job_status import ColocatedRLJobStatus
from colocated_rl_api.names import PodUid
from colocated_rl_operator.clients.errors import JobGone, NotFound
from colocated_rl_operator.clients.events import About
from colocated_rl_operator.clients.kube import Body, Kube
from colocated_rl_operator.clients.members import Address, MemberReport
from colocated_rl_operator.loop.pods import Pods
from colocated_rl_operator.loop.record import Record
from colocated_rl_operator.manifests.belongings import StartParts
from colocated_rl_operator.planner.observation import Job, Member, Memory, RefusedPod
from colocated_rl_operator.planner.status import Stall

RELIST_S = 30.0
TAKE_OVER_S = 60.0  # from the first look at a job until its objects are applied again, and up to three times as long


@dataclass
class PodRecord:
    """A record holds what follows from one pod and its member's report; it is renewed when either is replaced."""

    pod: Body
    name: str
    seat: str
    attempt: int
    address: Address | None  # of its member, if that should answer
    answer: MemberReport | None = None
    member: Member | None = None


@dataclass
class JobState:
    """This object holds the state of one job, as this process knows it."""

    record: Record
    job: Job | None = None  # of the newest generation whose spec could be read
    pod_records: dict[PodUid, PodRecord] = field(default_factory=dict)
    reported_at: float = 0.0  # when its status was noted last
    memory: Memory = field(default_factory=Memory)
    is_waiting: bool = False  # for a member to come or to go
    thought_s: float = 0.0  # how long the last observation and plan took
    listed_at: float = 0.0  # when its pods were listed, or did not need it
    first_seen: dict[PodUid, float] = field(default_factory=dict)
    ending_since: dict[PodUid, float] = field(default_factory=dict)
    moments: dict[datetime, float] = field(default_factory=dict)  # by the monotonic clock, of times in its status
    restarts: dict[PodUid, int] = field(default_factory=dict)  # of its containers, when its member answered last
    keyed: set[PodUid] = field(default_factory=set)  # pods whose Secret with keys was made, or is not ours to make
    taints: dict[PodUid, str | None] = field(default_factory=dict)  # nodes to taint, by pod; None: that was done
    tried_of: int | None = None  # generation whose pods passed the server's dry run
    parts: StartParts | None = None  # of its pods, as loaded last
    parts_of: str = ""  # the name of their record
    applies_at: float = 0.0  # when it applies objects that another process has applied
    objects_of: tuple[int, int] | None = None  # generation and replicas whose objects were applied
    applied_at: float = 0.0  # when they were
    failure: str = ""  # the API server's message that ended the last pass
    failing_since: float | None = None  # since when each pass has ended by that failure
    stall: Stall | None = None
    stalled_on: object = None  # what was asked for when it stalled last
    stalled_at: float = 0.0  # when that was
    refused: dict[str, RefusedPod] = field(default_factory=dict)  # by seat
    leaves_until: float = 0.0  # another operator has the job, and nobody looks at it before

    @property
    def about(self) -> About:
        return self.record.about

    @property
    def status(self) -> ColocatedRLJobStatus:
        assert self.record.status is not None, "refresh_pods comes first"
        return self.record.status

    def failing_s(self, now: float) -> float:
        return 0.0 if self.failing_since is None else now - self.failing_since

    def forget(self) -> None:
        """Forget what is known, so that the next pass reads the job as for the first time."""
        self.record.forget()
        self.memory, self.objects_of = Memory(), None


async def refresh_pods(state: JobState, kube: Kube, pods: Pods, *, now: float) -> None:
    """Read the whole job the first time, and list its pods again while a member stays away."""
    if state.record.status is None:
        await _read_job(state, kube, pods)
        state.applies_at = state.applies_at or now + random.uniform(1, 3) * TAKE_OVER_S
    elif state.is_waiting and now >= state.listed_at + RELIST_S:
        await list_again(state, kube, pods)
    elif state.is_waiting:
        return
    state.listed_at = now


async def _read_job(state: JobState, kube: Kube, pods: Pods) -> None:
    about = state.about
    try:
        job = await kube.read_job(about.namespace, about.name)
    except NotFound as error:
        if not error.is_kind_known:
            raise
        raise JobGone(str(error)) from error
    if job["metadata"]["uid"] != about.uid:
        raise JobGone(f"job {about.namespace}/{about.name} is another one now: this one is gone")
    pods.know(about.uid, namespace=about.namespace)
    await list_again(state, kube, pods)
    state.record.take(job)


async def list_again(state: JobState, kube: Kube, pods: Pods) -> None:
    """Take the pods as the server lists them now."""
    about = state.about
    known = pods.known(about.uid)
    pods.replace(about.uid, await kube.list_pods(about.namespace, about.uid), known=known)
