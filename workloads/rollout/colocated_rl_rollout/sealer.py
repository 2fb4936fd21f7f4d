"""Define the interface of what makes a job's batches: a `Worker`, or a `Replay` of recorded batches."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from colocated_rl_api.facts import Problem
from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.logs import log
from colocated_rl_api.member_wire import RolloutTarget
from colocated_rl_rollout.store.batches import BatchRecord
from colocated_rl_rollout.store.store import Store

LOG = logging.getLogger(__name__)

FULL_RETRY_S = 10.0  # while the store's volume is full
WrittenT = TypeVar("WrittenT")


class Sealer(ABC):
    """Makes batches; the controller drives it. `changed` is called when facts may have changed.

    ended_at: the step after whose batch no other can come, whatever spec.steps is; None while one can.
    problem: why there is no progress.
    """

    def __init__(self, spec: ColocatedRLJobSpec, store: Store, changed: Callable[[], None], retry_s: float) -> None:
        self._spec, self._store, self._changed = spec, store, changed
        self._full_retry_s = retry_s
        self._wake = asyncio.Event()
        self._draining = False
        self.last_step = spec.steps  # nothing is made for later ones
        self.ended_at: int | None = None
        self.problem: Problem | None = None

    @property
    def filter_problem(self) -> Problem | None:
        """Return what is wrong with the job's filters, or None: a recording was filtered when it was made."""
        return None

    @abstractmethod
    async def run(self) -> None:
        """Run until `drain`; then return when nothing is under way."""

    def wake(self) -> None:
        """Wake the loop: something has changed that it may act on."""
        self._wake.set()

    def drain(self) -> None:
        """Begin nothing more."""
        self._draining = True
        self.wake()

    def tune(self, target: RolloutTarget) -> None:
        """Apply the settings of the spec that may change to everything that begins from here on."""
        if target.last_step is not None:
            self.last_step = target.last_step

    def discard_stale(self) -> None:  # noqa: B027 - nothing of a recording grows older
        """Give up what no batch can take any more, now that a step is trained."""

    async def _written(self, step: int, write: Callable[[], WrittenT]) -> WrittenT | None:
        """Write the files of a batch; return None while the volume has no room: nothing is lost, the caller retries."""
        try:
            written = await asyncio.to_thread(write)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._store.tell_full(f"batch {step} could not be written: {error}")
            self._changed()
            return None
        self._store.problem = None
        return written

    def _log_sealed(self, record: BatchRecord, since: float, *, filtered_groups: int | None = None) -> None:
        """Log that a batch is sealed. since: on the monotonic clock."""
        fields = record.model_dump(exclude={"sha256"}) | {"reward_mean": round(record.reward_mean, 4)}
        took_s = round(time.monotonic() - since, 3)
        log(LOG, "batch sealed", **fields, filtered_groups=filtered_groups, took_s=took_s)


def trainer_ranks(spec: ColocatedRLJobSpec) -> int:
    """Return how many ranks train a batch together: one for each device, or one for each replica without devices."""
    return spec.replicas * max(1, spec.gpus.count)
