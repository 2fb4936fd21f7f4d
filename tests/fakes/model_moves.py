"""An action of one agent may need the other pods of its group, and change what all of them share.

The search through all states (`fakes.model`) and the group that walks and real operators move (`fakes.group`) take
every step here, so both check the same: see the invariants there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from colocated_rl_agent.planner import actions as do
from colocated_rl_api import names
from colocated_rl_api.facts import EngineState, TrainerState
from colocated_rl_api.member_wire import Goal
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_operator.planner.observation import Climb
from colocated_rl_operator.planner.plan import Plan
from colocated_rl_operator.planner.reasons import Cause
from fakes.model_pod import (
    InvariantBroken,
    ModelPod,
    ModelRank,
    act,
    last_barrier,
    must,
    rank_view,
    standing_of,
)


class Durable(NamedTuple):
    """A Durable outlives every pod: batches in the store beyond `dropped` up to `sealed`, and the newest checkpoint.

    kept: newest step that the memory of the pods has, of a job that keeps steps there. It outlives processes.
    """

    dropped: int
    sealed: int
    saved: int
    kept: int | None = None

    def has(self, step: int) -> bool:
        return self.dropped < step <= self.sealed


def acted(pod: ModelPod, action: do.Action) -> ModelPod:
    return act(pod, action).noted()


def carried_out(
    before: ModelPod,
    action: do.Action,
    *,
    peers: Callable[[], Iterable[ModelPod]],
    durable: Durable,
    acted: Callable[[ModelPod, do.Action], ModelPod] = acted,
) -> tuple[ModelPod, int] | None:
    """Return the pod after its action and the newest checkpoint, or None: the action waits for other pods or a batch.

    peers: the other pods with trainers.
    """
    rank, saved = before.rank, durable.saved
    if (behind := _joined_behind(action)) is not None and not has_joined(rank, peers(), behind):
        return None
    match action:
        case do.AwaitTrainers():
            can_mirror, step = durable.kept is not None, max(saved, durable.kept or 0)
            pod = _with_rank(before, state=TrainerState.OFFLOADED, step=step, saved=saved, can_mirror=can_mirror)
        case do.Score(step=step) | do.Train(step=step):
            must(durable.has(step), f"batch {step} is not in the store")
            must(rank.step == step - 1, "a batch out of order")
            keep = rank.can_mirror and any(mirrors(pod, step - 1) for pod in peers())
            must(not keep, "a rank trains while others keep a step together")
            if isinstance(action, do.Score):
                pod = _with_rank(before, scored=step, state=TrainerState.ONLOADED)
            else:
                must(not before.ladder.scores or rank.scored == step, "a batch that no reference has scored")
                pod = _with_rank(before, step=step, state=TrainerState.ONLOADED)
        case do.Save(step=step):
            apart = rank.can_mirror and any(mirrors(pod, step) for pod in peers())
            must(not apart, "a rank saves a step that others keep in memory together")
            saved = max(saved, step)
            pod = _with_rank(before, saved=step)
        case do.Mirror(step=step):
            must(not any(pod.rank.step != step for pod in peers()), "a step is kept that others are beyond")
            must(not any(do.Save(step) in pod.about_to_keep for pod in peers()), "a step is kept that others save")
            if not all(pod.rank.mirrored == step or mirrors(pod, step) for pod in peers()):
                return None
            pod = _with_rank(before, mirrored=step)
        case do.SaveModel(version=version):
            must(saved >= version.step, "a model is left that no checkpoint has")
            pod = _with_rank(before, finished=version)
        case do.FetchShards(step=step) if not durable.has(step):
            return None
        case _:
            pod = acted(before, action)
    must(
        not pod.rank.is_on_device or pod.engine is None or pod.engine.has_given_up or pod.ladder.serves_on,
        "engine and trainer share the device",
    )
    return pod, saved


def _joined_behind(action: do.Action) -> int | None:
    """Return the step behind which all ranks meet in the action; None: each takes it by itself."""
    match action:
        case do.AwaitTrainers():
            return -1
        case do.Score(step=step) | do.Train(step=step):
            return step - 1
        case do.Save(step=step) | do.Mirror(step=step):
            return step
        case _:
            return None


def _with_rank(pod: ModelPod, **changes: object) -> ModelPod:
    return pod._replace(rank=pod.rank._replace(**changes)).noted()  # type: ignore[arg-type]


def mirrors(pod: ModelPod, step: int) -> bool:
    """Return whether the pod's ranks are about to keep a step in memory, which takes all ranks of the group."""
    return do.Mirror(step) in pod.about_to_keep


def has_joined(rank: ModelRank, peers: Iterable[ModelPod], step: int) -> bool:
    """Return whether every other rank is in the collective after `step`, or beyond it."""
    return all(
        pod.alive
        and pod.rank.is_alive
        and pod.rank.lineage == rank.lineage
        and (-1 if pod.rank.step is None else pod.rank.step) >= step
        for pod in peers
    )


def is_alone(rank: ModelRank, peers: Iterable[ModelPod]) -> bool:
    """Return whether a rank of the group has gone, which ends a collective. One that has not come yet is waited for."""
    return any(
        not pod.alive
        or (pod.rank.lineage == rank.lineage and not pod.rank.is_alive)
        or (pod.rank.lineage or 0) > (rank.lineage or 0)
        for pod in peers
    )


def without_peers(pod: ModelPod) -> ModelPod:
    """Return the pod after its rank waited in a collective for one that is gone."""
    return pod._replace(rank=ModelRank.of(rank_view(pod.rank).broke("nobody answers")))


def must_close_late(pods: Sequence[ModelPod], pod: ModelPod, action: do.Action) -> None:
    """Check that a healthy engine that serves on closes its gate when every pod has the new weights, or for good."""
    is_healthy = pod.engine is not None and pod.belief.state is EngineState.READY and pod.belief.broken is None
    is_climb = pod.target is not None and pod.target.goal is Goal.CLIMB and not pod.ending
    if isinstance(action, do.CloseGate) and pod.ladder.rolls_on and not pod.rules.releases and is_healthy and is_climb:
        written = Rung.EXPORTED if pod.ladder.serves_on else Rung.OFFLOADED
        must_have_stood(pods, pod.epoch, written, "a gate closes")


def must_cost_no_step(decided: Plan, *, before: Climb | None, saved: int) -> None:
    """Check that trainers start again because they have grown, or as another number of a group that was whole, only
    where a checkpoint has all that they did. before: the climb that was on record.
    """
    climb, was_whole = decided.climb, before is not None and bool(before.group)
    if not decided.raises or climb is None or not climb.group:
        return
    if climb.cause is Cause.TRAINERS_RECYCLED or (climb.cause is Cause.RESIZED and was_whole and climb.step):
        must(saved >= climb.step - 1, f"trainers start again behind step {climb.step - 1}, and {saved} is saved")


def must_rise_together(
    pods: Sequence[ModelPod],
    before: ModelPod,
    after: ModelPod,
    action: do.Action,
    *,
    served: WeightVersion | None,
    standing_of: Callable[[ModelPod], Rung] = standing_of,
) -> None:
    """Check that a pod goes beyond a barrier only after every pod has stood at it. served: by all engines at once."""
    was, now = standing_of(before), standing_of(after)
    is_climb = after.target is not None and after.target.goal is Goal.CLIMB and not after.ending
    is_rise = not after.ladder.reaches(was, now) and not isinstance(action, do.KillEngine)  # a loss is no going on
    joins = after.role == names.ROLE_ENGINE and after.target is not None and after.target.version == served
    if is_climb and is_rise and not joins:  # what all have served already: they passed its barriers long ago
        passed = last_barrier(after.ladder, after.ladder.place(was))
        must_have_stood(pods, after.epoch, passed, f"{type(action).__name__} led to {now}")


def must_have_stood(pods: Sequence[ModelPod], epoch: int, barrier: Rung | None, what: str) -> None:
    """Check that every pod has stood there, or higher."""
    if barrier is None:
        return
    for index, pod in enumerate(pods):
        stood = dict(pod.stood).get(epoch, Rung.UNKNOWN)
        if not pod.ladder.reaches(stood, barrier):
            raise InvariantBroken(f"{what} in epoch {epoch} before gpu-{index} stood at {barrier}: it stood at {stood}")
