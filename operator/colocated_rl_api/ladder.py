"""The ladder: the fixed order in which a pod's GPUs change hands, and where a pod stands on it.

One table, read by the planner, the agents, the documentation and the tests. A rung is a named set of facts; a pod
stands at the highest rung whose facts all hold, seen from the weights version that the group is climbing to. Barriers
are rungs that every member must reach before any goes on.

Nothing here stores a position: `standing` derives it from facts, so a restart of either side costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from colocated_rl_api.member_wire import EngineFacts, PodFacts


class WeightVersion(NamedTuple):
    """Name of one set of weights: the optimizer step that made it, in the lineage that made it.

    `lineage` counts how often the job's trainers were started together. It rises at each reload of a checkpoint, so
    weights that were computed twice for the same step never pass for one another.
    """

    step: int
    lineage: int

    def __str__(self) -> str:
        return f"{self.step}-{self.lineage}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        """Inverse of str(). Raises ValueError for anything else, the engine's own "default" included (H22)."""
        match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text)
        if match is None:
            raise ValueError(f"weight version {text!r} is not STEP-LINEAGE: was the engine updated without a version?")
        return cls(int(match[1]), int(match[2]))


class Rung(StrEnum):
    """What must be true of a member to stand here; the table of DESIGN, in order."""

    UNKNOWN = "Unknown"  # no facts, or facts that can't be: below all others
    SEALED = "Sealed"  # the rollout controller has the batch; the pod still serves older weights
    CLOSED = "Closed"  # gate shut: requests are refused at once
    SETTLED = "Settled"  # nothing in flight by the agent's own count
    PAUSED = "Paused"  # the engine answered the pause
    DRAINED = "Drained"  # the engine's scheduler said idle, after the gate last closed
    RELEASED = "Released"  # each memory tag released once, or the engine's process is gone; trainer may hold the GPU
    TRAINED = "Trained"  # every rank of the pod stands at the step
    EXPORTED = "Exported"  # the weights are written with a manifest
    OFFLOADED = "Offloaded"  # trainer state is off the device
    UPDATED = "Updated"  # the engine holds the weights of the version and said so
    RESTORED = "Restored"  # all of the engine's memory is mapped again
    SERVING = "Serving"  # gate open on the version

    def __lt__(self, other: str) -> bool:  # the order of the ladder, not of the alphabet
        return _ORDER[self] < _ORDER[Rung(other)]

    def __le__(self, other: str) -> bool:
        return _ORDER[self] <= _ORDER[Rung(other)]

    def __gt__(self, other: str) -> bool:
        return _ORDER[self] > _ORDER[Rung(other)]

    def __ge__(self, other: str) -> bool:
        return _ORDER[self] >= _ORDER[Rung(other)]


_ORDER = {rung: place for place, rung in enumerate(Rung)}

LADDER: tuple[Rung, ...] = tuple(rung for rung in Rung if rung is not Rung.UNKNOWN)
BARRIERS: frozenset[Rung] = frozenset(
    {Rung.SEALED, Rung.PAUSED, Rung.DRAINED, Rung.RELEASED, Rung.TRAINED, Rung.EXPORTED, Rung.UPDATED, Rung.SERVING}
)


def next_barrier(after: Rung) -> Rung:
    """The barrier that a group may aim for when its slowest member stands at `after`.

    The group may stand one barrier beyond its slowest member. At the top it stays there.
    """
    return next((rung for rung in LADDER if rung > after and rung in BARRIERS), Rung.SERVING)


def standing(pod: PodFacts | None, at: WeightVersion) -> Rung:
    """Where a GPU pod stands on the way to serving version `at`; UNKNOWN without facts.

    A pod stands at its lowest engine's rung. An engine whose process is gone satisfies everything below Updated: it
    maps no memory and has nothing in flight (the gate is closed whenever an engine is missing).
    """
    if pod is None or not pod.engines or not pod.trainers:
        return Rung.UNKNOWN
    if all(_is_updated(engine, at) for engine in pod.engines):
        if not all(engine.is_mapped for engine in pod.engines):
            return Rung.UPDATED
        return Rung.SERVING if pod.gate.open and not _any_paused(pod.engines) else Rung.RESTORED
    if pod.gate.open:
        return Rung.SEALED
    if not pod.gate.settled:
        return Rung.CLOSED
    if not all(engine.is_absent or engine.is_paused for engine in pod.engines):
        # an engine that is starting on this very version was let in by Offloaded; any other one is simply not paused
        return Rung.OFFLOADED if _starts_on(pod, at) else Rung.SETTLED
    if not all(engine.is_absent or engine.is_drained for engine in pod.engines):
        return Rung.PAUSED
    if not all(engine.is_absent or engine.is_released for engine in pod.engines):
        # weights that were resumed for the update are mapped, and belong to no version until it is confirmed
        return Rung.OFFLOADED if _is_offloaded(pod, at) else Rung.DRAINED
    if not _is_trained(pod, at):
        return Rung.RELEASED
    if not all(rank.exported == at for rank in pod.trainers):
        return Rung.TRAINED
    return Rung.OFFLOADED if _is_offloaded(pod, at) else Rung.EXPORTED


def slowest(standings: Iterable[Rung]) -> Rung:
    """The lowest rung of a group; UNKNOWN for an empty one."""
    return min(standings, key=_ORDER.__getitem__, default=Rung.UNKNOWN)


def _is_updated(engine: EngineFacts, at: WeightVersion) -> bool:
    return engine.is_ready and engine.version == at and engine.weights_mapped


def _any_paused(engines: Sequence[EngineFacts]) -> bool:
    return any(engine.is_paused for engine in engines)


def _is_trained(pod: PodFacts, at: WeightVersion) -> bool:
    return all(rank.is_alive and rank.lineage == at.lineage and rank.step == at.step for rank in pod.trainers)


def _is_offloaded(pod: PodFacts, at: WeightVersion) -> bool:
    return _is_trained(pod, at) and all(rank.exported == at and rank.is_offloaded for rank in pod.trainers)


def _starts_on(pod: PodFacts, at: WeightVersion) -> bool:
    return _is_offloaded(pod, at) and all(
        engine.is_absent or engine.is_paused or (not engine.is_ready and engine.starts_on == at)
        for engine in pod.engines
    )
