"""Say where every member should stand next. The module is pure.

*The group may stand one barrier beyond its slowest member.* Gates close for new weights only after the evaluation of
the served ones, and open only on the checksum that more than half of the engines hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from colocated_rl_api import names
from colocated_rl_api.facts import EngineFacts
from colocated_rl_api.member_wire import EngineSpan, Goal, PodTarget, Rendezvous, RolloutTarget
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_api.seats import ROLLOUT_SEAT
from colocated_rl_operator.planner.last_save import whole_to_save
from colocated_rl_operator.planner.observation import Climb, Member, Observation
from colocated_rl_operator.planner.size import size_at_boundary


def climb_targets(seen: Observation) -> dict[str, PodTarget | RolloutTarget]:
    targets: dict[str, PodTarget | RolloutTarget] = {}
    climb, rollout, first = seen.climb, seen.rollout_member, seen.current.get(seen.job.lineage_seats[0])
    ladder = seen.job.ladder
    if climb is None or not climb.group:
        return targets  # without a group there is nobody to climb together
    if rollout is not None and rollout.facts is not None:
        targets[rollout.name] = _rollout_target(seen, climb)
    whole = whole_to_save(seen)
    if whole is not None:
        seen, first = whole, whole.current.get(seen.job.lineage_seats[0])
    if first is None or first.address is None or rollout is None or rollout.address is None:
        return targets  # the trainers have no rendezvous, or no batches: every member keeps its last target
    common = PodTarget(
        epoch=climb.epoch,
        goal=Goal.CLIMB,
        step=climb.step,
        lineage=climb.lineage,
        rung=ladder.next_barrier(Rung.UNKNOWN),
        rendezvous=Rendezvous(
            address=first.address,
            port=names.RENDEZVOUS_PORT + climb.lineage % names.RENDEZVOUS_PORTS,
            world_size=seen.job.replicas * seen.job.ranks_per_pod,
        ),
        batches=rollout.data_port,
        is_last=climb.step >= seen.last_step,
        saves=whole is not None or seen.is_warned or size_at_boundary(seen) != seen.job.replicas,
        weights=_weights(seen, climb),
    )
    granted = common.model_copy(update={"rung": _granted(seen), "checksum": agreed_checksum(seen, climb)})
    for member in seen.gpu_members:
        if member.pod_facts is None:
            continue
        if member.pod_facts.epoch != climb.epoch:
            targets[member.name] = _with_span(seen, member, common)  # it must first report under this epoch
        elif whole is not None and seen.standings[member.name] is ladder.top:  # where alone all trainers save
            targets[member.name] = _with_span(seen, member, granted.model_copy(update={"rung": ladder.top}))
        elif seen.slowest is not Rung.UNKNOWN:
            targets[member.name] = _with_span(seen, member, granted)
    return targets


def stop_targets(
    seen: Observation, climb: Climb, members: Iterable[Member], *, rollout_goal: Goal = Goal.STOP
) -> dict[str, PodTarget | RolloutTarget]:
    lowest = seen.job.ladder.next_barrier(Rung.UNKNOWN)
    stop = PodTarget(epoch=climb.epoch, goal=Goal.STOP, step=climb.step, lineage=climb.lineage, rung=lowest)
    rollout = _rollout_target(seen, climb).model_copy(update={"goal": rollout_goal, "evaluate": None})
    return {
        member.name: rollout if member.seat == ROLLOUT_SEAT else _with_span(seen, member, stop)
        for member in members
        if member.facts
    }


def _with_span(seen: Observation, member: Member, target: PodTarget) -> PodTarget:
    """Return the target of a pod whose engine may be over several pods: then each is told of the others."""
    seats = seen.job.spans.get(member.seat)
    if seats is None:
        return target
    pods = [seen.current[seat] for seat in seats if seat in seen.current]
    first, parts = seen.current.get(seats[0]), [pod for pod in pods if pod.seat != seats[0]]
    facts = first.pod_facts if first else None
    engine = facts.engines[0] if facts and facts.engines else None
    is_first = member.seat == seats[0]
    span = EngineSpan(
        pods=tuple(pod.uid for pod in pods),
        address=first.address if first else None,
        engine=None if is_first else engine,
        gate=None if is_first or facts is None else facts.gate,
        lost=engine.incarnation if is_first and engine and _has_lost_part(engine, parts) else None,
    )
    return target.model_copy(update={"span": span})


def _has_lost_part(engine: EngineFacts, parts: Iterable[Member]) -> bool:
    """Return whether a part of the engine has ended."""
    found = (each for pod in parts if pod.pod_facts for each in pod.pod_facts.engines)
    return any(part.is_absent and part.part_of == engine.incarnation is not None for part in found)


def _rollout_target(seen: Observation, climb: Climb) -> RolloutTarget:
    spec = seen.job.spec
    finished = climb.step if seen.is_finished else climb.step - 1
    engines = seen.serving_members if seen.job.ladder.serves else ()
    return RolloutTarget(
        epoch=climb.epoch,
        goal=Goal.CLIMB,
        trained_step=max(finished, seen.trained_step),
        saved_step=seen.replay_step,
        engines=tuple(member.data_port for member in engines if member.data_port is not None),
        references=tuple(member.data_port for member in seen.scoring_members if member.data_port is not None),
        evaluate=evaluating.step if (evaluating := evaluation_due(seen)) else None,
        climbed=seen.memory.climbed,
        last_step=spec.steps,
        concurrency=spec.rollout.concurrency,
        temperature=spec.rollout.sampling.temperature,
        evaluation=spec.evaluation,
    )


def _granted(seen: Observation) -> Rung:
    """Return the rung one barrier beyond the slowest; gates stay open while the served weights are evaluated."""
    return Rung.EXPORTED if keeps_gates_open(seen) else seen.job.ladder.next_barrier(seen.slowest)


def _weights(seen: Observation, climb: Climb) -> WeightVersion | None:
    """Return the weights that engines in pods of their own may load.

    They are the climb's once every trainer has exported them, and until then the version that all engines served.
    """
    ladder, trainers = seen.job.ladder, seen.trainer_members
    if not ladder.placement.shares_weights:
        return None
    is_written = len(trainers) == len(seen.job.trainer_seats) and all(
        ladder.reaches(seen.standings[member.name], Rung.EXPORTED) for member in trainers
    )
    return climb.version if is_written else seen.served


def agreed_checksum(seen: Observation, climb: Climb) -> str | None:
    """Return the checksum that engines serve, or that more than half of them hold, once all that are there hold the
    climb's weights.

    None before that, without such a majority, or if the job does not compare its engines.
    """
    if not (seen.job.spec.judges_weights and seen.job.ladder.reaches(seen.slowest, Rung.UPDATED)):
        return None
    if len(agreed := {*checksums(seen, climb, only_served=True).values()}) == 1:
        return agreed.pop()  # each gate opened on the one that was agreed on
    held = checksums(seen, climb)
    (checksum, engines), *_ = Counter(held.values()).most_common()
    return checksum if 2 * engines > len(held) else None


def checksums(seen: Observation, climb: Climb, *, only_served: bool = False) -> dict[str, str | None]:
    """Return each engine's checksum of the climb's weights, by its name and its pod's where that has several.

    only_served: of those to which a gate is open.
    """
    return {
        (f"{engine.name} of {member.name}" if len(member.pod_facts.engines) > 1 else member.name): engine.checksum
        for member in seen.serving_members
        if member.pod_facts
        for engine in member.pod_facts.engines
        if engine.version == climb.version and not (only_served and engine.shut)
    }


def keeps_gates_open(seen: Observation) -> Evaluating | None:
    """Return the evaluation that must finish before gates close for new weights, or None."""
    return evaluation_due(seen) if seen.slowest is Rung.EXPORTED and seen.job.ladder.serves_on else None


@dataclass(frozen=True)
class Evaluating:
    """An evaluation measures the weights that all engines serve, which do not change until it is done or late."""

    step: int
    ends: float  # at the latest


def evaluation_due(seen: Observation) -> Evaluating | None:
    """Return the evaluation that is due; None if none is due, or each set has a result, or its deadline is over."""
    evaluation, facts, climb, ladder = seen.job.spec.evaluation, seen.rollout_facts, seen.climb, seen.job.ladder
    if evaluation is None or climb is None:
        return None
    version, since = seen.served, seen.memory.epoch_at
    if seen.is_up or version == climb.version:
        version, since = climb.version, seen.memory.reached.get(Rung.SERVING, seen.now)
    elif version is None or not ladder.serves_on or not ladder.reaches(Rung.EXPORTED, seen.slowest):
        return None
    if version.step < seen.last_step and version.step % evaluation.every_steps != 0:
        return None
    is_done = facts is not None and not evaluation.lacking(facts.evaluated, version.step)
    ends = since + evaluation.deadline_seconds
    return None if is_done or seen.now >= ends else Evaluating(version.step, ends)
