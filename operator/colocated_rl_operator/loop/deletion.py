"""End a job at the API server: stop its members, then delete its pods, by force if need be."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from colocated_rl_api.logs import log
from colocated_rl_api.names import PodUid
from colocated_rl_api.seats import ROLLOUT_SEAT
from colocated_rl_operator.clients.errors import ApiError, ApiUnreachable, NotAdmitted
from colocated_rl_operator.clients.events import About
from colocated_rl_operator.loop.doors import DELETE_GRACE_S, Doors
from colocated_rl_operator.loop.job_state import JobState
from colocated_rl_operator.loop.objects import STALL_RETRY_S, is_lasting, refusal_of
from colocated_rl_operator.loop.pods import job_of
from colocated_rl_operator.loop.reporting import count, report_status, set_stall
from colocated_rl_operator.planner.observation import Observation
from colocated_rl_operator.planner.plan import Plan
from colocated_rl_operator.planner.status import leaving

LOG = logging.getLogger(__name__)

MAX_EXPIRE_RETRY_S = 3600.0
DELETE_TRIES, DELETE_RETRY_S = 4, 1.0
FORCE_TRIES = 60  # nothing waits for it, and nothing retries after it
STOP_S = 5.0  # members of a deleted job have this long to end by themselves


async def shut_down_job(state: JobState, decided: Plan, doors: Doors, woken: asyncio.Event) -> None:
    """Ask members of a deleted job to stop, wait briefly, then delete its pods. Garbage collection takes the rest."""
    sent = doors.members.send(state.about.uid, decided.targets)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            while sent and not _all_stopped(state, doors):
                woken.clear()
                await woken.wait()
    await delete_pods(state.about, doors)
    log(LOG, "job shut down")
    await state.record.commit(leaving(before=state.status, at=doors.wall()))


def _all_stopped(state: JobState, doors: Doors) -> bool:
    answers = doors.members.answers(state.about.uid).values()
    return all(answer.facts is None or answer.facts.stopped for answer in answers)


async def expire(state: JobState, seen: Observation, decided: Plan, doors: Doors) -> float | None:
    """Delete a job whose time to live is over. Its end is recorded first, even if it goes at once.

    Return after how many seconds to try again, or None.
    """
    if state.stall is None:
        await state.record.commit(state.status)
    try:
        await doors.kube.delete_job(state.about.namespace, state.about.name, uid=state.about.uid)
    except (NotAdmitted, ApiUnreachable) as error:
        if isinstance(error, ApiUnreachable) and not is_lasting(state, error, doors):
            raise
        set_stall(state, refusal_of(error), action="DeleteJob")
        report_status(state, seen, decided, doors)
        count(state, doors)
        ttl_s, ended_at = seen.job.spec.ttl_seconds_after_finished or 0, seen.finished_at or seen.now
        return expire_again_s(overdue_s=seen.now - ended_at - ttl_s)
    log(LOG, "job expired", reason="ttlSecondsAfterFinished is over")
    return None


def expire_again_s(*, overdue_s: float) -> float:
    """Return the wait before a refused deletion is tried again: it doubles, up to an hour."""
    return min(max(STALL_RETRY_S, overdue_s), MAX_EXPIRE_RETRY_S)


async def delete_pods(about: About, doors: Doors) -> None:
    """Delete every pod of the job at once. Garbage collection would do it too, half a minute later or more."""
    await _retry(partial(_delete_each, about, doors))


async def _retry(delete: Callable[[], Awaitable[None]], *, tries: int = DELETE_TRIES) -> None:
    """Call `delete` until it succeeds, `tries` times at most. Raises the last ApiError."""
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
    """Delete every pod; raise the first error only after all had their turn."""
    found = await _pods_of(about, doors)
    deletions = (doors.kube.delete_pod(about.namespace, name, uid=uid, grace_s=DELETE_GRACE_S) for name, uid in found)
    for outcome in await asyncio.gather(*deletions, return_exceptions=True):
        if outcome is not None:
            raise outcome


async def force_delete_pods(about: About, doors: Doors) -> None:
    """Force-delete a deleted job's GPU pods that did not end, never the store's pod: its volume may be in use.

    Then drop the job's finalizer where kopf could not: it asks once, and again only at the next change of the job.
    """
    await asyncio.sleep(doors.force_after_s)
    try:
        await _retry(partial(_forget_pods, about, doors), tries=FORCE_TRIES)
        await _retry(partial(doors.kube.drop_finalizer, about.namespace, about.name, uid=about.uid), tries=FORCE_TRIES)
    except ApiError as error:
        log(LOG, "pods left to garbage collection", logging.WARNING, reason=str(error))


async def _forget_pods(about: About, doors: Doors) -> None:
    for name, uid in await _pods_of(about, doors):
        if not name.startswith(f"{about.name}-{ROLLOUT_SEAT}-"):
            await doors.kube.delete_pod(about.namespace, name, uid=uid, grace_s=0)
            log(LOG, "pod forgotten", logging.WARNING, pod=name, reason="its job is deleted and it did not end")


async def _pods_of(about: About, doors: Doors) -> list[tuple[str, PodUid]]:
    """Return names and UIDs of the job's pods, without those that merely carry its labels, such as a person's copy."""
    found = [pod for pod in await doors.kube.list_pods(about.namespace, about.uid) if job_of(pod) == about.uid]
    return [(pod["metadata"]["name"], pod["metadata"]["uid"]) for pod in found]
