"""Decide when the group goes on with another number of replicas. The module is pure.

A group becomes smaller at once where pods have had no room for a while: it can't go on before. What is left of it forms
a group in a new lineage, as after the loss of a pod, and trains again what no checkpoint holds. All else waits for the
next step, behind a checkpoint of the last one: that step begins with other trainers, and none is trained twice.

The number is a part of the climb, so it is on record before a pod is made, deleted or sent a target for it.
"""

from __future__ import annotations

from dataclasses import replace

from colocated_rl_operator.planner.failure_policy import Decision, Hold, listed, raise_epoch, starts
from colocated_rl_operator.planner.last_save import whole_to_save
from colocated_rl_operator.planner.observation import Climb, Observation
from colocated_rl_operator.planner.reasons import Cause, Waiting
from colocated_rl_operator.planner.size import has_no_room, is_resizable, size_at_boundary, will_have_room


def shrink_to_fit(seen: Observation, climb: Climb | None) -> Decision | None:
    """Let the group go on with the replicas for which there is room, if the job accepts so few.

    A group that forms, and is asked to be smaller, is so at once: it has nothing to lose.
    """
    job, asked = seen.job, seen.job.spec.replicas
    if not is_resizable(seen):
        return None
    if climb is not None and not climb.group and asked < job.replicas:
        return _regroup(seen, climb, asked, f"{asked} replicas are asked for instead of {job.replicas}")
    if will_have_room(seen) or whole_to_save(seen) is not None:  # else what is being saved would be trained again
        return None
    policy = job.spec.elastic_policy
    least = asked if policy is None else min(asked, policy.min_replicas)
    fit = min(asked, len(job.lineage_seats) - len(seen.unplaced))
    if not has_no_room(seen) or fit < least:
        return None
    why = f"no node has taken on {listed([*seen.unplaced])}"
    return _regroup(seen, climb, fit, f"{why}: {fit} of {asked} replicas continue")


def _regroup(seen: Observation, climb: Climb | None, replicas: int, message: str) -> Decision:
    left = None if climb is None else replace(climb, group="")
    return raise_epoch(seen, left, Cause.RESIZED, message, replicas=replicas)


def resize(seen: Observation, following: Climb, *, until: float) -> Decision | Hold | None:
    """Begin the next step with another number of replicas: fewer if the spec asks for fewer, or those that have come.

    It waits for a checkpoint of the last step, for which targets ask; until: for no longer than this.
    """
    job, replicas = seen.job, size_at_boundary(seen)
    if replicas == job.replicas:
        return None
    what = f"{replicas} replicas instead of {job.replicas}, {job.spec.replicas} are asked for"
    last = following.step - 1
    if job.ladder.trains and seen.saved_step < last and seen.now < until:
        return Hold(
            until, f"{what}: step {following.step} begins with them once step {last} is saved", Waiting.CHECKPOINT
        )
    group = replace(seen, job=job.sized(replicas)).group or ""
    following = replace(following, lineage=seen.next_lineage, group=group)
    return raise_epoch(seen, following, Cause.RESIZED, f"{what}: {starts(seen)} together again", replicas=replicas)
