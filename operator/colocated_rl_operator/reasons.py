"""Every reason that the operator gives, in conditions, events, status.cause and logs. Stable: people alert on them."""

from __future__ import annotations

from enum import StrEnum

from colocated_rl_api.member_wire import Goal


class Cause(StrEnum):
    """Why the epoch was raised; `status.cause`."""

    FIRST_START = "FirstStart"
    NEXT_STEP = "NextStep"
    TAKEOVER = "OperatorRestarted"  # or another operator had the job meanwhile: same goal, new epoch
    POD_REPLACED = "PodReplaced"
    TRAINER_DIED = "TrainerDied"
    RUNG_DEADLINE = "RungDeadlineExceeded"
    ALL_STEPS_DONE = "AllStepsDone"
    BACKOFF_LIMIT = "BackoffLimitExceeded"
    PODS_NOT_READY = "PodsReadyDeadlineExceeded"
    DEADLINE = "DeadlineExceeded"
    SUSPENDED = "Suspended"  # members stop, then pods go, until spec.suspend is false
    RESUMED = "Resumed"

    @property
    def is_failure(self) -> bool:
        """The job ends as failed."""
        return self in (Cause.BACKOFF_LIMIT, Cause.PODS_NOT_READY, Cause.DEADLINE)

    @property
    def is_recovery(self) -> bool:
        """Trainers start again after a loss."""
        return self in (Cause.POD_REPLACED, Cause.TRAINER_DIED, Cause.RUNG_DEADLINE)

    @property
    def goal(self) -> Goal:
        stops = self in (Cause.ALL_STEPS_DONE, Cause.SUSPENDED) or self.is_failure
        return Goal.STOP if stops else Goal.CLIMB


class Waiting(StrEnum):
    """What a plan holds for."""

    PODS = "PodsNotReady"  # a pod is missing, starting or silent
    STOPPING = "MembersStopping"


class ConditionType(StrEnum):
    READY = "Ready"  # kstatus: the job does what its spec says, or has done it
    RECONCILING = "Reconciling"  # kstatus: on the way there
    STALLED = "Stalled"  # kstatus: a person must do something
    PODS_READY = "PodsReady"
    GPU_SHARING_READY = "GPUSharingReady"  # every engine has served beside or in turn with its trainer
    SUSPENDED = "Suspended"  # no pod of the job is there, and none is made
    COMPLETE = "Complete"
    FAILED = "Failed"


class Reason(StrEnum):
    """Reasons of conditions, besides the causes above and, of GPUSharingReady, the placement."""

    SERVING = "Serving"  # every gate is open on the target's version
    CLIMBING = "Climbing"
    PODS_STARTING = "PodsStarting"
    MEMBERS_ANSWER = "MembersAnswer"
    JOB_ENDED = "JobEnded"
    SUSPENDING = "Suspending"  # pods are on their way out
    NOT_SUSPENDED = "NotSuspended"
    STEPS_REMAIN = "StepsRemain"
    COMPLETED = "Completed"
    NOT_FAILED = "NotFailed"
    NOT_STALLED = "NotStalled"
    INVALID_SPEC = "InvalidSpec"
    DELETED = "Deleted"
    POD_DELETED = "PodDeleted"  # events: a pod that stays silent or does not end
    OBJECT_REFUSED = "ObjectRefused"  # the API server does not admit an object of the job
