"""Say who has the GPU of a pod, from the rung where the pod stands: timelines and the agent's metrics agree on it.

One case differs: an engine of a mixed job with devices of its own generates on while it waits at Offloaded for the
others. An agent sees that its gate is open; a timeline sees rungs alone, and counts that wait as switch.
"""

from __future__ import annotations

from enum import StrEnum

from colocated_rl_api import names
from colocated_rl_api.ladder import TIME_SLICED, Ladder
from colocated_rl_api.rungs import Placement, Rung

UP_TO_CLOSED = (Rung.UNKNOWN, *TIME_SLICED.rungs[: TIME_SLICED.place(Rung.CLOSED)])


class PodHolder(StrEnum):
    """Names who has the GPU of a pod."""

    START = "start-up"
    ROLLOUT = "rollout"
    SWITCH = "switch"
    TRAINER = "training"
    BOTH = "rollout and training"
    IDLE = "idle"  # trainers on GPUs of their own, between steps, and spares


def holder_of(rung: Rung, towards: Rung | None, ladder: Ladder, role: str) -> PodHolder:
    """Return who holds the GPU between two rungs. towards: None if not reached yet. role: the pod's."""
    if not (ladder.serves and ladder.trains):
        return PodHolder.ROLLOUT if ladder.serves else PodHolder.TRAINER
    if role == names.ROLE_TRAINER:
        return PodHolder.IDLE if rung is ladder.top else PodHolder.TRAINER
    if ladder.placement is Placement.MIXED and role == names.ROLE_ENGINE:
        return PodHolder.SWITCH if rung in (Rung.OFFLOADED, Rung.RESTORED) else PodHolder.ROLLOUT
    if ladder.serves_on:
        beside = _RESIDENT.get(rung, PodHolder.ROLLOUT)
        return PodHolder.ROLLOUT if beside is PodHolder.BOTH and role == names.ROLE_ENGINE else beside
    if towards in UP_TO_CLOSED or rung in (Rung.SEALED, Rung.SERVING, Rung.UNKNOWN):
        return PodHolder.ROLLOUT
    return PodHolder.TRAINER if rung in _TRAINING else PodHolder.SWITCH


_TRAINING = (Rung.RELEASED, Rung.SCORED, Rung.TRAINED, Rung.EXPORTED)
_RESIDENT = {
    **dict.fromkeys((Rung.SEALED, Rung.SCORED, Rung.TRAINED), PodHolder.BOTH),
    **dict.fromkeys((Rung.CLOSED, Rung.SETTLED, Rung.PAUSED, Rung.DRAINED, Rung.UPDATED), PodHolder.SWITCH),
}
