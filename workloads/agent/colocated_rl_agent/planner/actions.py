"""What an agent can do to its pod, as values. `facts.next_action` chooses one, `agent` carries it out.

Actions of one lane never run side by side; an action that overrides cancels what runs in its lane. While an action runs
it keeps being chosen, so equal values mean "go on": deadlines in them are points in time, not durations.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from colocated_rl_api.rungs import WeightVersion


class Lane(StrEnum):
    GATE = "gate"  # at once, in the loop
    ENGINE = "engine"
    TRAINERS = "trainers"
    POD = "pod"


@dataclass(frozen=True)
class _Action:
    lane: ClassVar[Lane]
    overrides: ClassVar[bool] = False


@dataclass(frozen=True)
class Wait:
    """Nothing to do before something changes, or until a point in time. A `reason` other than "" is a problem."""

    until: float | None = None
    reason: str = ""
    message: str = ""


# ---------------------------------------------------------------------------------------------------------- the gate
@dataclass(frozen=True)
class CloseGate(_Action):
    lane = Lane.GATE


@dataclass(frozen=True)
class OpenGate(_Action):
    lane = Lane.GATE
    version: WeightVersion


# -------------------------------------------------------------------------------------------------------- the engine
@dataclass(frozen=True)
class StartEngine(_Action):
    lane = Lane.ENGINE
    version: WeightVersion


@dataclass(frozen=True)
class AwaitEngine(_Action):
    """Until it answers and is what a switch needs."""

    lane = Lane.ENGINE
    until: float


@dataclass(frozen=True)
class KillEngine(_Action):
    """The process group, and wait until it is reaped: from then on the engine is absent."""

    lane = Lane.ENGINE
    overrides = True
    reason: str
    is_fault: bool = False  # the engine's: it counts as lost, and the next start may wait
    doubts: WeightVersion | None = None  # weights that it was not shown to hold


@dataclass(frozen=True)
class AbortAll(_Action):
    """Until nothing is in flight."""

    lane = Lane.ENGINE
    until: float


@dataclass(frozen=True)
class Pause(_Action):
    lane = Lane.ENGINE


@dataclass(frozen=True)
class Flush(_Action):
    lane = Lane.ENGINE


@dataclass(frozen=True)
class Release(_Action):
    """All tags that the job offloads, in one call."""

    lane = Lane.ENGINE


@dataclass(frozen=True)
class Resume(_Action):
    lane = Lane.ENGINE
    tags: tuple[str, ...]


@dataclass(frozen=True)
class VerifyExport(_Action):
    """Every file against the manifest, before an engine sees it: it takes missing and torn tensors in silence."""

    lane = Lane.ENGINE
    version: WeightVersion


@dataclass(frozen=True)
class Update(_Action):
    """Load the export, and read the version back; and the checksum, where the job asks for it."""

    lane = Lane.ENGINE
    version: WeightVersion


@dataclass(frozen=True)
class Continue(_Action):
    """Until the engine says that it takes requests."""

    lane = Lane.ENGINE


@dataclass(frozen=True)
class CheckProbe(_Action):
    lane = Lane.ENGINE
    version: WeightVersion


# ------------------------------------------------------------------------------------------------------ the trainers
@dataclass(frozen=True)
class StartTrainers(_Action):
    lane = Lane.TRAINERS
    lineage: int


@dataclass(frozen=True)
class AwaitTrainers(_Action):
    """Until every rank has loaded its checkpoint."""

    lane = Lane.TRAINERS
    until: float


@dataclass(frozen=True)
class StopTrainers(_Action):
    """Every rank of the pod, and wait until all are reaped."""

    lane = Lane.TRAINERS
    overrides = True
    reason: str


@dataclass(frozen=True)
class FetchShards(_Action):
    lane = Lane.TRAINERS
    step: int


@dataclass(frozen=True)
class Onload(_Action):
    lane = Lane.TRAINERS


@dataclass(frozen=True)
class Score(_Action):
    """The reference's log-probabilities of a batch."""

    lane = Lane.TRAINERS
    step: int


@dataclass(frozen=True)
class Train(_Action):
    lane = Lane.TRAINERS
    step: int


@dataclass(frozen=True)
class Export(_Action):
    lane = Lane.TRAINERS
    version: WeightVersion


@dataclass(frozen=True)
class Offload(_Action):
    lane = Lane.TRAINERS


@dataclass(frozen=True)
class Save(_Action):
    """A checkpoint of the finished step, while rollout runs."""

    lane = Lane.TRAINERS
    step: int


@dataclass(frozen=True)
class SaveModel(_Action):
    """Leave the export as the job's model."""

    lane = Lane.TRAINERS
    version: WeightVersion


@dataclass(frozen=True)
class RemoveExports(_Action):
    """All but one version."""

    lane = Lane.TRAINERS
    keep: WeightVersion


@dataclass(frozen=True)
class EndPod(_Action):
    """Everything has ended: the runner may, too."""

    lane = Lane.POD
    code: int


EngineAction = (
    StartEngine
    | AwaitEngine
    | KillEngine
    | AbortAll
    | Pause
    | Flush
    | Release
    | Resume
    | Update
    | Continue
    | CheckProbe
)
TrainerAction = (
    StartTrainers
    | AwaitTrainers
    | StopTrainers
    | FetchShards
    | Onload
    | Score
    | Train
    | Export
    | Offload
    | Save
    | SaveModel
)
LaneAction = EngineAction | TrainerAction | VerifyExport | RemoveExports | EndPod
Action = CloseGate | OpenGate | LaneAction
