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

    RESTART_ENGINE = "RestartEngine", "The agent starts the engine again, more slowly each time; the pod stays."
    RETRY_STEP = (
        "RetryStep",
        "The trainers start together again from the newest checkpoint and do the step again; engines and pods stay.",
    )
    ROLL_BACK = (
        "RollBack",
        "The trainers start together again and go back to the last finished step, engines serve it, and rollout goes "
        "on until the step is tried again after the back-off.",
    )
    RESTART_POD = (
        "RestartPod",
        "The pod is deleted and made again; then the trainers start together again. Those of a job whose engines have "
        "pods of their own go on while one of these is made again.",
    )
    REPLACE_POD_ELSEWHERE = (
        "ReplacePodElsewhere",
        "As RestartPod, and no GPU pod of the job is put on the node where it stood any more: of such nodes the newest "
        "8 are avoided. Where no rule has this action, as a usual answer, a node is avoided while others have room.",
    )
    REQUEUE = (
        "Requeue",
        "Members stop and pods go, so that their devices are free; the job tries again after a while that grows each "
        "time and is another for each job: of jobs that gave up together, the oldest comes back first.",
    )
    FAIL_JOB = "FailJob", "The job fails at once: its members stop, its pods' logs and its volumes are kept."


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
        "An engine ended by itself, or its agent ended it because its state was no longer known. Where a "
        "trainer of its pod ended too, as with their container, that is the cause. maxTries counts how often since it "
        "last served. RestartEngine never counts.",
        (FailureAction.RESTART_ENGINE, *_OF_A_POD),
        True,
    )
    TRAINER_DIED = (
        "TrainerDied",
        "A trainer rank ended by itself, or its agent ended it past a deadline. Not one whose container was signalled "
        "to end, as in a drain, nor those that end because of it. The usual answer to the second death at a step that "
        "began in the same one of several pods is ReplacePodElsewhere.",
        _OF_A_STEP,
        True,
    )
    NOT_RETRIABLE = (
        "NotRetriable",
        "A trainer rank ended and reported that it would end again until the job's settings change: a gradient that "
        "is not finite (nonFiniteGradient), options that it rejects, a model or a step for which the memory that it "
        "has never suffices.",
        (FailureAction.FAIL_JOB, FailureAction.RETRY_STEP, FailureAction.ROLL_BACK),
        True,
    )
    OUT_OF_MEMORY = (
        "OutOfMemory",
        "The same, and by then kubelet has reported that the pod's GPU container was ended for its memory. Where "
        "the kernel ends single processes (cgroup v1), that is TrainerDied.",
        _OF_A_STEP,
        True,
    )
    RUNG_DEADLINE = (
        "RungDeadlineExceeded",
        "The group stood on one rung for longer than spec.switch allows. At fault are the pods that stand lowest; "
        "when all stand there, those that report a problem. Or no trainer got on with a step for a minute and ten "
        "times as long as ever in a finished one: at fault are the pods that are furthest behind.",
        _OF_A_STEP,
        True,
    )
    WEIGHTS_DIFFER = (
        "WeightsDiffer",
        "Engines hold different weights of one version, or two in a row were not shown to hold theirs, and no other of "
        "their pod holds them (weightSync.verify: Weights).",
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
        "containers start, or kubelet starts them again: so looks a lost node.",
        _OF_A_NODE,
        False,
    )
    POD_EVICTED = (
        "PodEvicted",
        "The cluster took the GPU pod away and reports that in the pod's condition DisruptionTarget, or Kueue's "
        "TerminationTarget, or in kubelet's reason: preemption, drain, a node out of resources, a taint, a node that "
        "is shut down or gone. Or the pod left a node that is about to go, by the chart's nodes.leavingTaints.",
        _OF_A_POD,
        False,
    )
    BAD_DEVICE = (
        "BadDevice",
        "A device of the GPU pod is Unhealthy, as its node reports in allocatedResourcesStatus (Kubernetes 1.36; with "
        "the feature gate ResourceHealthStatus before); or its driver tells of errors of its memory that can't be "
        "corrected, of a row that can't be remapped, that it is lost, or of an XID by which it or a link is bad; or "
        "its node has one of nodes.badConditions of the chart.",
        _OF_A_NODE,
        False,
    )
    POD_FAILED = (
        "PodFailed",
        "The GPU pod ended as Failed without being deleted: its node did not admit it, for instance for a device that "
        "is not healthy, or evicted it because it filled a volume of its own or its ephemeral-storage limit.",
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
