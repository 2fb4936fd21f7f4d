"""Decide which operator owns a job: of two that watch one namespace, the first to read it."""

from __future__ import annotations

from colocated_rl_api import names
from colocated_rl_operator.loop.doors import Doors
from colocated_rl_operator.loop.job_state import JobState
from colocated_rl_operator.loop.record import News
from colocated_rl_operator.planner.reasons import Reason


async def claim(state: JobState, doors: Doors) -> bool:
    """Return whether the job is this operator's. Ownership is recorded before anything is made, and never taken away.

    Two operators that watch one namespace would raise the epoch over each other for ever, and have no common authority.
    """
    theirs = state.status.operator
    if theirs is None:
        await state.record.commit(state.status.model_copy(update={"operator": doors.release}))
    elif theirs != doors.release:
        note = (
            f"operator {doors.release} leaves this job alone: operator {theirs} has it. If that one is gone for good: "
            f"kubectl patch {names.SHORT_NAME} {state.about.name} --subresource=status --type=merge "
            """--patch='{"status": {"operator": null}}'"""
        )
        state.record.note(None, News("Warning", Reason.ANOTHER_OPERATOR, note, action="LeaveAlone"))
        return False
    return True
