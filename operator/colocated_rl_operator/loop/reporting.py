"""Report the job's status and events, from what was seen and decided.

An epoch is in the job's status, written against the version we know, before a target carries it. All else is noted and
written beside the loop. An event reports only what was recorded.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from colocated_rl_api.job_status import Phase
from colocated_rl_api.logs import log
from colocated_rl_operator.loop.doors import Doors
from colocated_rl_operator.loop.job_state import JobState
from colocated_rl_operator.loop.record import News
from colocated_rl_operator.loop.start import with_digests
from colocated_rl_operator.planner.observation import Observation, in_epoch
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
    report,
)

LOG = logging.getLogger(__name__)


async def record_epoch(state: JobState, seen: Observation, decided: Plan, doors: Doors) -> None:
    """Write the new epoch to the status; return when the API server has it. Raises StaleEpoch, ApiError."""
    climb = decided.climb
    assert climb is not None
    if seen.memory.raised and seen.climb and seen.highest_epoch > seen.climb.epoch:
        await doors.confirm()  # somebody went beyond our epoch: make sure that we still lead
    status = report(seen, decided, before=state.status, at=doors.wall(), stall=state.stall)
    if climb.cause is not Cause.NEXT_STEP:  # a group has come together: its nodes have reported what they run
        status = with_digests(status, doors.pods.of(state.about.uid))
    await state.record.commit(status)
    now = state.reported_at = doors.clock()
    state.memory = replace(in_epoch(climb, seen, state.memory, now=now), raised=True)
    doors.metrics.raised.labels(climb.cause).inc()
    log(LOG, "epoch raised", epoch=climb.epoch, step=climb.step, version=str(climb.version), reason=climb.cause)
    if climb.cause is not Cause.TAKEOVER:
        is_trouble = climb.cause.is_failure or climb.cause.is_recovery
        state.record.note(
            None, News("Warning" if is_trouble else "Normal", climb.cause, decided.message, action="RaiseEpoch")
        )


def report_status(state: JobState, seen: Observation, decided: Plan, doors: Doors) -> float | None:
    """Note the status if it changed. Return after how many seconds to report again although nothing changed."""
    before = state.status
    status = report(seen, decided, before=before, at=doors.wall(), stall=state.stall)
    wait_s = [BRIEF_OUTAGE_S] if is_brief_outage(seen, before) else []  # after which the outage is not brief any more
    if status == before:
        return min(wait_s, default=None)
    due_in_s = state.reported_at + PROGRESS_S - doors.clock()
    if not is_urgent(before, status) and due_in_s > 0:
        return min([due_in_s, *wait_s])
    is_new, news = status.phase is not before.phase, list[News]()
    if is_new:
        log(LOG, "phase changed", epoch=status.epoch, step=status.step, phase=status.phase)
    if is_new and status.phase is Phase.COMPLETE:
        done = all_done(seen.job, status.step, status.model)
        news.append(News("Normal", Reason.COMPLETED, done, action="Complete"))
    if backs_off(status) and not backs_off(before) and decided.wait is not None:
        news.append(News("Warning", Reason.BACKING_OFF, decided.wait.message, action="BackOff"))
    for recorded, former in ((status.start_time, before.start_time), (status.ended_at, before.ended_at)):
        if recorded is not None and recorded != former:
            state.moments[recorded] = seen.now  # before the wall clock can be set
    state.record.note(status, *news)
    state.reported_at = doors.clock()
    return min(wait_s, default=None)


def count(state: JobState, doors: Doors) -> None:
    status, stalled = state.status, None if state.stall is None else state.stall.reason
    is_near_limit = (
        state.job is not None and status.ended_at is None and 2 * (status.restarts or 0) > state.job.spec.backoff_limit
    )
    doors.metrics.count_job(state.about.uid, status.phase, stalled, is_near_limit=is_near_limit)


def refuse(state: JobState, body: Any, message: str, doors: Doors) -> None:
    """Report the fault of an invalid spec, once for each generation."""
    doors.metrics.count_job(state.about.uid, state.status.phase, Reason.INVALID_SPEC)
    status = invalid(message, generation=body["metadata"]["generation"], before=state.status, at=doors.wall())
    if is_urgent(state.status, status):
        state.record.note(status, News("Warning", Reason.INVALID_SPEC, message, action="Refuse"))


def set_stall(state: JobState, stall: Stall, *, action: str) -> None:
    """Stall the job. The event is sent once for each message."""
    if state.stall != stall:
        state.record.note(None, News("Warning", stall.reason, stall.message, action=action))
    state.stall = stall
