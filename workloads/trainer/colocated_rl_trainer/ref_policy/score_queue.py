"""Queue samples that wait for a device. The module knows neither network nor torch.

A device takes what fits into one pass: the oldest sample, and later ones of the same temperature. A sample whose caller
no longer waits is skipped.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field


class ScoringFailed(Exception):
    """A pass over the sample failed. The message states why; the model is unchanged."""


@dataclass(frozen=True, eq=False)
class QueuedSample:
    """Holds a sample to be scored. ids: int32. start: first place whose log-probability is requested, above 0."""

    ids: memoryview
    start: int
    temperature: float
    answer: Future[bytes] = field(default_factory=Future)

    def __len__(self) -> int:
        return len(self.ids)


class ScoreQueue:
    """Queues samples in order of arrival. most_tokens: that a device takes at once; a longer sample is alone."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._waiting: deque[QueuedSample] = deque()
        self._arrived = threading.Condition()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def ask(self, sample: QueuedSample, *, deadline_s: float) -> bytes:
        """Wait for the log-probabilities from `start` on, as float32. Raises ScoringFailed, TimeoutError."""
        with self._arrived:
            self._waiting.append(sample)
            self._arrived.notify()
        try:
            return sample.answer.result(timeout=deadline_s)
        except TimeoutError:
            sample.answer.cancel()
            raise

    def take(self) -> list[QueuedSample]:
        """Return at least one sample, in order of arrival. Blocks until there is one."""
        with self._arrived:
            while True:
                taken = self._pick()
                if taken:
                    return taken
                self._arrived.wait()

    def _pick(self) -> list[QueuedSample]:
        taken: list[QueuedSample] = []
        left: deque[QueuedSample] = deque()
        tokens = 0
        for sample in self._waiting:
            if sample.answer.cancelled():
                continue
            has_same_temperature = not taken or sample.temperature == taken[0].temperature
            if has_same_temperature and (not taken or tokens + len(sample) <= self._most_tokens):
                if sample.answer.set_running_or_notify_cancel():
                    taken.append(sample)
                    tokens += len(sample)
            else:
                left.append(sample)
        self._waiting = left
        return taken
