"""List what can fail in a job and which actions may answer it: schema, plan, documentation and tests read the table.

A cause is here only if the operator can distinguish it from every other. Its answers are those that can help: what is
asked of a cause that it can't have is refused when the job is made, with the answers that it can have.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from colocated_rl_api.parts import Part, Rule, rules
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
        "8 are avoided.",
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
        "to end, as in a drain, nor those that end because of it.",
        _OF_A_STEP,
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
        "when all stand there, those that report a problem.",
        _OF_A_STEP,
        True,
    )
    WEIGHTS_DIFFER = (
        "WeightsDiffer",
        "Engines hold different weights of one version (weightSync.verify: Checksum), or two in a row of one pod were "
        "not shown to hold theirs (Checksum, Probe).",
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
        "A running GPU pod's agent does not answer the operator for 30 s while others do, or for 300 s while kubelet "
        "starts it again: so looks a lost node.",
        _OF_A_POD,
        False,
    )
    POD_EVICTED = (
        "PodEvicted",
        "The cluster took the GPU pod away and reports that in the pod's condition DisruptionTarget, or Kueue's "
        "TerminationTarget, or in kubelet's reason: preemption, drain, a node out of resources, a taint, a node that "
        "is shut down or gone.",
        _OF_A_POD,
        False,
    )
    POD_FAILED = (
        "PodFailed",
        "The GPU pod ended as Failed without being deleted: its node did not admit it, for instance for a device that "
        "is not healthy.",
        _OF_A_POD,
        True,
    )


def _does_not_answer(cause: FailureCause) -> str:
    """Return why an action is refused. Each cause has a rule: the server could not bound the cost of one over all."""
    return f"{cause} is answered by {', '.join(cause.answers)}: write one of them, or a rule of its own for that cause"


_CAN_ANSWER = tuple(
    Rule(
        field="action",
        rule=f"!('{cause}' in self.onCauses) || self.action in {[str(each) for each in cause.answers]}",
        message=_does_not_answer(cause),
    )
    for cause in FailureCause
)
_RUNGS_WORDS = (
    "atRungs names where the group stood when its deadline passed: it goes with onCauses: [RungDeadlineExceeded] alone"
)
_RUNGS = Rule(
    field="atRungs",
    rule=f"!has(self.atRungs) || self.onCauses == ['{FailureCause.RUNG_DEADLINE}']",
    message=_RUNGS_WORDS,
)


class FailureRule(Part):
    """An answer to some causes. `onCauses` and not `on`, which is the boolean true in kubectl's YAML."""

    model_config = ConfigDict(json_schema_extra=rules(*_CAN_ANSWER, _RUNGS))

    on_causes: list[Annotated[FailureCause, Field(strict=False)]] = Field(
        min_length=1,
        max_length=len(FailureCause),
        json_schema_extra={"x-kubernetes-list-type": "set"},
        description="Causes that the rule answers.",
    )
    at_rungs: list[Annotated[Rung, Field(strict=False)]] | None = Field(
        default=None,
        min_length=1,
        max_length=len(Rung),
        json_schema_extra={"x-kubernetes-list-type": "set"},
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

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if len(set(self.on_causes)) != len(self.on_causes):
            raise ValueError(f"onCauses is a set: {', '.join(self.on_causes)} has one of them twice")
        if self.at_rungs is not None and len(set(self.at_rungs)) != len(self.at_rungs):
            raise ValueError(f"atRungs is a set: {', '.join(self.at_rungs)} has one of them twice")
        for cause in self.on_causes:
            if self.action not in cause.answers:
                raise ValueError(_does_not_answer(cause))
        if self.at_rungs is not None and self.on_causes != [FailureCause.RUNG_DEADLINE]:
            raise ValueError(_RUNGS_WORDS)
        return self


_BACKOFF_FOUND = "maxBackoffSeconds is %d and backoffSeconds is %d: write a maximum that is no smaller"
_BACKOFF = Rule(
    field="maxBackoffSeconds",
    rule="!has(self.backoffSeconds) || !has(self.maxBackoffSeconds) || self.backoffSeconds <= self.maxBackoffSeconds",
    message="maxBackoffSeconds must be at least backoffSeconds",
    expression=f"'{_BACKOFF_FOUND}'.format([self.maxBackoffSeconds, self.backoffSeconds])",
)


_POLICY_CONFIG = ConfigDict(json_schema_extra=rules(_BACKOFF))


class FailurePolicy(Part):
    """The policy answers failures by cause; a cause without a rule that matches has its usual answer."""

    model_config = _POLICY_CONFIG

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

    @model_validator(mode="after")
    def _backs_off_up_to_a_maximum(self) -> Self:
        if self.backoff_seconds > self.max_backoff_seconds:
            raise ValueError(_BACKOFF_FOUND % (self.max_backoff_seconds, self.backoff_seconds))
        return self

    def backoff_s(self, tries: int) -> float:
        """Return the delay before the answer to a failure that so many others preceded in a row."""
        return min(self.backoff_seconds * 2.0 ** min(tries, 32), self.max_backoff_seconds)
