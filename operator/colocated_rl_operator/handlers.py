"""What kopf calls: a table of contents. One daemon drives each job; watch events only wake it.

kopf watches jobs and pods, keeps its finalizer on jobs while their daemon runs, and stops daemons on deletion and exit.
Nothing else of it is used: no indexes, no retries, no status, no events, no peering (see the notes at each setting).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf

from colocated_rl_api import names
from colocated_rl_api.logs import bind, log
from colocated_rl_operator.clients.cluster import ClusterAccess
from colocated_rl_operator.clients.errors import JobGone, OperatorError, first
from colocated_rl_operator.clients.events import About
from colocated_rl_operator.clients.kube import Body
from colocated_rl_operator.loop.act import Doors, delete_pods, force_delete_pods
from colocated_rl_operator.loop.case import (
    JobState,
    Wakeups,
    job_of,
    version_of,
)
from colocated_rl_operator.loop.reconcile import end, one_pass
from colocated_rl_operator.loop.record import Record

LOG = logging.getLogger(__name__)

OURS = {names.MANAGED_BY_LABEL: names.MANAGED_BY}
DISMISS_S = 15.0  # for a daemon to end by itself, on deletion and on exit; then it is cancelled
CANCEL_S = 5.0
LOGIN_RETRY_S = 1.0
CONNECTION_LIFE = timedelta(days=3650)
REST, MAX_REST_S = 20.0, 0.2  # between passes, unless there is hurry: so many times what the last one took, and no more


@dataclass
class OperatorContext:
    """What handlers share; kopf hands it to each as `memo.office`."""

    access: ClusterAccess
    doors: Doors
    wakeups: Wakeups
    jobs: dict[str, Body] = field(default_factory=dict)  # the newest state of each, by UID: a watch may go back
    driven: set[str] = field(default_factory=set)  # jobs that have had their daemon in this process
    burials: set[asyncio.Task[None]] = field(default_factory=set)  # of jobs that are gone
    has_logged_in: bool = False

    def reap(self, about: About) -> None:
        """A job is gone, and some of its pods perhaps not."""
        burial = asyncio.create_task(force_delete_pods(about, self.doors), name=f"bury/{about.name}")
        self.burials.add(burial)
        burial.add_done_callback(self.burials.discard)

    def close(self) -> None:
        for burial in self.burials:
            burial.cancel()


class NoDiffs(kopf.DiffBaseStorage):
    """No handler asks what changed, and to find out kopf would copy each object of each event, status and all."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


@kopf.on.startup()
async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.persistence.finalizer = names.FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=names.GROUP)
    settings.persistence.diffbase_storage = NoDiffs()
    settings.posting.enabled = False  # a new Event object for each log line
    settings.scanning.disabled = True  # else it lists namespaces and CRDs; __main__ has waited for ours
    # else every pod there is
    settings.watching.label_selectors["pods"] = f"{names.MANAGED_BY_LABEL}={names.MANAGED_BY}"
    settings.watching.connect_timeout = 10
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.networking.request_timeout = 20
    # kopf waits for the daemon where it handles the deletion, and drops the finalizer there: a back-off of the daemon's
    # would be waited out whole whenever the daemon's last write is handled before the daemon has ended
    settings.background.instant_exit_timeout = DISMISS_S
    settings.process.ultimate_exiting_timeout = DISMISS_S + CANCEL_S + 5
    logging.getLogger("kopf").setLevel(logging.WARNING)  # a line for each watch event otherwise


@kopf.on.login()
async def login(memo: Any, **_: Any) -> kopf.ConnectionInfo:
    office = memo.office
    if office.has_logged_in:
        await asyncio.sleep(LOGIN_RETRY_S)
    office.has_logged_in = True
    return connection(office.access)


def is_ours(spec: Any, **_: Any) -> bool:
    """Jobs of another controller get no daemon, and so no finalizer. The field never changes."""
    return bool(spec.get("managedBy", names.OPERATOR) == names.OPERATOR)


@kopf.daemon(names.GROUP, names.VERSION, names.PLURAL, when=is_ours, cancellation_timeout=CANCEL_S, backoff=1)
async def drive(body: kopf.Body, stopped: Any, memo: Any, **_: Any) -> None:
    await drive_job(body, stopped, memo.office)


@kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, when=is_ours)
async def on_job_event(event: kopf.RawEvent, memo: Any, **_: Any) -> None:
    note_job(event, memo.office)
    await release_orphan(event, memo.office)


@kopf.on.event("pods", labels=OURS)
async def poke_of_pod(event: kopf.RawEvent, memo: Any, **_: Any) -> None:
    note_pod(event, memo.office)


def note_pod(event: Any, office: OperatorContext) -> None:
    pod, pods = event["object"], office.doors.pods
    if (job_uid := job_of(pod)) is None:
        return
    if event["type"] == "DELETED":
        pods.remove(job_uid, pod["metadata"]["uid"])
    else:
        pods.put(pod)
    office.wakeups.wake(job_uid, hurry=False)


def note_job(event: Any, office: OperatorContext) -> None:
    """Wake the loop for what a person changed; our own status writes come back here too."""
    job, uid = event["object"], event["object"]["metadata"]["uid"]
    known = office.jobs.get(uid)
    if event["type"] == "DELETED":
        office.jobs.pop(uid, None)
        office.driven.discard(uid)
    elif known is None or version_of(known) <= version_of(job):
        office.jobs[uid] = job
    if known is None or _matter(known) != _matter(office.jobs.get(uid)):
        office.wakeups.wake(uid)


def _matter(job: Body | None) -> object:
    """What a wake-up depends on."""
    return job and (job["metadata"]["generation"], job["metadata"].get("deletionTimestamp"))


async def release_orphan(event: Any, office: OperatorContext) -> None:
    """A job that was deleted while no operator ran gets no daemon; kopf drops its finalizer when this returns."""
    metadata = event["object"]["metadata"]
    is_gone = event["type"] == "DELETED" or not metadata.get("deletionTimestamp")
    if is_gone or metadata["uid"] in office.driven:
        return
    office.driven.add(metadata["uid"])
    about = _about(metadata)
    with bind(job=about.name, job_uid=about.uid):
        await _or_leave_pods(delete_pods(about, office.doors))
        office.reap(about)


async def drive_job(body: Any, stopped: Any, office: OperatorContext) -> None:
    """Until the job is deleted or this process ends. Never returns before: kopf would not start it again."""
    about, doors = _about(body["metadata"]), office.doors
    woken = office.wakeups.of(about.uid)
    case = JobState(Record(about, doors.kube, doors.events, failed=woken.set))
    office.driven.add(about.uid)
    stopping = asyncio.ensure_future(stopped.wait())
    stopping.add_done_callback(lambda _: office.wakeups.wake(about.uid))
    with bind(job=about.name, job_uid=about.uid):
        try:
            await _drive(case, stopped, office)
            if not stopped or kopf.DaemonStoppingReason.RESOURCE_DELETED in stopped.reason:
                await _let_go(case, office.jobs.get(about.uid, body), office, woken)
        finally:
            stopping.cancel()
            doors.queue.forget(about.uid)
            doors.members.keep(about.uid, ())  # kopf would wait for these tasks when it ends
            await case.record.close()


async def _drive(case: JobState, stopped: Any, office: OperatorContext) -> None:
    """Pass by pass, until asked to stop or the job is on its way out, whatever kopf has heard last."""
    uid, doors = case.about.uid, office.doors
    woken, hurried = office.wakeups.of(uid), office.wakeups.hurry(uid)
    try:
        while not stopped and (job := office.jobs.get(uid)) and not job["metadata"].get("deletionTimestamp"):
            office.wakeups.clear(uid)  # before observing: a change during the pass must not be lost
            with doors.metrics.pass_s.time():
                wait_s = await one_pass(case, job, doors)
            await _within(wait_s, woken)
            await _within(min(REST * case.thought_s, MAX_REST_S), hurried)
    except JobGone as error:
        log(LOG, "the job is gone", logging.WARNING, reason=str(error))
        office.jobs.pop(uid, None)


async def _let_go(case: JobState, body: Any, office: OperatorContext, woken: asyncio.Event) -> None:
    await _or_leave_pods(end(case, body, office.doors, woken))
    office.reap(case.about)
    office.doors.pods.forget(case.about.uid)
    office.doors.metrics.forget_job(case.about.uid)
    office.wakeups.forget(case.about.uid)


def _about(metadata: Any) -> About:
    return About(metadata["namespace"], metadata["name"], metadata["uid"])


async def _or_leave_pods(deletion: Coroutine[None, None, None]) -> None:
    try:
        await deletion
    except* OperatorError as errors:
        log(LOG, "pods left to garbage collection", logging.WARNING, reason=str(first(errors)))


async def _within(wait_s: float | None, event: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await event.wait()


def connection(access: ClusterAccess) -> kopf.ConnectionInfo:
    """kopf's way to the same API server. A rotated token comes in with the next login, after its first 401.

    A token that was not rotated is given again too, because a 401 may be of the moment, and a broken TLS connection
    counts as one. kopf ends when it sees what failed before: no two of these are equal.
    """
    return kopf.ConnectionInfo(
        expiration=datetime.now(UTC) + CONNECTION_LIFE,
        server=access.server,
        ca_data=access.ca_pem,
        token=access.token(),
        certificate_data=access.certificate_pem,
        private_key_data=access.certificate_pem,
    )
