"""Decide which operator owns a job: of two that watch one namespace, the first to read it.

An admin hands jobs over by the settings of the operator that shall have them: it takes over those of the operators that
it names. The Lease of the other one would decide by itself, and wrongly: it tells who is away, and not who is gone. A
job that changes hands may need other keys, and so other pods, which no pause of an operator should cost it.
"""

from __future__ import annotations

import logging

from colocated_rl_api.logs import log
from colocated_rl_operator.loop.doors import Doors
from colocated_rl_operator.loop.job_state import JobState
from colocated_rl_operator.loop.record import News
from colocated_rl_operator.planner.reasons import Reason

LOG = logging.getLogger(__name__)


async def claim(state: JobState, doors: Doors) -> bool:
    """Return whether the job is this operator's. Ownership is recorded before anything is made.

    Two operators that watch one namespace would raise the epoch over each other for ever, and have no common authority.
    """
    theirs = state.status.operator
    if theirs is None or theirs in doors.takes_over - {doors.release}:
        await state.record.commit(state.status.model_copy(update={"operator": doors.release}))
        if theirs is not None:
            log(LOG, "job taken over", reason=f"it was that of operator {theirs}")
    elif theirs != doors.release:
        note = (
            f"operator {doors.release} leaves this job alone: operator {theirs} has it. An admin lets this one take "
            f"jobs of that one over by the chart's value watch.takeOver: [{theirs}]"
        )
        state.record.note(None, News("Warning", Reason.ANOTHER_OPERATOR, note, action="LeaveAlone"))
        return False
    return True
