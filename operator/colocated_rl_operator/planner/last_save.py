"""Decide whether a group saves the step where it stands while pods of it end. The module is pure.

A pod that is evicted or deleted, or whose container was signalled to end, has its grace. Its agent hands back partial
samples first, and its trainers, with all others of the group, still have the state of the last step in host memory. A
checkpoint takes all ranks, so the operator asks for it: with the target that they hold, in the same epoch. Meanwhile
the successor starts, and it joins once the checkpoint is durable, or once there is no more time.
"""

from __future__ import annotations

from dataclasses import replace

from colocated_rl_api.failure import FailureCause
from colocated_rl_api.rungs import Rung
from colocated_rl_operator.planner.notices import NOTICE_S
from colocated_rl_operator.planner.observation import Member, Observation


def whole_to_save(seen: Observation) -> Observation | None:
    """Return the observation with pods that end still in their seats, if the group is to save its step; None if not.

    The group is whole with them, and has stood at the top: its ranks are at rest, whatever became of engines with
    devices of their own. What a bad device has computed is not saved, nor what outlives the only pod that ends in the
    memory of others.
    """
    climb, ladder, since = seen.climb, seen.job.ladder, seen.memory.ending_since
    if climb is None or since is None or seen.now >= since + NOTICE_S:
        return None
    ending = {pod.seat for pod in seen.ending}
    others = (pod for pod in seen.members if pod.seat not in ending)
    whole = replace(seen, members=(*others, *(replace(pod, ends_at=None) for pod in seen.ending)))
    if not (ladder.trains and climb.group == whole.group and ladder.top in seen.memory.reached):
        return None
    standings = (whole.standings[pod.name] for pod in whole.trainer_members)  # engines may have gone
    is_at_rest = all(ladder.reaches(rung, Rung.EXPORTED) for rung in standings) and not whole.trainer_died
    is_kept = whole.mirrored_step == climb.step and len(ending) == 1 < len(whole.trainer_members)
    if not is_at_rest or is_kept or whole.saved_step >= climb.step or any(map(_is_in_doubt, whole.trainer_members)):
        return None
    return whole


def _is_in_doubt(pod: Member) -> bool:
    return bool(pod.bad_device) or (pod.notice is not None and pod.notice.cause is FailureCause.BAD_DEVICE)
