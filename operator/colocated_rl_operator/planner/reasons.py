"""Every reason that the operator gives, in conditions, events, status.cause and logs. Stable: people alert on them.

Each states here what it means and what a person can do; `docs/reference.md` is made of it. There is no other way to
give a reason: conditions and events take these types.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from colocated_rl_api.member_wire import Goal


class DocumentedReason(StrEnum):
    """Holds a word for programs, with what it means, and what to do about it: "" if nothing."""

    meaning: str
    advice: str

    def __new__(cls, word: str, meaning: str, advice: str = "") -> Self:
        reason = str.__new__(cls, word)
        reason._value_ = word
        reason.meaning, reason.advice = meaning, advice
        return reason


_MORE_RESTARTS = "read why in the event and in the pod's log; raise backoffLimit if restarts are expected"
_RETRY = "continue it from its newest checkpoint with `kubectl crlj retry JOB`"


class Cause(DocumentedReason):
    """A cause raised the epoch; `status.cause`, and an event for each but OperatorRestarted."""

    FIRST_START = "FirstStart", "Every member answers: the trainers start for the first time."
    NEXT_STEP = "NextStep", "The batch of the next step is sealed: the GPUs change hands."
    TAKEOVER = (
        "OperatorRestarted",
        "Another operator process took over the job, or had it meanwhile; the goal is the same.",
    )
    POD_REPLACED = (
        "PodReplaced",
        "A GPU pod was lost and is recreated: all trainers restart from the newest checkpoint, unless it had only "
        "engines.",
        "see PodDeleted, or why its node lost it; the event says whether it counts against backoffLimit",
    )
    TRAINER_DIED = (
        "TrainerDied",
        "A trainer's process exited: all trainers restart from the newest checkpoint.",
        _MORE_RESTARTS,
    )
    RUNG_DEADLINE = (
        "RungDeadlineExceeded",
        "A pod stayed on a rung for longer than spec.switch allows: all trainers restart.",
        "the event names pod and rung, status.outOfLine has what it waits for; if it is only slow, suspend the job and "
        "raise that deadline of spec.switch",
    )
    WEIGHTS_DIFFER = (
        "WeightsDiffer",
        "Engines on the same version hold different weights, without a majority; or two engines in a row failed the "
        "check of the same export (weightSync.verify: Weights). They do not serve, and all trainers restart.",
        "the event names each pod with its checksum, or the finding; check memory and devices of their nodes; "
        + _MORE_RESTARTS,
    )
    TRAINERS_RECYCLED = (
        "TrainersRecycled",
        "A trainer's host memory grew by more than failurePolicy.maxTrainerGrowth: all trainers restart with the next "
        "step, from the checkpoint of the last one. It does not count against backoffLimit.",
        "nothing; colocate_child_memory_growth_bytes shows how fast they grow",
    )
    RESIZED = (
        "Resized",
        "The group continues with another number of replicas: as many as there is room for (spec.elasticPolicy), or as "
        "spec.replicas requests. All trainers restart, and batches are divided again.",
        "the event says how many and why; condition PodsReady says what is missing",
    )
    ALL_STEPS_DONE = "AllStepsDone", "The last step is done, and its checkpoint and model are saved: members stop."
    BACKOFF_LIMIT = (
        "BackoffLimitExceeded",
        "More than backoffLimit failures happened within backoffWindowSteps: the job has failed.",
        "the message has the last failure; the pods' logs are kept until the job continues or is deleted; "
        f"{_RETRY}, or with a higher backoffLimit",
    )
    FAILURE_POLICY = (
        "FailurePolicy",
        "A failure was answered with FailJob, by a rule of spec.failurePolicy or because it would recur "
        "(NotRetriable): the job has failed.",
        f"the message names the failure, and the rule if there was one; fix what failed; {_RETRY}",
    )
    PODS_NOT_READY = (
        "PodsReadyDeadlineExceeded",
        "Not every member answered within podsReadyDeadlineSeconds: members stop and pods are deleted, so that no GPU "
        "waits for missing ones, and the job tries again later.",
        "the message names the missing pods and why: quota, nodes, images, claims",
    )
    DEADLINE = (
        "DeadlineExceeded",
        "The job was active for longer than activeDeadlineSeconds: it has failed.",
        f"{_RETRY}: its time starts again; while a job runs the deadline may be raised",
    )
    SUSPENDED = (
        "Suspended",
        "The job is suspended (spec.suspend): members stop, then pods are deleted, and volumes stay.",
        "set spec.suspend to false to continue the job",
    )
    RESUMED = (
        "Resumed",
        "Suspension ended (spec.suspend), or a retried job's pods are gone: pods are created, and trainers start.",
    )
    RETRIED = (
        "Retried",
        "A failed job was asked to continue, by spec.retries or a higher backoffLimit: its pods are deleted, then it "
        "is resumed.",
    )

    @property
    def is_failure(self) -> bool:
        """Return whether the job ends as failed."""
        return self in (Cause.BACKOFF_LIMIT, Cause.FAILURE_POLICY, Cause.DEADLINE)

    @property
    def is_recovery(self) -> bool:
        """Return whether trainers start again after a loss."""
        return self in (Cause.POD_REPLACED, Cause.TRAINER_DIED, Cause.RUNG_DEADLINE, Cause.WEIGHTS_DIFFER)

    @property
    def rests(self) -> bool:
        """Return whether no pod is wanted for now."""
        return self in (Cause.SUSPENDED, Cause.PODS_NOT_READY, Cause.RETRIED)

    @property
    def goal(self) -> Goal:
        stops = self is Cause.ALL_STEPS_DONE or self.rests or self.is_failure
        return Goal.STOP if stops else Goal.CLIMB


class Waiting(StrEnum):
    """A plan holds for one of these reasons."""

    PODS = "PodsNotReady"  # a pod is missing, starting or silent
    STOPPING = "MembersStopping"
    BACKOFF = "BackingOff"  # the answer to a failure has its time
    QUEUE = "Queued"  # the job is tried again later
    CHECKPOINT = "CheckpointUnderWay"  # trainers start again from it: they have grown, or will be more or fewer
    ENGINE = "EngineStarting"  # it has failed, and the next step would end it once more


HOLDS_A_STEP = frozenset({Waiting.CHECKPOINT, Waiting.ENGINE})  # of a job that serves, and goes on by itself


class ConditionType(DocumentedReason):
    """Names the conditions of a job, which are always all there."""

    READY = (
        "Ready",
        "The job does what its spec asks for: every engine has served the current lineage. It stays true during "
        "switches and when the job is complete.",
    )
    RECONCILING = "Reconciling", "The job is on its way to Ready, or to Suspended."
    STALLED = "Stalled", "A person must act.", "see the message"
    PODS_READY = "PodsReady", "Every member answers: GPU pods and the rollout controller."
    GPU_SHARING_READY = (
        "GPUSharingReady",
        "Every engine has served, in turn with its trainer or beside it; the reason is the placement.",
    )
    SUSPENDED = "Suspended", "The job is suspended and none of its pods is left."
    COMPLETE = "Complete", "All steps are done and saved, and every member has stopped."
    FAILED = (
        "Failed",
        "The job does not continue by itself, and every member has stopped.",
        "the reason and the message say why, and how to continue",
    )


class Reason(DocumentedReason):
    """Reasons besides the causes. Completed and those behind it have an event too, but for PodNotRunning."""

    SERVING = "Serving", "Engines serve, or change hands in an ordinary switch."
    TRAINING = "Training", "Trainers train, in a job without engines."
    CLIMBING = "Climbing", "Trainers and engines start."
    PODS_STARTING = (
        "PodsStarting",
        "Not every member answers: pods start, or were lost.",
        "the message names them; podsReadyDeadlineSeconds after the loss the job gives its GPUs back and tries again",
    )
    OPERATOR_CUT_OFF = (
        "OperatorCutOff",
        "Every pod is ready, but the operator reaches none of those that it reached before. What runs continues, the "
        "next switch waits, and no deadline of the pods runs.",
        "check the network between the operator and the job's pods, and the operator's log: after `authority made` the "
        "job's pods must be recreated",
    )
    BACKING_OFF = (
        "BackingOff",
        "Something failed, and the operator waits for the back-off of spec.failurePolicy. An event too.",
        "the message says what failed, what will be done and when",
    )
    MEMBERS_ANSWER = "MembersAnswer", "Every member answers."
    JOB_ENDED = "JobEnded", "The job is complete or has failed: its members have stopped."
    TIME_SLICED = "TimeSliced", "Engines and trainer take turns on the GPUs."
    RESIDENT = "Resident", "Engines and trainer both stay on the GPUs."
    DISAGGREGATED = "Disaggregated", "Engines and trainers have GPUs of their own."
    MIXED = "Mixed", "Some engines and the trainers take turns on the GPUs, other engines have their own."
    ROLLOUT_ONLY = "RolloutOnly", "Engines have the GPUs: batches are recorded and not trained."
    TRAIN_ONLY = "TrainOnly", "The trainer has the GPUs: it trains recorded batches."
    SUSPENDING = "Suspending", "Members stop, then their pods are deleted."
    NOT_SUSPENDED = "NotSuspended", "The job runs, or has ended."
    STEPS_REMAIN = "StepsRemain", "There are steps to do."
    NOT_FAILED = "NotFailed", "The job has not failed."
    NOT_STALLED = "NotStalled", "No person is needed."
    DELETED = "Deleted", "The job is being deleted: members stop, then pods are deleted."
    COMPLETED = "Completed", "All steps are done."
    INVALID_SPEC = (
        "InvalidSpec",
        "The spec breaks a rule that the API server could not check, or a newer operator wrote the status; running "
        "pods are left alone.",
        "fix what the message names",
    )
    OBJECT_REFUSED = (
        "ObjectRefused",
        "The API server rejects an object of the job, or the deletion of an expired one (quota, pod security, a "
        "webhook, a missing right, a name that is taken), or has failed at it for 30 s. Or the job may not use its "
        "profile, or its pods have what the profile does not allow.",
        "the message has the server's error; it is retried every 30 s, a deletion less and less often",
    )
    VOLUME_LOST = (
        "VolumeLost",
        "The claim of the store or of the checkpoints of a started job is gone: no pod is created, because on an empty "
        "volume it would repeat what is recorded as done.",
        "restore the claims that the message names, with their data, or create another job, which starts from its "
        "spec.model; the operator looks every 30 s",
    )
    POD_DELETED = (
        "PodDeleted",
        "A pod was deleted because its member stayed silent or did not stop, because its node did not end it, or "
        "because an injected container kept it running after its job.",
        "the message names it, with the last output of our containers if there is any; check its node",
    )
    NODE_TAINTED = (
        "NodeTainted",
        "An event: a pod was recreated on another node because of a bad device, and its node is tainted, as the "
        "chart's nodes.taint allows.",
        "repair the node, then remove its taint: kubectl taint node NODE rl.colocate.dev/unfit-",
    )
    ANOTHER_OPERATOR = (
        "AnotherOperator",
        "An event: status.operator names another operator, and this one leaves the job alone.",
        "have each namespace watched by one operator; to hand jobs over, name the other one in the chart's "
        "watch.takeOver",
    )
    POD_NOT_RUNNING = (
        "PodNotRunning",
        "A container of the pod does not run; only in status.outOfLine.",
        "the message is kubelet's, with the last output of a container of ours",
    )
