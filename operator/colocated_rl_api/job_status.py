"""Define the status of a `ColocatedRLJob`: what the operator knows. Only the operator writes it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from colocated_rl_api.parts import Part
from colocated_rl_api.rungs import Placement, ReferencePlacement


class Phase(StrEnum):
    """One word for people. No program may depend on it: conditions are for programs."""

    PENDING = "Pending"  # pods not there yet
    STARTING = "Starting"  # first climb
    ROLLOUT = "Rollout"
    SWITCHING = "Switching"  # GPUs change hands, or engines take new weights
    TRAINING = "Training"
    RECOVERING = "Recovering"  # climbing again after a loss
    SUSPENDING = "Suspending"  # pods on their way out
    SUSPENDED = "Suspended"  # no pods, until spec.suspend is false
    QUEUED = "Queued"  # not all pods came: none is there, until it is tried again
    COMPLETE = "Complete"
    FAILED = "Failed"


class Holder(StrEnum):
    """The holder is the side that computes on the GPUs."""

    NOBODY = "Nobody"
    ROLLOUT = "Rollout"
    TRAINER = "Trainer"
    BOTH = "Both"  # resident: rollout goes on beside training
    SWITCHING = "Switching"


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class StatusPart(Part):
    """Base of every part of the status. Written by the operator alone, also by a newer one: unknown fields pass."""

    model_config = ConfigDict(strict=False, extra="ignore")


ENDS = ("Complete", "Failed")
"""Conditions of which one is true once a job has ended and every member has stopped."""


class Condition(StatusPart):
    """A condition has the fields of metav1.Condition."""

    type: str = Field(max_length=316, description="CamelCase name, once in the list.")
    status: ConditionStatus = Field(description="Whether it holds.")
    reason: str = Field(
        min_length=1, max_length=1024, description="CamelCase cause of the newest transition, for programs."
    )
    message: str = Field(max_length=32_768, description="The same for people.")
    last_transition_time: datetime = Field(description="When status changed.")
    observed_generation: int | None = Field(default=None, ge=0, description="Generation of the spec that it answers.")


class RolloutStatus(StatusPart):
    """Progress of rollout, as the controller reported it last."""

    reward: float | None = Field(default=None, description="Mean reward of the newest sealed batch.")
    staleness: float | None = Field(default=None, description="Mean staleness of its tokens, in steps.")
    tokens_per_second: float | None = Field(
        default=None, description="Of responses that ended, or were interrupted, over the last 30 seconds."
    )
    samples: dict[str, int] = Field(default_factory=dict, max_length=16, description="Samples by state.")
    filtered: dict[str, int] = Field(
        default_factory=dict, max_length=16, description="Those that filters kept from training, by filter."
    )
    last_step: int | None = Field(
        default=None, description="Step of the last batch, once prompts.passes are over. Absent before."
    )


class WeightSyncStatus(StatusPart):
    """Says how near the engines' outputs are to the trainer's, by the probe that comes with each export."""

    difference_nats: float = Field(
        description="Mean difference between their log-probabilities of the same tokens, of the engine that differs "
        "most."
    )
    limit_nats: float = Field(description="What is accepted of that engine after its next update.")


class ReferenceStatus(StatusPart):
    """The frozen policy that KL is measured against."""

    placement: ReferencePlacement = Field(
        description="WithTrainer: a step waits until its batch is scored. Else sealing a batch waits for the scores of "
        "its samples."
    )
    replicas: int | None = Field(default=None, description="Pods that score. Absent with the trainer.")
    ready_replicas: int | None = Field(default=None, description="Those that answer. Absent with the trainer.")
    unscored: int | None = Field(
        default=None, description="Finished samples that wait for it. Absent with the trainer."
    )


class BestOfStatus(StatusPart):
    """The best of some answers to a prompt."""

    answers: int = Field(description="So many answers.")
    mean: float = Field(description="Mean reward of the best of them: pass@k, where rewards are 0 or 1.")


class EvaluationStatus(StatusPart):
    """Newest result of a set."""

    name: str = Field(max_length=63, description="The set, by its name in spec.evaluation.sets.")
    step: int = Field(description="Step of the weights.")
    mean: float = Field(description="Mean reward: the share of right answers where rewards are 0 or 1.")
    stderr: float = Field(description="Standard error of the mean.")
    best: float | None = Field(
        default=None, description="Mean of the best answer to each prompt; absent with one answer each."
    )
    best_of: list[BestOfStatus] | None = Field(
        default=None,
        max_length=8,
        description="The same of 2, 4, 8 ... of the answers to a prompt, over all choices of so many (unbiased); "
        "absent with fewer than 3 each.",
    )
    samples: int = Field(description="Answers.")


class CheckpointStatus(StatusPart):
    """Newest durable checkpoint."""

    step: int = Field(description="Its step.")
    time: datetime = Field(description="When it was first seen.")


class StartStatus(StatusPart):
    """Pods are made of these since the newest start of the group, also those that are made again."""

    operator: str = Field(default="", max_length=64, description="Version of the operator that made the start.")
    images: dict[str, Annotated[str, Field(max_length=512)]] = Field(
        default_factory=dict, max_length=8, description="Images that the chart named then: agent, rollout, gpu."
    )
    digests: dict[str, Annotated[str, Field(max_length=640)]] = Field(
        default_factory=dict,
        max_length=16,
        description="Of images that pods run, by name and tag, where nodes tell them.",
    )
    revision: str = Field(
        default="",
        max_length=253,
        description="ControllerRevision with the pod templates; empty if that operator kept none.",
    )


class PodOutOfLine(StatusPart):
    """A pod that has a problem, or does not stand where the others do."""

    name: str = Field(max_length=253, description="Name of the pod.")
    rung: str | None = Field(
        default=None, max_length=32, description="Where it stands; absent for the rollout controller."
    )
    reason: str = Field(default="", max_length=64, description="CamelCase cause, for programs.")
    message: str = Field(default="", max_length=1024, description="The same for people.")


class FailuresStatus(StatusPart):
    """Losses and failures that made the trainers start together again, and what was done about the newest."""

    cause: str = Field(
        default="",
        max_length=64,
        description="Of the newest failure, as in spec.failurePolicy; absent for a pod that somebody deleted.",
    )
    action: str = Field(default="", max_length=64, description="What was done about it.")
    rule: int | None = Field(
        default=None, description="Index of the matching rule in spec.failurePolicy.rules; absent: the usual answer."
    )
    pod_restarts: int = Field(
        default=0,
        description="Restarts that replaced GPU pods, whether they counted or not.",
    )
    step_retries: int = Field(default=0, description="Restarts in the pods that there were, likewise.")
    step: int | None = Field(default=None, description="Step that failed last.")
    tries: int = Field(default=0, description="Failures of that step in a row.")
    pod: str = Field(
        default="",
        max_length=253,
        description="The one pod in which the newest death of trainers began, if it was one.",
    )
    avoided_nodes: list[Annotated[str, Field(max_length=253)]] = Field(
        default_factory=list, max_length=8, description="Nodes that get no GPU pod of the job, the newest last."
    )
    counted_steps: list[int] = Field(
        default_factory=list,
        max_length=1001,
        description="Steps of the failures that count against backoffLimit, see spec.backoffWindowSteps.",
    )


class ColocatedRLJobStatus(StatusPart):
    """Observed state of the job. Written by the operator alone."""

    observed_generation: int | None = Field(
        default=None, description="Generation of the spec that this answers; -1 before the first look."
    )
    phase: Phase | None = Field(default=None, description="Summary for people.")
    operator: str | None = Field(
        default=None,
        max_length=317,
        description="Operator that has the job, NAMESPACE/LEASE, from its first look on; others leave the job alone.",
    )
    step: int | None = Field(
        default=None, description="Last finished step; the newest batch where mode is RolloutOnly."
    )
    weight_version: str | None = Field(
        default=None,
        max_length=32,
        description="STEP-LINEAGE that all engines serve; that all trainers hold where mode is TrainOnly.",
    )
    epoch: int | None = Field(default=None, description="Fencing number; raised before each climb.")
    lineage: int | None = Field(default=None, description="How often the trainers were started together.")
    target_step: int | None = Field(default=None, description="Step that the epoch climbs to.")
    cause: str | None = Field(default=None, max_length=64, description="Why the epoch was raised.")
    group: str | None = Field(default=None, max_length=64, description="Hash of the pods that form the trainer group.")
    restarts: int | None = Field(
        default=None,
        description="Failures of the last backoffWindowSteps steps that count against backoffLimit.",
    )
    retries: int | None = Field(default=None, description="Of spec.retries, those that were acted on.")
    failures: FailuresStatus | None = Field(default=None, description="Absent while there were none.")
    placement: Placement | None = Field(
        default=None,
        description="How engines and trainer share the GPUs, derived from mode, rollout.placement and rollout.offload.",
    )
    gpu_holder: Holder | None = Field(default=None, description="Who computes on the GPUs.")
    rung: str | None = Field(default=None, max_length=32, description="Rung of the slowest pod.")
    replicas: int | None = Field(
        default=None, description="GPU pods of the group: of engines and of trainers, without a reference's."
    )
    ready_replicas: int | None = Field(
        default=None,
        description="Those that answer. Condition PodsReady counts a reference's and the rollout controller too.",
    )
    group_replicas: int | None = Field(
        default=None,
        description="Replicas of the group: fewer than spec.replicas while there is no room for all of them "
        "(spec.elasticPolicy), and others from a change of spec.replicas until the next step.",
    )
    ready_spares: int | None = Field(
        default=None, description="Pods of spec.spares that have started, and hold devices for the group."
    )
    pods_by_rung: dict[str, int] = Field(default_factory=dict, max_length=16, description="Pods by rung.")
    out_of_line: list[PodOutOfLine] = Field(default_factory=list, max_length=10, description="At most ten.")
    rollout: RolloutStatus | None = Field(default=None, description="Progress of rollout.")
    weight_sync: WeightSyncStatus | None = Field(
        default=None, description="Absent until an engine was probed, and with weightSync.verify Version."
    )
    reference: ReferenceStatus | None = Field(default=None, description="Absent without spec.reference.")
    evaluations: list[EvaluationStatus] = Field(
        default_factory=list, max_length=16, description="Newest evaluation of each set."
    )
    checkpoint: CheckpointStatus | None = Field(default=None, description="Newest durable checkpoint.")
    mirrored_step: int | None = Field(
        default=None,
        description="Newest step that all trainers that run have kept in the memory of pods "
        "(spec.checkpoint.inMemory); absent: not each of them has kept one.",
    )
    start: StartStatus | None = Field(default=None, description="What pods are made of since the newest start.")
    restored_from: str | None = Field(
        default=None,
        max_length=1024,
        description="CLAIM/DIRECTORY of the checkpoint that the job began from; absent: from spec.model.",
    )
    model: str | None = Field(
        default=None,
        max_length=317,
        description="CLAIM/DIRECTORY of the trained model in Hugging Face format; set once the last step has left it.",
    )
    last_switch_seconds: float | None = Field(
        default=None, description="Last switch, from the first gate closed to all gates open, training excluded."
    )
    start_time: datetime | None = Field(
        default=None, description="When the job was first acted on, or resumed; absent while it is suspended."
    )
    completion_time: datetime | None = Field(
        default=None, description="When it completed. When it failed is condition Failed's lastTransitionTime."
    )
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=32,
        description="Conditions, by type. Those of other controllers stay as they are.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )

    @property
    def ended_at(self) -> datetime | None:
        """Return when the job completed or failed, with every member stopped; None for a job that goes on."""
        ends = (item for item in self.conditions if item.type in ENDS and item.status is ConditionStatus.TRUE)
        return next((item.last_transition_time for item in ends), None)
