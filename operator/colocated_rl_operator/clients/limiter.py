"""Bound the operator's calls to the API server, as client-go's token bucket does, and wait when the server asks for it.

All kinds and namespaces share one bucket: a hundred jobs that fail at once, or a defect of ours, must not take the
server from others. No library: those for asyncio have no way to hold back what already waits, as `Retry-After` asks.
"""

from __future__ import annotations

import asyncio

CALLS_PER_S, BURST = 200.0, 400  # of one process; a take-over of 500 jobs makes about a thousand calls
HOLD_AT_MOST_S = 15.0  # whatever the server asks for


class CallLimiter:
    """Lets `burst` calls begin at once and `calls_per_s` of them in each second, in the order in which they came."""

    def __init__(self, calls_per_s: float = CALLS_PER_S, burst: int = BURST) -> None:
        self._interval_s = 1 / calls_per_s
        self._burst_s = burst * self._interval_s
        self._full_at = 0.0  # when the bucket is full again, by the loop's clock
        self._held_until = 0.0

    async def wait(self) -> None:
        """Wait for the turn of one call."""
        now = asyncio.get_running_loop().time()
        self._full_at = max(self._full_at, now) + self._interval_s
        turn = self._full_at - self._burst_s
        while (left := max(turn, self._held_until) - asyncio.get_running_loop().time()) > 0:  # noqa: ASYNC110 - a time has no event
            await asyncio.sleep(left)

    def hold(self, seconds: float) -> None:
        """Begin no call for some time, HOLD_AT_MOST_S at most; those that wait for their turn wait for this too."""
        until = asyncio.get_running_loop().time() + min(seconds, HOLD_AT_MOST_S)
        self._held_until = max(self._held_until, until)
