"""Decide the action that follows a failure, by the job's failure policy. The module is pure.

The first rule that matches is followed; if none matches, the usual answer of the cause is. The module also decides
which pods are at fault, and so are replaced if the action replaces pods: never a whole group that merely stands still
together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from colocated_rl_api.back_off import doubled_s
from colocated_rl_api.failure import FailureAction, FailureCause
from colocated_rl_api.rungs import Rung
from colocated_rl_operator.planner.actions import DeletePod, PodAction, TaintNode
from colocated_rl_operator.planner.notices import NOTICE_S, Notice
from colocated_rl_operator.planner.observation import (
    MAX_AVOIDED,
    Climb,
    FailureTally,
    Member,
    Observation,
)
from colocated_rl_operator.planner.reasons import Cause, Waiting
from colocated_rl_operator.planner.silence import is_silent

UNCOUNTED = ", which does not count against backoffLimit"
HOLD_UP_NOBODY = frozenset({"StateNotMirrored", "SlowNetwork"})  # problems with which a pod goes on all the same
QUEUE_S, MAX_QUEUE_S = 30.0, 600.0  # at least, for a job whose pods did not come; up to twice as long


@dataclass(frozen=True)
class Decision:
    """A decision raises a new climb. pods: the pod actions that go with it."""

    climb: Climb
    message: str
    pods: tuple[PodAction, ...] = ()


@dataclass(frozen=True)
class Hold:
    """A hold delays the next climb until a moment."""

    until: float
    message: str
    reason: Waiting = Waiting.BACKOFF


@dataclass(frozen=True)
class Failure:
    """A failure records what went wrong.

    pods: those at fault; empty if unknown. tries: the failures in a row before this one.
    """

    cause: FailureCause
    message: str  # for people, without what is done about it
    pods: tuple[Member, ...]
    since: float
    tries: int
    rung: Rung | None = None


@dataclass(frozen=True)
class Verdict:
    """A verdict names the action that follows a failure.

    rule: the index of the policy's rule; None: the usual answer. counts: against backoffLimit, by rule or cause.
    """

    action: FailureAction
    rule: int | None
    counts: bool

    @property
    def by(self) -> str:
        """Name the rule that decided, for messages."""
        return "" if self.rule is None else f" (failurePolicy.rules[{self.rule}])"


def judge(seen: Observation, failure: Failure) -> Verdict:
    """Return the verdict of the first rule that matches, or else the usual one of the cause."""
    for number, rule in enumerate(seen.job.spec.failure_policy.rules):
        is_for_rung = rule.at_rungs is None or failure.rung in rule.at_rungs
        has_tries = rule.max_tries is None or failure.tries < rule.max_tries
        if failure.cause in rule.on_causes and is_for_rung and has_tries:
            counts = failure.cause.counts if rule.counts is None else rule.counts
            return _off_its_node(seen, failure, Verdict(rule.action, number, counts))
    return _off_its_node(seen, failure, Verdict(failure.cause.answers[0], None, failure.cause.counts))


def _off_its_node(seen: Observation, failure: Failure, verdict: Verdict) -> Verdict:
    """Return the verdict; a pod whose node gives notice is made again on another node, if at all."""
    if verdict.action is FailureAction.RESTART_POD and any(pod in seen.noticed for pod in failure.pods):
        return replace(verdict, action=FailureAction.REPLACE_POD_ELSEWHERE)
    return verdict


def _judge_in_a_row(seen: Observation, climb: Climb, failure: Failure) -> Verdict:
    """Return the verdict. Two deaths in a row that began in one pod of several look like its node's or device's fault.

    Not those for memory: another node would have no more of it. Once the pod is made again, the next one has no past.
    """
    verdict, pod = judge(seen, failure), _only_pod(seen, failure)
    if verdict.rule is None and failure.tries and pod and pod == climb.tally.pod:
        return replace(verdict, action=FailureAction.REPLACE_POD_ELSEWHERE)
    return verdict


def _only_pod(seen: Observation, failure: Failure) -> str:
    """Return the name of the pod of several in which a death of trainers began; "" if it was not one."""
    is_of_step = failure.cause in (FailureCause.TRAINER_DIED, FailureCause.RUNG_DEADLINE)
    is_one = is_of_step and len(failure.pods) == 1 < len(seen.job.lineage_seats)
    return failure.pods[0].name if is_one else ""


def still_counting(counted: tuple[int, ...], *, step: int, window: int) -> tuple[int, ...]:
    """Return the failures that count in a climb to `step`.

    counted: the steps in which they happened. A failure counts until `window` steps are finished from its own on.
    """
    return tuple(failed for failed in counted if step - failed < window)


def raise_epoch(
    seen: Observation, climb: Climb | None, cause: Cause, message: str, *, replicas: int | None = None
) -> Decision:
    """Return the next climb. It answers every retry that was asked for, unless the end of a failed job is repeated.

    replicas: of the group from now on; None: as before.
    """
    is_repeated = climb is not None and climb.cause.is_failure and cause.is_failure
    climb = climb or unstarted(cause)
    tally = replace(climb.tally, counted=_counted(seen, climb))
    retries = climb.retries if is_repeated else seen.job.spec.retries
    replicas = seen.job.replicas if replicas is None else replicas
    raised = replace(climb, epoch=seen.highest_epoch + 1, cause=cause, tally=tally, retries=retries, replicas=replicas)
    return Decision(raised, message)


def unstarted(cause: Cause) -> Climb:
    """Return what a job without a record stands on before its first epoch is raised."""
    return Climb(epoch=0, step=0, lineage=0, group="", cause=cause)


# -------------------------------------------------------------------------------------------------------- what follows
def after_death(seen: Observation, climb: Climb) -> Decision | Hold | None:
    return _carry_out(seen, climb, Cause.TRAINER_DIED, death(seen, step=climb.step, tries=_tries(seen, climb)))


def after_standstill(seen: Observation, climb: Climb, since: float, message: str) -> Decision | Hold | None:
    failure = standstill(seen, since=since, tries=_tries(seen, climb), message=message)
    return _carry_out(seen, climb, Cause.RUNG_DEADLINE, failure)


def after_stall(seen: Observation, climb: Climb, behind: tuple[Member, ...]) -> Decision | Hold | None:
    """Answer a step in which no rank gets on any more, long before the deadline of its rung.

    behind: the pods of the ranks that have done least, which are at fault unless all have done as much.
    """
    tries, since = _tries(seen, climb), seen.memory.progress_at
    message = f"no trainer gets on with step {climb.step}; furthest behind: {_named(behind, 'no word from it')}"
    pods = behind if len(behind) < len(seen.trainer_members) else ()
    failure = Failure(FailureCause.RUNG_DEADLINE, message, pods, since, tries, seen.slowest)
    return _carry_out(seen, climb, Cause.RUNG_DEADLINE, failure)


def after_difference(seen: Observation, climb: Climb, message: str) -> Decision | Hold | None:
    """Answer a difference between the engines' weights, or weights not confirmed.

    The answer never waits for a back-off: meanwhile those weights would be served.
    """
    failure = Failure(FailureCause.WEIGHTS_DIFFER, message, (), seen.now, _tries(seen, climb))
    return _carry_out(seen, climb, Cause.WEIGHTS_DIFFER, failure)


def after_loss(seen: Observation, climb: Climb) -> Decision | Hold | None:
    """Answer the loss of engines and pods, where more is to be done than agents and roster do anyway."""
    has_rules = bool(seen.job.spec.failure_policy.rules)
    is_troubled = any(member.bad_device or member.silent_since is not None for member in seen.members)
    if not (has_rules or seen.noticed or is_troubled):
        return None
    failures = [*lost_pods(seen, tries=_tries(seen, climb))]
    if has_rules and seen.all_answer:
        failures += lost_engines(seen)
    for failure in failures:
        verdict = judge(seen, failure)
        is_left_to_roster = verdict.rule is None and verdict.action is FailureAction.RESTART_POD
        if is_left_to_roster or verdict.action is FailureAction.RESTART_ENGINE:
            continue
        if _avoids_more(climb, failure, verdict) or _is_due(seen, climb, failure, verdict):
            return _carry_out(seen, climb, Cause.POD_REPLACED, failure)
    return None


def _carry_out(seen: Observation, climb: Climb, cause: Cause, failure: Failure) -> Decision | Hold | None:
    """Start the trainers together again after a back-off, in these pods or in others, or end the job."""
    verdict = _judge_in_a_row(seen, climb, failure)
    if verdict.action is FailureAction.FAIL_JOB:
        return _fail(seen, climb, failure, verdict)
    counts = verdict.counts and bool(climb.group)
    if _is_used_up(seen, climb, counts=counts):
        return _give_up(seen, climb, failure.message)
    replaces = bool(failure.pods) and verdict.action in (FailureAction.RESTART_POD, FailureAction.REPLACE_POD_ELSEWHERE)
    then = _then(seen, climb, failure, verdict, replaces=replaces)
    due = failure.since + seen.job.spec.failure_policy.backoff_s(failure.tries)
    may_wait = cause in (Cause.TRAINER_DIED, Cause.RUNG_DEADLINE) and verdict.action is not FailureAction.ROLL_BACK
    if may_wait and seen.now < due:
        return Hold(due, f"{failure.message}: {then}, {due - failure.since:.0f} s later")
    following = replace(climb, tally=_tallied(seen, climb, failure, verdict, replaces=replaces))
    message = f"{failure.message}: {then}{'' if verdict.counts else UNCOUNTED}"
    if replaces:
        return _replace_pods(seen, following, failure, message)
    if verdict.action is FailureAction.ROLL_BACK:
        following = replace(following, step=_finished(seen, climb))
    return raise_epoch(seen, replace(following, lineage=seen.next_lineage), cause, message)


def _replace_pods(seen: Observation, climb: Climb, failure: Failure, message: str) -> Decision:
    """Delete the pods at fault that still fill their seats; a silent one is left to the roster."""
    current = {member.uid for member in seen.current.values()}
    at_fault = () if failure.cause is FailureCause.MEMBER_SILENT else failure.pods
    pods = tuple(DeletePod(pod.name, pod.uid, None, message) for pod in at_fault if pod.uid in current)
    climb = replace(climb, group="") if _has_trainers(seen, failure) else climb
    return replace(raise_epoch(seen, climb, Cause.POD_REPLACED, message), pods=pods)


def after_absence(seen: Observation, climb: Climb | None, message: str) -> Decision:
    """Answer pods that did not come: all pods go, so that no device waits for them."""
    climb = climb or unstarted(Cause.PODS_NOT_READY)
    failure = Failure(FailureCause.PODS_NOT_READY, message, (), seen.now, _tries(seen, climb))
    verdict = judge(seen, failure)
    if verdict.action is FailureAction.FAIL_JOB:
        return _fail(seen, climb, failure, verdict)
    if _is_used_up(seen, climb, counts=verdict.counts):
        return _give_up(seen, climb, message)
    tally = replace(
        _judged(climb.tally, failure, verdict),
        pod_restarts=climb.tally.pod_restarts + verdict.counts,
        step=max(_step(seen, climb), climb.tally.step),
        tries=failure.tries + 1,
        counted=_counted(seen, climb, adds=verdict.counts),
    )
    decision = raise_epoch(seen, replace(climb, tally=tally), Cause.PODS_NOT_READY, message)
    wait_s = queue_s(seen, decision.climb)
    return replace(decision, message=f"{message}: all pods go, and the job tries again in {wait_s:.0f} s{verdict.by}")


def queue_s(seen: Observation, climb: Climb) -> float:
    """Return the seconds a job stays queued: jobs that wait for each other's devices must not come back at one moment.

    Of jobs that gave up equally often, the oldest comes back first: while it is queued, others wait into the later half
    of their range. They wait no longer, or an old job for which there is never room would hold up all others.
    """
    digest = hashlib.sha256(f"{seen.job.uid} {climb.epoch}".encode()).digest()
    share = (int.from_bytes(digest[:4]) / 2**32 + seen.has_elder) / 2
    return doubled_s(QUEUE_S, climb.tally.tries - 1, MAX_QUEUE_S) * (1 + share)


def after_replacement(seen: Observation, climb: Climb) -> Decision:
    """Answer pods that were lost and made again without a rule that matched.

    The restart counts if one of them failed by itself. A pod that the cluster took away, that a person deleted, or
    whose fate is unknown, is no failure of the step either, and does not bring a rule's maxTries nearer.
    """
    message, losses = _replaced(seen), [cause for cause in seen.memory.losses.values() if cause is not None]
    cause = next((cause for cause in losses if cause.counts), losses[0] if losses else None)
    counts = cause is not None and cause.counts
    if _is_used_up(seen, climb, counts=counts):
        return _give_up(seen, climb, message)
    tally = replace(
        climb.tally,
        pod_restarts=climb.tally.pod_restarts + 1,
        cause=cause or "",
        action=FailureAction.RESTART_POD,
        rule=None,
        counted=_counted(seen, climb, adds=counts),
    )
    if counts:
        tally = replace(tally, step=max(_step(seen, climb), tally.step), tries=_tries(seen, climb) + 1)
    following = replace(climb, lineage=seen.next_lineage, group=seen.group or climb.group, tally=tally)
    then = f"{starts(seen)} together again{'' if counts else UNCOUNTED}"
    return raise_epoch(seen, following, Cause.POD_REPLACED, f"{message}: {then}")


def _avoids_more(climb: Climb, failure: Failure, verdict: Verdict) -> bool:
    """Return whether pods are to be made elsewhere, and a node of theirs is not avoided yet."""
    known = {None, *climb.tally.avoids}
    return verdict.action is FailureAction.REPLACE_POD_ELSEWHERE and any(pod.node not in known for pod in failure.pods)


def _is_due(seen: Observation, climb: Climb, failure: Failure, verdict: Verdict) -> bool:
    """Return whether the verdict is to be carried out: not again for pods that were gone when the epoch was raised,
    unless a group has lost trainers with them, and not while a group forms unless the job fails.
    """
    if not climb.group and verdict.action is not FailureAction.FAIL_JOB:
        return False
    is_known = failure.tries > 0 and all(pod.uid in seen.memory.gone for pod in failure.pods)
    return not is_known or bool(climb.group and _has_trainers(seen, failure))


def _has_trainers(seen: Observation, failure: Failure) -> bool:
    """Return whether a pod of the lineage is at fault: a loss of engines alone costs the trainers nothing."""
    return any(pod.seat in seen.job.lineage_seats for pod in failure.pods)


def _fail(seen: Observation, climb: Climb, failure: Failure, verdict: Verdict) -> Decision:
    failed = replace(seen.climb or climb, tally=_judged(climb.tally, failure, verdict))
    is_of_settings = failure.cause is FailureCause.NOT_RETRIABLE
    todo = "suspend the job and change what is named; " if is_of_settings else ""
    message = f"{failure.message}: the job fails{verdict.by}; {todo}{how_to_retry(seen)}"
    return raise_epoch(seen, failed, Cause.FAILURE_POLICY, message)


def _judged(tally: FailureTally, failure: Failure, verdict: Verdict) -> FailureTally:
    return replace(tally, cause=failure.cause, action=verdict.action, rule=verdict.rule)


def _is_used_up(seen: Observation, climb: Climb, *, counts: bool) -> bool:
    """Return whether backoffLimit is used up. An uncounted failure never ends a job, even if the limit was lowered."""
    return counts and len(_counted(seen, climb)) >= seen.job.spec.backoff_limit


def _counted(seen: Observation, climb: Climb, *, adds: bool = False) -> tuple[int, ...]:
    """Return the steps of the failures that count in the climb, with one more if `adds`."""
    step = _step(seen, climb)
    found = still_counting(climb.tally.counted, step=step, window=seen.job.spec.backoff_window_steps)
    return (*found, max((step, *found))) if adds else found


def _step(seen: Observation, climb: Climb) -> int:
    """Return the step in which a failure happens: the climb's, or the newest batch where nothing is trained."""
    return climb.step if seen.job.ladder.trains else seen.recorded_step


def _tries(seen: Observation, climb: Climb) -> int:
    """Return the failures in a row before the next one: none once a step is done, or a batch where none is trained."""
    return climb.tally.tries_at(_step(seen, climb))


def after_failure(seen: Observation) -> Decision | None:
    """Let a failed job go on if a person asks for it by spec.retries, or by a higher backoffLimit if that ended it.

    Its members stop and its pods go first, as in a suspension. Then it starts as a job that is resumed.
    """
    climb, spec = seen.climb, seen.job.spec
    if climb is None or not climb.cause.is_failure:
        return None
    if spec.retries > climb.retries:
        tally, why = replace(climb.tally, counted=(), tries=0), "spec.retries is raised"
    elif climb.cause is Cause.BACKOFF_LIMIT and spec.backoff_limit > climb.restarts:
        tally = replace(climb.tally, counted=_counted(seen, climb, adds=True))
        why = f"backoffLimit is {spec.backoff_limit} now"
    else:
        return None
    return raise_epoch(seen, replace(climb, tally=tally), Cause.RETRIED, f"{why}: the job continues, with new pods")


def how_to_retry(seen: Observation) -> str:
    """Return how a person continues a job that fails now."""
    return f"to continue it: kubectl crlj retry -n {seen.job.namespace} {seen.job.name}"


def _give_up(seen: Observation, climb: Climb, message: str) -> Decision:
    spec, used = seen.job.spec, len(_counted(seen, climb))
    used_up = f"backoffLimit {spec.backoff_limit} is used up by {_count(used, 'failure')} within "
    used_up += _count(spec.backoff_window_steps, "step")
    if (others := climb.tally.pod_restarts + climb.tally.step_retries - used) > 0:
        used_up += f" ({others} more do not count)"
    todo = f"read the pods' logs and fix what fails; {how_to_retry(seen)}, or a backoffLimit above {used}"
    return raise_epoch(seen, seen.climb, Cause.BACKOFF_LIMIT, f"{message}, but {used_up}: {todo}")


def _count(number: int, one: str, more: str | None = None) -> str:
    return f"{number} {one if number == 1 else more or one + 's'}"


def _then(seen: Observation, climb: Climb, failure: Failure, verdict: Verdict, *, replaces: bool) -> str:
    match verdict.action:
        case FailureAction.ROLL_BACK:
            return f"back to step {_finished(seen, climb)}{verdict.by}"
        case FailureAction.RESTART_POD | FailureAction.REPLACE_POD_ELSEWHERE if replaces:
            pods = listed([pod.name for pod in failure.pods])
            nodes = listed(sorted({pod.node for pod in failure.pods if pod.node}))
            elsewhere = f", not on {nodes}" if verdict.action is FailureAction.REPLACE_POD_ELSEWHERE and nodes else ""
            return f"{pods} recreated{elsewhere}{verdict.by}"
        case _:
            return f"{starts(seen)} together again{verdict.by}"


def _tallied(seen: Observation, climb: Climb, failure: Failure, verdict: Verdict, *, replaces: bool) -> FailureTally:
    tally, avoids = climb.tally, climb.tally.avoids
    if replaces and verdict.action is FailureAction.REPLACE_POD_ELSEWHERE:
        nodes = dict.fromkeys(pod.node for pod in failure.pods if pod.node)
        avoids = (*(node for node in avoids if node not in nodes), *nodes)[-MAX_AVOIDED:]
    is_first = bool(climb.group)  # without a group, its pods are being made again already, for another failure
    return FailureTally(
        pod_restarts=tally.pod_restarts + (replaces and is_first),
        step_retries=tally.step_retries + (not replaces),
        step=max(_step(seen, climb), tally.step),
        tries=_tries(seen, climb) + is_first,
        cause=failure.cause,
        action=verdict.action,
        rule=verdict.rule,
        pod=_only_pod(seen, failure),
        avoids=avoids,
        counted=_counted(seen, climb, adds=verdict.counts and is_first),
    )


def _finished(seen: Observation, climb: Climb) -> int:
    """Return the last finished step that the record or any member knows of."""
    done = climb.step if seen.is_finished else climb.step - 1
    reported = (seen.rollout_facts.trained_step,) if seen.rollout_facts else ()
    return max(0, done, seen.trained_step, *reported)


def rest_after_roll_back(seen: Observation, following: Climb) -> Hold | None:
    """Hold a step that was rolled back until its back-off is over, counted from when engines served again.

    Only a step that was rolled back has failed and is climbed to once more, whatever was answered since.
    """
    tally = following.tally
    if not tally.tries_at(following.step):
        return None
    backoff_s = seen.job.spec.failure_policy.backoff_s(tally.tries - 1)
    due = seen.memory.reached.get(seen.job.ladder.top, seen.now) + backoff_s
    message = f"step {following.step} failed {_count(tally.tries, 'time')}: rollout continues before it is retried"
    return Hold(due, message) if seen.now < due else None


# ----------------------------------------------------------------------------------------------------- what has failed
def death(seen: Observation, *, step: int, tries: int) -> Failure:
    """Describe the death of a trainer in the climb to `step`.

    No pod is at fault if the trainer reported that it would end again. Otherwise the pods whose containers were ended
    for their memory are at fault, though a peer's rank may have been seen to end before theirs; without any, the first
    to die.
    """
    memory, of_trainers = seen.memory, seen.trainer_members
    since = seen.now if memory.died_at is None else memory.died_at
    if words := seen.not_retriable:
        message = f"a trainer ended at step {step}, and would end again: {words}"
        return Failure(FailureCause.NOT_RETRIABLE, message, (), since, tries)
    killed = tuple(pod for pod in of_trainers if pod.memory_kills > memory.memory_kills.get(pod.uid, 0))
    pods = killed or tuple(pod for pod in seen.gpu_members if pod.uid in memory.died) or seen.dead
    cause = FailureCause.OUT_OF_MEMORY if killed else FailureCause.TRAINER_DIED
    why = "its container was ended for its memory" if killed else "it ended by itself"
    message = f"a trainer died at step {step}: {_named(pods, why)}"
    return Failure(cause, message, pods, since, tries)


def standstill(seen: Observation, *, since: float, tries: int, message: str) -> Failure:
    """Describe a standstill on one rung, past its deadline.

    The pods that stand there are at fault; if all do, only those that report a problem.
    """
    slowest = tuple(member for member in seen.gpu_members if seen.standings[member.name] is seen.slowest)
    if len(slowest) == len(seen.gpu_members) > 1:
        troubled = tuple(member for member in slowest if _is_troubled(member))
        slowest = troubled if len(troubled) < len(slowest) else ()
    return Failure(FailureCause.RUNG_DEADLINE, message, slowest, since, tries, seen.slowest)


def _is_troubled(member: Member) -> bool:
    """Return whether the pod reports a problem that can hold it up."""
    problem = member.pod_facts.problem if member.pod_facts else None
    return problem is not None and problem.reason not in HOLD_UP_NOBODY


def lost_engines(seen: Observation) -> Iterator[Failure]:
    """Yield lost engines, except in pods whose trainer ended too: their container ended, and `death` answers that."""
    dead = {member.uid for member in seen.dead}
    for member in seen.gpu_members:
        engines = member.pod_facts.engines if member.pod_facts else ()
        failures = max((engine.failures for engine in engines), default=0)
        if failures and member.uid not in dead:
            often = f", {failures} times since it last served" if failures > 1 else ""
            message = f"the engine of {_named((member,), 'no last words')} was lost{often}"
            yield Failure(FailureCause.ENGINE_LOST, message, (member,), seen.now, failures - 1)


def lost_pods(seen: Observation, *, tries: int) -> Iterator[Failure]:
    """Yield GPU pods lost for a known cause, with a bad device, that leave their node, or whose member is silent.

    Those that are still there are one failure for each cause, so that all of a lost rack move at once, and none to a
    node that another one leaves. A pod that a person deleted is no failure.
    """
    newest = {member.seat: member for member in sorted(seen.members, key=lambda member: member.attempt)}
    there: dict[FailureCause, list[tuple[Member, str]]] = {}
    for seat in seen.job.gpu_seats:
        current, pod = seen.current.get(seat), newest.get(seat)
        if current is None:
            if pod is not None and pod.fate is not None:
                message = f"pod {pod.name} is lost ({pod.trouble or pod.fate})"
                yield Failure(pod.fate, message, (pod,), seen.now, tries)
        elif current.bad_device and not came_back(seen, current):
            message = f"a device of pod {current.name} is bad ({current.bad_device})"
            there.setdefault(FailureCause.BAD_DEVICE, []).append((current, message))
        elif current.notice and current in seen.noticed and seen.now >= leaves_at(seen, current.notice, seat):
            message = f"pod {current.name} leaves node {current.node} ({current.notice.message})"
            there.setdefault(current.notice.cause, []).append((current, message))
        elif is_silent(seen, current):
            message = f"no answer from pod {current.name} for {seen.now - (current.silent_since or seen.now):.0f} s"
            there.setdefault(FailureCause.MEMBER_SILENT, []).append((current, message))
    for cause, found in there.items():
        pods, messages = zip(*found, strict=True)
        yield Failure(cause, listed(list(messages)), pods, seen.now, tries)


def came_back(seen: Observation, pod: Member) -> bool:
    """Return whether the pod was made again for a bad device, on a node that was left in vain: no other had room.

    A node that is avoided for another reason, such as a silence that is over, has not been left for that.
    """
    tally = seen.climb.tally if seen.climb else FailureTally()
    return pod.attempt > 0 and tally.cause == FailureCause.BAD_DEVICE and pod.node in tally.avoids


def taints(seen: Observation, climb: Climb) -> tuple[TaintNode, ...]:
    """Return the taint of each node that the job avoids and on which it has a pod with a bad device.

    A pod that has ended is only a reason when its node begins to be avoided: later somebody may have mended that.
    """
    before = seen.climb.tally.avoids if seen.climb else ()
    return tuple(
        TaintNode(node, pod.uid)
        for node in climb.tally.avoids
        for pod in seen.members
        if pod.node == node
        and (pod.bad_device or (pod.notice and pod.notice.cause is FailureCause.BAD_DEVICE))
        and (pod.holds_room or node not in before)
    )


def leaves_at(seen: Observation, notice: Notice, seat: str) -> float:
    """Return when a pod leaves a node that gives notice.

    A node that is about to go leaves trainers time for the step under way and a checkpoint of it, and not more than
    some clouds leave the node.
    """
    is_saved = seen.is_up and seen.climb is not None and seen.saved_step >= seen.climb.step
    waits = notice.cause is FailureCause.POD_EVICTED and seat in seen.job.trainer_seats and not is_saved
    return notice.since + NOTICE_S if waits else seen.now


def _named(pods: tuple[Member, ...] | list[Member], usual: str) -> str:
    """Name the pods, each with the problem that it reports, or `usual`."""
    problems = [(pod.name, pod.pod_facts.problem if pod.pod_facts else None) for pod in pods[:10]]
    return ", ".join(f"{name} ({problem.message[:200] if problem else usual})" for name, problem in problems)


# -------------------------------------------------------------------------------------------------------- for messages
def starts(seen: Observation) -> str:
    """Name the processes whose start begins a climb."""
    return "the trainers start" if seen.job.ladder.trains else "the engines start"


def _replaced(seen: Observation) -> str:
    """Name the pods that no longer fill their seat and still exist, each with the reason."""
    climbing = set(seen.job.gpu_seats)
    gone = [member for member in seen.members if member.seat in climbing and not member.is_usable]
    newest = {member.seat: member for member in sorted(gone, key=lambda member: member.attempt)}
    reasons = [f"{member.name} ({_why_gone(member)})" for member in newest.values()]
    return f"replaced: {listed(reasons)}" if reasons else "a GPU pod was replaced"


def _why_gone(member: Member) -> str:
    return member.trouble or ("deleted" if member.ends_at is not None else str(member.phase))


def listed(words: list[str]) -> str:
    return ", ".join(words[:10]) + (f" and {len(words) - 10} more" if len(words) > 10 else "")
