"""Answer requests for scores (`colocated_rl_api.reference_wire`), whichever port or socket they came to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qs

from colocated_rl_api.reference_wire import BYTES_OF_A_TOKEN, SCORE_PATH
from colocated_rl_trainer.protocol.http_handler import Rejected
from colocated_rl_trainer.ref_policy.figures import ScoreCounts
from colocated_rl_trainer.ref_policy.score_queue import QueuedSample, ScoreQueue, ScoringFailed


@dataclass
class ScoreRequests:
    """Answers one request after another, in the thread of each.

    deadline_s: for an answer, from the end of the request. vocabulary: its size, once the model is loaded.
    """

    queue: ScoreQueue
    deadline_s: float
    figures: ScoreCounts
    vocabulary: int | None = None

    @property
    def is_ready(self) -> bool:
        return self.vocabulary is not None

    def answer(self, target: str, body: bytes) -> bytes:
        """Return the log-probabilities for a request. target: its path and query. Raises Rejected."""
        sample = self._sample(target, body)
        try:
            with self.figures.answering(len(sample)):
                return self.queue.ask(sample, deadline_s=self.deadline_s)
        except ScoringFailed as error:
            raise Rejected(HTTPStatus.SERVICE_UNAVAILABLE, "NotScored", str(error)) from error
        except TimeoutError as error:
            late = f"no answer within {self.deadline_s:.0f} s: {self.queue.waiting} samples wait"
            raise Rejected(HTTPStatus.SERVICE_UNAVAILABLE, "Late", late) from error

    def _sample(self, target: str, body: bytes) -> QueuedSample:
        path, _, query_string = target.partition("?")
        if path != SCORE_PATH:
            raise Rejected(HTTPStatus.NOT_FOUND, "NotFound", f"no {path} here, only {SCORE_PATH}")
        if self.vocabulary is None:
            raise Rejected(HTTPStatus.SERVICE_UNAVAILABLE, "Starting", "the model is being loaded: ask again later")
        query = {name: values[-1] for name, values in parse_qs(query_string).items()}
        try:
            start, temperature = int(query["start"]), float(query["temperature"])
        except (KeyError, ValueError) as error:
            raise _bad_request(f"?start= and temperature= must be numbers: {error}") from error
        if len(body) % BYTES_OF_A_TOKEN:
            raise _bad_request(f"a body of {len(body)} bytes is no row of int32")
        ids = memoryview(bytearray(body)).cast("i")  # torch needs writable memory
        if not 1 <= start < len(ids):
            raise _bad_request(f"start is {start}, must be from 1 to below the {len(ids)} tokens of the sample")
        if not (math.isfinite(temperature) and temperature > 0):
            raise _bad_request(f"temperature is {temperature}, must be above 0")
        if not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise _bad_request(f"a token is not one of the {self.vocabulary} of the model")
        return QueuedSample(ids, start, temperature)


def _bad_request(message: str) -> Rejected:
    return Rejected(HTTPStatus.BAD_REQUEST, "BadRequest", message)
