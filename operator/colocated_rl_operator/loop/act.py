"""Carries a plan out: record a new epoch first, then targets, then objects; status and events are noted beside.

The order is the point. An epoch is in the job's status, written against the version we know, before a target carries
it; a barrier's targets go out before any slower call to the API server; an event tells only what was recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from colocated_rl_api import names
from colocated_rl_api.job_status import Phase
from colocated_rl_api.logs import log
from colocated_rl_api.pod_template import PodTemplate
from colocated_rl_api.seats import ROLLOUT_SEAT, role_of
from colocated_rl_operator.clients.authority import Authority
from colocated_rl_operator.clients.errors import (
    ApiError,
    ApiUnreachable,
    Conflict,
    NotAdmitted,
    VolumeLost,
    first,
)
from colocated_rl_operator.clients.events import About, Events
from colocated_rl_operator.clients.kube import Body, Kube
from colocated_rl_operator.clients.members import Members
from colocated_rl_operator.loop.case import (
    JobState,
    Pods,
    Queue,
    job_of,
    list_again,
)
from colocated_rl_operator.loop.record import News
from colocated_rl_operator.manifests import belongings, resources
from colocated_rl_operator.metrics import OperatorMetrics
from colocated_rl_operator.planner.actions import CreatePod, DeletePod
from colocated_rl_operator.planner.observation import Job, Observation, in_epoch
from colocated_rl_operator.planner.plan import Plan
from colocated_rl_operator.planner.reasons import Cause, Reason
from colocated_rl_operator.planner.status import (
    BRIEF_OUTAGE_S,
    PROGRESS_S,
    Stall,
    all_done,
    backs_off,
    invalid,
    is_brief_outage,
    is_urgent,
    leaving,
    report,
)

LOG = logging.getLogger(__name__)

AT_ONCE = 16  # calls to the API server for one job
STALL_RETRY_S = 30.0
FAILS_S = 30.0  # what the API server fails at for so long is told as what it refuses
REPAIR_S = 300.0  # between looks at what somebody may have deleted or changed: no watch tells
MAX_EXPIRE_RETRY_S = 3600.0
NAME_RETRY_S = 1.0
DELETE_GRACE_S = 30  # of pods whose job is deleted
DELETE_TRIES, DELETE_RETRY_S = 4, 1.0
BURY_TRIES = 60  # nobody waits for it, and nobody comes after it
BURY_AFTER_S = DELETE_GRACE_S + 15.0  # then a pod of a deleted job has no node that answers
IS_ENDING = "object is being deleted"  # says the server of a name that will be free
NO_DRY_RUN = "does not support dry run"  # says the server of a webhook that it may not ask: it judges the pod itself
STOP_S = 5.0  # members of a deleted job have this long to end by themselves


@dataclass(frozen=True)
class Doors:
    """Every neighbour of the operator, and what it needs to speak of them."""

    kube: Kube
    members: Members
    events: Events
    pods: Pods
    authority: Authority
    images: resources.PodImages
    metrics: OperatorMetrics
    namespace: str  # the operator's own
    release: str  # this operator in the words of jobs: NAMESPACE/LEASE
    confirm: Callable[[], Awaitable[None]]  # returns only if this process leads
    queue: Queue = field(default_factory=Queue)
    bury_after_s: float = BURY_AFTER_S
    repair_s: float = REPAIR_S
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], datetime] = lambda: datetime.now(UTC).replace(microsecond=0)


async def claim(case: JobState, doors: Doors) -> bool:
    """Whether the job is this operator's: recorded before anything is made of it, and never taken from another.

    Two operators that watch one namespace would raise the epoch over each other for ever, and have no common authority.
    """
    theirs = case.status.operator
    if theirs is None:
        await case.record.commit(case.status.model_copy(update={"operator": doors.release}))
    elif theirs != doors.release:
        note = (
            f"operator {doors.release} leaves this job alone: operator {theirs} has it. If that one is gone for good: "
            f"kubectl patch {names.SHORT_NAME} {case.about.name} --subresource=status --type=merge "
            """--patch='{"status": {"operator": null}}'"""
        )
        case.record.note(None, News("Warning", Reason.ANOTHER_OPERATOR, note, action="LeaveAlone"))
        return False
    return True


async def act(case: JobState, seen: Observation, decided: Plan, doors: Doors) -> float | None:
    """Do what the plan says; returns after how many seconds to look again although nothing changed."""
    if decided.is_expired:
        return await _expire(case, seen, decided, doors)
    if decided.raises:
        await _record_epoch(case, seen, decided, doors)
    _send_targets(case, seen.job, decided, doors)
    if decided.pods or not decided.is_over:
        retry_s = await _bring_about(case, seen, decided, doors)
    else:
        retry_s = case.stall = None
    report_s = 0.0 if decided.raises else _report(case, seen, decided, doors)
    if decided.is_over and not seen.is_over:
        report_s = 0.0  # from here on its time to live runs
    _count(case, doors)
    return min((each for each in (retry_s, report_s) if each is not None), default=None)


def _send_targets(case: JobState, job: Job, decided: Plan, doors: Doors) -> None:
    job_uid = case.about.uid
    slowest = job.ladder.slowest(decided.standings.values())
    awaited = (pod for pod, rung in decided.standings.items() if rung is slowest is not job.ladder.top)
    sent = doors.members.send(job_uid, decided.targets, awaited)
    heard_at = doors.members.heard_at(job_uid)
    if sent:
        doors.metrics.targets.inc(sent)
    if sent and heard_at is not None and not decided.raises:
        doors.metrics.barrier_s.observe(doors.clock() - heard_at)


# -------------------------------------------------------------------------------------------------------------- status
async def _record_epoch(case: JobState, seen: Observation, decided: Plan, doors: Doors) -> None:
    climb = decided.climb
    assert climb is not None
    if seen.memory.raised and seen.climb and seen.highest_epoch > seen.climb.epoch:
        await doors.confirm()  # somebody went beyond our epoch: are we still the one who leads?
    await case.record.commit(report(seen, decided, before=case.status, at=doors.wall(), stall=case.stall))
    now = case.reported_at = doors.clock()
    case.memory = replace(in_epoch(climb.epoch, seen, case.memory, now=now), raised=True)
    doors.metrics.raised.labels(climb.cause).inc()
    log(LOG, "epoch raised", epoch=climb.epoch, step=climb.step, version=str(climb.version), reason=climb.cause)
    if climb.cause is not Cause.TAKEOVER:
        is_trouble = climb.cause.is_failure or climb.cause.is_recovery
        case.record.note(
            None, News("Warning" if is_trouble else "Normal", climb.cause, decided.message, action="RaiseEpoch")
        )


def _report(case: JobState, seen: Observation, decided: Plan, doors: Doors) -> float | None:
    before = case.status
    status = report(seen, decided, before=before, at=doors.wall(), stall=case.stall)
    wait_s = [BRIEF_OUTAGE_S] if is_brief_outage(seen, before) else []  # then it is no blink any more, and worth a word
    if status == before:
        return min(wait_s, default=None)
    due_in_s = case.reported_at + PROGRESS_S - doors.clock()
    if not is_urgent(before, status) and due_in_s > 0:
        return min([due_in_s, *wait_s])
    is_new, news = status.phase is not before.phase, list[News]()
    if is_new:
        log(LOG, "phase", epoch=status.epoch, step=status.step, phase=status.phase)
    if is_new and status.phase is Phase.COMPLETE:
        news.append(News("Normal", Reason.COMPLETED, all_done(seen.job, status.model), action="Complete"))
    if backs_off(status) and not backs_off(before) and decided.wait is not None:
        news.append(News("Warning", Reason.BACKING_OFF, decided.wait.message, action="BackOff"))
    case.record.note(status, *news)
    case.reported_at = doors.clock()
    return min(wait_s, default=None)


def _count(case: JobState, doors: Doors) -> None:
    doors.metrics.count_job(case.about.uid, case.status.phase, None if case.stall is None else case.stall.reason)


def refuse(case: JobState, body: Any, message: str, doors: Doors) -> None:
    """Say what is wrong with the spec, once for each generation."""
    doors.metrics.count_job(case.about.uid, case.status.phase, Reason.INVALID_SPEC)
    status = invalid(message, generation=body["metadata"]["generation"], before=case.status, at=doors.wall())
    if is_urgent(case.status, status):
        case.record.note(status, News("Warning", Reason.INVALID_SPEC, message, action="Refuse"))


# ------------------------------------------------------------------------------------------------------------- objects
async def _bring_about(case: JobState, seen: Observation, decided: Plan, doors: Doors) -> float | None:
    """Objects of the job, then its pods, which need them all; returns after how many seconds to try again.

    What the API server refuses stalls the job, and so do what it fails at again and again and a volume that is gone.
    """
    done: list[asyncio.Task[bool]] = []
    try:
        makes_pods = any(isinstance(action, CreatePod) for action in decided.pods)
        if case.tried_of != seen.job.generation and not seen.members:
            await _try_pods(seen.job, doors)
            case.tried_of = seen.job.generation
        is_stale = case.objects_of != seen.job.generation and not (seen.rests or decided.is_over)
        is_late = _repair_in_s(case, seen, decided, doors) == 0
        if makes_pods:
            await _make_objects(seen.job, doors, has_begun=bool(case.status.lineage))
        if is_stale or is_late or makes_pods:
            await _apply_objects(seen.job, doors)
            case.objects_of, case.applied_at = seen.job.generation, doors.clock()
        limit = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            done = [group.create_task(_change_pod(case, seen.job, each, limit, doors)) for each in decided.pods]
        if any(isinstance(action, DeletePod) for action in decided.pods):
            await list_again(case, doors.kube, doors.pods)
    except* VolumeLost as errors:
        _stall(case, Stall(Reason.VOLUME_LOST, str(first(errors))), action="MakeNoPods")
    except* NotAdmitted as errors:
        _stall(case, _refused(first(errors)), action="CreateObjects")
    except* ApiUnreachable as errors:
        if not _lasts(case, first(errors), doors):
            raise
        _stall(case, _refused(first(errors)), action="CreateObjects")
    else:
        case.stall = None
    if case.stall is not None:
        return STALL_RETRY_S
    if not all(task.result() for task in done):
        return NAME_RETRY_S
    return _repair_in_s(case, seen, decided, doors)


def _repair_in_s(case: JobState, seen: Observation, decided: Plan, doors: Doors) -> float | None:
    """Until objects are applied again. None in a switch, which has no time for the API server, and at rest."""
    if seen.rests or decided.is_over or set(decided.standings.values()) != {seen.job.ladder.top}:
        return None
    return max(0.0, case.applied_at + doors.repair_s - doors.clock())


def _lasts(case: JobState, error: ApiUnreachable, doors: Doors) -> bool:
    """Somebody should know of it: a panic in the server, a webhook that is down. Not that the server itself is away."""
    is_same = error.status is not None and case.failure == str(error)
    return is_same and case.failing_s(doors.clock()) >= FAILS_S


def _refused(error: ApiError) -> Stall:
    return Stall(Reason.OBJECT_REFUSED, str(error))


def _stall(case: JobState, stall: Stall, *, action: str) -> None:
    """Said once, for as long as the words are the same."""
    if case.stall != stall:
        case.record.note(None, News("Warning", stall.reason, stall.message, action=action))
    case.stall = stall


async def _try_pods(job: Job, doors: Doors) -> None:
    """Ask the server what it thinks of pods as the job wants them, of one of each role: before any of them is made,
    and while the job is still suspended. Not later: beside those that there are, a quota has no room. Raises Refused.
    """
    of_each_role = {role_of(seat): seat for seat in (*job.gpu_seats, *job.reference_seats)}.values()
    gpu, rollout = job.spec.pod_templates.gpu, job.spec.pod_templates.rollout
    for seat, template in (*((seat, gpu) for seat in of_each_role), (ROLLOUT_SEAT, rollout)):
        if template == PodTemplate():
            continue  # all of it is the operator's own
        body = resources.pod(job, seat, 0, doors.images)
        try:
            await doors.kube.create_pod(job.namespace, body, dry_run=True)
        except Conflict:
            pass  # there is such a pod: it has its verdict
        except NotAdmitted as error:
            if NO_DRY_RUN not in str(error):
                raise


async def _make_objects(job: Job, doors: Doors, *, has_begun: bool) -> None:
    """What is made once, and may have grown since. has_begun: then a refusal is no news, for where a quota is used up
    the server refuses an object before it sees that there is one; what was lost since, pods will say. And then volumes
    are looked for and never made: on empty ones pods would begin again what is recorded as done. Raises VolumeLost.
    """
    held = belongings.irreplaceable(job) if has_begun else {}
    claims = {claim["metadata"]["name"]: claim for claim in belongings.claims(job)}
    lost = [name for name in held if await _is_gone(job, claims.pop(name), doors)]
    if lost:
        raise VolumeLost(
            "; ".join(f"claim {name} is gone, and with it {held[name]}" for name in lost)
            + ". Somebody deleted it, not the operator, which makes no empty one in its place. Put it back by its name "
            "with its data, from a released PersistentVolume or a snapshot, and the job goes on; or make another job, "
            "which begins with its spec.model"
        )

    async def make(making: Awaitable[object]) -> None:
        try:
            await making
        except Conflict:
            pass  # its name contains the job's UID
        except NotAdmitted:
            if not has_begun:
                raise

    await make(doors.kube.create_secret(job.namespace, belongings.tls_secret(job, doors.authority.job_files(job.uid))))
    for claim in claims.values():
        await make(doors.kube.create_claim(job.namespace, claim))


async def _is_gone(job: Job, claim: Body, doors: Doors) -> bool:
    """False too where a quota is used up, and nobody can tell."""
    try:
        await doors.kube.create_claim(job.namespace, claim, dry_run=True)
    except (Conflict, NotAdmitted):
        return False
    return True


async def _apply_objects(job: Job, doors: Doors) -> None:
    for body in belongings.applied(job, operator_namespace=doors.namespace):
        await doors.kube.apply(job.namespace, body)


async def _change_pod(
    case: JobState, job: Job, action: CreatePod | DeletePod, limit: asyncio.Semaphore, doors: Doors
) -> bool:
    """False while an ending pod has the name, of a deleted job most likely. Raises Refused if another's has it."""
    async with limit:
        match action:
            case CreatePod(seat, attempt, avoids):
                body = resources.pod(job, seat, attempt, doors.images, avoids=avoids)
                name = body["metadata"]["name"]
                try:
                    doors.pods.put(await doors.kube.create_pod(job.namespace, body))
                except Conflict as error:
                    await list_again(case, doors.kube, doors.pods)  # ours perhaps, and the watch has not said so yet
                    is_ours = name in {pod["metadata"]["name"] for pod in doors.pods.of(job.uid)}
                    if is_ours or IS_ENDING in str(error):
                        return is_ours
                    raise NotAdmitted(f"{error}, and is no pod of this job: delete it", error.status) from error
                log(LOG, "pod created", pod=name)
            case DeletePod(name, uid, grace_s, why, is_fault):
                await doors.kube.delete_pod(job.namespace, name, uid=uid, grace_s=grace_s)
                log(LOG, "pod deleted", logging.WARNING if is_fault else logging.INFO, pod=name, reason=why)
                if is_fault:
                    case.record.note(None, News("Warning", Reason.POD_DELETED, why, action="DeletePod"))
    return True


# ------------------------------------------------------------------------------------------------------------ deletion
async def shut_down_job(case: JobState, decided: Plan, doors: Doors, woken: asyncio.Event) -> None:
    """The job is being deleted: tell members to stop, briefly, then delete pods. Volumes and the rest follow owners."""
    told = doors.members.send(case.about.uid, decided.targets)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            while told and not _all_stopped(case, doors):
                woken.clear()
                await woken.wait()
    await delete_pods(case.about, doors)
    log(LOG, "job dismissed")
    await case.record.commit(leaving(before=case.status, at=doors.wall()))


async def _expire(case: JobState, seen: Observation, decided: Plan, doors: Doors) -> float | None:
    """Its end is written before it goes, also when it goes at once. The rest is that of every deletion.

    Returns after how many seconds to try again.
    """
    if case.stall is None:
        await case.record.commit(case.status)
    try:
        await doors.kube.delete_job(case.about.namespace, case.about.name, uid=case.about.uid)
    except (NotAdmitted, ApiUnreachable) as error:
        if isinstance(error, ApiUnreachable) and not _lasts(case, error, doors):
            raise
        _stall(case, _refused(error), action="DeleteJob")
        _report(case, seen, decided, doors)
        _count(case, doors)
        ttl_s, ended_at = seen.job.spec.ttl_seconds_after_finished or 0, seen.finished_at or seen.now
        return expire_again_s(overdue_s=seen.now - ended_at - ttl_s)
    log(LOG, "job expired", reason="ttlSecondsAfterFinished is over")
    return None


def expire_again_s(*, overdue_s: float) -> float:
    """When to ask again for a deletion that the server did not admit: each time twice as late, up to an hour."""
    return min(max(STALL_RETRY_S, overdue_s), MAX_EXPIRE_RETRY_S)


async def delete_pods(about: About, doors: Doors) -> None:
    """Every pod of the job, at once. Garbage collection would come to it too, half a minute later or more."""
    await _retry(partial(_delete_each, about, doors))


async def _retry(delete: Callable[[], Awaitable[None]], *, tries: int = DELETE_TRIES) -> None:
    """Several times, if need be. Raises the last ApiError."""
    for tries_left in reversed(range(tries)):
        try:
            await delete()
            return
        except ApiError as error:
            if not tries_left:
                raise
            log(LOG, "not deleted, trying again", logging.WARNING, reason=str(error))
        await asyncio.sleep(DELETE_RETRY_S)


async def _delete_each(about: About, doors: Doors) -> None:
    """Raises the first error, after every pod had its turn."""
    found = await _pods_of(about, doors)
    deletions = (doors.kube.delete_pod(about.namespace, name, uid=uid, grace_s=DELETE_GRACE_S) for name, uid in found)
    for outcome in await asyncio.gather(*deletions, return_exceptions=True):
        if outcome is not None:
            raise outcome


async def force_delete_pods(about: About, doors: Doors) -> None:
    """Forget GPU pods of a deleted job that did not end. The store's pod is never forced: its volume may be in use.

    And let go of the job, where kopf could not: it asks once, and goes by the next change of the job after that.
    """
    await asyncio.sleep(doors.bury_after_s)
    try:
        await _retry(partial(_forget_pods, about, doors), tries=BURY_TRIES)
        await _retry(partial(doors.kube.drop_finalizer, about.namespace, about.name, uid=about.uid), tries=BURY_TRIES)
    except ApiError as error:
        log(LOG, "pods left to garbage collection", logging.WARNING, reason=str(error))


async def _forget_pods(about: About, doors: Doors) -> None:
    for name, uid in await _pods_of(about, doors):
        if not name.startswith(f"{about.name}-{ROLLOUT_SEAT}-"):
            await doors.kube.delete_pod(about.namespace, name, uid=uid, grace_s=0)
            log(LOG, "pod forgotten", logging.WARNING, pod=name, reason="its job is deleted and it did not end")


async def _pods_of(about: About, doors: Doors) -> list[tuple[str, str]]:
    """Names and UIDs; without pods that merely have the labels of one, such as a person's copy of it."""
    found = [pod for pod in await doors.kube.list_pods(about.namespace, about.uid) if job_of(pod) == about.uid]
    return [(pod["metadata"]["name"], pod["metadata"]["uid"]) for pod in found]


def _all_stopped(case: JobState, doors: Doors) -> bool:
    answers = doors.members.answers(case.about.uid).values()
    return all(answer.facts is None or answer.facts.stopped for answer in answers)
