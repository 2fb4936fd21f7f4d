"""These rules decide which groups are admitted and when each must train, so that no token exceeds the limit. Pure.

Staleness of a token at step k is k - 1 - version: 0 for the weights that the step starts from. A group's deadline is
the last step at which its oldest token is within the limit. Sealing waits for a group rather than let it pass its
deadline: bounded staleness, no waiting and no discarded tokens can't all hold, and waiting loses nothing. A job may
choose otherwise (`spec.rollout.atMaxStaleness`): then tokens that are too old are masked, or their samples discarded.

The age of a token without a version is not known, so no rule can hold it to the limit. Where a job accepts such tokens
(`spec.rollout.unversionedTokens`), they count as of the oldest weights that the batch being collected may train: their
group is due in that batch, so that they grow as little older as can be, and they are neither masked nor discarded.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from colocated_rl_rollout.rules.samples import GroupId

NO_DEADLINE = sys.maxsize  # of a group without tokens, which can't be stale


def staleness(version_step: int, *, at_step: int) -> int:
    """Return the steps between the weights that made a token and the weights that step `at_step` starts from."""
    return at_step - 1 - version_step


def deadline(oldest_step: int | None, *, max_staleness: int, unversioned_at: int | None = None) -> int:
    """Return the last step that may train a group whose oldest token was made by the weights of `oldest_step`.

    unversioned_at: the step whose batch is collected, where the group has tokens without a version; else None.
    """
    known = NO_DEADLINE if oldest_step is None else oldest_step + 1 + max_staleness
    return known if unversioned_at is None else min(known, unversioned_at)


def room(
    *,
    live: int,
    completed: int,
    sealed: int,
    concurrency: int,
    batch_size: int,
    max_staleness: int,
    steps_left: int,
    spare: int = 0,
) -> int:
    """Return how many groups may be admitted now.

    live: being generated, waiting or scored. completed: waiting for a batch. sealed: in a batch that is not trained.
    steps_left: steps whose batch is not sealed; nothing is generated for a step that won't come.
    The second bound keeps staleness within the limit: every group that is admitted, but for `spare` ones, has its place
    in one of the next `max_staleness + 1` batches.
    """
    ahead = (max_staleness + 1) * batch_size + spare - live - completed - sealed
    wanted = steps_left * batch_size + (spare if steps_left else 0) - live - completed
    return max(0, min(concurrency - live, ahead, wanted))


class Candidate(NamedTuple):
    """Describes a group as sealing sees it. It sorts by urgency, then by age."""

    deadline: int
    id: GroupId
    is_complete: bool


def choose(groups: Iterable[Candidate], *, step: int, batch_size: int, waits: bool = True) -> list[GroupId] | None:
    """Return the ids of the groups of batch `step`, oldest first, or None while sealing has to wait.

    Choose the most urgent first, then the oldest. Wait for `batch_size` complete groups; with `waits`, also wait when
    taking a less urgent group now would leave more urgent ones than the batches up to their deadline can hold.
    """
    ranked = sorted(groups)
    picked = [group for group in ranked if group.is_complete][:batch_size]
    if len(picked) < batch_size:
        return None
    chosen = {group.id for group in picked}
    left = [group.deadline for group in ranked if group.id not in chosen] if waits else []
    for limit in left:
        if limit >= picked[-1].deadline:
            break  # nothing less urgent was picked: waiting would not help
        if bisect_right(left, limit) > (limit - step) * batch_size:
            return None
    return sorted(chosen)
