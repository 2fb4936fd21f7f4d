"""The loop of one job: observe, plan, act, report. Level-triggered, and each job its own: none waits for another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from colocated_rl_api.logs import log
from colocated_rl_operator.clients.errors import (
    RETRY_S,
    ApiError,
    JobGone,
    JobInvalid,
    NotFound,
    StaleEpoch,
    first,
)
from colocated_rl_operator.loop.act import (
    Doors,
    act,
    claim,
    delete_pods,
    refuse,
    shut_down_job,
)
from colocated_rl_operator.loop.case import RELIST_S, JobState, refresh_pods
from colocated_rl_operator.loop.observe import observe, read_job
from colocated_rl_operator.planner.observation import Observation
from colocated_rl_operator.planner.plan import Plan, plan, stop

LOG = logging.getLogger(__name__)

AGAIN_S = 60.0  # another operator's job may become ours


async def one_pass(case: JobState, body: Mapping[str, Any], doors: Doors) -> float | None:
    """Returns after how many seconds to look again although nothing changed; None: not at all. Raises JobGone."""
    wait_s: float | None = RETRY_S
    try:
        wait_s = await _pass(case, body, doors)
        if case.stall is None:
            case.failing_since = None
    except* StaleEpoch as errors:
        log(LOG, "somebody else raised the epoch", logging.WARNING, reason=str(first(errors)))
        await doors.confirm()
        case.forget()
    except* NotFound as errors:
        log(LOG, "something is gone, perhaps the job: looking again", logging.WARNING, reason=str(first(errors)))
        case.forget()
        wait_s = _again_s(case, first(errors), doors)
    except* ApiError as errors:
        log(LOG, "pass not finished, trying again", logging.WARNING, reason=str(first(errors)))
        wait_s = _again_s(case, first(errors), doors)
    return wait_s


def _again_s(case: JobState, error: ApiError, doors: Doors) -> float:
    now = doors.clock()
    if case.failing_since is None or case.failure != str(error):
        case.failure, case.failing_since = str(error), now
    return error.again_s(failing_s=case.failing_s(now))


async def _pass(case: JobState, body: Mapping[str, Any], doors: Doors) -> float | None:
    case.record.check()
    await refresh_pods(case, doors.kube, doors.pods, now=doors.clock())
    if not await claim(case, doors):
        case.forget()
        return AGAIN_S
    began = doors.clock()
    try:
        seen = _observe(case, body, doors)
    except JobInvalid as error:
        refuse(case, body, str(error), doors)
        return None
    with doors.metrics.plan_s.time():
        decided = plan(seen)
    case.thought_s = doors.clock() - began
    case.is_waiting = decided.wait is not None
    again_s = await act(case, seen, decided, doors)
    waits = [
        again_s,
        None if decided.wake_at is None else max(0.0, decided.wake_at - doors.clock()),
        RELIST_S if case.is_waiting else None,
    ]
    return min((wait_s for wait_s in waits if wait_s is not None), default=None)


def _observe(case: JobState, body: Mapping[str, Any], doors: Doors) -> Observation:
    now, at = doors.clock(), doors.wall()
    if case.job is None or case.job.generation != body["metadata"]["generation"]:
        case.job = read_job(body)
    before = case.memory.last_switch_s
    seen = observe(case, case.job, pods=doors.pods, members=doors.members, queue=doors.queue, now=now, at=at)
    if (switch_s := seen.memory.last_switch_s) is not None and switch_s != before:
        doors.metrics.switch_s.observe(switch_s)
    return seen


async def end(case: JobState, body: Mapping[str, Any], doors: Doors, woken: asyncio.Event) -> None:
    """The job is being deleted, or is gone."""
    try:
        await refresh_pods(case, doors.kube, doors.pods, now=doors.clock())
    except JobGone:
        await delete_pods(case.about, doors)  # nobody can be told
        return
    if not await claim(case, doors):
        return
    try:
        seen = _observe(case, body, doors)
        decided = stop(seen)
    except JobInvalid:
        decided = Plan(climb=None)  # nobody can be told, and its pods go all the same
    await shut_down_job(case, decided, doors, woken)
