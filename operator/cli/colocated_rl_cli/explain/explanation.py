"""Explain why a job does not move: from the evidence, the rung of each pod, the causes, and the remedies. Pure.

Each cause comes from who knows it best: the job's conditions, kubelet about pods, members about themselves. A cause
that heals by itself is shown, and is not a problem. If nothing is wrong, the explanation names what the job waits for:
who moves the slowest pod from its rung, and which deadline of the spec bounds that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median

import pydantic

from colocated_rl_api import names
from colocated_rl_api.facts import EPOCHS_OF_WAITS, PodFacts, Problem, RolloutFacts
from colocated_rl_api.job_status import ColocatedRLJobStatus, ConditionStatus, FailuresStatus, Phase
from colocated_rl_api.rungs import Rung
from colocated_rl_api.seats import is_spare, seats_for
from colocated_rl_cli.base.errors import CliError
from colocated_rl_cli.evidence.causes import event_ts
from colocated_rl_cli.evidence.evidence import (
    Evidence,
    Object,
    facts_of,
    has_pages,
    rungs_of,
    seats_of,
    steps_of,
)
from colocated_rl_cli.explain import remedies
from colocated_rl_cli.explain.waiting import waits_for

QUIET_S = 30.0  # over which rollout controllers count their tokens
STRAGGLES_S = 10.0  # in the newest epochs, that the other pods of a role waited and one did not

AT_REST = (Phase.SUSPENDING, Phase.SUSPENDED, Phase.QUEUED, Phase.FAILED)  # pods that end are no news
HELD_UP = (  # conditions with the reasons that hold up a job whose pods may show nothing wrong
    ("Reconciling", "BackingOff"), ("Reconciling", "PodsReadyDeadlineExceeded"), ("PodsReady", "OperatorCutOff"),
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """Names one cause, with the pod and the rung that it concerns."""

    reason: str
    message: str  # from the source of the cause: what happened
    pod: str | None = None
    rung: str | None = None

    @property
    def remedy(self) -> remedies.Remedy:
        return remedies.of(self.reason)


@dataclass(frozen=True)
class Explanation:
    """Holds everything that `explain` shows.

    waits_for: what the job waits for if nothing is wrong. notes: what could not be observed.
    """

    job: str
    headline: str
    causes: tuple[Finding, ...] = ()
    waits_for: str | None = None
    rungs: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # newest warning events
    notes: tuple[str, ...] = ()

    @property
    def is_problem(self) -> bool:
        return any(not cause.remedy.heals for cause in self.causes)


def explain(seen: Evidence) -> Explanation:
    """Explain a job from what was observed of it."""
    job, metadata = seen.job, seen.job["metadata"]
    status, unknown = _status(job)
    facts = facts_of(seen)
    rungs = rungs_of(status, seen, facts)
    causes = [*_of_job(job, status)]
    if not (_is_over(status) or status.phase in AT_REST or metadata.get("deletionTimestamp")):
        causes += _of_pods(seen, status)
        causes += _of_members(status, facts, rungs, {cause.pod for cause in causes})
        causes += _of_rollout(seen, status, facts)
    stragglers = () if _is_over(status) else tuple(_stragglers(seen, facts))
    return Explanation(
        job=f"{metadata['namespace']}/{metadata['name']}",
        headline=_headline(job, status, now=seen.now),
        causes=(*sorted(causes, key=lambda cause: cause.remedy.heals), *stragglers),
        waits_for=None if causes or _is_over(status) else waits_for(seen, status, facts, rungs),
        rungs={pod: rung.value for pod, rung in sorted(rungs.items())} | _spares(seen),
        warnings=tuple(_warnings(seen)),
        notes=(*_notes(seen), *(f"status.{field} is known only to a newer kubectl crlj" for field in unknown)),
    )


def _status(job: Object) -> tuple[ColocatedRLJobStatus, list[str]]:
    """Return the readable part of the status, and the fields that a newer operator wrote and this can't read."""
    reported = dict(job.get("status") or {})
    try:
        return ColocatedRLJobStatus.model_validate(reported), []
    except pydantic.ValidationError as error:
        unknown = sorted({str(one["loc"][0]) for one in error.errors()})
    known = {field: value for field, value in reported.items() if field not in unknown}
    return ColocatedRLJobStatus.model_validate(known), unknown


def _headline(job: Object, status: ColocatedRLJobStatus, *, now: datetime) -> str:
    parts = [str(status.phase or "not acted on"), f"step {status.step or 0} of {steps_of(job)}"]
    if status.target_step is not None and status.target_step != status.step and not _is_over(status):
        parts.append(f"on the way to step {status.target_step}")
    if status.epoch is not None:
        parts.append(f"epoch {status.epoch}" + (f" ({status.cause})" if status.cause else ""))
    if status.checkpoint is not None and not _is_over(status):
        minutes = max(0, round((now - status.checkpoint.time).total_seconds() / 60))
        parts.append(f"newest checkpoint of step {status.checkpoint.step}, {minutes} min old")
    if status.mirrored_step is not None and not _is_over(status):
        parts.append(f"step {status.mirrored_step} in the memory of pods")
    restarts, made = status.restarts or 0, status.failures
    uncounted = max(0, made.pod_restarts + made.step_retries - restarts) if made else 0
    if restarts or uncounted:
        besides = f" ({uncounted} more do not count)" if uncounted else ""
        parts.append(f"{restarts} of {job['spec'].get('backoffLimit', 6)} restarts used{besides}")
    if status.failures is not None:
        parts += _failures(status.failures)
    return ", ".join(parts)


def _failures(failures: FailuresStatus) -> Iterator[str]:
    """Describe the action on the newest failure, and the rule that chose it."""
    if failures.cause:
        rule = "the usual answer" if failures.rule is None else f"failurePolicy.rules[{failures.rule}]"
        yield f"last {failures.cause}: {failures.action} ({rule})"
    if failures.avoided_nodes:
        yield f"no GPU pod on {' '.join(failures.avoided_nodes)}"


def _observed(status: ColocatedRLJobStatus) -> int | None:
    """Return the newest generation that an operator has observed; None for -1, the schema's default."""
    return None if status.observed_generation == -1 else status.observed_generation


def _is_over(status: ColocatedRLJobStatus) -> bool:
    return _holds(status, "Complete") or _holds(status, "Failed")


def _holds(status: ColocatedRLJobStatus, kind: str) -> bool:
    return any(one.type == kind and one.status is ConditionStatus.TRUE for one in status.conditions)


# ------------------------------------------------------------------------------------------------------------- the job
def _of_job(job: Object, status: ColocatedRLJobStatus) -> Iterator[Finding]:
    if job["metadata"].get("deletionTimestamp"):
        yield Finding("Deleted", f"since {job['metadata']['deletionTimestamp']}")
    elif job["spec"].get("managedBy", names.OPERATOR) != names.OPERATOR:
        yield Finding("ManagedByAnother", str(job["spec"]["managedBy"]))
    elif (observed := _observed(status)) is None:
        yield Finding("NotSeen", f"created {job['metadata'].get('creationTimestamp')}, and it has no status")
    elif observed < job["metadata"].get("generation", 0):
        yield Finding("SpecNotSeen", f"generation {job['metadata']['generation']}, seen {observed}")
    true = [one for one in status.conditions if one.status is ConditionStatus.TRUE]
    stops = {one.reason: one.message for one in true if one.type in ("Stalled", "Failed")}  # as a rule for one reason
    yield from (Finding(reason, message) for reason, message in stops.items())
    yield from (Finding("Suspended", one.message) for one in true if one.type == "Suspended")
    for one in status.conditions:
        if (one.type, one.reason) in HELD_UP:
            yield Finding(one.reason, one.message)
    if status.phase is Phase.SUSPENDING:
        yield Finding("Suspending", "")
    asked, replicas = job["spec"].get("replicas", 1), status.group_replicas
    if replicas not in (None, asked) and not (_is_over(status) or _holds(status, "Suspended")):
        yield Finding("Resized", f"the group has {replicas} replicas, {asked} are asked for")


# ---------------------------------------------------------------------------------------------------------------- pods
def _of_pods(seen: Evidence, status: ColocatedRLJobStatus) -> Iterator[Finding]:
    """Yield what kubelet and the scheduler report about the newest pod of each seat."""
    if _observed(status) is None:
        return
    current = seats_of(seen.pods)
    for seat in _seats(seen.job["spec"], replicas=status.group_replicas):
        if seat not in current:
            yield Finding("NoPod", f"seat {seat}")
    for pod in (pod for seat, pod in current.items() if not is_spare(seat)):
        if trouble := _trouble(pod, seen.events):
            yield Finding(*trouble, pod=pod["metadata"]["name"])


def _spares(seen: Evidence) -> dict[str, str]:
    """Return what each spare does, in the place of its rung, or why it can't."""
    spares = (pod for seat, pod in seats_of(seen.pods).items() if is_spare(seat))
    troubles = {pod["metadata"]["name"]: _trouble(pod, seen.events) for pod in spares}
    return {
        name: f"a spare: {': '.join(filter(None, trouble))}" if trouble else "a spare, which holds room for the group"
        for name, trouble in troubles.items()
    }


def _seats(spec: Object, *, replicas: int | None) -> tuple[str, ...]:
    """Return the seats of a job, even if another version's fields make its spec unreadable.

    replicas: of the group; None: as many as the spec asks for.
    """
    rollout, reference = spec.get("rollout", {}), spec.get("reference") or {}
    if not isinstance(rollout, Mapping):
        rollout = {}  # too much was written into it: `bounded_json`
    sizes = {
        "replicas": replicas or spec.get("replicas", 1),
        "engines": rollout.get("replicas", 0),
        "references": reference.get("replicas", 0),
    }
    return seats_for(spec.get("mode", ""), rollout.get("placement", ""), **sizes).all


def _trouble(pod: Object, events: Sequence[Object]) -> tuple[str, str] | None:
    """Return reason and message of a pod's trouble; None for a pod that runs."""
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    if pod["metadata"].get("deletionTimestamp"):
        return "PodTerminating", f"since {pod['metadata']['deletionTimestamp']}"
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            is_gated = condition.get("reason") == "SchedulingGated"
            return "SchedulingGated" if is_gated else "Unschedulable", condition.get("message", "")
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
    if not has_pages(pod) and not _is_ready(status):
        return "PodStarting", "it runs, and is not ready: its model is being loaded"
    return None


def _is_ready(status: Object) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", ()))


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
def _of_members(
    status: ColocatedRLJobStatus,
    facts: Mapping[str, PodFacts | RolloutFacts],
    rungs: Mapping[str, Rung],
    known: set[str | None],
) -> Iterator[Finding]:
    """Yield members' problems. known: pods whose cause was found already."""
    problems: dict[str, Problem] = {
        pod.name: Problem(reason=pod.reason, message=pod.message) for pod in status.out_of_line if pod.reason
    }
    for pod, reported in facts.items():
        if reported.problem is not None:
            problems[pod] = reported.problem
        else:
            problems.pop(pod, None)  # the page is newer than the status
    for pod, problem in sorted(problems.items()):
        if pod not in known:
            yield Finding(problem.reason, problem.message, pod, rungs[pod].value if pod in rungs else None)
    if status.rung == Rung.UNKNOWN:
        for pod in sorted(set(rungs) - set(problems) - known - {None}):
            if rungs[pod] is Rung.UNKNOWN:
                yield Finding("MemberSilent", f"epoch {status.epoch} is not known to it", pod, Rung.UNKNOWN.value)


def _of_rollout(
    seen: Evidence, status: ColocatedRLJobStatus, facts: Mapping[str, PodFacts | RolloutFacts]
) -> Iterator[Finding]:
    for pod, reported in facts.items():
        if not isinstance(reported, RolloutFacts) or reported.problem is not None or status.rung != Rung.SERVING:
            continue
        if reported.gates_open == 0:
            yield Finding("NoGateOpen", "every gate is closed, as it sees them", pod)
        elif reported.tokens_per_second == 0.0 and not (_is_busy(reported, status) or _opened_recently(seen)):
            yield Finding("NothingGenerated", f"{reported.gates_open} gates are open", pod)


def _is_busy(reported: RolloutFacts, status: ColocatedRLJobStatus) -> bool:
    """Return whether rollout works or waits without a fault: tokens count only once their response has ended."""
    is_ahead = reported.sealed is not None and reported.sealed.step > (status.step or 0)
    return bool(reported.samples.get("running") or reported.unscored or reported.stopped or is_ahead)


def _opened_recently(seen: Evidence) -> bool:
    """Return whether a gate opened so recently that its tokens may not be counted yet."""
    return seen.now.timestamp() < max(seen.since.values(), default=0.0) + QUIET_S


def _stragglers(seen: Evidence, facts: Mapping[str, PodFacts | RolloutFacts]) -> Iterator[Finding]:
    """Yield each pod that the others of its role waited for in the newest epochs, while it waited for nobody."""
    by_role: dict[str, dict[str, float]] = defaultdict(dict)
    epoch = max((each.epoch for each in facts.values() if isinstance(each, PodFacts)), default=0)
    for pod in seats_of(seen.pods).values():
        name, reported = pod["metadata"]["name"], facts.get(pod["metadata"]["name"])
        if isinstance(reported, PodFacts) and reported.epoch == epoch:
            by_role[pod["metadata"]["labels"][names.ROLE_LABEL]][name] = reported.waited_s
    for waits in by_role.values():
        for name, waited_s in waits.items():
            others = [each for other, each in waits.items() if other != name]
            if others and (usual_s := median(others)) >= STRAGGLES_S and waited_s < usual_s / 4:
                message = f"in {EPOCHS_OF_WAITS} epochs the others waited {usual_s:.0f} s, it {waited_s:.0f} s"
                yield Finding("Straggler", message, name)


# --------------------------------------------------------------------------------------------------------------- words
def _warnings(seen: Evidence) -> Iterator[str]:
    shown = [event for event in seen.events if event.get("type") == "Warning"]
    for event in sorted(shown, key=lambda event: event_ts(event) or 0.0)[-5:]:
        count = event.get("count") or (event.get("series") or {}).get("count") or 1
        often = f" ({count} times)" if count > 1 else ""
        yield f"{event['involvedObject'].get('name')}: {event.get('reason')}: {event.get('message', '')}{often}"[:400]


def _notes(seen: Evidence) -> Iterator[str]:
    yield from seen.unread
    refused = {str(error) for error in seen.states.values() if isinstance(error, CliError)}
    if refused:
        unread = sum(isinstance(state, CliError) for state in seen.states.values())
        yield f"{unread} of {len(seen.states)} members' pages were not read, the status stands in: {min(refused)}"
