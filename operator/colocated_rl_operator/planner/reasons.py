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
_RETRY = "let it go on from its newest checkpoint with `kubectl crlj retry JOB`"


class Cause(DocumentedReason):
    """A cause raised the epoch; `status.cause`, and an event for each but OperatorRestarted."""

    FIRST_START = "FirstStart", "Every member answers: the trainers start for the first time."
    NEXT_STEP = "NextStep", "The batch of the next step is sealed: the GPUs change hands."
    TAKEOVER = "OperatorRestarted", "Another operator process has the job, or had it meanwhile: the goal is the same."
    POD_REPLACED = (
        "PodReplaced",
        "A GPU pod was lost and is made again: the trainers start together again from the newest checkpoint, unless it "
        "had engines alone.",
        "see PodDeleted, or why its node let it go; the event states whether it counts against backoffLimit",
    )
    TRAINER_DIED = (
        "TrainerDied",
        "A trainer's process ended: the trainers start together again from the newest checkpoint.",
        _MORE_RESTARTS,
    )
    RUNG_DEADLINE = (
        "RungDeadlineExceeded",
        "A pod stayed where it was for longer than spec.switch allows: the trainers start together again.",
        "the event names pod and rung, status.outOfLine has what it waits for; if it is slow and well, raise that "
        "deadline of spec.switch while the job is suspended",
    )
    WEIGHTS_DIFFER = (
        "WeightsDiffer",
        "Engines took the same version and hold different weights, no more than half of them the same; or an engine "
        "was not shown to hold its weights, nor was the one that was started on them after it (weightSync.verify: "
        "Weights). What differs does not serve, the trainers start together again.",
        "the event names each pod with its checksum, or states what was found; look at the memory and the devices of "
        "their nodes; " + _MORE_RESTARTS,
    )
    TRAINERS_RECYCLED = (
        "TrainersRecycled",
        "A trainer has gained more host memory than failurePolicy.maxTrainerGrowth: all of them start together again "
        "with the next step, from the checkpoint of the last one. It does not count against backoffLimit.",
        "nothing; colocate_child_memory_growth_bytes shows how fast they grow",
    )
    RESIZED = (
        "Resized",
        "The group goes on with another number of replicas: as many as there is room for (spec.elasticPolicy), or as "
        "spec.replicas asks for. The trainers start together again, and batches are dealt anew.",
        "the event states how many and why; condition PodsReady states what is missing",
    )
    ALL_STEPS_DONE = "AllStepsDone", "The last step is done and saved, its model is left: members are asked to stop."
    BACKOFF_LIMIT = (
        "BackoffLimitExceeded",
        "More than backoffLimit failures happened within backoffWindowSteps: the job has failed.",
        "the message states the last failure; the pods' logs are there until the job goes on or is deleted; "
        f"{_RETRY}, or with a higher backoffLimit",
    )
    FAILURE_POLICY = (
        "FailurePolicy",
        "A failure is answered with FailJob, by a rule of spec.failurePolicy or because it would come again "
        "(NotRetriable): the job has failed.",
        f"the message names the failure, and the rule if it was one; put right what failed; {_RETRY}",
    )
    PODS_NOT_READY = (
        "PodsReadyDeadlineExceeded",
        "Not every member answered within podsReadyDeadlineSeconds: members stop and pods go, so that no GPU waits for "
        "those that are missing, and the job tries again later.",
        "the message names who was missing and why: quota, nodes, images, claims",
    )
    DEADLINE = (
        "DeadlineExceeded",
        "The job was active for longer than activeDeadlineSeconds: it has failed.",
        f"{_RETRY}: its time begins anew; while a job runs the deadline may be raised",
    )
    SUSPENDED = (
        "Suspended",
        "Suspension is asked for (spec.suspend): members stop, then pods go, and volumes stay.",
        "set spec.suspend to false for the job to go on",
    )
    RESUMED = (
        "Resumed",
        "Suspension ended (spec.suspend), or a retried job's pods are gone: pods are made, trainers start together.",
    )
    RETRIED = (
        "Retried",
        "A failed job is asked to go on, by spec.retries or a higher backoffLimit: its pods go, then it is resumed.",
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
        "The job does what its spec asks for: every engine has served the present lineage, also through switches. It "
        "stays true when the job is complete.",
    )
    RECONCILING = "Reconciling", "The job is on its way to Ready, or to Suspended."
    STALLED = "Stalled", "A person must act.", "the message states on what"
    PODS_READY = "PodsReady", "Every member answers: GPU pods and the rollout controller."
    GPU_SHARING_READY = (
        "GPUSharingReady",
        "Every engine has served, in turn with its trainer or beside it; the reason is the placement.",
    )
    SUSPENDED = "Suspended", "The job is suspended and none of its pods is left."
    COMPLETE = "Complete", "All steps are done and saved, and every member has stopped."
    FAILED = (
        "Failed",
        "The job does not go on by itself, and every member has stopped.",
        "the reason and the message say why, and how it goes on",
    )


class Reason(DocumentedReason):
    """Reasons besides the causes. Completed and those behind it have an event too, but for PodNotRunning."""

    SERVING = "Serving", "Engines serve, or change hands in an ordinary switch."
    TRAINING = "Training", "Trainers train, in a job without engines."
    CLIMBING = "Climbing", "Trainers and engines start."
    PODS_STARTING = (
        "PodsStarting",
        "Not every member answers yet, or again.",
        "the message names them; podsReadyDeadlineSeconds after the loss its GPUs are given back, and it tries again",
    )
    OPERATOR_CUT_OFF = (
        "OperatorCutOff",
        "Every pod is ready, and the operator reaches none of those that it has reached before. What runs goes on, the "
        "next switch waits, and no deadline of the pods runs.",
        "look at the network between the operator and the job's pods, and at its log: after `authority made` the job's "
        "pods have to be made again",
    )
    BACKING_OFF = (
        "BackingOff",
        "Something failed, and what is done about it waits for the back-off of spec.failurePolicy. An event too.",
        "the message states what failed, what will be done and when",
    )
    MEMBERS_ANSWER = "MembersAnswer", "Every member answers."
    JOB_ENDED = "JobEnded", "The job is complete or has failed: its members have stopped."
    TIME_SLICED = "TimeSliced", "Engines and trainer take turns on the GPUs."
    RESIDENT = "Resident", "Engines and trainer both stay on the GPUs."
    DISAGGREGATED = "Disaggregated", "Engines and trainers have GPUs of their own."
    MIXED = "Mixed", "Some engines and the trainers take turns on the GPUs, other engines have their own."
    ROLLOUT_ONLY = "RolloutOnly", "Engines have the GPUs: batches are recorded and not trained."
    TRAIN_ONLY = "TrainOnly", "The trainer has the GPUs: it trains recorded batches."
    SUSPENDING = "Suspending", "Members stop, then their pods go."
    NOT_SUSPENDED = "NotSuspended", "The job runs, or has ended."
    STEPS_REMAIN = "StepsRemain", "There are steps to do."
    NOT_FAILED = "NotFailed", "Nothing that ends the job has happened."
    NOT_STALLED = "NotStalled", "No person is needed."
    DELETED = "Deleted", "The job is being deleted: members were asked to stop, pods are going."
    COMPLETED = "Completed", "All steps are done."
    INVALID_SPEC = (
        "InvalidSpec",
        "The spec breaks a rule that the API server could not see, or the status is of a newer operator; what runs "
        "stays as it is.",
        "put right what the message names",
    )
    OBJECT_REFUSED = (
        "ObjectRefused",
        "The API server does not admit an object of the job, or the deletion of an expired one: quota, pod security, "
        "a webhook, a missing right, a name that is taken. Or it has failed at it for half a minute. Or the job may "
        "not have its profile, or its pods have what that does not allow.",
        "the message has the server's words; it is tried again every 30 s, a deletion less and less often",
    )
    VOLUME_LOST = (
        "VolumeLost",
        "The claim of the store or of the checkpoints is gone, of a job that has begun: no pod is made, because on an "
        "empty volume it would begin again what is recorded as done.",
        "put back the claims that the message names, with their data, or make another job, which begins with its "
        "spec.model; it is looked for every 30 s",
    )
    POD_DELETED = (
        "PodDeleted",
        "A pod was deleted because its member stayed silent or did not stop, because its node did not end it, or "
        "because a container that is not the operator's kept it running after its job.",
        "the message names it, and the last words of a container of ours if there are any; look at its node",
    )
    NODE_TAINTED = (
        "NodeTainted",
        "An event: a pod was made again elsewhere for a bad device, and its node is tainted, because the chart's "
        "nodes.taint allows it.",
        "mend the node, then remove its taint: kubectl taint node NODE rl.colocate.dev/unfit-",
    )
    ANOTHER_OPERATOR = (
        "AnotherOperator",
        "An event: another operator has the job, by status.operator, and this one leaves it alone.",
        "let each namespace be watched by one; to hand jobs over, name the other one in the chart's watch.takeOver",
    )
    POD_NOT_RUNNING = (
        "PodNotRunning",
        "A container of the pod does not run; a reason of status.outOfLine alone.",
        "the message is kubelet's, with the last words of a container of ours",
    )
