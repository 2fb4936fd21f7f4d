"""Score each finished sample with a job's reference, between reward and batch, where that is a stage of rollout.

A reference's scores follow from the sample and from a model that never changes: they may be requested again, of any of
its pods, and are not in the store. A sample that is not scored yet waits, and its group is in no batch meanwhile: it
counts against the bounds of rollout as any other finished one, so these stop rollout in the end. Scores are of the
temperature that the next batch is sealed with; when that changes, they are requested anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp
import numpy as np
import pydantic
from numpy.typing import NDArray

from colocated_rl_api.back_off import MOMENT_S, doubled_s
from colocated_rl_api.facts import Problem
from colocated_rl_api.logs import failure_of, log
from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.reference_wire import BYTES_OF_A_TOKEN, SCORE_PATH, ScoreError
from colocated_rl_member.data import DataClient
from colocated_rl_rollout.metrics import RolloutMetrics
from colocated_rl_rollout.rules.samples import (
    Group,
    GroupId,
    Sample,
    SampleId,
    SampleState,
    Scores,
)

LOG = logging.getLogger(__name__)

REFUSES_SAMPLE = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)  # for which no pod has to rest
AT_ONCE = 32  # samples on the way to one pod, which takes several into one pass
CONNECT_S = 10.0
MAX_ERROR_BYTES = 2048
REST_S, REST_AT_MOST_S = 0.2, 30.0  # of a pod that failed, and of a sample; doubled each time
TOLD_AFTER = 5  # failures of one sample before a problem is reported: others may be scored meanwhile


class NotScored(Exception):
    """The pod gave no answer, or none that can be used. is_of_sample: the pod is not at fault."""

    def __init__(self, message: str, *, is_of_sample: bool = False) -> None:
        super().__init__(message)
        self.is_of_sample = is_of_sample


@dataclass(eq=False)
class _Pod:
    endpoint: Endpoint
    in_flight: int = 0
    asked_at: float = 0.0  # with its newest sample
    failures: int = 0  # in a row
    rests_until: float = 0.0
    under_way: set[asyncio.Timeout] = field(default_factory=set)


@dataclass(eq=False)
class _Trouble:
    """Records the failed attempts at one sample."""

    failures: int
    words: str


class ReferencePods:
    """Holds all pods of a job's reference. temperature: of the wanted scores, from its next use on.

    deadline_s: for one answer. changed: called when it may be possible to send a sample or to seal a batch.
    """

    def __init__(
        self,
        client: DataClient,
        *,
        temperature: float,
        deadline_s: float,
        metrics: RolloutMetrics,
        changed: Callable[[], None],
        rest_s: float = REST_S,
    ) -> None:
        self.temperature = temperature
        self._client = client
        self._deadline_s = deadline_s
        self._metrics = metrics
        self._changed = changed
        self._rest_s = rest_s
        self._pods: dict[Endpoint, _Pod] = {}
        self._due: dict[SampleId, Sample] = {}  # samples that may be sent, by id, oldest request first
        self._left: dict[GroupId, dict[SampleId, Sample]] = {}  # without scores, perhaps no longer wanted
        self._trouble: dict[SampleId, _Trouble] = {}  # by sample
        self._tasks: set[asyncio.Task[None]] = set()
        self._words = ""  # of the newest failure
        metrics.unscored.set_function(lambda: self.unscored)

    def follow(self, endpoints: Iterable[Endpoint]) -> None:
        """Use these pods, and no others, from now on; samples at other pods are sent again."""
        named = set(endpoints)
        for endpoint in self._pods.keys() - named:
            for attempt in self._pods.pop(endpoint).under_way:
                if not attempt.expired():
                    attempt.reschedule(asyncio.get_running_loop().time())
        for endpoint in named - self._pods.keys():
            self._pods[endpoint] = _Pod(endpoint)

    # ------------------------------------------------------------------------------------------------- what is wanted
    def want(self, group: Group) -> None:
        """Request scores of the group's finished samples that have none."""
        for sample in group.kept:
            if self._wants(sample) and sample.id not in self._left.get(group.id, ()):
                self._left.setdefault(group.id, {})[sample.id] = sample
                self._due[sample.id] = sample

    def has_scored(self, group: Group) -> bool:
        """Return whether all requested scores of the group that are still wanted are in."""
        return not any(map(self._wants, self._left.get(group.id, {}).values()))

    @property
    def unscored(self) -> int:
        """Return how many finished samples wait for scores or are being scored."""
        return sum(self._wants(sample) for left in self._left.values() for sample in left.values())

    @property
    def problem(self) -> Problem | None:
        """Return why scoring makes no progress, or None."""
        if not self.unscored:
            return None
        stuck = next((trouble for trouble in self._trouble.values() if trouble.failures >= TOLD_AFTER), None)
        if not self._pods:
            why = "none of its pods is there"
        elif all(pod.failures for pod in self._pods.values()):
            why = self._words
        elif stuck is not None:
            why = stuck.words
        else:
            return None
        message = f"finished samples wait for the reference, and no batch takes them before: {why}"
        return Problem(reason="ReferenceUnavailable", message=message[:1024])

    def _wants(self, sample: Sample) -> bool:
        is_scored = sample.scores is not None and sample.scores.temperature == self.temperature
        return sample.state is SampleState.COMPLETED and not is_scored

    def _is_done_with(self, sample: Sample) -> None:
        self._trouble.pop(sample.id, None)
        left = self._left.get(sample.group.id, {})
        left.pop(sample.id, None)
        if not left:
            self._left.pop(sample.group.id, None)

    # ------------------------------------------------------------------------------------------------- asking
    def send(self, group: asyncio.TaskGroup) -> None:
        """Send due samples to pods that take them: those that answer first, of them those with the fewest samples.

        Of several with as few, each gets one in turn.
        """
        while self._due and (pod := self._pick()) is not None:
            sample = self._due.pop(next(iter(self._due)))
            if not self._wants(sample):
                self._is_done_with(sample)
                continue
            pod.in_flight += 1
            pod.asked_at = asyncio.get_running_loop().time()
            task = group.create_task(self._attempt(sample, pod), name=f"reference/{sample.id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def end(self) -> None:
        """Cancel all requests: no more scores are wanted."""
        self._due.clear()
        for task in self._tasks:
            task.cancel()

    def _pick(self) -> _Pod | None:
        now = asyncio.get_running_loop().time()
        takes = (pod for pod in self._pods.values() if pod.in_flight < AT_ONCE and now >= pod.rests_until)
        # one that has failed comes last: it rests for as long as its sample does, and would get it again and again
        return min(takes, key=lambda pod: (pod.failures > 0, pod.in_flight, pod.asked_at), default=None)

    async def _attempt(self, sample: Sample, pod: _Pod) -> None:
        temperature = self.temperature
        try:
            logp = await self._ask(sample, pod, temperature)
        except NotScored as error:
            self._metrics.reference_answers.labels("failed").inc()
            self._failed(sample, pod, error)
        else:
            self._metrics.reference_answers.labels("scored").inc()
            pod.failures = 0
            sample.scores = Scores(temperature, logp)
            if self._wants(sample):
                self._due[sample.id] = sample  # the temperature has changed since
            else:
                self._is_done_with(sample)
        finally:
            pod.in_flight -= 1
            self._changed()

    def _failed(self, sample: Sample, pod: _Pod, error: NotScored) -> None:
        """Retry the sample after a while, and rest the pod if the pod is at fault."""
        loop, self._words = asyncio.get_running_loop(), str(error)
        failures = self._trouble[sample.id].failures if sample.id in self._trouble else 0
        self._trouble[sample.id] = _Trouble(failures + 1, self._words)
        is_first = not error.is_of_sample and not pod.failures
        level = logging.WARNING if is_first or failures + 1 == TOLD_AFTER else logging.DEBUG
        log(LOG, "sample not scored", level, sample=sample.id, reason=self._words)
        if not error.is_of_sample and loop.time() >= pod.rests_until:
            rest_s = doubled_s(self._rest_s, pod.failures, REST_AT_MOST_S)
            pod.failures += 1
            pod.rests_until = loop.time() + rest_s
            loop.call_later(rest_s + MOMENT_S, self._changed)
        loop.call_later(doubled_s(self._rest_s, failures, REST_AT_MOST_S), self._is_due_again, sample)

    def _is_due_again(self, sample: Sample) -> None:
        self._due[sample.id] = sample
        self._changed()

    async def _ask(self, sample: Sample, pod: _Pod, temperature: float) -> NDArray[np.float32]:
        """Return a log-probability of each token of the response. Raises NotScored."""
        ids = np.concatenate([np.asarray(sample.group.prompt.ids, "<i4"), sample.tokens.ids.astype("<i4")])
        start = max(1, len(sample.group.prompt.ids))  # the first token of all has no context
        unasked = np.zeros(start - len(sample.group.prompt.ids), np.float32)
        if start >= len(ids):
            return unasked[: len(sample.tokens)]
        path = f"{SCORE_PATH}?start={start}&temperature={temperature!r}"
        try:
            async with asyncio.timeout(self._deadline_s) as attempt:
                pod.under_way.add(attempt)
                try:
                    answer = await self._post(pod.endpoint, path, ids.tobytes())
                finally:
                    pod.under_way.discard(attempt)
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is one
            raise NotScored(f"{pod.endpoint.pod} did not answer: {failure_of(error)}") from error
        wanted = BYTES_OF_A_TOKEN * (len(ids) - start)
        logp = np.frombuffer(answer, "<f4") if len(answer) == wanted else np.full(1, np.nan, np.float32)
        if not np.isfinite(logp).all():
            what = f"{len(answer)} bytes of {wanted}, or some that are no numbers"
            raise NotScored(f"{pod.endpoint.pod} answered {what}", is_of_sample=True)
        return np.concatenate([unasked, logp])

    async def _post(self, endpoint: Endpoint, path: str, body: bytes) -> bytes:
        headers = {"Content-Type": "application/octet-stream"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with self._client.request(
            "POST", endpoint, path, data=body, headers=headers, timeout=timeout
        ) as response:
            if response.status != HTTPStatus.OK:
                is_of_sample = response.status in REFUSES_SAMPLE
                why = _words_of(await response.content.read(MAX_ERROR_BYTES))
                raise NotScored(f"{endpoint.pod} answered {response.status}: {why}", is_of_sample=is_of_sample)
            answer: bytearray = bytearray()
            async for piece in response.content.iter_any():
                answer += piece
                if len(answer) > len(body):  # a number for each token at most
                    raise NotScored(f"{endpoint.pod} answered more than was asked", is_of_sample=True)
            return bytes(answer)


def _words_of(body: bytes) -> str:
    """Return the reference's message, which quotes no sample; for any other body, its length."""
    try:
        refusal = ScoreError.model_validate_json(body)
    except pydantic.ValidationError:
        return f"{len(body)} bytes"
    return f"{refusal.error}: {refusal.message}"[:300]
