"""Carry out a plan: record a new epoch first, then send targets, then change objects; note status and events beside.

The order matters. An epoch is in the job's status before a target carries it (`reporting`); a barrier's targets go
out before any slower call to the API server (`objects`).
"""

from __future__ import annotations

from colocated_rl_operator.loop.deletion import expire
from colocated_rl_operator.loop.doors import Doors
from colocated_rl_operator.loop.job_state import JobState
from colocated_rl_operator.loop.objects import apply_plan, end_budget
from colocated_rl_operator.loop.reporting import count, record_epoch, report_status
from colocated_rl_operator.planner.observation import Job, Observation
from colocated_rl_operator.planner.plan import Plan


async def act(state: JobState, seen: Observation, decided: Plan, doors: Doors) -> float | None:
    """Carry out the plan; return after how many seconds to look again although nothing changed."""
    if decided.is_expired:
        return await expire(state, seen, decided, doors)
    if decided.raises:
        await record_epoch(state, seen, decided, doors)
    _send_targets(state, seen.job, decided, doors)
    if decided.raises:
        await end_budget(seen.job, decided, doors)
    if decided.pods or not decided.is_over:
        retry_s = await apply_plan(state, seen, decided, doors)
    else:
        retry_s = state.stall = None
    report_s = 0.0 if decided.raises else report_status(state, seen, decided, doors)
    if decided.is_over and not seen.is_over:
        report_s = 0.0  # from here on its time to live runs
    count(state, doors)
    return min((each for each in (retry_s, report_s) if each is not None), default=None)


def _send_targets(state: JobState, job: Job, decided: Plan, doors: Doors) -> None:
    job_uid = state.about.uid
    slowest = job.ladder.slowest(decided.standings.values())
    awaited = (pod for pod, rung in decided.standings.items() if rung is slowest is not job.ladder.top)
    sent = doors.members.send(job_uid, decided.targets, awaited)
    heard_at = doors.members.heard_at(job_uid)
    if sent:
        doors.metrics.targets.inc(sent)
    if sent and heard_at is not None and not decided.raises:
        doors.metrics.barrier_s.observe(doors.clock() - heard_at)
