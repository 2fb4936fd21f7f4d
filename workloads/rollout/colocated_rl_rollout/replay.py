"""The worker of a job that only trains: takes the recorded batch of a step when the step before it is trained.

`recording` makes its files durable here, and it is sealed in this job's store; from there on it is a batch as any
other, served to trainers, replayed to them, committed and forgotten. Nothing is generated, rewarded or left out.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path

from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.logs import log
from colocated_rl_api.member_wire import Problem
from colocated_rl_rollout.recording import RecordingUnusable, Taken, take_batch
from colocated_rl_rollout.store import Store
from colocated_rl_rollout.worker import FULL_RETRY_S, trainer_ranks

LOG = logging.getLogger(__name__)


class Replay:
    """Stands where a `Worker` does. `changed` is called when facts may have changed."""

    def __init__(
        self,
        spec: ColocatedRLJobSpec,
        *,
        store: Store,
        recording: Path,
        changed: Callable[[], None],
        retry_s: float = FULL_RETRY_S,
    ) -> None:
        self._store = store
        self._recording = recording
        self._ranks = trainer_ranks(spec)
        self._changed = changed
        self._retry_s = retry_s
        self._wake = asyncio.Event()
        self._draining = False
        self.last_step = spec.steps  # may change while the job runs
        self.problem: Problem | None = None

    async def run(self) -> None:
        """Until `drain`."""
        while not self._draining:
            self._wake.clear()
            step = self._store.next_step
            if not self._store.sealed_groups and step <= self.last_step:
                await self._take(step)
            self._changed()
            await self._wake.wait()

    def wake(self) -> None:
        """Something has changed that it may act on."""
        self._wake.set()

    def drain(self) -> None:
        """Begin nothing more."""
        self._draining = True
        self.wake()

    async def _take(self, step: int) -> None:
        started = time.monotonic()
        try:
            taken = await asyncio.to_thread(
                take_batch, self._recording, self._store.batch_directory, step=step, shards=self._ranks
            )
        except RecordingUnusable as error:
            message = f"{error}; lower spec.steps to {step - 1} to end the job there"
            if self.problem is None:
                log(LOG, "recording unusable", logging.WARNING, step=step, reason=message)
            self.problem = Problem(reason="RecordingUnusable", message=message[:1024])
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._store.tell_full(f"batch {step} could not be written: {error}")
        else:
            self.problem = self._store.problem = None
            await self._seal(taken, started)
            return
        asyncio.get_running_loop().call_later(self._retry_s, self.wake)

    async def _seal(self, taken: Taken, started: float) -> None:
        record = taken.record
        self._store.seal_recorded(record, taken.rewards)
        await self._store.flushed()
        log(
            LOG,
            "batch sealed",
            step=record.step,
            samples=record.samples,
            loss_tokens=record.loss_tokens,
            reward_mean=round(record.reward_mean, 4),
            staleness=record.staleness,
            truncated=record.truncated,
            took_s=round(time.monotonic() - started, 3),
        )
