"""The worker of a job that only trains takes the recorded batch of a step once the step before it is trained.

`recording` makes its files durable here, and the batch is sealed in this job's store; from then on it is a batch as any
other: served to trainers, replayed to them, committed and forgotten. Nothing is generated, rewarded or filtered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from colocated_rl_api.facts import Problem
from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.logs import log
from colocated_rl_rollout.sealer import FULL_RETRY_S, Sealer, trainer_ranks
from colocated_rl_rollout.store.recording import RecordingUnusable, take_batch
from colocated_rl_rollout.store.store import Store

LOG = logging.getLogger(__name__)


class Replay(Sealer):
    """Seals recorded batches. recording: where the files are, read-only."""

    def __init__(
        self,
        spec: ColocatedRLJobSpec,
        *,
        store: Store,
        recording: Path,
        changed: Callable[[], None],
        full_retry_s: float = FULL_RETRY_S,
    ) -> None:
        super().__init__(spec, store, changed, full_retry_s)
        self._recording = recording

    async def run(self) -> None:
        while not self._draining:
            self._wake.clear()
            step = self._store.next_step
            if not self._store.sealed_groups and step <= self.last_step and not await self._seals(step):
                asyncio.get_running_loop().call_later(self._full_retry_s, self.wake)
            self._changed()
            await self._wake.wait()

    async def _seals(self, step: int) -> bool:
        started = time.monotonic()
        take = partial(
            take_batch,
            self._recording,
            self._store.batch_directory,
            step=step,
            shards=trainer_ranks(self._spec),
            needs_scores=self._spec.seals_with_scores,
            accepts_unversioned=self._spec.rollout.accepts_unversioned,
            free_bytes=self._store.free_bytes,
        )
        try:
            taken = await self._written(step, take)
        except RecordingUnusable as error:
            message = f"{error}; lower spec.steps to {step - 1} to end the job there"
            if self.problem is None:
                log(LOG, "recording unusable", logging.WARNING, step=step, reason=message)
            self.problem = Problem(reason="RecordingUnusable", message=message[:1024])
            return False
        if taken is None:
            return False
        self.problem = None
        self._store.seal_recorded(taken.record, taken.rewards)
        await self._store.flushed()
        self._log_sealed(taken.record, started)
        return True
