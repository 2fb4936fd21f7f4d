"""Define the faults that a person injects into a GPU pod, and the body of `POST /v1/faults` on its pages port.

The route exists only in pods that were made while the chart allowed it (`faultInjection.enabled`). Whoever may forward
a pod's port may ask: nobody gets a right from it that was not there before.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from colocated_rl_api.wire import Wire

PATH = "/v1/faults"
MAX_SECONDS = 3600


class FaultKind(StrEnum):
    ENGINE_CRASH = "engine-crash"  # SIGKILL to the engine and all of its processes
    TRAINER_CRASH = "trainer-crash"  # SIGKILL to the pod's first trainer rank
    SLOW_WEIGHTS = "slow-weights"  # the engine's next update of its weights takes longer, by `seconds`
    GATE_CLOSED = "gate-closed"  # the gate closes now, and does not open for `seconds`


LASTING = (FaultKind.SLOW_WEIGHTS, FaultKind.GATE_CLOSED)


class InjectedFault(Wire):
    """An InjectedFault is done once, to the pod that is asked."""

    kind: FaultKind
    seconds: float = Field(default=30, gt=0, le=MAX_SECONDS)  # of LASTING kinds
