"""Say when a pod has been silent for so long that its node is gone, most likely, and it is done without.

If no member answers at all, the fault is more likely in the operator's own network: then silence counts only from when
some member is heard again. Where kubelet reports that a container does not run, the pod is left to kubelet's restarts
for longer: another pod would most likely fail in the same way, and the log would go with this one. The module is pure.
"""

from __future__ import annotations

from colocated_rl_operator.planner.observation import Member, Observation, PodPhase

SILENCE_S = 30.0  # a running member may stay silent this long, about what a replaced pod costs: the network heals
RESTARTS_S = 300.0  # or this long, while its containers start, or kubelet restarts them again and again


def silent_at(seen: Observation, pod: Member) -> float | None:
    """Return when the pod has been silent for too long; None while it is not silent, or nobody is heard."""
    heard_since = seen.memory.heard_since
    if pod.phase is not PodPhase.RUNNING or pod.silent_since is None or heard_since is None:
        return None
    return max(pod.silent_since, heard_since) + (RESTARTS_S if pod.trouble or pod.is_starting else SILENCE_S)


def is_silent(seen: Observation, pod: Member) -> bool:
    """Return whether the pod has been silent for too long while others were heard."""
    at = silent_at(seen, pod)
    return at is not None and seen.now >= at
