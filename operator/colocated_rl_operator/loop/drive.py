"""Drive one job from its first event to its end: watch events wake its loop, and the loop runs pass by pass.

`handlers` connects this module to kopf, of which nothing here knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from colocated_rl_api.logs import bind, log
from colocated_rl_api.names import JobUid
from colocated_rl_operator.clients.cluster import ClusterAccess
from colocated_rl_operator.clients.errors import JobGone, OperatorError, first
from colocated_rl_operator.clients.events import About
from colocated_rl_operator.clients.kube import Body, version_of
from colocated_rl_operator.loop.deletion import delete_pods, force_delete_pods
from colocated_rl_operator.loop.doors import Doors
from colocated_rl_operator.loop.job_state import JobState
from colocated_rl_operator.loop.observe import token_name
from colocated_rl_operator.loop.pods import job_of
from colocated_rl_operator.loop.reconcile import end, one_pass
from colocated_rl_operator.loop.record import Record
from colocated_rl_operator.loop.wakeups import Wakeups

LOG = logging.getLogger(__name__)

REST, MAX_REST_S = 20.0, 0.2  # between passes without hurry: REST times the last one's duration, up to MAX_REST_S


@dataclass
class OperatorContext:
    """All handlers share this context; kopf hands it to each as `memo.context`."""

    access: ClusterAccess
    doors: Doors
    wakeups: Wakeups
    jobs: dict[JobUid, Body] = field(default_factory=dict)  # the newest state of each: a watch may go back
    driven: set[str] = field(default_factory=set)  # jobs that have had their daemon in this process
    reapers: set[asyncio.Task[None]] = field(default_factory=set)  # of jobs that are gone
    has_logged_in: bool = False

    def reap(self, about: About) -> None:
        """Force-delete, in the background, pods that outlive a job that is gone."""
        reaper = asyncio.create_task(force_delete_pods(about, self.doors), name=f"reap/{about.name}")
        self.reapers.add(reaper)
        reaper.add_done_callback(self.reapers.discard)

    def close(self) -> None:
        """Cancel all reapers."""
        for reaper in self.reapers:
            reaper.cancel()


def note_pod(event: Any, context: OperatorContext) -> None:
    """Put the pod into the cache, and wake its job's loop."""
    pod, pods = event["object"], context.doors.pods
    if (job_uid := job_of(pod)) is None:
        return
    if event["type"] == "DELETED":
        pods.lose(job_uid, pod)
    else:
        pods.put(pod)
    context.wakeups.wake(job_uid, hurry=False)


def note_node(event: Any, context: OperatorContext) -> None:
    """Put the node into the cache, and wake all jobs if it gives notice, or no longer does."""
    node, doors = event["object"], context.doors
    is_gone = event["type"] == "DELETED"
    name = node["metadata"]["name"]
    if doors.nodes.remove(name) if is_gone else doors.nodes.put(node, now=doors.clock()):
        for job_uid in context.jobs:
            context.wakeups.wake(job_uid, hurry=False)


def note_job(event: Any, context: OperatorContext) -> None:
    """Cache the job, and wake its loop if a person changed it; our own status writes come back here too."""
    job, uid = event["object"], event["object"]["metadata"]["uid"]
    known = context.jobs.get(uid)
    if event["type"] == "DELETED":
        context.jobs.pop(uid, None)
        context.driven.discard(uid)
    elif known is None or version_of(known) <= version_of(job):
        context.jobs[uid] = job
    if known is None or _matter(known) != _matter(context.jobs.get(uid)):
        context.wakeups.wake(uid)


def _matter(job: Body | None) -> object:
    """Return the fields of a job whose change wakes its loop."""
    if job is None:
        return None
    metadata = job["metadata"]
    return metadata["generation"], metadata.get("deletionTimestamp"), token_name(metadata)


async def release_orphan(event: Any, context: OperatorContext) -> None:
    """Delete the pods of a job that was deleted while no operator ran; it gets no daemon.

    kopf drops its finalizer when this returns.
    """
    metadata = event["object"]["metadata"]
    is_gone = event["type"] == "DELETED" or not metadata.get("deletionTimestamp")
    if is_gone or metadata["uid"] in context.driven:
        return
    context.driven.add(metadata["uid"])
    about = _about(metadata)
    with bind(job=about.name, job_uid=about.uid):
        await _leave_pods_on_error(delete_pods(about, context.doors))
        context.reap(about)


class Stopped(Protocol):
    """The flag becomes true when the job's loop should end."""

    def __bool__(self) -> bool: ...
    async def wait(self) -> Any: ...


async def drive_job(body: Any, stopped: Stopped, context: OperatorContext, *, was_deleted: Callable[[], bool]) -> None:
    """Drive the job until it is deleted or this process ends, and never return before: kopf would not start it again.

    was_deleted: asked once `stopped` is set; whether the job is deleted, and not merely this process ending.
    """
    about, doors = _about(body["metadata"]), context.doors
    woken = context.wakeups.of(about.uid)
    state = JobState(Record(about, doors.kube, doors.events, failed=woken.set))
    context.driven.add(about.uid)
    stopping = asyncio.ensure_future(stopped.wait())
    stopping.add_done_callback(lambda _: context.wakeups.wake(about.uid))
    with bind(job=about.name, job_uid=about.uid):
        try:
            await _drive(state, stopped, context)
            if not stopped or was_deleted():
                await _finish(state, context.jobs.get(about.uid, body), context, woken)
        finally:
            stopping.cancel()
            doors.queue.forget(about.uid)
            doors.members.keep(about.uid, ())  # kopf would wait for these tasks when it ends
            await state.record.close()


async def _drive(state: JobState, stopped: Stopped, context: OperatorContext) -> None:
    """Run pass after pass until asked to stop or until the job is being deleted, whatever kopf has heard last."""
    uid, doors = state.about.uid, context.doors
    woken, hurried = context.wakeups.of(uid), context.wakeups.hurry(uid)
    try:
        while not stopped and (job := context.jobs.get(uid)) and not job["metadata"].get("deletionTimestamp"):
            context.wakeups.clear(uid)  # before observing: a change during the pass must not be lost
            with doors.metrics.pass_s.time():
                wait_s = await one_pass(state, job, doors)
            await _within(wait_s, woken)
            await _within(min(REST * state.thought_s, MAX_REST_S), hurried)
    except JobGone as error:
        log(LOG, "job deleted", logging.WARNING, reason=str(error))
        context.jobs.pop(uid, None)


async def _finish(state: JobState, body: Any, context: OperatorContext, woken: asyncio.Event) -> None:
    try:
        await _leave_pods_on_error(end(state, body, context.doors, woken))
    finally:  # kopf does not wait for a server that is slow
        context.reap(state.about)
        context.doors.pods.forget(state.about.uid)
        context.doors.metrics.forget_job(state.about.uid)
        context.wakeups.forget(state.about.uid)


def _about(metadata: Any) -> About:
    return About(metadata["namespace"], metadata["name"], metadata["uid"])


async def _leave_pods_on_error(deletion: Coroutine[None, None, None]) -> None:
    try:
        await deletion
    except* OperatorError as errors:
        log(LOG, "pods left to garbage collection", logging.WARNING, reason=str(first(errors)))


async def _within(wait_s: float | None, event: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await event.wait()
