"""Describe what a job waits for when nothing is wrong: who moves its slowest pod, or fills its batch. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from colocated_rl_api.facts import EvaluationResult, PodFacts, RolloutFacts
from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.job_status import ColocatedRLJobStatus
from colocated_rl_api.rungs import Placement, Rung
from colocated_rl_cli.evidence.evidence import Evidence, spec_of, steps_of
from colocated_rl_cli.evidence.records import ladder_of


class Mover(NamedTuple):
    """A mover takes a pod from its rung to the next one, within a deadline of spec.switch."""

    text: str
    deadline: str | None


MOVERS: dict[Rung, Mover] = {
    Rung.UNKNOWN: Mover("its agent reports under the new epoch", None),
    Rung.SEALED: Mover("its agent closes the gate", "settle_seconds"),
    Rung.CLOSED: Mover("requests in flight are ended and handed back", "settle_seconds"),
    Rung.SETTLED: Mover("the engine pauses", "engine_call_seconds"),
    Rung.PAUSED: Mover("the engine's scheduler reports that it is idle", "engine_call_seconds"),
    Rung.DRAINED: Mover("the engine releases its memory", "engine_call_seconds"),
    Rung.RELEASED: Mover("the trainer, which has the GPU, makes the step (after a start: loads its checkpoint)", None),
    Rung.SCORED: Mover("the trainer, which has scores of the batch, makes the step", None),
    Rung.TRAINED: Mover("the trainer writes the new weights", "trainer_progress_seconds"),
    Rung.EXPORTED: Mover("the trainer leaves the device", "trainer_progress_seconds"),
    Rung.OFFLOADED: Mover("the engine starts on the new weights, or loads them", "engine_start_seconds"),
    Rung.UPDATED: Mover("the engine maps its memory again", "engine_call_seconds"),
    Rung.RESTORED: Mover("its weights are checked and the gate opens", "engine_call_seconds"),
    Rung.SERVING: Mover("rollout fills the next batch", None),
}
RESIDENT_MOVERS = MOVERS | {
    Rung.SEALED: Mover("the trainer makes the step beside rollout (after a start: loads its checkpoint)", None),
    Rung.EXPORTED: Mover("its agent closes the gate, once no evaluation needs the older weights", "settle_seconds"),
    Rung.DRAINED: Mover("the engine loads the new weights, or starts on them", "engine_start_seconds"),
    Rung.UPDATED: Mover("its weights are checked and the gate opens", "engine_call_seconds"),
}
APART_MOVERS = RESIDENT_MOVERS | {
    Rung.TRAINED: Mover(
        "trainers write the new weights, and agents of engines compare them", "trainer_progress_seconds"
    ),
}
MIXED_MOVERS = MOVERS | {
    Rung.EXPORTED: Mover(
        "the trainer leaves the device, and agents compare the new weights", "trainer_progress_seconds"
    ),
}
ALONE_MOVERS = MOVERS | {
    Rung.SEALED: Mover("the trainer makes the step (after a start: loads its checkpoint)", None),
    Rung.RELEASED: Mover("the engine starts on the model, and its gate opens", "engine_start_seconds"),
}
SCORED = Mover("the reference scores the batch (after a start: the trainer loads its checkpoint)", None)


def waits_for(
    seen: Evidence,
    status: ColocatedRLJobStatus,
    facts: Mapping[str, PodFacts | RolloutFacts],
    rungs: Mapping[str, Rung],
) -> str:
    """Return what a healthy job waits for, and for how long at most."""
    known = {pod: rung for pod, rung in rungs.items() if rung is not Rung.UNKNOWN}
    at = (
        ladder_of(seen.job).slowest(known.values())
        if known
        else Rung(status.rung)
        if status.rung in set(Rung)
        else Rung.UNKNOWN
    )
    if at is ladder_of(seen.job).top:
        rollout = next((known for known in facts.values() if isinstance(known, RolloutFacts)), None)
        return _batch(seen, status, rollout)
    who = sorted(pod for pod, rung in known.items() if rung is at) or ["every pod"]
    since = max((seen.since[pod] for pod in who if pod in seen.since), default=None)
    lasted = f", for {max(0.0, seen.now.timestamp() - since):.0f} s now" if since is not None else ""
    return f"{_listed(who)} at {at}{lasted}: {_mover(seen, at).text}{_bound(seen, at)}"


def _mover(seen: Evidence, at: Rung) -> Mover:
    ladder = ladder_of(seen.job)
    if ladder.next_barrier(at) is Rung.SCORED and at in ladder.training:
        return SCORED
    match ladder.placement:
        case Placement.TIME_SLICED:
            return MOVERS[at]
        case Placement.RESIDENT:
            return RESIDENT_MOVERS[at]
        case Placement.DISAGGREGATED:
            return APART_MOVERS[at]
        case Placement.MIXED:
            return MIXED_MOVERS[at]
        case Placement.ROLLOUT_ONLY | Placement.TRAIN_ONLY:
            return ALONE_MOVERS[at]


def _bound(seen: Evidence, at: Rung) -> str:
    spec = spec_of(seen.job)
    if spec is None:
        return ""
    switch = spec.switch
    if ladder_of(seen.job).next_barrier(at) in (Rung.SCORED, Rung.TRAINED):
        return (
            f" (at most {switch.trainer_start_seconds} s to start, "
            f"{switch.trainer_progress_seconds} s without progress: "
            "switch.trainerStartSeconds, switch.trainerProgressSeconds)"
        )
    name = _mover(seen, at).deadline
    if name is None:
        return ""
    alias = type(switch).model_fields[name].alias
    return f" (at most {getattr(switch, name)} s: switch.{alias})"


def _batch(seen: Evidence, status: ColocatedRLJobStatus, rollout: RolloutFacts | None) -> str:
    """Return what the next step needs while all gates are open, or there are none."""
    spec, step = spec_of(seen.job), status.step or 0
    if spec is None:
        return f"the batch of step {step + 1}"
    if step >= steps_of(seen.job):
        return "the last checkpoint, the model that the job leaves and the last evaluation"
    if not spec.ladder.serves:
        return f"the recorded batch of step {step + 1}"
    if spec.ladder.trains and rollout and rollout.sealed and rollout.sealed.step > step:
        return _sealed(spec, step, rollout.sealed.step, rollout.evaluated)
    return _filling(spec, step + 1, status, rollout)


def _sealed(spec: ColocatedRLJobSpec, step: int, sealed: int, evaluated: Sequence[EvaluationResult]) -> str:
    if spec.evaluation and not spec.ladder.serves_on and (lacking := spec.evaluation.lacking(evaluated, step)):
        return (
            f"batch {sealed} is sealed; the evaluation of step {step} has to end first: "
            f"{', '.join(each.name for each in lacking)} (at most "
            f"{spec.evaluation.deadline_seconds} s: evaluation.deadlineSeconds)"
        )
    return f"batch {sealed} is sealed: the {_begins(spec)} begins"


def _filling(spec: ColocatedRLJobSpec, batch: int, status: ColocatedRLJobStatus, rollout: RolloutFacts | None) -> str:
    """Return how far rollout is, by its own facts or else by the status."""
    figures, scoring = rollout or status.rollout, rollout or status.reference
    samples = (figures and figures.samples) or {}
    wanted = spec.rollout.batch_size * spec.rollout.group_size
    done = samples.get("completed", 0)
    under_way = sum(samples.get(state, 0) for state in ("running", "interrupted", "scoring"))
    rate = figures and figures.tokens_per_second
    pace = f", {rate:.0f} tokens/s" if rate else ""  # 0 only means that no response ended recently
    unscored = scoring and scoring.unscored
    scored = f", {unscored} of them wait for the reference" if unscored else ""
    return f"rollout fills batch {batch}: {done} of {wanted} samples finished{scored}, {under_way} under way{pace}"


def _begins(spec: ColocatedRLJobSpec) -> str:
    return "step" if spec.ladder.serves_on else "switch"


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more" if len(words) > 4 else "")
