"""Define what a job does where not all of its pods have room: with how few replicas it goes on, and its spares."""

from __future__ import annotations

from pydantic import Field

from colocated_rl_api.parts import Part, Rule

IN_RANGE = Rule(
    field="elasticPolicy.minReplicas",
    rule="!has(self.elasticPolicy) || self.elasticPolicy.minReplicas <= self.replicas",
    message="elasticPolicy.minReplicas must be at most replicas, with which the job goes on where there is room",
    expression="'elasticPolicy.minReplicas is %d, and replicas is %d: it must be at most that, with which the job goes "
    "on where there is room'.format([self.elasticPolicy.minReplicas, self.replicas])",
)
COUNTS = Rule(
    field="elasticPolicy",
    rule="!has(self.elasticPolicy) || !has(self.mode) || self.mode != 'RolloutOnly' || "
    "!has(self.rollout.placement) || self.rollout.placement != 'OwnDevices'",
    message="elasticPolicy is about replicas, and a RolloutOnly job whose engines have devices of their own has as "
    "many pods as rollout.replicas says: leave it out",
)
SPARES_COUNT = Rule(
    field="spares",
    rule="!has(self.spares) || self.spares == 0 || !has(self.mode) || self.mode != 'RolloutOnly' || "
    "!has(self.rollout.placement) || self.rollout.placement != 'OwnDevices'",
    message="spares are for the pods that replicas counts, and a RolloutOnly job whose engines have devices of their "
    "own has none of them: leave spares out",
)


def not_queued(field: str) -> str:
    """Return why a job in a queue may not have the field."""
    return (
        f"{field} is not for a job in a queue, which admits a group of a fixed number of pods: leave it out, or leave "
        "the queue's label out"
    )


class ElasticPolicy(Part):
    """The policy lets a job go on with fewer replicas, and with all of them once there is room again."""

    min_replicas: int = Field(ge=1, le=1024, description="Fewest replicas to continue with; with fewer it waits.")
    shrink_after_seconds: int = Field(
        default=30,
        ge=1,
        le=86_400,
        description="The job continues without a pod that no node has taken for this long. Make it longer than a "
        "cluster autoscaler needs for a node, if that is worth waiting for.",
    )
