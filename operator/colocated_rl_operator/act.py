"""Carries a plan out: record a new epoch first, then targets, then objects, then the rest of the status, then events.

The order is the point. An epoch is in the job's status, written against the version we know, before a target carries
it; a barrier's targets go out before any slower call to the API server; an event tells only what was recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from colocated_rl_api.job import ColocatedRLJobStatus, Phase
from colocated_rl_api.logs import log
from colocated_rl_operator import resources
from colocated_rl_operator.actions import CreatePod, DeletePod
from colocated_rl_operator.authority import Authority
from colocated_rl_operator.case import Case, Pods, read_status, take_status
from colocated_rl_operator.errors import Conflict, Refused, StaleEpoch
from colocated_rl_operator.events import About, Events
from colocated_rl_operator.kube import Kube
from colocated_rl_operator.members import Members
from colocated_rl_operator.metrics import Metrics
from colocated_rl_operator.observation import Job, Observation
from colocated_rl_operator.plan import Plan
from colocated_rl_operator.reasons import Cause, Reason
from colocated_rl_operator.status import BLINK_S, PROGRESS_S, Stall, invalid, is_blink, is_urgent, leaving, report

LOG = logging.getLogger(__name__)

AT_ONCE = 16  # calls to the API server for one job
WRITE_TRIES = 5  # of one status, each after somebody else's change of the object
STALL_RETRY_S = 30.0
NAME_RETRY_S = 1.0
DELETE_GRACE_S = 30  # of pods whose job is deleted
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
    metrics: Metrics
    namespace: str  # the operator's own
    confirm: Callable[[], Awaitable[None]]  # returns only if this process leads
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], datetime] = lambda: datetime.now(UTC).replace(microsecond=0)


async def act(case: Case, seen: Observation, decided: Plan, doors: Doors) -> float | None:
    """Do what the plan says; returns after how many seconds to look again although nothing changed."""
    if decided.raises:
        await _record_epoch(case, seen, decided, doors)
    _send_targets(case, decided, doors)
    doors.metrics.count_job(case.uid, case.status.phase if case.status else None)
    retry_s = None if decided.is_over else await _bring_about(case, seen, decided, doors)
    if decided.raises:
        await _tell_of_epoch(case, decided, doors)
        return 0.0
    report_s = await _report(case, seen, decided, doors)
    return min((each for each in (retry_s, report_s) if each is not None), default=None)


def _send_targets(case: Case, decided: Plan, doors: Doors) -> None:
    sent, heard_at = doors.members.send(case.uid, decided.targets), doors.members.heard_at(case.uid)
    if sent:
        doors.metrics.targets.inc(sent)
    if sent and heard_at is not None and not decided.raises:
        doors.metrics.barrier_s.observe(doors.clock() - heard_at)


# -------------------------------------------------------------------------------------------------------------- status
async def _record_epoch(case: Case, seen: Observation, decided: Plan, doors: Doors) -> None:
    climb = decided.climb
    assert climb is not None
    assert case.status is not None
    if seen.memory.raised and seen.climb and seen.highest_epoch > seen.climb.epoch:
        await doors.confirm()  # somebody went beyond our epoch: are we still the one who leads?
    status = report(seen, decided, before=case.status, at=doors.wall(), stall=case.stall)
    await _write(case, status, doors)
    now = seen.now
    case.memory = replace(case.memory, epoch=climb.epoch, raised=True, epoch_at=now, reached={}, progress_at=now)
    doors.metrics.raised.labels(climb.cause).inc()
    log(LOG, "epoch raised", epoch=climb.epoch, step=climb.step, version=str(climb.version), reason=climb.cause)


async def _tell_of_epoch(case: Case, decided: Plan, doors: Doors) -> None:
    cause = decided.climb.cause if decided.climb else Cause.TAKEOVER
    if cause is not Cause.TAKEOVER:
        kind = "Warning" if cause.is_failure or cause.is_recovery else "Normal"
        await _tell(case, kind, cause, decided.message, "RaiseEpoch", doors)


async def _report(case: Case, seen: Observation, decided: Plan, doors: Doors) -> float | None:
    assert case.status is not None
    before = case.status
    status = report(seen, decided, before=before, at=doors.wall(), stall=case.stall)
    wait_s = [BLINK_S] if is_blink(seen, before) else []  # then it is no blink any more, and worth a word
    if status == before:
        return min(wait_s, default=None)
    due_in_s = case.written_at + PROGRESS_S - doors.clock()
    if not is_urgent(before, status) and due_in_s > 0:
        return min([due_in_s, *wait_s])
    await _write(case, status, doors)
    if status.phase is not before.phase:
        log(LOG, "phase", epoch=status.epoch, step=status.step, phase=status.phase)
    if status.phase is Phase.ROLLOUT and before.phase is not Phase.ROLLOUT and seen.memory.last_switch_s is not None:
        doors.metrics.switch_s.observe(seen.memory.last_switch_s)
    if status.phase is Phase.COMPLETE and before.phase is not Phase.COMPLETE:
        await _tell(case, "Normal", Reason.COMPLETED, f"all {seen.job.spec.steps} steps are done", "Complete", doors)
    return None


async def _write(case: Case, status: ColocatedRLJobStatus, doors: Doors) -> None:
    """Write the status against the version we know. Raises StaleEpoch when somebody else has raised the epoch."""
    body, known = status.model_dump(mode="json", by_alias=True, exclude_none=True), case.status and case.status.epoch
    for tries_left in reversed(range(WRITE_TRIES)):
        try:
            version = case.resource_version
            answer = await doors.kube.write_status(case.namespace, case.name, resource_version=version, status=body)
            break
        except Conflict:
            if not tries_left:
                raise
        job = await doors.kube.read_job(case.namespace, case.name)
        if job["metadata"]["uid"] != case.uid or read_status(job).epoch != known:
            raise StaleEpoch(f"status of {case.name} is of epoch {read_status(job).epoch}, not {known}")
        case.resource_version = job["metadata"]["resourceVersion"]  # spec or metadata changed, the epoch is ours
    take_status(case, answer)
    case.written_at = doors.clock()


async def refuse(case: Case, body: Any, message: str, doors: Doors) -> None:
    """Say what is wrong with the spec, once for each generation."""
    assert case.status is not None
    status = invalid(message, generation=body["metadata"]["generation"], before=case.status, at=doors.wall())
    if is_urgent(case.status, status):
        await _write(case, status, doors)
        await _tell(case, "Warning", Reason.INVALID_SPEC, message, "Refuse", doors)


# ------------------------------------------------------------------------------------------------------------- objects
async def _bring_about(case: Case, seen: Observation, decided: Plan, doors: Doors) -> float | None:
    """Objects of the job, then its pods, which need them all; returns after how many seconds to try again.

    What the API server refuses stalls the job.
    """
    done: list[asyncio.Task[bool]] = []
    try:
        if case.objects_of != seen.job.generation or any(isinstance(action, CreatePod) for action in decided.pods):
            await _apply_objects(seen.job, doors)
            case.objects_of = seen.job.generation
        limit = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            done = [group.create_task(_change_pod(case, seen.job, each, limit, doors)) for each in decided.pods]
    except* Refused as errors:
        message = str(_first(errors))
        if case.stall is None or case.stall.message != message:
            await _tell(case, "Warning", Reason.OBJECT_REFUSED, message, "CreateObjects", doors)
        case.stall = Stall(Reason.OBJECT_REFUSED, message)
    else:
        case.stall = None
    if case.stall is not None:
        return STALL_RETRY_S
    return None if all(task.result() for task in done) else NAME_RETRY_S


async def _apply_objects(job: Job, doors: Doors) -> None:
    with contextlib.suppress(Conflict):  # made at an earlier look; its name contains the job's UID
        await doors.kube.create_secret(job.namespace, resources.tls_secret(job, doors.authority.job_files(job.uid)))
    wanted = (resources.config(job), resources.network_policy(job, operator_namespace=doors.namespace))
    for body in (*wanted, *resources.claims(job)):
        await doors.kube.apply(job.namespace, body)


async def _change_pod(
    case: Case, job: Job, action: CreatePod | DeletePod, limit: asyncio.Semaphore, doors: Doors
) -> bool:
    """False when the pod's name is taken by somebody else's, most likely an ending pod of a deleted job."""
    async with limit:
        match action:
            case CreatePod(seat, attempt):
                body = resources.pod(job, seat, attempt, doors.images)
                name = body["metadata"]["name"]
                try:
                    doors.pods.put(await doors.kube.create_pod(job.namespace, body))
                except Conflict:
                    await _refresh_pods(case, doors)  # ours perhaps, and the watch has not said so yet
                    return name in {pod["metadata"]["name"] for pod in doors.pods.of(case.uid)}
                log(LOG, "pod created", pod=name)
            case DeletePod(name, uid, grace_s, why):
                await doors.kube.delete_pod(job.namespace, name, uid=uid, grace_s=grace_s)
                await _refresh_pods(case, doors)
                log(LOG, "pod deleted", logging.WARNING, pod=name, reason=why)
                await _tell(case, "Warning", Reason.POD_DELETED, why, "DeletePod", doors)
    return True


async def _refresh_pods(case: Case, doors: Doors) -> None:
    for pod in await doors.kube.list_pods(case.namespace, case.uid):
        doors.pods.put(pod)


# ------------------------------------------------------------------------------------------------------------ deletion
async def dismiss(case: Case, decided: Plan, doors: Doors, woken: asyncio.Event) -> None:
    """The job is being deleted: tell members to stop, briefly, then delete pods. Volumes and the rest follow owners."""
    assert case.status is not None
    doors.members.send(case.uid, decided.targets)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            while not _all_stopped(case, doors):
                woken.clear()
                await woken.wait()
    await delete_pods(case, doors)
    log(LOG, "job dismissed")
    # the last act: its echo makes kopf look at the object again and drop the finalizer, else it waits out its back-off
    await _write(case, leaving(before=case.status, at=doors.wall()), doors)


async def delete_pods(case: Case, doors: Doors) -> None:
    """Every pod of the job, at once. Garbage collection would come to it too, half a minute later or more."""
    async with asyncio.TaskGroup() as group:
        for pod in await doors.kube.list_pods(case.namespace, case.uid):
            name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
            group.create_task(doors.kube.delete_pod(case.namespace, name, uid=uid, grace_s=DELETE_GRACE_S))


def _all_stopped(case: Case, doors: Doors) -> bool:
    answers = doors.members.answers(case.uid).values()
    return all(answer.facts is None or answer.facts.stopped for answer in answers)


async def _tell(case: Case, kind: Any, reason: str, note: str, action: str, doors: Doors) -> None:
    about = About(case.namespace, case.name, case.uid)
    await doors.events.tell(about, kind, reason, note, action=action)


def _first(errors: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
