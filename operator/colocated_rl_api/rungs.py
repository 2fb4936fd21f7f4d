"""The words that facts, ladders and targets share: rungs, placements, and the name of one set of weights."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple, Never, NoReturn

_VERSION = re.compile(r"(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})")  # one spelling for each: it names a directory too


class WeightVersion(NamedTuple):
    """Names one set of weights: the optimizer step that made it, in the lineage that made it.

    `lineage` counts how often the job's trainers were started together. It rises at each reload of a checkpoint, so
    weights that were computed twice for the same step never pass for one another.
    """

    step: int
    lineage: int

    def __str__(self) -> str:
        return f"{self.step}-{self.lineage}"

    @classmethod
    @lru_cache(maxsize=64)  # each of a thousand pods reports the same few
    def parse(cls, text: str) -> WeightVersion:
        """Invert str(). Raises ValueError for anything else, the engine's own "default" included (H22)."""
        match = _VERSION.fullmatch(text)
        if match is None:
            raise ValueError(f"weight version {text!r} is not STEP-LINEAGE: was the engine updated without a version?")
        return cls(int(match[1]), int(match[2]))


class Rung(StrEnum):
    """A rung is what must be true of a member that stands on it. A `Ladder` has those of a placement, in order."""

    UNKNOWN = "Unknown"  # no facts, or facts that can't be: below all others
    SEALED = "Sealed"  # the rollout controller has the batch; the pod still serves older weights
    CLOSED = "Closed"  # gate shut: requests are refused at once
    SETTLED = "Settled"  # nothing in flight by the agent's own count
    PAUSED = "Paused"  # the engine answered the pause
    DRAINED = "Drained"  # the engine's scheduler reported idle, after the gate last closed
    RELEASED = "Released"  # each memory tag released once, or the engine's process is gone; trainer may hold the GPU
    SCORED = "Scored"  # only with a reference: its log-probabilities of the batch are in
    TRAINED = "Trained"  # every rank of the pod stands at the step
    EXPORTED = "Exported"  # the weights are written with a manifest
    OFFLOADED = "Offloaded"  # trainer state is off the device
    UPDATED = "Updated"  # the engine holds the weights of the version and reported it
    RESTORED = "Restored"  # all of the engine's memory is mapped again
    SERVING = "Serving"  # gate open on the version

    def __lt__(self, other: Never) -> NoReturn:  # type: ignore[override]
        raise TypeError("rungs are in no order, least of all that of the alphabet: ask the job's Ladder")

    __le__ = __gt__ = __ge__ = __lt__  # type: ignore[assignment]


class Placement(StrEnum):
    """A placement is a way in which engines and trainer share the devices; `status.placement`."""

    TIME_SLICED = "TimeSliced"  # they take turns
    RESIDENT = "Resident"  # both stay; engines take new weights under a pause
    DISAGGREGATED = "Disaggregated"  # each has its own, in pods of its own; engines take new weights under a pause
    MIXED = "Mixed"  # some engines take turns with the trainers, others have devices of their own
    ROLLOUT_ONLY = "RolloutOnly"  # no trainers: engines serve the model as it is
    TRAIN_ONLY = "TrainOnly"  # no engines: trainers train recorded batches

    @property
    def shares_weights(self) -> bool:
        """Return whether pods share a volume of weights, from which engines in pods of their own read them."""
        return self in (Placement.DISAGGREGATED, Placement.MIXED)


class RolloutPlacement(StrEnum):
    """Engines compute on the trainers' devices or on their own: `rollout.placement`."""

    WITH_TRAINER = "WithTrainer"  # in the trainers' pods, on their devices
    OWN_DEVICES = "OwnDevices"  # in pods of their own
    BOTH = "Both"  # some in the trainers' pods, others in pods of their own


class ReferencePlacement(StrEnum):
    """The reference computes on the devices of another role or on its own: `reference.placement`."""

    WITH_TRAINER = "WithTrainer"  # in the trainers' processes
    WITH_ROLLOUT = "WithRollout"  # in the engines' pods, where engines stay on their devices
    OWN_DEVICES = "OwnDevices"  # in pods of its own
