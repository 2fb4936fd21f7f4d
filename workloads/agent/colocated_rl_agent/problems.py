"""This module reports why the pod makes no progress to its target: the last failure, or the wait in progress."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from colocated_rl_agent.planner.actions import Action, Wait
from colocated_rl_api.facts import Problem
from colocated_rl_api.logs import log

LOG = logging.getLogger(__name__)

MESSAGE_CHARS = 1024


def slow_network(fault: str) -> Problem | None:
    """Return the problem of ranks that go on, but more slowly than they could. Every other problem comes before it."""
    return Problem(reason="SlowNetwork", message=fault[:MESSAGE_CHARS]) if fault else None


class Problems:
    """Problems holds the pod's problem for the operator's status.

    A failure counts until a rung is gained or the failed work is done after all, a wait while it lasts. A failure comes
    before a wait.
    """

    def __init__(self) -> None:
        self._failure: Problem | None = None
        self._waits_for: Problem | None = None

    @property
    def newest(self) -> Problem | None:
        return self._failure or self._waits_for

    def failed(self, reason: str, message: str) -> None:
        problem = Problem(reason=reason, message=message[:MESSAGE_CHARS])
        if problem != self._failure:
            self._failure = problem
            log(LOG, "problem reported", logging.WARNING, reason=reason, message=problem.message)

    def rung_gained(self) -> None:
        self._failure = None

    def made_good(self, reason: str) -> None:
        """Clear a failure with this reason, since the failed work has been done after all."""
        if self._failure is not None and self._failure.reason == reason:
            self._failure = None

    def chosen(self, choices: Iterable[Action | Wait]) -> None:
        """Record the wait with a reason among the chosen actions, if there is one."""
        waits_for = None
        for choice in choices:
            if isinstance(choice, Wait) and choice.reason:
                waits_for = Problem(reason=choice.reason, message=choice.message[:MESSAGE_CHARS])
        if waits_for is not None and waits_for != self._waits_for:
            log(LOG, "wait reported", reason=waits_for.reason, message=waits_for.message)
        self._waits_for = waits_for
