"""Decide where every member should stand. The module is pure: it is called after every change and keeps no state.

The group may stand one barrier beyond its slowest member (`targets`). A member that has not reported under the present
epoch, or does not answer, stands below all others: no further rung is granted until its standing is known again, and
rungs that were granted stay granted.

A `Climb` is the only thing that is decided rather than derived: the step, lineage and epoch that the group climbs to.
It is raised for a reason (`Cause`) and recorded before a target carries it. Everything else follows from facts, so the
loss of either side costs a reconnect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from colocated_rl_api.job import Switch
from colocated_rl_api.ladder import Ladder
from colocated_rl_api.member_wire import Goal, PodTarget, RolloutTarget
from colocated_rl_api.rungs import Rung
from colocated_rl_api.seats import ROLLOUT_SEAT
from colocated_rl_operator.planner.actions import DeletePod, PodAction, TaintNode, WaitFor
from colocated_rl_operator.planner.failure_policy import (
    Decision,
    Hold,
    after_absence,
    after_death,
    after_difference,
    after_failure,
    after_loss,
    after_replacement,
    after_stall,
    after_standstill,
    how_to_retry,
    leaves_at,
    listed,
    queue_s,
    raise_epoch,
    rest_after_roll_back,
    starts,
    taints,
    unstarted,
)
from colocated_rl_operator.planner.last_save import whole_to_save
from colocated_rl_operator.planner.notices import NOTICE_S
from colocated_rl_operator.planner.observation import (
    Climb,
    Member,
    Observation,
    PodPhase,
)
from colocated_rl_operator.planner.reasons import Cause, Waiting
from colocated_rl_operator.planner.resizing import resize, shrink_to_fit
from colocated_rl_operator.planner.roster import clear, muster
from colocated_rl_operator.planner.size import no_room_at
from colocated_rl_operator.planner.targets import (
    agreed_checksum,
    checksums,
    climb_targets,
    evaluation_due,
    keeps_gates_open,
    stop_targets,
)

MARGIN_S = 30.0  # beyond the members' own deadlines: they act first, and report
RESTARTS_AWAITED = 2  # of an engine beside others
STOP_DEADLINE_S = 60.0  # members that have not stopped this long after the target to stop lose their pod


@dataclass(frozen=True)
class Plan:
    """A plan names where every member should stand, and which pods there should be."""

    climb: Climb | None  # None: nothing decided yet
    raises: bool = False  # `climb` is new: record it before any target is sent
    standings: Mapping[str, Rung] = field(default_factory=dict)
    targets: Mapping[str, PodTarget | RolloutTarget] = field(default_factory=dict)  # without one: keep the last
    pods: tuple[PodAction, ...] = ()
    taints: tuple[TaintNode, ...] = ()
    wait: WaitFor | None = None
    message: str = ""  # for people, when `raises`: what happened
    is_over: bool = False  # every member has stopped: record the end
    is_expired: bool = False  # ttlSecondsAfterFinished is over: delete the job
    wake_at: float | None = None  # look again then, even if nothing changes


def plan(seen: Observation) -> Plan:
    """Return the whole decision that follows from one observation."""
    if seen.is_over and after_failure(seen) is None:
        return _keep(seen)
    found = _carry_on(seen)
    return replace(found, taints=taints(seen, found.climb)) if found.climb else found


def _carry_on(seen: Observation) -> Plan:
    """Return the plan of a job that is not over."""
    match _decide(seen):
        case Decision(climb, message, pods):
            # facts count under the epoch they were reported in, so the new one starts with every pod unknown
            found = _follow(seen.following(climb), raises=True, message=message)
            return replace(found, pods=(*pods, *found.pods)) if pods else found
        case Hold(until, message, reason):
            found = _follow(seen, raises=False, message="")
            wake_at = until if found.wake_at is None else min(until, found.wake_at)
            return replace(found, wait=WaitFor(reason, (), message), wake_at=wake_at)
        case None:
            return _follow(seen, raises=False, message="")


def stop(seen: Observation) -> Plan:
    """Return the plan of a job that is being deleted: every member stops, in the present epoch."""
    if seen.climb is None:
        return Plan(climb=None)
    targets = stop_targets(seen, seen.climb, seen.current.values())
    return Plan(climb=seen.climb, standings=seen.standings, targets=targets)


def _keep(seen: Observation) -> Plan:
    """Keep a finished job until its TTL is over; delete pods that still run, or they would hold devices for ever."""
    ttl_s, now, ended_at = seen.job.spec.ttl_seconds_after_finished, seen.now, seen.finished_at
    if ended_at is None:
        return Plan(climb=seen.climb, is_over=True)
    until = None if ttl_s is None else ended_at + ttl_s
    pods_until = ended_at + STOP_DEADLINE_S if seen.current else None
    return Plan(
        climb=seen.climb,
        is_over=True,
        is_expired=until is not None and now >= until,
        pods=tuple(map(_outlives, seen.current.values())) if pods_until is not None and now >= pods_until else (),
        wake_at=min((each for each in (until, pods_until) if each is not None and now < each), default=None),
    )


def _follow(seen: Observation, *, raises: bool, message: str) -> Plan:
    """Return the plan that follows from the climb as it is."""
    climb = seen.climb
    if seen.rests and not (climb and climb.lineage):
        found = _leave(seen)
    elif climb is not None and climb.cause.goal is Goal.STOP:
        found = _stop(seen, climb, since=seen.now if raises else seen.memory.epoch_at)
    else:
        found = _climb(seen)
    return replace(found, raises=raises, message=message)


# ------------------------------------------------------------------------------------------------------- the decision
def _decide(seen: Observation) -> Decision | Hold | None:
    """Return a new climb, a hold before the next one, or None to go on with the present one."""
    climb = seen.climb
    if climb is not None and climb.cause.goal is Goal.STOP:
        return _decide_after_stop(seen, climb)
    if seen.job.spec.suspend:
        message = "members stop, then their pods go; volumes stay"
        return raise_epoch(seen, climb, Cause.SUSPENDED, message) if climb or seen.members else None
    if (failure := _decide_by_time(seen, climb)) is not None:
        return failure
    if (smaller := shrink_to_fit(seen, climb)) is not None:
        return smaller
    if climb is None:
        return _first(seen) if seen.all_answer else None
    found: Decision | Hold | None
    if seen.all_answer:
        found = _save_first(seen, climb) or _decide_when_all_answer(seen, climb)
    else:
        found = after_loss(seen, climb) or _save_first(seen, climb)
    if _is_contested(seen) and not isinstance(found, Decision):
        return raise_epoch(seen, climb, Cause.TAKEOVER, "the operator looks at the job for the first time, or again")
    return found


def _save_first(seen: Observation, climb: Climb) -> Hold | None:
    """Hold the next climb while the group saves its step before pods of it are gone."""
    since = seen.memory.ending_since
    if since is None or whole_to_save(seen) is None:
        return None
    names = listed([pod.name for pod in seen.ending])
    return Hold(since + NOTICE_S, f"step {climb.step} is saved before {names} ends", Waiting.CHECKPOINT)


def _decide_after_stop(seen: Observation, climb: Climb) -> Decision | Hold | None:
    """Finish a rest that has begun before the job goes on: a member's target to stop can't be taken back."""
    if (retried := after_failure(seen)) is not None:
        return retried
    if climb.cause.rests and not seen.members:
        return _decide_at_rest(seen, climb)
    return raise_epoch(seen, climb, climb.cause, "the end is announced again") if _is_contested(seen) else None


def _decide_at_rest(seen: Observation, climb: Climb) -> Decision | Hold | None:
    if seen.job.spec.suspend:
        is_new = climb.cause is not Cause.SUSPENDED
        return raise_epoch(seen, climb, Cause.SUSPENDED, "it has no pods") if is_new else None
    if climb.cause is Cause.PODS_NOT_READY:
        if (late := _decide_by_time(seen, climb)) is not None:
            return late
        until = seen.memory.epoch_at + queue_s(seen, climb)
        if seen.now < until:
            active_until = _active_until(seen)
            return Hold(until if active_until is None else min(until, active_until), "", Waiting.QUEUE)
    return raise_epoch(seen, replace(climb, group=""), Cause.RESUMED, "the job continues: its pods are recreated")


def _decide_by_time(seen: Observation, climb: Climb | None) -> Decision | None:
    """Return the climb of a job that has run, or waited for its members, for longer than its spec allows."""
    spec, awaited_since, active_until = seen.job.spec, seen.memory.awaited_since, _active_until(seen)
    if active_until is not None and seen.now >= active_until:
        message = f"not complete {spec.active_deadline_seconds} s after its start: activeDeadlineSeconds is over"
        message += f"; {how_to_retry(seen)}"
        return raise_epoch(seen, climb, Cause.DEADLINE, message)
    if awaited_since is not None and seen.now >= awaited_since + spec.pods_ready_deadline_seconds:
        why = _absentees(seen) + (f"; {seen.hindrance}" if seen.hindrance else "")
        message = f"not every member answered within {spec.pods_ready_deadline_seconds} s: {why}"
        return after_absence(seen, climb, message)
    return None


def _decide_when_all_answer(seen: Observation, climb: Climb) -> Decision | Hold | None:
    if not climb.lineage or _has_fallen_back(seen, climb):
        return _first(seen, climb)
    if not climb.group:
        if climb.cause is Cause.POD_REPLACED and seen.hindrance:
            return None  # the pod at fault may be there still: it would be answered again at once, and for ever
        regrouped = replace(climb, lineage=seen.next_lineage, group=seen.group or "")
        cause = climb.cause if climb.cause in (Cause.POD_REPLACED, Cause.RESIZED) else Cause.RESUMED
        return raise_epoch(seen, regrouped, cause, f"every member answers again: {starts(seen)}")
    if seen.group != climb.group:
        return after_replacement(seen, climb)
    if (decision := after_loss(seen, climb)) is not None:
        return decision
    if seen.slowest is not Rung.UNKNOWN and (decision := _decide_for_whole_group(seen, climb)):
        return decision
    if not seen.is_up and (behind := seen.stalled):
        return after_stall(seen, climb, behind)
    if not seen.is_up and seen.now >= _deadline(seen):
        where = f"{_laggards(seen)} stayed at {seen.slowest} for {seen.now - seen.memory.progress_at:.0f} s"
        return after_standstill(seen, climb, _deadline(seen), where)
    return None


def _decide_for_whole_group(seen: Observation, climb: Climb) -> Decision | Hold | None:
    """Decide for a group whose every member has reported under this epoch."""
    if not seen.job.ladder.trains:
        return _decide_without_trainers(seen, climb)
    if difference := _difference(seen, climb):
        return after_difference(seen, climb, difference)
    if seen.is_up and climb.step >= seen.last_step:
        return _decide_after_last_step(seen, climb)
    if seen.is_up and _may_begin_next_step(seen, climb):
        return _begin_next_step(seen, replace(climb, step=climb.step + 1))
    return after_death(seen, climb) if seen.trainer_died and not _holds_new_weights(seen) else None


def _decide_without_trainers(seen: Observation, climb: Climb) -> Decision | Hold | None:
    steps = seen.last_step
    if seen.recorded_step < steps or evaluation_due(seen) is not None:
        return resize(seen, climb, until=seen.now) if seen.is_up else None
    return raise_epoch(seen, climb, Cause.ALL_STEPS_DONE, f"all {steps} batches are recorded")


def _difference(seen: Observation, climb: Climb) -> str:
    """Name the engines that serve other weights than the climb's, or hold different ones; "" if none does."""
    if words := _rejections(seen, climb):
        return f"weights {climb.version} are served by none of {words}"
    if not (seen.job.compares_engines and _holds_new_weights(seen)) or agreed_checksum(seen, climb) is not None:
        return ""
    held = listed([f"{name} {str(checksum)[:12]}" for name, checksum in checksums(seen, climb).items()])
    return f"engines hold different weights {climb.version} ({held})"


def _may_begin_next_step(seen: Observation, climb: Climb) -> bool:
    """Return whether the next batch is sealed, and no evaluation must end first: only updates wait with `serves_on`.

    A step is not begun either while a pod is about to leave its node, until its trainers have saved the last one.
    """
    if seen.is_warned:
        return False
    return seen.recorded_step > climb.step and (seen.job.ladder.serves_on or evaluation_due(seen) is None)


def _wait_for_engines(seen: Observation) -> Hold | None:
    """Hold the next step while an engine starts again beside others of its pod: trainers need the memory that it maps.

    Where steps are shorter than its start, it would be ended by each of them, for ever. One that fails to start is
    waited for RESTARTS_AWAITED times, each until its start has succeeded or its agent gives it up.
    """
    if not seen.job.ladder.takes_turns:
        return None
    starting = [
        f"{engine.name} of {member.name}"
        for member in seen.trainer_members
        if member.pod_facts
        for engine in member.pod_facts.engines
        if engine.is_starting and engine.failures <= RESTARTS_AWAITED  # once at least: without it the group is not up
    ]
    if not starting:
        return None
    until = seen.now + seen.job.spec.switch.engine_start_seconds
    return Hold(until, f"the next step waits for {listed(starting)}, which failed and starts again", Waiting.ENGINE)


def _begin_next_step(seen: Observation, following: Climb) -> Decision | Hold | None:
    if seen.trainer_died:
        return after_death(seen, following)
    found = (
        _wait_for_engines(seen)
        or rest_after_roll_back(seen, following)
        or resize(seen, following, until=_deadline(seen))
        or _recycle_trainers(seen, following)
    )
    return found or raise_epoch(seen, following, Cause.NEXT_STEP, f"step {following.step}")


def _recycle_trainers(seen: Observation, following: Climb) -> Decision | Hold | None:
    """Begin the next step with new processes of the trainers if one has grown too large, where that costs no step.

    That is behind a step with a checkpoint, for which the next step waits if it is being written, as long as a trainer
    may take for it.
    """
    last, spec = following.step - 1, seen.job.spec
    if not (grown := seen.outgrown):
        return None
    message = f"trainers have gained more host memory than {spec.failure_policy.max_trainer_growth} in {listed(grown)}"
    if seen.saved_step >= last:
        following = replace(following, lineage=seen.next_lineage)
        message += f": {starts(seen)} together again with step {following.step}, from the checkpoint of step {last}"
        return raise_epoch(seen, following, Cause.TRAINERS_RECYCLED, message)
    is_being_written = last % spec.checkpoint.every_steps == 0 and seen.now < _deadline(seen)
    return Hold(_deadline(seen), message, Waiting.CHECKPOINT) if is_being_written else None


def _decide_after_last_step(seen: Observation, climb: Climb) -> Decision | Hold | None:
    """End the job once its last weights are durable and evaluated. Saving has a deadline."""
    if seen.keeps_all and evaluation_due(seen) is None:
        return raise_epoch(seen, climb, Cause.ALL_STEPS_DONE, f"all {seen.last_step} steps are done")
    if seen.trainer_died and not (seen.keeps_all and _holds_new_weights(seen)):
        return after_death(seen, climb)
    if not seen.keeps_all and seen.now >= _deadline(seen):
        what = "model" if seen.saved_step >= climb.step else "checkpoint"
        return after_standstill(seen, climb, _deadline(seen), f"the last {what} is not durable in time")
    return None


def _holds_new_weights(seen: Observation) -> bool:
    """Return whether every engine holds the climb's weights; False without engines."""
    ladder = seen.job.ladder
    return ladder.serves and ladder.reaches(seen.slowest, Rung.UPDATED)


def _has_fallen_back(seen: Observation, climb: Climb) -> bool:
    """Return whether trainers are beyond the recorded climb: the API server's store was restored from before it."""
    recorded = (climb.lineage, climb.step)
    return any((rank.lineage, rank.step or 0) > recorded for rank in seen.ranks if rank.lineage)


def _first(seen: Observation, recorded: Climb | None = None) -> Decision:
    """Return the first climb of a job that is new, or whose status was lost: then the members' facts are the record."""
    trained = seen.rollout_facts.trained_step if seen.rollout_facts else 0
    climb = replace(
        recorded or unstarted(Cause.FIRST_START),
        step=max([trained, *(rank.step or 0 for rank in seen.ranks)]),
        lineage=seen.next_lineage,
        group=seen.group or "",
    )
    why = "every member answers"
    if restored := seen.restored_from:
        why += f", and the job continues from {restored}"
    if recorded and recorded.lineage:
        why = f"trainers are beyond {recorded.version}, which is recorded: as after a restore of etcd"
    return raise_epoch(seen, climb, Cause.FIRST_START, f"{why}: {starts(seen)}")


def _is_contested(seen: Observation) -> bool:
    """Return whether this process has not raised the epoch yet, or a member has accepted a higher one."""
    return seen.climb is not None and (not seen.memory.raised or seen.highest_epoch > seen.climb.epoch)


# ----------------------------------------------------------------------------------------------------------- deadlines
def patience_s(ladder: Ladder, barrier: Rung, switch: Switch) -> float:
    """Return for how many seconds a group may stand still below a barrier: its members' own deadlines, and a margin."""
    call, step = switch.engine_call_seconds, switch.trainer_progress_seconds
    match barrier:
        case Rung.SERVING if not ladder.trains:
            return switch.engine_start_seconds + 4 * call + MARGIN_S
        case Rung.PAUSED:
            return switch.settle_seconds + call + MARGIN_S
        case Rung.DRAINED | Rung.RELEASED:
            return 3 * call + MARGIN_S
        case Rung.SCORED | Rung.TRAINED:
            return switch.trainer_start_seconds + step + MARGIN_S
        case Rung.EXPORTED if ladder.serves_on:
            return max(2 * step, switch.engine_start_seconds) + MARGIN_S  # an engine lost meanwhile starts again
        case Rung.EXPORTED:
            return 2 * step + MARGIN_S
        case Rung.OFFLOADED if ladder.rolls_on:
            return max(step, switch.engine_start_seconds) + MARGIN_S  # likewise
        case Rung.OFFLOADED:
            return step + MARGIN_S
        case Rung.UPDATED if ladder.shuts_at is Rung.UPDATED:  # engines that served on are interrupted first
            return step + switch.engine_start_seconds + switch.settle_seconds + 4 * call + MARGIN_S
        case Rung.UPDATED:
            return step + switch.engine_start_seconds + 2 * call + MARGIN_S
        case Rung.SERVING:
            return max(4 * call, step) + MARGIN_S  # step: the last checkpoint is saved while serving
        case _:
            return MARGIN_S


def _deadline(seen: Observation) -> float:
    ladder, evaluating = seen.job.ladder, keeps_gates_open(seen)
    since = max(seen.memory.progress_at, evaluating.ends) if evaluating else seen.memory.progress_at
    return since + patience_s(ladder, ladder.next_barrier(seen.slowest), seen.job.spec.switch)


def _active_until(seen: Observation) -> float | None:
    limit_s = seen.job.spec.active_deadline_seconds
    return None if limit_s is None or seen.started_at is None else seen.started_at + limit_s


# ------------------------------------------------------------------------------------------------------------ climbing
def _climb(seen: Observation) -> Plan:
    pods, wake_at = muster(seen)
    wakes = [wake for wake in (wake_at, _active_until(seen)) if wake is not None]
    if seen.memory.awaited_since is not None:
        wakes.append(seen.memory.awaited_since + seen.job.spec.pods_ready_deadline_seconds)
    if seen.all_answer:
        wakes.append(_deadline(seen))
    if evaluating := evaluation_due(seen):
        wakes.append(evaluating.ends)
    if (shrinks_at := no_room_at(seen)) is not None:
        wakes.append(shrinks_at)
    wakes += [leaves_at(seen, member.notice, member.seat) for member in seen.noticed if member.notice]
    return Plan(
        climb=seen.climb,
        standings=seen.standings,
        targets=climb_targets(seen),
        pods=pods,
        wait=WaitFor(Waiting.PODS, seen.absent, _absentees(seen)) if seen.absent else None,
        wake_at=min((wake for wake in wakes if wake > seen.now), default=None),
    )


def _rejections(seen: Observation, climb: Climb) -> str:
    """Name the pods that no longer start an engine on the climb's weights, with the first one's reason; "" if none."""
    reasons = {
        member.name: engine.rejected.message
        for member in seen.gpu_members
        if member.pod_facts
        for engine in member.pod_facts.engines
        if engine.rejected is not None
        and engine.rejected.version == climb.version
        and not any(other.version == climb.version for other in member.pod_facts.engines)
    }
    return f"{listed(list(reasons))} ({next(iter(reasons.values()))})" if reasons else ""


# ------------------------------------------------------------------------------------------------------------ stopping
def _stop(seen: Observation, climb: Climb, *, since: float) -> Plan:
    """Stop every member, GPU pods first: the rollout controller stays to keep what they hand back.

    A member that does not stop in time, or whose pod never ran, loses its pod, so that no GPU stays taken. Pods that
    ended stay for their logs, unless the job is suspended. A reference loses its pod at once: it has nothing to hand
    back.
    """
    running = [member for member in seen.current.values() if not seen.has_stopped(member)]
    if not running:
        return _leave(seen) if seen.rests else Plan(climb=climb, standings=seen.standings, is_over=True)
    references = [member for member in running if member.is_reference]
    members = [member for member in running if not member.is_reference]
    gpus = [member for member in members if member.seat != ROLLOUT_SEAT]
    until = since + STOP_DEADLINE_S * (1 if gpus else 2)
    late = seen.now >= until
    ends = [_end(member) for member in gpus or members if late or member.phase is PodPhase.PENDING]
    return Plan(
        climb=climb,
        standings=seen.standings,
        targets=stop_targets(seen, climb, members, rollout_goal=Goal.CLIMB if gpus else Goal.STOP),
        pods=(*ends, *map(_delete_reference, references)),
        wait=WaitFor(Waiting.STOPPING, tuple(member.name for member in (*members, *references))),
        wake_at=None if late else until,
    )


def _end(member: Member) -> DeletePod:
    if member.phase is PodPhase.PENDING:
        return DeletePod(member.name, member.uid, None, f"pod {member.name} never ran, and need not", is_fault=False)
    return DeletePod(member.name, member.uid, None, f"pod {member.name} did not stop within {STOP_DEADLINE_S:.0f} s")


def _outlives(member: Member) -> DeletePod:
    why = f"pod {member.name} still ran {STOP_DEADLINE_S:.0f} s after its job: a container in it that is not ours"
    return DeletePod(member.name, member.uid, None, why)


def _delete_reference(reference: Member) -> DeletePod:
    why = f"pod {reference.name} goes: nothing is scored any more"
    return DeletePod(reference.name, reference.uid, None, why, is_fault=False)


def _leave(seen: Observation) -> Plan:
    """Delete the pods of a job that rests: none of its members runs any more, or none has had a target yet."""
    pods, wake_at = clear(seen)
    wait = WaitFor(Waiting.STOPPING, tuple(member.name for member in seen.members)) if seen.members else None
    return Plan(climb=seen.climb, standings=seen.standings, pods=pods, wait=wait, wake_at=wake_at)


# -------------------------------------------------------------------------------------------------------- for messages
def _absentees(seen: Observation) -> str:
    return listed([f"{seat} ({_why_absent(seen, seat)})" for seat in seen.absent])


def _why_absent(seen: Observation, seat: str) -> str:
    member, refused = seen.current.get(seat), seen.refused.get(seat)
    if member is None:
        return f"no pod: {refused.message}" if refused else "no pod"
    if member.pod_facts and member.pod_facts.ending:
        return "its container was signalled to end"
    problem = member.facts.problem if member.facts else None
    if member.is_reference:
        silence = "not ready"  # it is still loading its model
    else:
        silence = "its reference is not ready" if member.answers else "no connection"
    return member.trouble or (problem.message if problem else f"pod {member.phase}, {silence}")


def _laggards(seen: Observation) -> str:
    """Name the slowest members, each with the problem that it reports."""
    slowest = [member for member in seen.gpu_members if seen.standings[member.name] is seen.slowest]
    problems = {member.name: member.pod_facts.problem for member in slowest if member.pod_facts}
    return listed([f"{name} ({problem.message[:200]})" if problem else name for name, problem in problems.items()])
