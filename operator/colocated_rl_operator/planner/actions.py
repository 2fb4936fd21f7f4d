"""What a plan asks the shell to do. Values: `act` is the only one that carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from colocated_rl_operator.planner.reasons import Waiting


@dataclass(frozen=True)
class CreatePod:
    """Fill a seat. avoids: nodes on which the pod may not stand."""

    seat: str
    attempt: int
    avoids: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeletePod:
    """Of that UID alone. grace_s: None for the pod's own, 0 to forget a pod whose node does not answer.

    is_fault: people are told of it, by an event.
    """

    name: str
    uid: str
    grace_s: int | None
    why: str
    is_fault: bool = True


PodAction = CreatePod | DeletePod


@dataclass(frozen=True)
class WaitFor:
    """Nothing to do until something changes, or until the deadline that the plan's `wake_at` names."""

    reason: Waiting
    who: tuple[str, ...] = ()
    message: str = ""
