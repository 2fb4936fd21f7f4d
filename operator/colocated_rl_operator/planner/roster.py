"""Decide which pods the job should have: one usable pod in each seat.

A pod that ended, or whose member stays silent (`silence`), is replaced by a pod with the next attempt number; one that
ended keeps its logs. While no member answers at all, podsReadyDeadlineSeconds decides, which does not run while every
node reports its pod of the job as ready.

A GPU pod's seat is filled again at once, even while the old pod is still ending: epoch, lineage and pod UID fence the
old pod, and it owns no exclusive volume. In a queue's pod group the old pod counts until it has failed, and the queue
would delete the new one as surplus: there the seat waits for as long as the deletion may take. The store's volume
admits one pod, so the rollout seat waits until no container of the old pod can run any more, and that pod is never
force-deleted. It does not wait until the old pod is gone: a queue keeps a pod that has failed until there is another.

Pods of seats that the group has no longer go. Those of waiting seats and spares (`size`) go if a seat of the group has
no room.

A reference with devices of its own is no member: kubelet restarts it, and the loss of its node removes its pod. Nobody
can send it new keys, so its pod is replaced for them, one after the other.
"""

from __future__ import annotations

from colocated_rl_api.back_off import doubled_s
from colocated_rl_api.seats import ROLLOUT_SEAT, is_spare
from colocated_rl_operator.planner.actions import CreatePod, DeletePod, PodAction
from colocated_rl_operator.planner.observation import Member, Observation, PodPhase
from colocated_rl_operator.planner.silence import is_silent, silent_at
from colocated_rl_operator.planner.size import has_no_room, room_needed_at, seat_to_open, spares_to_keep

FORCE_AFTER_S = 30.0  # past the grace of a deletion: the node does not answer
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 60.0  # between two attempts at one seat
MOST_ATTEMPTS = 10**9 - 1  # of as many digits as a pod's name has for it, see `resources.seat_and_attempt`


def muster(seen: Observation) -> tuple[tuple[PodAction, ...], float | None]:
    """Return the actions that bring every seat nearer to a usable pod, and when to look again."""
    actions: list[PodAction] = []
    wake: list[float] = []
    for pod in seen.members:
        if pod.ends_at is not None:
            _force_delete(pod, pod.ends_at, seen.now, actions, wake)
    actions += [
        DeletePod(pod.name, pod.uid, grace_s=None, why=_why(pod, seen.now))
        for pod in seen.current.values()
        if is_silent(seen, pod)
    ]
    silences = (silent_at(seen, pod) for pod in seen.members)  # the room of one that ends counts until then, see `size`
    wake += [at for at in silences if at is not None and seen.now < at]
    actions += [*_renewals(seen), *_surplus(seen), *_former(seen)]
    wake += [at for at in room_needed_at(seen).values() if seen.spare_members and seen.now < at]
    wake += [refused.until for refused in seen.refused.values()]
    opened = seat_to_open(seen)
    wanted = (*seen.job.seats.all, *((opened,) if opened else ()))
    vacant = [seat for seat in wanted if seat not in seen.current]
    seated: dict[str, list[Member]] = {seat: [] for seat in vacant}
    for pod in seen.members if vacant else ():
        if pod.seat in seated:
            seated[pod.seat].append(pod)
    for seat, pods in seated.items():
        if not _is_held(seat, pods, seen, wake):
            _fill(seat, seen, actions, wake)
    return tuple(actions), min(wake, default=None)


def _renewals(seen: Observation) -> list[PodAction]:
    """Return the deletion of one reference whose keys are outdated, once all references are there and ready."""
    references = seen.reference_members
    if len(references) < len(seen.job.reference_seats) or not all(pod.is_ready for pod in references):
        return []
    why = "its certificate or data token is to be replaced"
    late = [pod for pod in references if pod.name in seen.outdated]
    return [
        DeletePod(pod.name, pod.uid, None, f"pod {pod.name} is replaced: {why}", is_fault=False) for pod in late[:1]
    ]


def _surplus(seen: Observation) -> list[PodAction]:
    """Return the deletions of pods that are not of the group, and that nobody waits for or whose room it needs."""
    job = seen.job
    waits = () if has_no_room(seen) else job.waiting_seats
    kept = {*job.seats.all, *waits, *spares_to_keep(seen)}
    return [
        DeletePod(pod.name, pod.uid, None, f"pod {pod.name} goes: {_why_surplus(seen, pod)}", is_fault=False)
        for pod in seen.current.values()
        if pod.seat not in kept
    ]


def _why_surplus(seen: Observation, pod: Member) -> str:
    if pod.seat in seen.job.spare_seats:
        return f"it is a spare, and room is needed for {', '.join(room_needed_at(seen))}"
    if is_spare(pod.seat):
        return f"spec.spares is {seen.job.spec.spares}"
    return f"the group has {seen.job.replicas} replicas"


def _former(seen: Observation) -> list[PodAction]:
    """Return the deletions of pods that have ended beside the group, but for the newest of each seat.

    The group does without them, so nothing limits how often they fail.
    """
    group = seen.job.seats
    ended = [pod for pod in seen.members if pod.seat not in group and not pod.is_usable and pod.ends_at is None]
    newest = {pod.seat: pod for pod in sorted(ended, key=lambda pod: pod.attempt)}
    return [
        DeletePod(pod.name, pod.uid, None, f"pod {pod.name} has ended, and a later one too", is_fault=False)
        for pod in ended
        if pod is not newest[pod.seat]
    ]


def clear(seen: Observation) -> tuple[tuple[PodAction, ...], float | None]:
    """Return the actions that delete every pod, and when to look again."""
    actions: list[PodAction] = []
    wake: list[float] = []
    for pod in seen.members:
        if pod.ends_at is None:
            why = f"pod {pod.name} goes: its job is suspended"
            actions.append(DeletePod(pod.name, pod.uid, grace_s=None, why=why, is_fault=False))
        else:
            _force_delete(pod, pod.ends_at, seen.now, actions, wake)
    return tuple(actions), min(wake, default=None)


def _force_delete(pod: Member, ends_at: float, now: float, actions: list[PodAction], wake: list[float]) -> None:
    """Force-delete a GPU pod that does not end within its grace; add the deadline to `wake` if it is still ahead."""
    if pod.seat == ROLLOUT_SEAT:
        return
    if now >= ends_at + FORCE_AFTER_S:
        message = f"pod {pod.name} did not end {FORCE_AFTER_S:.0f} s after its grace period: it is force-deleted"
        actions.append(DeletePod(pod.name, pod.uid, grace_s=0, why=message))
    else:
        wake.append(ends_at + FORCE_AFTER_S)


def _why(pod: Member, now: float) -> str:
    message = f"no answer from pod {pod.name} for {now - (pod.silent_since or now):.0f} s: it is replaced"
    return f"{message}; {pod.trouble}" if pod.trouble else message


def _is_held(seat: str, pods: list[Member], seen: Observation, wake: list[float]) -> bool:
    """Return whether an ending pod holds the seat, by the store's volume or by its place in a queue's group."""
    ending = [(pod, pod.ends_at) for pod in pods if pod.ends_at is not None]
    if seat == ROLLOUT_SEAT:
        return any(_may_run(pod) for pod, _ in ending)
    if not ending or not seen.job.queue:
        return False
    until = max(ends_at for _, ends_at in ending) + FORCE_AFTER_S
    if seen.now >= until or all(pod.phase is PodPhase.FAILED for pod, _ in ending):
        return False
    wake.append(until)
    return True


def _may_run(pod: Member) -> bool:
    """Return whether a container of an ending pod may still run: it has not ended, and it was given a node."""
    if pod.phase is PodPhase.PENDING:
        return pod.node is not None
    return pod.phase not in (PodPhase.SUCCEEDED, PodPhase.FAILED)


def _fill(seat: str, seen: Observation, actions: list[PodAction], wake: list[float]) -> None:
    last = seen.memory.attempts.get(seat)
    avoids = seen.climb.tally.avoids if seen.climb and seat != ROLLOUT_SEAT else ()
    if last is None:
        actions.append(CreatePod(seat, attempt=0, avoids=avoids))
        return
    due = seen.memory.made_at[seat] + doubled_s(FIRST_DELAY_S, last, MAX_DELAY_S)  # though it may be gone
    if seen.now >= due:
        # nobody replaces a pod that often: somebody else made a pod of that name, and further ones would be nobody's
        attempt = last + 1 if last < MOST_ATTEMPTS else 0
        actions.append(CreatePod(seat, attempt=attempt, avoids=avoids))
    else:
        wake.append(due)
