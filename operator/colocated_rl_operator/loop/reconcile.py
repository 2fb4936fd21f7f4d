"""Reconcile one job: observe, plan, act, report. The loop is level-triggered, and no job waits for another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
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
from colocated_rl_operator.loop.act import act
from colocated_rl_operator.loop.claim import claim
from colocated_rl_operator.loop.deletion import delete_pods, shut_down_job
from colocated_rl_operator.loop.doors import Doors
from colocated_rl_operator.loop.job_state import RELIST_S, JobState, list_again, refresh_pods
from colocated_rl_operator.loop.observe import observe, read_job, token_name
from colocated_rl_operator.loop.reporting import refuse
from colocated_rl_operator.planner.observation import Observation
from colocated_rl_operator.planner.plan import Plan, plan, stop

LOG = logging.getLogger(__name__)

AGAIN_S = 60.0  # another operator's job may become ours


async def one_pass(state: JobState, body: Mapping[str, Any], doors: Doors) -> float | None:
    """Run a pass; return after how many seconds to look again without a change, None: never. Raises JobGone."""
    wait_s: float | None = RETRY_S
    try:
        wait_s = await _pass(state, body, doors)
        if state.stall is None:
            state.failing_since = None
    except* StaleEpoch as errors:
        log(LOG, "epoch raised elsewhere", logging.WARNING, reason=str(first(errors)))
        await doors.confirm()
        state.forget()
    except* NotFound as errors:
        log(LOG, "object not found, trying again", logging.WARNING, reason=str(first(errors)))
        state.forget()
        wait_s = _again_s(state, first(errors), doors)
    except* ApiError as errors:
        log(LOG, "pass not finished, trying again", logging.WARNING, reason=str(first(errors)))
        wait_s = _again_s(state, first(errors), doors)
    return wait_s


def _again_s(state: JobState, error: ApiError, doors: Doors) -> float:
    now = doors.clock()
    if state.failing_since is None or state.failure != str(error):
        state.failure, state.failing_since = str(error), now
    return error.again_s(failing_s=state.failing_s(now))


async def _pass(state: JobState, body: Mapping[str, Any], doors: Doors) -> float | None:
    if (left_s := state.leaves_until - doors.clock()) > 0:
        return left_s
    state.record.check()
    await refresh_pods(state, doors.kube, doors.pods, now=doors.clock())
    if not await claim(state, doors):
        doors.members.keep(state.about.uid, ())  # each would take its members' connections from the other
        doors.metrics.forget_job(state.about.uid)  # the other one counts it
        doors.queue.forget(state.about.uid)
        state.forget()
        state.leaves_until = doors.clock() + AGAIN_S  # whatever its pods do
        return AGAIN_S
    began = doors.clock()
    try:
        seen = _observe(state, body, doors)
    except JobInvalid as error:
        refuse(state, body, str(error), doors)
        return None
    with doors.metrics.plan_s.time():
        decided = plan(seen)
    state.thought_s = doors.clock() - began
    if _blames(seen, decided):  # the server knows of a drain before it ends a pod's trainers, and others with them
        await list_again(state, doors.kube, doors.pods)
        seen = _observe(state, body, doors)
        decided = plan(seen)
    if decided.raises:  # a new climb may have another number of replicas
        seen = replace(seen, job=seen.job.led_by(decided.climb))
    state.is_waiting = decided.wait is not None
    again_s = await act(state, seen, decided, doors)
    waits = [
        again_s,
        None if decided.wake_at is None else max(0.0, decided.wake_at - doors.clock()),
        RELIST_S if state.is_waiting else None,
    ]
    return min((wait_s for wait_s in waits if wait_s is not None), default=None)


def _blames(seen: Observation, decided: Plan) -> bool:
    """Return whether the plan counts a failure against the job, or ends the job for one."""
    before, after = seen.climb, decided.climb
    if not decided.raises or before is None or after is None:
        return False
    return after.cause.is_failure or after.restarts > before.restarts


def _observe(state: JobState, body: Mapping[str, Any], doors: Doors) -> Observation:
    now, at = doors.clock(), doors.wall()
    job, metadata = state.job, body["metadata"]
    if job is None or (job.generation, job.token_name) != (metadata["generation"], token_name(metadata)):
        job = state.job = read_job(body)
    before = state.memory.last_switch_s
    seen = observe(
        state,
        job,
        pods=doors.pods,
        members=doors.members,
        queue=doors.queue,
        nodes=doors.nodes,
        keyring=doors.keyring,
        now=now,
        at=at,
    )
    if (switch_s := seen.memory.last_switch_s) is not None and switch_s != before:
        doors.metrics.switch_s.observe(switch_s)
    return seen


async def end(state: JobState, body: Mapping[str, Any], doors: Doors, woken: asyncio.Event) -> None:
    """Shut down a job that is being deleted, or delete the pods of one that is gone."""
    try:
        await refresh_pods(state, doors.kube, doors.pods, now=doors.clock())
    except JobGone:
        await delete_pods(state.about, doors)  # no member can be asked to stop
        return
    if not await claim(state, doors):
        return
    try:
        seen = _observe(state, body, doors)
        decided = stop(seen)
    except JobInvalid:
        decided = Plan(climb=None)  # no member can be asked to stop, and its pods go all the same
    await shut_down_job(state, decided, doors, woken)
