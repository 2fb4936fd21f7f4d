"""Say who has the GPU behind a gate, as far as the gate shows it: rungs are the operator's to know."""

from __future__ import annotations

from colocated_rl_api.holders import PodHolder
from colocated_rl_api.rungs import Placement


def holder_behind(
    is_open: bool | None, placement: Placement, *, sealed: int, trained: int
) -> tuple[PodHolder | None, str]:
    """Return who has the GPU, or None where it can't be known here, and why.

    is_open: of the gate; None: it does not answer. sealed, trained: newest steps that are.
    """
    waits = f"batch {sealed} waits for training" if sealed > trained else "no batch waits for training"
    match is_open, placement:
        case None, _:
            return None, "its gate does not answer the rollout controller"
        case True, Placement.RESIDENT if sealed > trained:
            return PodHolder.BOTH, f"its gate is open, and {waits}"
        case True, _:
            return PodHolder.ROLLOUT, "its gate is open: the engine takes requests"
        case _, Placement.TIME_SLICED | Placement.MIXED:
            return None, f"its gate is closed, and {waits}: it switches, trains or starts"
        case _:
            return None, "its gate is closed: the engine starts, or takes new weights"
