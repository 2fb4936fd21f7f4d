"""Say what a group of another number of replicas depends on: what is asked for, who waits to join, what has no room.

The seats of a group are always the first ones. The seats that the spec asks for beyond them are *waiting*: their pods
are made one after the other, and one that no node has taken on holds nothing. When a waiting pod answers there is room
for it, and the group takes it in at its next step (`resizing`).

The pods of `spec.spares` are made likewise, after those, and never join: they give their room to pods of the group that
have none. A spare pod with all that it has loaded could be taken in instead, at the price that any seat may have any
rank. What a spare keeps ready is a node: its devices, and the images on it. The module is pure.
"""

from __future__ import annotations

from itertools import takewhile

from colocated_rl_operator.planner.observation import Member, Observation
from colocated_rl_operator.planner.silence import is_silent

SPARE_AFTER_S = 5.0  # without room, of a pod of the group: many times what scheduler and kubelet need for one
SHRINK_AFTER_S = 30.0  # without room, of a job that is asked to have fewer replicas and has no elasticPolicy


def is_resizable(seen: Observation) -> bool:
    """Return whether the group can go on with another number of replicas.

    Not engines alone on devices of their own, which `replicas` does not count. Not in a queue or a gang, which are of a
    fixed number of pods. Nor with a rollout controller of an older version: it does not deal a batch to whoever asks.
    """
    facts, counts = seen.rollout_facts, bool(seen.job.trainer_seats)
    is_fixed = bool(seen.job.queue) or any(member.is_in_gang for member in seen.members)
    return counts and not is_fixed and facts is not None and facts.deals_anew


def size_at_boundary(seen: Observation) -> int:
    """Return with how many replicas the group goes on at its next step: of more, those that are there."""
    job = seen.job
    if not is_resizable(seen):
        return job.replicas
    coming = tuple(takewhile(lambda seat: _answers(seen, seat), job.waiting_seats))
    shares = job.engine_seats == job.trainer_seats
    at_a_time = job.spec.rollout.engine.pods if shares else 1  # the pods of an engine come together
    there = job.replicas + len(coming)
    return min(job.spec.replicas, there - there % at_a_time)


def no_room_at(seen: Observation) -> float | None:
    """Return when pods that are not placed have waited for long enough: then there is no room. None: all are placed."""
    since, policy = seen.memory.unplaced_since, seen.job.spec.elastic_policy
    if since is None or not seen.unplaced:
        return None
    return since + (SHRINK_AFTER_S if policy is None else policy.shrink_after_seconds)


def has_no_room(seen: Observation) -> bool:
    until = no_room_at(seen)
    return until is not None and seen.now >= until


def room_needed_at(seen: Observation) -> dict[str, float]:
    """Return when a spare gives its room to the pod of a seat, for each seat whose pod is not placed.

    A seat that has no pod, as between two attempts, needs none yet. Room that came free is offered to all first.
    """
    freed_at = seen.memory.freed_at
    pods = ((seat, seen.current.get(seat)) for seat in (*seen.unplaced, *seen.job.waiting_seats))
    since = {seat: pod.created_at for seat, pod in pods if pod is not None and not pod.is_placed}
    return {seat: SPARE_AFTER_S + (at if freed_at is None else max(at, freed_at)) for seat, at in since.items()}


def spares_to_keep(seen: Observation) -> tuple[str, ...]:
    """Return the seats of the spares that keep their pods: one gives its room to each pod of the group that has none.

    One whose node or device has a fault has nothing to give, and one without a node would compete for what others give.
    """
    needed = sum(seen.now >= at for at in room_needed_at(seen).values())
    if not needed:
        return seen.job.spare_seats
    placed = [pod for pod in seen.spare_members if pod.is_placed]
    fit = [pod.seat for pod in placed if pod.is_fit]
    leaving = sum(pod.ends_at is not None for pod in _of_use(seen))
    given = fit[max(0, len(fit) - max(0, needed - leaving)) :]
    return tuple(pod.seat for pod in placed if pod.seat not in given)


def will_have_room(seen: Observation) -> bool:
    """Return whether a pod that is not of the group gives its room, or is about to."""
    return bool(_of_use(seen))


def _of_use(seen: Observation) -> list[Member]:
    """Return the pods that are not of the group and whose room another one can have: their node is there."""
    return [pod for pod in seen.beside if pod.is_fit and not is_silent(seen, pod)]


def seat_to_open(seen: Observation) -> str | None:
    """Return the waiting seat that is to get a pod: the next one, once the group is whole and those before are placed.

    A spare's comes after those of the group.

    None: no seat is.
    """
    climb = seen.climb
    if climb is None or not climb.group or not seen.all_answer or not is_resizable(seen):
        return None
    for seat in (*seen.job.waiting_seats, *seen.job.spare_seats):
        pod = seen.current.get(seat)
        if pod is None:
            return None if seat in seen.refused else seat
        if not pod.is_placed:
            return None
    return None


def _answers(seen: Observation, seat: str) -> bool:
    return seat in seen.current and seen.current[seat].answers
