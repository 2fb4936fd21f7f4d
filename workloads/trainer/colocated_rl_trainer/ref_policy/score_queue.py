"""Where questions wait for a device. Knows neither network nor torch.

A device takes what fits into one pass: the oldest question, and others of the same temperature that came after it.
Whoever asked and has gone is passed over.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field


class ScoringFailed(Exception):
    """A pass over the question failed. The message says why; the model is what it was."""


@dataclass(frozen=True, eq=False)
class QueuedSample:
    """ids: a sample, as it came, int32. start: the first place whose log-probability is wanted, above 0."""

    ids: memoryview
    start: int
    temperature: float
    answer: Future[bytes] = field(default_factory=Future)

    def __len__(self) -> int:
        return len(self.ids)


class ScoreQueue:
    """most_tokens: of the questions that one device takes at once; a longer one stands alone."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._waiting: deque[QueuedSample] = deque()
        self._came = threading.Condition()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def ask(self, question: QueuedSample, *, deadline_s: float) -> bytes:
        """Log-probabilities from `start` on, float32. Raises NotScored, TimeoutError."""
        with self._came:
            self._waiting.append(question)
            self._came.notify()
        try:
            return question.answer.result(timeout=deadline_s)
        except TimeoutError:
            question.answer.cancel()
            raise

    def take(self) -> list[QueuedSample]:
        """At least one, in the order in which they came. Blocks until there is one."""
        with self._came:
            while True:
                taken = self._pick()
                if taken:
                    return taken
                self._came.wait()

    def _pick(self) -> list[QueuedSample]:
        taken: list[QueuedSample] = []
        left: deque[QueuedSample] = deque()
        tokens = 0
        for question in self._waiting:
            if question.answer.cancelled():
                continue
            is_alike = not taken or question.temperature == taken[0].temperature
            if is_alike and (not taken or tokens + len(question) <= self._most_tokens):
                if question.answer.set_running_or_notify_cancel():
                    taken.append(question)
                    tokens += len(question)
            else:
                left.append(question)
        self._waiting = left
        return taken
