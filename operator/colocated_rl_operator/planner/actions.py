"""Name the actions that a plan asks the shell for. They are values: only `loop.act` carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from colocated_rl_api.names import PodUid
from colocated_rl_operator.planner.reasons import Waiting


@dataclass(frozen=True)
class CreatePod:
    """Create the pod that fills a seat. avoids: nodes on which it may not run."""

    seat: str
    attempt: int
    avoids: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeletePod:
    """Delete the pod with that UID and no other.

    grace_s: None takes the pod's own grace; 0 forgets a pod whose node does not answer.
    is_fault: an event reports the deletion to people.
    """

    name: str
    uid: PodUid
    grace_s: int | None
    why: str
    is_fault: bool = True


PodAction = CreatePod | DeletePod


@dataclass(frozen=True)
class TaintNode:
    """Taint a node that has a bad device, where an admin allows it. uid: of the pod that had the device."""

    node: str
    uid: PodUid


@dataclass(frozen=True)
class WaitFor:
    """Wait until something changes, or until the plan's `wake_at`."""

    reason: Waiting
    who: tuple[str, ...] = ()
    message: str = ""
