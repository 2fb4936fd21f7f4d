"""Why is this job not moving? From what was seen, which pod stands where, what is the case, and what to do. Pure.

Causes come from those who know best: conditions of the job, kubelet about pods, members about themselves. A cause that
heals by itself is told, and is no problem. Where nothing is wrong, what the job waits for is said all the same: who
moves the slowest pod from its rung, and which deadline of the spec bounds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import pydantic

from colocated_rl_api import names
from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.job_status import ColocatedRLJobStatus, ConditionStatus, Phase
from colocated_rl_api.ladder import RESIDENT, TIME_SLICED, Ladder, Rung
from colocated_rl_api.member_wire import PodFacts, PodTarget, Problem, RolloutFacts
from colocated_rl_cli import remedies
from colocated_rl_cli.errors import CliError

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Evidence:
    """What was seen. states: page `/v1/state` by pod, or why it was not read. since: when a pod reached its rung."""

    job: Object
    pods: Sequence[Object]
    events: Sequence[Object]
    states: Mapping[str, Any | CliError]
    now: datetime
    since: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cause:
    reason: str
    message: str  # of whoever knows: names what happened
    pod: str | None = None
    rung: str | None = None

    @property
    def remedy(self) -> remedies.Remedy:
        return remedies.of(self.reason)


@dataclass(frozen=True)
class Explanation:
    """`waits_for`: what the job does now, when nothing is wrong with it. `notes`: what could not be seen."""

    job: str
    headline: str
    causes: tuple[Cause, ...] = ()
    waits_for: str | None = None
    rungs: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # newest events of that kind
    notes: tuple[str, ...] = ()

    @property
    def is_problem(self) -> bool:
        return any(not cause.remedy.heals for cause in self.causes)


def explain(seen: Evidence) -> Explanation:
    job, metadata = seen.job, seen.job["metadata"]
    status, unknown = _status(job)
    facts = _facts(seen)
    rungs = _rungs(status, seen, facts)
    causes = [*_of_job(job, status)]
    if not (_is_over(status) or status.phase in (Phase.SUSPENDING, Phase.SUSPENDED)):
        causes += _of_pods(seen, status)
        causes += _of_members(status, facts, rungs, {cause.pod for cause in causes})
        causes += _of_rollout(status, facts)
    return Explanation(
        job=f"{metadata['namespace']}/{metadata['name']}",
        headline=_headline(job, status),
        causes=tuple(sorted(causes, key=lambda cause: cause.remedy.heals)),
        waits_for=None if causes or _is_over(status) else _waits_for(seen, status, facts, rungs),
        rungs={pod: rung.value for pod, rung in sorted(rungs.items())},
        warnings=tuple(_warnings(seen)),
        notes=(*_notes(seen), *(f"status.{field} is in words that a newer kubectl crlj knows" for field in unknown)),
    )


def _status(job: Object) -> tuple[ColocatedRLJobStatus, list[str]]:
    """What can be read of it, and the fields that can't: a newer operator has more phases."""
    told = dict(job.get("status") or {})
    try:
        return ColocatedRLJobStatus.model_validate(told), []
    except pydantic.ValidationError as error:
        unknown = sorted({str(one["loc"][0]) for one in error.errors()})
    known = {field: value for field, value in told.items() if field not in unknown}
    return ColocatedRLJobStatus.model_validate(known), unknown


def _headline(job: Object, status: ColocatedRLJobStatus) -> str:
    steps = job["spec"].get("steps", "?")
    parts = [str(status.phase or "not acted on"), f"step {status.step or 0} of {steps}"]
    if status.target_step is not None and status.target_step != status.step and not _is_over(status):
        parts.append(f"on the way to step {status.target_step}")
    if status.epoch is not None:
        parts.append(f"epoch {status.epoch} ({status.cause})")
    if status.restarts:
        parts.append(f"{status.restarts} of {job['spec'].get('backoffLimit', 6)} restarts used")
    return ", ".join(parts)


def _observed(status: ColocatedRLJobStatus) -> int | None:
    """Newest generation that an operator has looked at; the schema says -1 of a job that none has seen."""
    return None if status.observed_generation == -1 else status.observed_generation


def _is_over(status: ColocatedRLJobStatus) -> bool:
    return _holds(status, "Complete") or _holds(status, "Failed")


def _holds(status: ColocatedRLJobStatus, kind: str) -> bool:
    return any(one.type == kind and one.status is ConditionStatus.TRUE for one in status.conditions)


# ------------------------------------------------------------------------------------------------------------- the job
def _of_job(job: Object, status: ColocatedRLJobStatus) -> Iterator[Cause]:
    if job["metadata"].get("deletionTimestamp"):
        yield Cause("Deleted", f"since {job['metadata']['deletionTimestamp']}")
    elif job["spec"].get("managedBy", names.OPERATOR) != names.OPERATOR:
        yield Cause("ManagedByAnother", str(job["spec"]["managedBy"]))
    elif (observed := _observed(status)) is None:
        yield Cause("NotSeen", f"created {job['metadata'].get('creationTimestamp')}, and it has no status")
    elif observed < job["metadata"].get("generation", 0):
        yield Cause("SpecNotSeen", f"generation {job['metadata']['generation']}, seen {observed}")
    for one in status.conditions:
        if one.status is ConditionStatus.TRUE and one.type in ("Stalled", "Suspended"):
            yield Cause("Suspended" if one.type == "Suspended" else one.reason, one.message)
    if status.phase is Phase.SUSPENDING:
        yield Cause("Suspending", "")


# ---------------------------------------------------------------------------------------------------------------- pods
def _of_pods(seen: Evidence, status: ColocatedRLJobStatus) -> Iterator[Cause]:
    """What kubelet and the scheduler say; of each seat the newest pod."""
    if _observed(status) is None:
        return
    current = _current(seen.pods)
    replicas = seen.job["spec"].get("replicas", 1)
    for seat in (*(f"{names.ROLE_GPU}-{replica}" for replica in range(replicas)), names.ROLE_ROLLOUT):
        if seat not in current:
            yield Cause("NoPod", f"seat {seat}")
    for pod in current.values():
        if trouble := _trouble(pod, seen.events):
            yield Cause(*trouble, pod=pod["metadata"]["name"])


def _current(pods: Sequence[Object]) -> dict[str, Object]:
    """The pod of each seat: of several attempts the newest that has not ended."""
    found: dict[str, Object] = {}
    for pod in sorted(pods, key=lambda pod: int(pod["metadata"]["labels"].get(names.ATTEMPT_LABEL, 0))):
        labels, phase = pod["metadata"]["labels"], pod.get("status", {}).get("phase")
        replica = labels.get(names.REPLICA_LABEL)
        seat = names.ROLE_ROLLOUT if labels[names.ROLE_LABEL] == names.ROLE_ROLLOUT else f"{names.ROLE_GPU}-{replica}"
        if seat not in found or phase not in ("Succeeded", "Failed"):
            found[seat] = pod
    return found


def _trouble(pod: Object, events: Sequence[Object]) -> tuple[str, str] | None:
    """Reason and message; None for a pod that runs."""
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    if pod["metadata"].get("deletionTimestamp"):
        return "PodTerminating", f"since {pod['metadata']['deletionTimestamp']}"
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return "Unschedulable", condition.get("message", "")
    if status.get("reason") == "Evicted":
        return "Evicted", status.get("message", "")
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        if found := _container_trouble(container):
            return found
    if status.get("phase") == "Pending":
        mount = [
            one for one in events if one["involvedObject"].get("name") == name and "Mount" in one.get("reason", "")
        ]
        return ("VolumeNotMounted", mount[-1].get("message", "")) if mount else ("PodStarting", "Pending")
    if status.get("phase") == "Failed":
        return "PodNotRunning", " ".join(str(status.get(key, "")) for key in ("reason", "message")).strip() or "Failed"
    return None


def _container_trouble(container: Object) -> tuple[str, str] | None:
    state, name = container.get("state", {}), container["name"]
    waiting = state.get("waiting", {})
    reason = waiting.get("reason", "")
    if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
        return "ImageNotPulled", f"container {name}: {reason}: {waiting.get('message', '')}"
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated") or {}
    if "running" in state or not (ended.get("exitCode") or reason.startswith("Create") or reason == "CrashLoopBackOff"):
        return None
    if ended.get("reason") == "OOMKilled":
        return "OutOfMemory", f"container {name}, {container.get('restartCount', 0)} restarts"
    words = str(ended.get("message") or waiting.get("message") or "").strip()[-600:]
    return "ContainerCrashes", f"container {name}: {reason or ended.get('reason', '')}, {words}".rstrip(", ")


# ------------------------------------------------------------------------------------------------------------- members
def _facts(seen: Evidence) -> dict[str, PodFacts | RolloutFacts]:
    """Of the members whose page was read, and could be."""
    found: dict[str, PodFacts | RolloutFacts] = {}
    for pod, state in seen.states.items():
        if isinstance(state, CliError):
            continue
        model = PodFacts if state.get("facts", {}).get("type") == "podFacts" else RolloutFacts
        try:
            found[pod] = model.model_validate(state["facts"])
        except (pydantic.ValidationError, KeyError):
            continue  # of another version: told in the notes
    return found


def _rungs(
    status: ColocatedRLJobStatus, seen: Evidence, facts: Mapping[str, PodFacts | RolloutFacts]
) -> dict[str, Rung]:
    """Towards the version that the newest epoch climbs to; from members' pages, and from status for those not read.

    A page may be newer than the status: it says itself where its member is to go.
    """
    found = {pod.name: Rung(pod.rung) for pod in status.out_of_line if pod.rung in set(Rung)}
    for pod in _current(seen.pods).values():
        name = pod["metadata"]["name"]
        known, target = facts.get(name), _target(seen.states.get(name))
        if not isinstance(known, PodFacts):
            continue
        is_current = target is not None and target.epoch >= (status.epoch or 0) and known.epoch == target.epoch
        reached = _ladder(seen.job).standing(known, target.version) if target is not None and is_current else None
        found[name] = reached or Rung.UNKNOWN
    return found


def _spec(job: Object) -> ColocatedRLJobSpec | None:
    """None for one in words of another version."""
    try:
        return ColocatedRLJobSpec.model_validate(job["spec"])
    except pydantic.ValidationError:
        return None


def _ladder(job: Object) -> Ladder:
    spec = _spec(job)
    return spec.rollout.ladder if spec else TIME_SLICED


def _target(state: Any) -> PodTarget | None:
    """Of a GPU pod's page."""
    try:
        return PodTarget.model_validate(state["target"])
    except (pydantic.ValidationError, TypeError, KeyError):
        return None  # it has none yet, or the page was not read


def _of_members(
    status: ColocatedRLJobStatus,
    facts: Mapping[str, PodFacts | RolloutFacts],
    rungs: Mapping[str, Rung],
    known: set[str | None],
) -> Iterator[Cause]:
    """known: pods whose cause is told already."""
    problems: dict[str, Problem] = {
        pod.name: Problem(reason=pod.reason, message=pod.message) for pod in status.out_of_line if pod.reason
    }
    for pod, said in facts.items():
        if said.problem is not None:
            problems[pod] = said.problem
        else:
            problems.pop(pod, None)  # the page is newer than the status
    for pod, problem in sorted(problems.items()):
        if pod not in known:
            yield Cause(problem.reason, problem.message, pod, rungs[pod].value if pod in rungs else None)
    if status.rung == Rung.UNKNOWN:
        for pod in sorted(set(rungs) - set(problems) - known - {None}):
            if rungs[pod] is Rung.UNKNOWN:
                yield Cause("MemberSilent", f"epoch {status.epoch} is not known to it", pod, Rung.UNKNOWN.value)


def _of_rollout(status: ColocatedRLJobStatus, facts: Mapping[str, PodFacts | RolloutFacts]) -> Iterator[Cause]:
    for pod, said in facts.items():
        if not isinstance(said, RolloutFacts) or said.problem is not None or status.rung != Rung.SERVING:
            continue
        if said.gates_open == 0:
            yield Cause("NoGateOpen", "every gate is closed, as it sees them", pod)
        elif said.tokens_per_second == 0.0 and not said.stopped:
            yield Cause("NothingGenerated", f"{said.gates_open} gates are open", pod)


# ------------------------------------------------------------------------------------------------- what it waits for
class Mover(NamedTuple):
    """Who takes a pod from its rung to the next one, and which deadline of spec.switch bounds that."""

    words: str
    deadline: str | None


MOVERS: dict[Rung, Mover] = {
    Rung.UNKNOWN: Mover("its agent reports under the new epoch", None),
    Rung.SEALED: Mover("its agent closes the gate", "settle_seconds"),
    Rung.CLOSED: Mover("requests in flight are ended and handed back", "settle_seconds"),
    Rung.SETTLED: Mover("the engine pauses", "engine_call_seconds"),
    Rung.PAUSED: Mover("the engine's scheduler says that it is idle", "engine_call_seconds"),
    Rung.DRAINED: Mover("the engine releases its memory", "engine_call_seconds"),
    Rung.RELEASED: Mover("the trainer, which has the GPU, makes the step (after a start: loads its checkpoint)", None),
    Rung.TRAINED: Mover("the trainer writes the new weights", "trainer_progress_seconds"),
    Rung.EXPORTED: Mover("the trainer leaves the device", "trainer_progress_seconds"),
    Rung.OFFLOADED: Mover("the engine starts on the new weights, or loads them", "engine_start_seconds"),
    Rung.UPDATED: Mover("the engine maps its memory again", "engine_call_seconds"),
    Rung.RESTORED: Mover("the probe agrees and the gate opens", "engine_call_seconds"),
    Rung.SERVING: Mover("rollout fills the next batch", None),
}
RESIDENT_MOVERS = MOVERS | {
    Rung.SEALED: Mover("the trainer makes the step beside rollout (after a start: loads its checkpoint)", None),
    Rung.EXPORTED: Mover("its agent closes the gate, once no evaluation needs the older weights", "settle_seconds"),
    Rung.DRAINED: Mover("the engine loads the new weights, or starts on them", "engine_start_seconds"),
    Rung.UPDATED: Mover("the probe agrees and the gate opens", "engine_call_seconds"),
}


def _waits_for(
    seen: Evidence,
    status: ColocatedRLJobStatus,
    facts: Mapping[str, PodFacts | RolloutFacts],
    rungs: Mapping[str, Rung],
) -> str:
    known = {pod: rung for pod, rung in rungs.items() if rung is not Rung.UNKNOWN}
    at = (
        _ladder(seen.job).slowest(known.values())
        if known
        else Rung(status.rung)
        if status.rung in set(Rung)
        else Rung.UNKNOWN
    )
    if at is Rung.SERVING:
        rollout = next((said for said in facts.values() if isinstance(said, RolloutFacts)), None)
        return _batch(seen, status, rollout)
    who = sorted(pod for pod, rung in known.items() if rung is at) or ["every pod"]
    since = max((seen.since[pod] for pod in who if pod in seen.since), default=None)
    lasted = f", for {max(0.0, seen.now.timestamp() - since):.0f} s now" if since is not None else ""
    return f"{_listed(who)} at {at}{lasted}: {_mover(seen, at).words}{_bound(seen, at)}"


def _mover(seen: Evidence, at: Rung) -> Mover:
    return (RESIDENT_MOVERS if _ladder(seen.job) is RESIDENT else MOVERS)[at]


def _bound(seen: Evidence, at: Rung) -> str:
    spec = _spec(seen.job)
    if spec is None:
        return ""
    switch = spec.switch
    if _ladder(seen.job).next_barrier(at) is Rung.TRAINED:
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
    """All gates are open: what the next step needs."""
    spec, step = _spec(seen.job), status.step or 0
    if spec is None:
        return f"the batch of step {step + 1}"
    if step >= spec.steps:
        return "the last checkpoint and the last evaluation"
    samples = (rollout.samples if rollout else status.rollout.samples if status.rollout else {}) or {}
    if rollout and rollout.sealed and rollout.sealed.step > step:
        evaluated = rollout.evaluated.step if rollout.evaluated else None
        if spec.evaluation and evaluated != step and spec.rollout.ladder is TIME_SLICED:
            return (
                f"batch {rollout.sealed.step} is sealed; the evaluation of step {step} has to end first (at most "
                f"{spec.evaluation.deadline_seconds} s: evaluation.deadlineSeconds)"
            )
        return f"batch {rollout.sealed.step} is sealed: the {_begins(spec)} begins"
    wanted = spec.rollout.batch_size * spec.rollout.group_size
    done = samples.get("completed", 0)
    under_way = sum(samples.get(state, 0) for state in ("running", "interrupted", "scoring"))
    rate = rollout.tokens_per_second if rollout else status.rollout.tokens_per_second if status.rollout else None
    pace = f", {rate:.0f} tokens/s" if rate is not None else ""
    return f"rollout fills batch {step + 1}: {done} of {wanted} samples finished, {under_way} under way{pace}"


def _begins(spec: ColocatedRLJobSpec) -> str:
    return "switch" if spec.rollout.ladder is TIME_SLICED else "step"


# --------------------------------------------------------------------------------------------------------------- words
def _warnings(seen: Evidence) -> Iterator[str]:
    shown = [event for event in seen.events if event.get("type") == "Warning"]
    for event in shown[-5:]:
        count = event.get("count") or (event.get("series") or {}).get("count") or 1
        often = f" ({count} times)" if count > 1 else ""
        yield f"{event['involvedObject'].get('name')}: {event.get('reason')}: {event.get('message', '')}{often}"[:400]


def _notes(seen: Evidence) -> Iterator[str]:
    refused = {str(error) for error in seen.states.values() if isinstance(error, CliError)}
    if refused:
        unread = sum(isinstance(state, CliError) for state in seen.states.values())
        yield f"{unread} of {len(seen.states)} members' pages were not read, the status stands in: {min(refused)}"


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more" if len(words) > 4 else "")
