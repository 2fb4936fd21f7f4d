"""A job's pods with devices are a gang: who places them together, and how near one another."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from colocated_rl_api.parts import Part, one_of, should_match


class Gang(StrEnum):
    NONE = "None"  # each pod by itself
    NATIVE = "Native"  # by Kubernetes' own scheduler: PodGroup of scheduling.k8s.io
    VOLCANO = "Volcano"  # PodGroup of scheduling.volcano.sh
    COSCHEDULING = "Coscheduling"  # of scheduler-plugins: PodGroup of scheduling.x-k8s.io


class QueuedPods(StrEnum):
    ALL = "All"  # the rollout pod too, as one group with the others
    WITH_DEVICES = "WithDevices"  # the rollout pod waits in no queue


_is_label, _label_rule = should_match(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?",
    "should be a label of nodes: topology.kubernetes.io/zone",
)
_Label = Annotated[str, Field(max_length=317, json_schema_extra=_label_rule), _is_label]


class Topology(Part):
    """Nodes with one value of a label, on which pods with devices run together."""

    RULES = (one_of("topology is", "required", "preferred"),)

    required: _Label | None = Field(default=None, description="Label of nodes: pods wait for one value of it.")
    preferred: _Label | None = Field(default=None, description="The same, if they fit.")

    @property
    def label(self) -> str:
        return self.required or self.preferred or ""


class Scheduling(Part):
    """Placement of the job's pods with devices as one gang, and who waits in a queue."""

    gang: Gang | None = Field(
        default=None,
        strict=False,
        description="Scheduler that places all of them at once or none, of those that the cluster has; None: each by "
        "itself. The cluster's choice when absent.",
    )
    topology: Topology | None = Field(default=None, description="Where they are near one another.")
    queued_pods: QueuedPods = Field(
        default=QueuedPods.ALL,
        strict=False,
        description="Pods that wait in the job's queue: All; WithDevices: the rollout pod starts without it.",
    )
