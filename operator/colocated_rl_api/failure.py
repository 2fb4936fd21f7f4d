"""List what can fail in a job and which actions may answer it: schema, plan, documentation and tests read the table.

A cause is here only if the operator can distinguish it from every other. Its answers are those that can help: what is
asked of a cause that it can't have is refused when the job is made, with the answers that it can have.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field

from colocated_rl_api.back_off import doubled_s
from colocated_rl_api.parts import Distinct, Part, Quantity, Rule, size_in_bytes
from colocated_rl_api.rungs import Rung


class FailureAction(StrEnum):
    """An action answers a failure."""

    meaning: str

    def __new__(cls, word: str, meaning: str) -> Self:
        action = str.__new__(cls, word)
        action._value_ = word
        action.meaning = meaning
        return action

    RESTART_ENGINE = "RestartEngine", "The agent restarts the engine, with a growing back-off; the pod stays."
    RETRY_STEP = (
        "RetryStep",
        "All trainers restart from the newest checkpoint and repeat the step; engines and pods stay.",
    )
    ROLL_BACK = (
        "RollBack",
        "All trainers restart at the last finished step, engines serve it, and rollout continues until the step is "
        "retried after the back-off.",
    )
    RESTART_POD = (
        "RestartPod",
        "The pod is recreated, then all trainers restart. If engines have pods of their own, trainers continue while "
        "one of these is recreated.",
    )
    REPLACE_POD_ELSEWHERE = (
        "ReplacePodElsewhere",
        "As RestartPod, and no further GPU pod of the job runs on that node; the newest 8 such nodes are avoided. If "
        "it is the default action and no rule's, a node is avoided only while others have room.",
    )
    REQUEUE = (
        "Requeue",
        "Members stop and pods are deleted, so that their devices are free. The job tries again after a delay that "
        "grows each time and differs between jobs: of jobs that gave up together, the oldest returns first.",
    )
    FAIL_JOB = "FailJob", "The job fails at once: its members stop; its pods' logs and its volumes are kept."


_OF_A_STEP = (
    *(FailureAction.RETRY_STEP, FailureAction.ROLL_BACK, FailureAction.RESTART_POD),
    *(FailureAction.REPLACE_POD_ELSEWHERE, FailureAction.FAIL_JOB),
)
_OF_A_POD = FailureAction.RESTART_POD, FailureAction.REPLACE_POD_ELSEWHERE, FailureAction.FAIL_JOB
_OF_A_NODE = FailureAction.REPLACE_POD_ELSEWHERE, FailureAction.RESTART_POD, FailureAction.FAIL_JOB


class FailureCause(StrEnum):
    """A cause of a failure, as the operator reports it.

    answers: what may be done about it, the usual one first. counts: whether that is a failure of the job, against
    backoffLimit, unless a rule decides otherwise. What the cluster takes away is none.
    """

    meaning: str
    answers: tuple[FailureAction, ...]
    counts: bool

    def __new__(cls, word: str, meaning: str, answers: tuple[FailureAction, ...], counts: bool) -> Self:
        cause = str.__new__(cls, word)
        cause._value_ = word
        cause.meaning, cause.answers, cause.counts = meaning, answers, counts
        return cause

    ENGINE_LOST = (
        "EngineLost",
        "An engine exited, or its agent killed it because its state was unknown. If a trainer of its pod exited too, "
        "as with their container, that is the cause instead. maxTries counts failures since it last served. "
        "RestartEngine never counts.",
        (FailureAction.RESTART_ENGINE, *_OF_A_POD),
        True,
    )
    TRAINER_DIED = (
        "TrainerDied",
        "A trainer rank exited, or its agent killed it after a deadline. Ranks that end because a container got "
        "SIGTERM, as in a drain, do not count. The default answer to the second death at a step that began in the same "
        "one of several pods is ReplacePodElsewhere.",
        _OF_A_STEP,
        True,
    )
    NOT_RETRIABLE = (
        "NotRetriable",
        "A trainer rank exited and reported that this would recur until the job's settings change: a gradient that is "
        "not finite (nonFiniteGradient), options that it rejects, a model or a step that never fits into memory.",
        (FailureAction.FAIL_JOB, FailureAction.RETRY_STEP, FailureAction.ROLL_BACK),
        True,
    )
    OUT_OF_MEMORY = (
        "OutOfMemory",
        "As TrainerDied, and kubelet has reported that the pod's GPU container was killed for its memory. If the "
        "kernel kills single processes (cgroup v1), it is TrainerDied.",
        _OF_A_STEP,
        True,
    )
    RUNG_DEADLINE = (
        "RungDeadlineExceeded",
        "The group stood on one rung for longer than spec.switch allows. At fault are the pods on the lowest rung, or, "
        "if all are on it, those that report a problem. Or no trainer made progress for a minute and ten times as long "
        "as ever in a finished step: at fault are the pods that are furthest behind.",
        _OF_A_STEP,
        True,
    )
    WEIGHTS_DIFFER = (
        "WeightsDiffer",
        "Engines hold different weights of one version, or two in a row failed the check of theirs and no other engine "
        "of their pod holds them (weightSync.verify: Weights).",
        (FailureAction.RETRY_STEP, FailureAction.FAIL_JOB),
        True,
    )
    PODS_NOT_READY = (
        "PodsNotReady",
        "Not every member answered within podsReadyDeadlineSeconds of the start or of a loss.",
        (FailureAction.REQUEUE, FailureAction.FAIL_JOB),
        False,
    )
    MEMBER_SILENT = (
        "MemberSilent",
        "A running GPU pod's agent does not answer the operator for 30 s while others do, or for 300 s while its "
        "containers start or restart. A lost node looks the same.",
        _OF_A_NODE,
        False,
    )
    POD_EVICTED = (
        "PodEvicted",
        "The cluster removed the GPU pod, and the pod's condition DisruptionTarget, Kueue's TerminationTarget, or "
        "kubelet's reason says so: preemption, drain, a node out of resources, a taint, a node that is shut down or "
        "gone. Or the pod left a node that is about to go, by the chart's nodes.leavingTaints.",
        _OF_A_POD,
        False,
    )
    BAD_DEVICE = (
        "BadDevice",
        "The node reports a device of the GPU pod as Unhealthy in allocatedResourcesStatus (Kubernetes 1.36; before, "
        "with the feature gate ResourceHealthStatus); or its driver reports uncorrectable memory errors, a row that "
        "can't be remapped, a lost device, or an XID of a bad device or link; or its node has one of "
        "nodes.badConditions of the chart.",
        _OF_A_NODE,
        False,
    )
    POD_FAILED = (
        "PodFailed",
        "The GPU pod ended as Failed without being deleted: its node did not admit it, for instance for an unhealthy "
        "device, or evicted it because it filled one of its volumes or its ephemeral-storage limit.",
        _OF_A_POD,
        True,
    )


_CAN_ANSWER = tuple(  # a rule for each cause: the server could not bound the cost of one over all
    Rule(
        field="action",
        rule=f"!('{cause}' in self.onCauses) || self.action in {[str(each) for each in cause.answers]}",
        message=f"{cause} is answered by {', '.join(cause.answers)}: write one of them, or a rule of its own for that "
        "cause",
    )
    for cause in FailureCause
)
_RUNGS = Rule(
    field="atRungs",
    rule=f"!has(self.atRungs) || self.onCauses == ['{FailureCause.RUNG_DEADLINE}']",
    message="atRungs names where the group stood when its deadline passed: it goes with onCauses: "
    "[RungDeadlineExceeded] alone",
)


class FailureRule(Part):
    """An answer to some causes. `onCauses` and not `on`, which is the boolean true in kubectl's YAML."""

    RULES = (*_CAN_ANSWER, _RUNGS)

    on_causes: Distinct[Annotated[FailureCause, Field(strict=False)]] = Field(
        min_length=1,
        max_length=len(FailureCause),
        description="Causes that the rule answers.",
    )
    at_rungs: Distinct[Annotated[Rung, Field(strict=False)]] | None = Field(
        default=None,
        min_length=1,
        max_length=len(Rung),
        description="Rungs at which the group stood still, of RungDeadlineExceeded; any when absent.",
    )
    max_tries: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="Number of failures in a row, without a finished step between them, that the rule answers; all "
        "when absent.",
    )
    action: Annotated[FailureAction, Field(strict=False)] = Field(description="What is done.")
    counts: bool | None = Field(
        default=None,
        description="Whether such a failure counts against backoffLimit; by its cause when absent.",
    )


_BACKOFF = Rule(
    field="maxBackoffSeconds",
    rule="!has(self.backoffSeconds) || !has(self.maxBackoffSeconds) || self.backoffSeconds <= self.maxBackoffSeconds",
    message="maxBackoffSeconds must be at least backoffSeconds",
    expression="'maxBackoffSeconds is %d and backoffSeconds is %d: write a maximum that is no smaller'"
    ".format([self.maxBackoffSeconds, self.backoffSeconds])",
)


class FailurePolicy(Part):
    """The policy answers failures by cause; a cause without a rule that matches has its usual answer."""

    RULES = (_BACKOFF,)

    rules: list[FailureRule] = Field(
        default_factory=list, max_length=16, description="In order: the first that matches is followed."
    )
    backoff_seconds: int = Field(
        default=10,
        ge=0,
        le=3600,
        description="Delay before a step is tried again after a failure, doubled with each further failure in a row; "
        "0 is no delay.",
    )
    max_backoff_seconds: int = Field(default=300, ge=0, le=86_400, description="No back-off is longer.")
    max_trainer_growth: Quantity | None = Field(
        default=None,
        description="Host memory that a trainer rank may gain over what it held after the first switch of its process. "
        "Past it all trainers start again with the next step that follows a checkpoint, which costs no step and no "
        "restart. No limit when absent.",
    )

    @property
    def max_growth_bytes(self) -> int | None:
        return None if self.max_trainer_growth is None else size_in_bytes(self.max_trainer_growth)

    def backoff_s(self, tries: int) -> float:
        """Return the delay before the answer to a failure that so many others preceded in a row."""
        return doubled_s(self.backoff_seconds, tries, self.max_backoff_seconds)
