"""These values are the actions of an agent on its pod. `next_actions` chooses them, `agent` carries them out.

Actions of one lane never run side by side, and each engine has a lane of its own; an action that overrides cancels the
one running in its lane. The planner keeps choosing an action while it runs, so equal values mean "go on": deadlines are
points in time, not durations.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from colocated_rl_api.rungs import WeightVersion


class Lane(StrEnum):
    GATE = "gate"  # at once, in the loop
    ENGINE = "engine"  # one for each engine
    EXPORTS = "exports"
    TRAINERS = "trainers"
    POD = "pod"


@dataclass(frozen=True)
class _Action:
    lane: ClassVar[Lane]
    overrides: ClassVar[bool] = False


@dataclass(frozen=True)
class Wait:
    """Do nothing before something changes, or until a point in time. A `reason` other than "" is a problem."""

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
    """Wait until the engine answers and has what a switch needs."""

    lane = Lane.ENGINE
    until: float


@dataclass(frozen=True)
class KillEngine(_Action):
    """Kill the engine's process group and wait until it is reaped: from then on the engine is absent."""

    lane = Lane.ENGINE
    overrides = True
    reason: str
    is_fault: bool = False  # the engine is at fault: it counts as lost, and the next start may wait
    doubts: WeightVersion | None = None  # no check has shown that the engine holds these weights


@dataclass(frozen=True)
class AbortAll(_Action):
    """Abort all requests at the engine until nothing is in flight."""

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
    """Release all tags that the job offloads, in one call."""

    lane = Lane.ENGINE


@dataclass(frozen=True)
class Resume(_Action):
    lane = Lane.ENGINE
    tags: tuple[str, ...]


@dataclass(frozen=True)
class VerifyExport(_Action):
    """Compare every file with the manifest before an engine loads it: it accepts missing and torn tensors silently."""

    lane = Lane.EXPORTS
    version: WeightVersion


@dataclass(frozen=True)
class Update(_Action):
    """Load the export and read back the version, and the checksum if the job asks for it."""

    lane = Lane.ENGINE
    version: WeightVersion


@dataclass(frozen=True)
class Continue(_Action):
    """Continue generation, and wait until the engine reports that it takes requests."""

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
    """Wait until every rank has loaded its checkpoint."""

    lane = Lane.TRAINERS
    until: float


@dataclass(frozen=True)
class StopTrainers(_Action):
    """Stop every rank of the pod and wait until all are reaped."""

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
    """Compute the reference model's log-probabilities of a batch."""

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
    """Save a checkpoint of the finished step while rollout runs."""

    lane = Lane.TRAINERS
    step: int


@dataclass(frozen=True)
class Mirror(_Action):
    """Keep the finished step in the memory of pods while rollout runs."""

    lane = Lane.TRAINERS
    step: int


@dataclass(frozen=True)
class SaveModel(_Action):
    """Save the export as the job's final model."""

    lane = Lane.TRAINERS
    version: WeightVersion


@dataclass(frozen=True)
class RemoveExports(_Action):
    """Remove all exports but one version."""

    lane = Lane.TRAINERS
    keep: WeightVersion


@dataclass(frozen=True)
class EndPod(_Action):
    """Let the runner exit, since everything else has ended."""

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
    | Mirror
    | SaveModel
)
LaneAction = EngineAction | TrainerAction | VerifyExport | RemoveExports | EndPod
Action = CloseGate | OpenGate | LaneAction
