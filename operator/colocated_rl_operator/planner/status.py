"""Derive the job's status from the observation and the plan. The module is pure.

Conditions follow what kstatus reads (Flux, `helm --wait`): `Ready` is True from the first time that every engine serves
a lineage until that lineage is lost, through all ordinary switches, and for good once the job is complete; `Stalled`
means that a person must act. `phase` is a word for people.

A status is written when something in it matters to a program or a person waiting (`is_urgent`); figures that move all
the time ride along, or are written at most every PROGRESS_S.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from colocated_rl_api.facts import Problem
from colocated_rl_api.job_status import (
    BestOfStatus,
    CheckpointStatus,
    ColocatedRLJobStatus,
    Condition,
    ConditionStatus,
    EvaluationStatus,
    FailuresStatus,
    Holder,
    Phase,
    PodOutOfLine,
    ReferenceStatus,
    RolloutStatus,
    WeightSyncStatus,
)
from colocated_rl_api.ladder import Ladder
from colocated_rl_api.rungs import Placement, ReferencePlacement, Rung, WeightVersion
from colocated_rl_api.seats import role_of
from colocated_rl_api.weights import finished_model, limit_nats
from colocated_rl_operator.planner.observation import (
    Climb,
    FailureTally,
    Job,
    Member,
    Observation,
    rests,
)
from colocated_rl_operator.planner.plan import Plan
from colocated_rl_operator.planner.reasons import (
    HOLDS_A_STEP,
    Cause,
    ConditionType,
    DocumentedReason,
    Reason,
    Waiting,
)
from colocated_rl_operator.planner.size import is_resizable

PROGRESS_S = 10.0
BRIEF_OUTAGE_S = 5.0  # a shorter absence (a take-over, a restarted agent) does not change the status
MAX_OUT_OF_LINE = 10


SHARING: dict[Placement, tuple[Reason, str]] = {
    Placement.TIME_SLICED: (
        Reason.TIME_SLICED,
        "engines and trainers take turns: the GPUs change hands once a batch is sealed",
    ),
    Placement.RESIDENT: (
        Reason.RESIDENT,
        "engines and trainers stay on the GPUs: gates close only while engines take new weights",
    ),
    Placement.DISAGGREGATED: (
        Reason.DISAGGREGATED,
        "engines and trainers have GPUs of their own: gates close only while engines take new weights",
    ),
    Placement.MIXED: (
        Reason.MIXED,
        "some engines take turns with the trainers; those with GPUs of their own serve on until there are new weights",
    ),
    Placement.ROLLOUT_ONLY: (
        Reason.ROLLOUT_ONLY,
        "engines have the GPUs, with the model as it is: batches are recorded, and nothing is trained",
    ),
    Placement.TRAIN_ONLY: (
        Reason.TRAIN_ONLY,
        "trainers have the GPUs: they train recorded batches, and nothing is generated",
    ),
}


_SEALED = "it scores what rollout has finished, and a batch is sealed with its scores"
SCORING: dict[ReferencePlacement, str] = {
    ReferencePlacement.WITH_TRAINER: "; the reference scores each batch on the trainers' GPUs before its step",
    ReferencePlacement.WITH_ROLLOUT: f"; the reference is beside the engines on their GPUs: {_SEALED}",
    ReferencePlacement.OWN_DEVICES: f"; the reference has GPUs of its own: {_SEALED}",
}


@dataclass(frozen=True)
class Stall:
    """A stall is a fault that a person must put right."""

    reason: Reason
    message: str


def report(
    seen: Observation, plan: Plan, *, before: ColocatedRLJobStatus, at: datetime, stall: Stall | None = None
) -> ColocatedRLJobStatus:
    """Return the status to write.

    before: the status written last. at: wall clock, for people. stall: set if an object was refused.
    """
    found = _Pass(seen, plan, before, stall)
    stamp = _Stamp(before.conditions, seen.job.generation, at)
    return ColocatedRLJobStatus(
        observed_generation=seen.job.generation,
        phase=found.phase,
        operator=before.operator,
        step=found.step,
        weight_version=str(found.served) if found.served else None,
        **_climb_figures(plan.climb),
        placement=seen.job.ladder.placement,
        gpu_holder=_holder(found.phase, seen.job.ladder),
        rung=found.slowest.value if plan.climb and not plan.is_over and not found.rests else None,
        replicas=len(seen.job.gpu_seats),
        group_replicas=seen.job.replicas if plan.climb else None,
        ready_replicas=before.ready_replicas if found.answering and not seen.all_answer else _ready(seen),
        ready_spares=_ready_spares(seen) if seen.job.spare_seats else None,
        pods_by_rung={rung.value: pods for rung, pods in Counter(plan.standings.values()).items()},
        out_of_line=found.out_of_line,
        rollout=_rollout(seen) or before.rollout,
        weight_sync=_weight_sync(seen, before.weight_sync),
        reference=_reference(seen),
        evaluations=_evaluations(seen) or before.evaluations,
        checkpoint=_checkpoint(seen, before, at),
        mirrored_step=seen.mirrored_step,
        restored_from=seen.restored_from or before.restored_from,
        start=before.start,
        model=found.model,
        last_switch_seconds=_rounded(seen.memory.last_switch_s) or before.last_switch_seconds,
        start_time=None if found.rests and found.phase is not Phase.QUEUED else before.start_time or at,
        completion_time=(before.completion_time or at) if found.phase is Phase.COMPLETE else None,
        conditions=[stamp(kind, *judge(found)) for kind, judge in CONDITIONS.items()],
    )


@dataclass(frozen=True)
class _Pass:
    """A pass has what was seen, decided and found written, and derives from it what several fields share."""

    seen: Observation
    plan: Plan
    before: ColocatedRLJobStatus
    stall: Stall | None

    @property
    def rests(self) -> bool:
        return rests(self.seen.job, self.plan.climb)

    @property
    def cause(self) -> Cause | None:
        return self.plan.climb.cause if self.plan.climb else None

    @cached_property
    def served(self) -> WeightVersion | None:
        """Return what engines serve. A top that was reached counts, even if the same pass leads to the next climb."""
        if self.rests:
            return None
        return self.seen.climb.version if self.seen.climb and self.seen.is_up else self.seen.served

    @property
    def step(self) -> int | None:
        """Return the newest finished step, which counts like `served`."""
        seen = self.seen
        if not seen.job.ladder.trains:
            return max(self.before.step or 0, seen.recorded_step)
        return max(seen.trained_step, seen.climb.step) if seen.climb and seen.is_finished else self.before.step

    @property
    def slowest(self) -> Rung:
        return Rung.UNKNOWN if self.plan.raises else self.seen.slowest

    @cached_property
    def answering(self) -> bool:
        """Return whether every member answers that a climb waits for."""
        return self.seen.all_answer or is_brief_outage(self.seen, self.before)

    @property
    def model(self) -> str | None:
        job, version = self.seen.job, self.seen.finished
        return f"{job.claim_name('checkpoints')}/{finished_model(version.step)}" if version else self.before.model

    @property
    def backs_off(self) -> bool:
        return self.plan.wait is not None and self.plan.wait.reason is Waiting.BACKOFF

    @cached_property
    def phase(self) -> Phase:
        phase = _phase(self)
        return Phase.RECOVERING if self.backs_off and phase is not Phase.ROLLOUT else phase

    @cached_property
    def readiness(self) -> tuple[bool, DocumentedReason]:
        is_ready, reason = _readiness(self.phase, self.cause, self.seen.job.ladder)
        return is_ready, Reason.BACKING_OFF if self.backs_off and not is_ready else reason

    @cached_property
    def waiting(self) -> str:
        """Return what the job waits for; "" if nothing."""
        if self.phase is Phase.QUEUED:
            return self.plan.message
        if self.plan.wait and (self.backs_off or not self.answering or self.plan.wait.reason in HOLDS_A_STEP):
            return self.plan.wait.message
        return self.trouble if self.phase in (Phase.STARTING, Phase.RECOVERING) else ""

    @cached_property
    def out_of_line(self) -> list[PodOutOfLine]:
        return _out_of_line(self.seen, self.plan)

    @property
    def trouble(self) -> str:
        """Return what the first pod with a problem reports, such as an engine that is too old; "" without one."""
        return next((f"{pod.name}: {pod.message}" for pod in self.out_of_line if pod.message), "")

    @cached_property
    def failure(self) -> str:
        """Return why the job has failed, in the words of the pass that decided it; "" if it has not."""
        if self.phase is not Phase.FAILED:
            return ""
        recorded = (item.message for item in self.before.conditions if item.type == ConditionType.FAILED)
        return next(recorded, "") or self.plan.message


def all_done(job: Job, steps: int | None, model: str | None) -> str:
    what = "steps are done" if job.ladder.trains else "batches are recorded"
    return f"all {steps} {what}" + (f"; the model is in {model}" if model else "")


def is_brief_outage(seen: Observation, before: ColocatedRLJobStatus) -> bool:
    """Return whether members that answered before have been away for less than BRIEF_OUTAGE_S."""
    since = seen.memory.unready_since
    if since is None or seen.now >= since + BRIEF_OUTAGE_S:
        return False
    return any(
        item.type == ConditionType.PODS_READY and item.status is ConditionStatus.TRUE for item in before.conditions
    )


def backs_off(status: ColocatedRLJobStatus) -> bool:
    """Return whether the job waits for a back-off after a failure."""
    return any(item.reason == Reason.BACKING_OFF for item in status.conditions)


def invalid(message: str, *, generation: int, before: ColocatedRLJobStatus, at: datetime) -> ColocatedRLJobStatus:
    """Return the status of a job whose spec breaks a rule that the API server can't check. Its running pods stay."""
    stamp = _Stamp(before.conditions, generation, at)
    fresh = [
        stamp(ConditionType.READY, False, Reason.INVALID_SPEC, message),
        stamp(ConditionType.RECONCILING, False, Reason.INVALID_SPEC, "nothing is done until the spec is corrected"),
        stamp(ConditionType.STALLED, True, Reason.INVALID_SPEC, message),
    ]
    kept = [condition for condition in before.conditions if condition.type not in {new.type for new in fresh}]
    return before.model_copy(update={"observed_generation": generation, "conditions": [*fresh, *kept]})


def leaving(*, before: ColocatedRLJobStatus, at: datetime) -> ColocatedRLJobStatus:
    """Return the status of a job that is being deleted, once its members were asked to stop and its pods are going."""
    stamp = _Stamp(before.conditions, before.observed_generation or 0, at)
    ready = stamp(ConditionType.READY, False, Reason.DELETED, "members were asked to stop, pods are going")
    kept = [condition for condition in before.conditions if condition.type != ready.type]
    return before.model_copy(update={"conditions": [ready, *kept]})


def is_urgent(before: ColocatedRLJobStatus, after: ColocatedRLJobStatus) -> bool:
    """Return whether anything changed that a program or a person may be waiting for."""
    return _key(before) != _key(after)


def _key(status: ColocatedRLJobStatus) -> object:
    conditions = tuple((item.type, item.status, item.reason) for item in status.conditions)
    return (
        *(status.observed_generation, status.phase, status.step, status.epoch, status.weight_version),
        *(status.ready_replicas, status.reference and status.reference.ready_replicas, conditions),
    )


# --------------------------------------------------------------------------------------------------------------- words
def _phase(found: _Pass) -> Phase:
    seen, plan, climb = found.seen, found.plan, found.plan.climb
    if found.rests:
        return _phase_at_rest(seen, climb)
    if climb is None:
        return Phase.PENDING
    if climb.cause.is_failure:
        return Phase.FAILED
    if climb.cause is Cause.ALL_STEPS_DONE:
        return Phase.COMPLETE if plan.is_over else (found.before.phase or Phase.ROLLOUT)
    if not climb.group and climb.cause not in (Cause.POD_REPLACED, Cause.RESIZED):
        return Phase.PENDING  # resumed, and not all members are back
    return _phase_of_group(found, climb) if found.answering else Phase.RECOVERING


def _phase_of_group(found: _Pass, climb: Climb) -> Phase:
    slowest, served, ladder = found.slowest, found.served, found.seen.job.ladder
    if slowest is ladder.top:
        return Phase.ROLLOUT if ladder.serves else Phase.TRAINING
    is_new = found.plan.raises and climb.cause is not Cause.TAKEOVER
    if slowest is Rung.UNKNOWN and not is_new:
        return found.before.phase or Phase.RECOVERING  # until the members have answered under this epoch
    if served is None:
        return Phase.STARTING
    if served.lineage != climb.lineage or served == climb.version:
        return Phase.RECOVERING
    return Phase.TRAINING if slowest in ladder.training else Phase.SWITCHING


def _phase_at_rest(seen: Observation, climb: Climb | None) -> Phase:
    match climb and climb.cause:
        case Cause.PODS_NOT_READY:
            return Phase.QUEUED
        case Cause.RETRIED:
            return Phase.PENDING
        case _:
            return Phase.SUSPENDING if seen.members else Phase.SUSPENDED


def _holder(phase: Phase, ladder: Ladder) -> Holder:
    match phase:
        case Phase.TRAINING if ladder.rolls_on:
            return Holder.BOTH
        case Phase.ROLLOUT:
            return Holder.ROLLOUT
        case Phase.TRAINING:
            return Holder.TRAINER
        case Phase.PENDING | Phase.SUSPENDED | Phase.QUEUED | Phase.COMPLETE | Phase.FAILED:
            return Holder.NOBODY
        case Phase.STARTING | Phase.SWITCHING | Phase.RECOVERING | Phase.SUSPENDING:
            return Holder.SWITCHING


# ---------------------------------------------------------------------------------------------------------- conditions
class _Stamp:
    """A stamp makes conditions whose transition time changes only with their status."""

    def __init__(self, before: list[Condition], generation: int, at: datetime) -> None:
        self._before = {condition.type: condition for condition in before}
        self._generation = generation
        self._at = at

    def __call__(self, kind: ConditionType, value: bool, reason: DocumentedReason, message: str) -> Condition:
        status = ConditionStatus.TRUE if value else ConditionStatus.FALSE
        old = self._before.get(kind)
        if old and old.status is status and old.reason == reason and not message:
            message = old.message  # only the pass that made the decision has a message
        return Condition(
            type=kind,
            status=status,
            reason=reason,
            message=message[:2048],
            last_transition_time=old.last_transition_time if old and old.status is status else self._at,
            observed_generation=self._generation,
        )


def _readiness(phase: Phase, cause: Cause | None, ladder: Ladder) -> tuple[bool, DocumentedReason]:
    match phase:
        case Phase.COMPLETE:
            return True, Reason.COMPLETED
        case Phase.ROLLOUT | Phase.SWITCHING | Phase.TRAINING:
            return True, Reason.SERVING if ladder.serves else Reason.TRAINING
        case Phase.PENDING:
            return False, Reason.PODS_STARTING
        case Phase.STARTING:
            return False, Reason.CLIMBING
        case Phase.SUSPENDING:
            return False, Reason.SUSPENDING
        case Phase.SUSPENDED:
            return False, Cause.SUSPENDED
        case Phase.QUEUED:
            return False, Cause.PODS_NOT_READY
        case Phase.RECOVERING | Phase.FAILED:
            return False, cause or Reason.CLIMBING


def _reconciling(found: _Pass) -> tuple[bool, DocumentedReason, str]:
    if found.backs_off:
        return True, Reason.BACKING_OFF, found.waiting
    is_ready, reason = found.readiness
    return not is_ready and found.phase not in (Phase.FAILED, Phase.SUSPENDED), reason, found.waiting


def _stalled(found: _Pass) -> tuple[bool, DocumentedReason, str]:
    if found.stall is not None:
        return True, found.stall.reason, found.stall.message
    if found.phase is Phase.FAILED and found.cause:
        return True, found.cause, found.failure
    return False, Reason.NOT_STALLED, ""


def _pods_ready(found: _Pass) -> tuple[bool, DocumentedReason, str]:
    if found.phase in (Phase.SUSPENDING, Phase.SUSPENDED, Phase.QUEUED):
        return False, found.readiness[1], found.waiting if found.phase is Phase.QUEUED else ""
    if found.plan.is_over:
        return False, Reason.JOB_ENDED, ""
    if not found.seen.absent or is_brief_outage(found.seen, found.before):  # a reference for rollout is ready too
        return True, Reason.MEMBERS_ANSWER, "; ".join(filter(None, (_size(found.seen), _spares(found.seen))))
    reason = Reason.OPERATOR_CUT_OFF if found.seen.is_deaf else Reason.PODS_STARTING
    return False, reason, found.plan.wait.message if found.plan.wait else found.waiting


def _size(seen: Observation) -> str:
    """Describe with how many replicas the group goes on, and what the next one waits for."""
    job, asked = seen.job, seen.job.spec.replicas
    if job.replicas == asked:
        return "every member answers"
    if not is_resizable(seen):
        return f"{job.replicas} replicas until the job is suspended and resumed, {asked} are asked for"
    if job.replicas > asked:
        return f"{job.replicas} replicas until the next step, which begins with {asked}"
    pods = (seen.current.get(seat) for seat in job.waiting_seats)
    trouble = next((f"; {pod.name}: {pod.trouble}" for pod in pods if pod is not None and pod.trouble), "")
    return f"{job.replicas} of {asked} replicas: others join at a step boundary once there is room for them{trouble}"


def _spares(seen: Observation) -> str:
    """Describe how many spares hold room, and what the others wait for; "" for a job without."""
    asked = len(seen.job.spare_seats)
    if not asked:
        return ""
    pods = {pod.seat: pod for pod in seen.spare_members}
    why = next((f" ({words})" for seat in seen.job.spare_seats if (words := _why_not(seen, seat, pods.get(seat)))), "")
    return f"{_ready_spares(seen)} of {asked} spares hold room for the group{why}"


def _why_not(seen: Observation, seat: str, pod: Member | None) -> str:
    """Return why a spare holds no room that is of use; "" if it does, or is about to."""
    if pod is None:
        is_gang = any(member.is_in_gang for member in seen.members)
        refused = seen.refused.get(seat)
        return "a gang has a fixed number of pods" if is_gang else refused.message if refused else ""
    if not pod.is_fit:
        return f"{pod.name}: {pod.bad_device or (pod.notice and pod.notice.message)}"
    return f"{pod.name}: {pod.trouble}" if pod.trouble and not pod.answers else ""


def _ready_spares(seen: Observation) -> int:
    return sum(pod.answers and pod.is_fit for pod in seen.spare_members)


def _gpu_sharing(found: _Pass) -> tuple[bool, DocumentedReason, str]:
    reason, shared = SHARING[found.seen.job.ladder.placement]
    reference = _reference(found.seen)
    scoring = SCORING[reference.placement] if reference else ""
    return found.served is not None and not found.plan.is_over, reason, shared + scoring


def _suspended(found: _Pass) -> tuple[bool, DocumentedReason, str]:
    if found.phase is Phase.SUSPENDED:
        kept = "its pods are gone, its volumes are kept: set spec.suspend to false to continue"
        return True, found.readiness[1], kept
    return False, found.readiness[1] if found.phase is Phase.SUSPENDING else Reason.NOT_SUSPENDED, ""


def _complete(found: _Pass) -> tuple[bool, DocumentedReason, str]:
    if found.phase is Phase.COMPLETE:
        return True, Reason.COMPLETED, all_done(found.seen.job, found.step, found.model)
    return False, Reason.STEPS_REMAIN, ""


def _failed(found: _Pass) -> tuple[bool, DocumentedReason, str]:
    """Like Complete, and like a batch/v1 Job: true once every member has stopped. The reason is there before."""
    is_failing = found.phase is Phase.FAILED
    return is_failing and found.plan.is_over, (found.cause if is_failing else None) or Reason.NOT_FAILED, found.failure


CONDITIONS: dict[ConditionType, Callable[[_Pass], tuple[bool, DocumentedReason, str]]] = {
    ConditionType.READY: lambda found: (*found.readiness, found.failure or found.waiting),
    ConditionType.RECONCILING: _reconciling,
    ConditionType.STALLED: _stalled,
    ConditionType.PODS_READY: _pods_ready,
    ConditionType.GPU_SHARING_READY: _gpu_sharing,
    ConditionType.SUSPENDED: _suspended,
    ConditionType.COMPLETE: _complete,
    ConditionType.FAILED: _failed,
}


# ------------------------------------------------------------------------------------------------------------- figures
def _checkpoint(seen: Observation, before: ColocatedRLJobStatus, at: datetime) -> CheckpointStatus | None:
    """Return the newest durable checkpoint: as recorded, while no trainer knows of another."""
    step, known = seen.saved_step, before.checkpoint
    if not step or (known is not None and known.step == step):
        return known
    return CheckpointStatus(step=step, time=at)


def _out_of_line(seen: Observation, plan: Plan) -> list[PodOutOfLine]:
    """Return pods that report a problem, and GPU pods that don't stand at the most common rung of their role."""
    usual: dict[str, Rung | None] = {}
    if len(set(plan.standings.values())) > 1:
        usual = {role: _most_common(seen, plan, role) for role in {role_of(seat) for seat in seen.job.gpu_seats}}
    found: list[tuple[bool, str, Rung | None, Problem | None]] = []
    for member in (pod for seat, pod in seen.current.items() if seat in seen.job.seats):
        rung, problem = plan.standings.get(member.name), member.facts.problem if member.facts else None
        if problem is None and member.trouble is not None:
            problem = Problem(reason=Reason.POD_NOT_RUNNING, message=member.trouble[:1024])
        if problem is not None or (usual and rung is not None and rung is not usual[role_of(member.seat)]):
            found.append((problem is None, member.name, rung, problem))
    return [
        PodOutOfLine(name=name, rung=rung, reason=problem.reason, message=problem.message)
        if problem
        else PodOutOfLine(name=name, rung=rung)
        for _, name, rung, problem in heapq.nsmallest(MAX_OUT_OF_LINE, found, key=lambda pod: pod[:2])
    ]


def _most_common(seen: Observation, plan: Plan, role: str) -> Rung | None:
    of_role = (plan.standings.get(member.name) for member in seen.gpu_members if role_of(member.seat) == role)
    rungs = Counter(rung for rung in of_role if rung is not None)
    return rungs.most_common(1)[0][0] if rungs else None


def _climb_figures(climb: Climb | None) -> dict[str, Any]:
    """Return the fields that record the climb; all are None before the first."""
    if climb is None:
        return {}
    return {
        "epoch": climb.epoch,
        "lineage": climb.lineage,
        "target_step": climb.step,
        "cause": climb.cause,
        "group": climb.group,
        "restarts": climb.restarts,
        "retries": climb.retries,
        "failures": _failures(climb.tally),
    }


def _failures(tally: FailureTally) -> FailuresStatus | None:
    if tally == FailureTally():
        return None
    return FailuresStatus(
        cause=tally.cause,
        action=tally.action,
        rule=tally.rule,
        pod_restarts=tally.pod_restarts,
        step_retries=tally.step_retries,
        step=tally.step,
        tries=tally.tries,
        pod=tally.pod,
        avoided_nodes=list(tally.avoids),
        counted_steps=list(tally.counted),
    )


def _ready(seen: Observation) -> int:
    return len(seen.job.gpu_seats) if seen.all_answer else sum(member.answers for member in seen.gpu_members)


def _rollout(seen: Observation) -> RolloutStatus | None:
    facts = seen.rollout_facts
    if facts is None:
        return None
    return RolloutStatus(
        reward=_rounded(facts.reward_mean),
        staleness=_rounded(facts.staleness_mean),
        tokens_per_second=_rounded(facts.tokens_per_second, digits=1),
        samples=facts.samples,
        filtered=facts.filtered,
        last_step=facts.last_step,
    )


def _weight_sync(seen: Observation, before: WeightSyncStatus | None) -> WeightSyncStatus | None:
    if not seen.job.spec.judges_weights:
        return None
    engines = (engine for member in seen.serving_members if member.pod_facts for engine in member.pod_facts.engines)
    noise = max((engine.noise_nats for engine in engines if engine.noise_nats is not None), default=None)
    if noise is None:
        return before
    return WeightSyncStatus(
        difference_nats=float(f"{noise:.2g}"),  # more digits would only be noise
        limit_nats=float(f"{limit_nats(noise):.2g}"),
    )


def _reference(seen: Observation) -> ReferenceStatus | None:
    """Return the reference's status; None without one, or if it scores nothing: no training, or no rollout."""
    job, facts = seen.job, seen.rollout_facts
    if job.ladder.scores:
        return ReferenceStatus(placement=ReferencePlacement.WITH_TRAINER)
    if job.spec.reference is None or not job.scoring_seats:
        return None
    return ReferenceStatus(
        placement=job.spec.reference.placement,
        replicas=len(job.scoring_seats),
        ready_replicas=sum(member.scores for member in seen.scoring_members),
        unscored=facts.unscored if facts else None,
    )


def _evaluations(seen: Observation) -> list[EvaluationStatus]:
    return [
        EvaluationStatus(
            name=result.name,
            step=result.step,
            mean=round(result.mean, 6),
            stderr=round(result.stderr, 6),
            best=_rounded(result.best, digits=6),
            best_of=[BestOfStatus(answers=each.answers, mean=round(each.mean, 6)) for each in result.best_of] or None,
            samples=result.samples,
        )
        for result in (seen.rollout_facts.evaluated if seen.rollout_facts else ())
    ]


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
