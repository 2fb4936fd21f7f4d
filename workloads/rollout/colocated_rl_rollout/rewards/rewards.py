"""Get prompts and rewards from task processes, so that neither holds up generation.

The processes run other people's code, in a container of their own (`task_server`): this module holds a connection to
each. Each process works through requests in batches, in order; the reply to each has a deadline. A process that misses
it, or dies, is replaced: its current request fails if it missed the deadline, or if a second process died of it; all
others are sent again. A task that can't be set up at all is the user's to fix: every caller gets `TaskUnusable`. Where
the job names an endpoint for rewards, a process answers with the row, and this module asks the endpoint.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pydantic

from colocated_rl_api.facts import Problem
from colocated_rl_api.job import EvaluationSet
from colocated_rl_api.logs import log
from colocated_rl_api.prompts import Prompts
from colocated_rl_rollout.rewards.task_connection import (
    MAX_LINE_BYTES,
    MAX_ROWS_BYTES,
    OTHER_DATA,
    RESTART_S,
    ProcessLost,
    TaskConnection,
    TaskUnusable,
)
from colocated_rl_rollout.tasks.task_wire import (
    DROPPED_BY,
    PROMPT_ROWS,
    SCORE,
    Data,
    JudgedSample,
    PromptContent,
    PromptRow,
    RewardAnswer,
    TaskReply,
    UnscoredRow,
)

LOG = logging.getLogger(__name__)

AT_ONCE = 32  # requests on the way to one process
DEATHS_PER_REQUEST = 2
FILTER_FAILED = "FilterFailed"  # a filter function of the job gave no verdict, for whatever reason
REWARD_UNAVAILABLE = "RewardUnavailable"  # the endpoint did not answer, which is no verdict on a response


class RewardFailed(Exception):
    """One request has no answer: `reason` is CamelCase and stable. The sample fails, the rest continue."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RewardService(Protocol):
    """Scores responses. problem: why it does not, now."""

    problem: Problem | None

    async def score(self, prompt: PromptContent, fields: Mapping[str, Any], response: str) -> RewardAnswer:
        """Return the reward of a response. Raises RewardFailed."""


@dataclass(eq=False)
class _Request:
    line: bytes
    kind: pydantic.TypeAdapter[Any]  # type of the reply
    most_bytes: int  # of the reply
    reply: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    deaths: int = 0


class TaskProcesses:
    """Connects to `count` processes for all the prompts of a job; `run` keeps them up.

    sets: of the evaluation, those with a source of their own. filters: functions that judge complete groups.
    socket: where the task server listens. endpoints: those that score rows, by the number of their source.
    """

    def __init__(
        self,
        prompts: Prompts,
        *,
        sets: Sequence[EvaluationSet] = (),
        filters: Sequence[str] = (),
        count: int,
        socket: Path,
        endpoints: Mapping[int, RewardService] | None = None,
    ) -> None:
        self._prompts = prompts
        self._sets = sets
        self._filters = filters
        self._endpoints = endpoints or {}
        self._data: asyncio.Future[Data] = asyncio.get_running_loop().create_future()
        self._count = count
        self._socket = socket
        self._reply_deadline_s = prompts.reward_deadline_seconds
        self._requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._unusable: TaskUnusable | None = None
        self._problem: Problem | None = None

    @property
    def problem(self) -> Problem | None:
        """Return why there are no prompts or rewards now, or None."""
        troubled = (endpoint.problem for endpoint in self._endpoints.values() if endpoint.problem)
        return self._problem or next(troubled, None)

    @property
    def holds_out(self) -> bool:
        """Return whether some prompts of rollout are kept from training."""
        return any(source.held_out_percent != 0 for source, _ in self._prompts.sources)

    async def data(self) -> Data:
        """Return the description of the data. Raises TaskUnusable."""
        return await asyncio.shield(self._data)

    async def prompts(self, start: int, count: int, *, source: int | None = None) -> list[PromptRow]:
        """Return the prompts from position `start` on, of rollout's or of a source by its number: `count` of them, or
        as many as fit in one reply.

        Raises RewardFailed, TaskUnusable.
        """
        request = {"prompts": [start, count]} if source is None else {"prompts_of": [source, start, count]}
        found: list[PromptRow] = await self._ask(request, PROMPT_ROWS, MAX_ROWS_BYTES)
        if not 0 < len(found) <= count:
            raise RewardFailed("ReplyGarbled", f"{len(found)} prompts came, {count} were asked for")
        return found

    async def score(self, index: int, response: str) -> float:
        """Score a response to the prompt of row `index`. Raises RewardFailed, TaskUnusable."""
        return (await self.score_with_figures(index, response)).reward

    async def score_with_figures(self, index: int, response: str) -> RewardAnswer:
        """Score a response as `score` does, and return what came beside the reward too."""
        most_bytes = MAX_ROWS_BYTES if self._endpoints else MAX_LINE_BYTES
        scored: RewardAnswer | UnscoredRow = await self._ask({"score": [index, response]}, SCORE, most_bytes)
        if not isinstance(scored, UnscoredRow):
            return scored
        endpoint = self._endpoints.get(scored.source)
        if endpoint is None:
            raise RewardFailed("ReplyGarbled", f"a row came back, and source {scored.source} has no endpoint for it")
        return await endpoint.score(scored.prompt, scored.fields, response)

    async def dropped_by(self, index: int | None, samples: Sequence[JudgedSample]) -> str | None:
        """Return the filter function that drops a complete group, or None. index: of its row, None without one.

        Raises RewardFailed with FILTER_FAILED, TaskUnusable.
        """
        try:
            name: str | None = await self._ask({"judge": [index, samples]}, DROPPED_BY, MAX_LINE_BYTES)
        except RewardFailed as error:
            raise RewardFailed(FILTER_FAILED, str(error)) from error
        if name is not None and name not in self._filters:
            raise RewardFailed(FILTER_FAILED, "the task process named a filter function that the job does not have")
        return name

    async def run(self) -> None:
        """Keep the processes up until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._keep_up(), name=f"task-process-{number}")

    async def _ask(self, request: dict[str, Any], kind: pydantic.TypeAdapter[Any], most_bytes: int) -> Any:
        if self._unusable is not None:
            raise self._unusable
        asked = _Request(json.dumps(request).encode() + b"\n", kind, most_bytes)
        self._requests.put_nowait(asked)
        return await asked.reply

    # ------------------------------------------------------------------------------------------------- one process
    async def _keep_up(self) -> None:
        while self._unusable is None:
            try:
                async with TaskConnection.open(self._socket) as process:
                    await self._greet(process)
                    while True:
                        await self._work_off(process)
            except ProcessLost as error:
                log(LOG, "task process replaced", logging.WARNING, reason=str(error))
                self._problem = Problem(reason="TaskProcessLost", message=f"{error}; it is started again"[:1024])
            except TaskUnusable as error:
                self._unusable = error
                self._problem = Problem(reason="PromptsUnusable", message=str(error)[:1024])
                if not self._data.done():
                    self._data.set_exception(error)
                    self._data.exception()  # marks it as retrieved: perhaps nobody asks
                self._fail_all(error)
            await asyncio.sleep(RESTART_S * (0.5 + random.random()))

    async def _greet(self, process: TaskConnection) -> None:
        data = await process.greet(self._prompts, sets=self._sets, filters=self._filters, count=self._count)
        if not self._data.done():
            self._data.set_result(data)
        elif self._data.result() != data:
            raise TaskUnusable(f"spec.rollout.prompts, or a set of spec.evaluation: {OTHER_DATA}")
        self._problem = None

    async def _work_off(self, process: TaskConnection) -> None:
        """Answer waiting requests, this process's share of them: otherwise slow ones would queue behind each other."""
        batch = [await self._requests.get()]
        share = -(-(1 + self._requests.qsize()) // self._count)
        while len(batch) < min(share, AT_ONCE):
            batch.append(self._requests.get_nowait())
        try:
            process.post(b"".join(request.line for request in batch))
            while batch:
                reply = await process.receive(deadline_s=self._reply_deadline_s, most_bytes=batch[0].most_bytes)
                _resolve(batch.pop(0), reply)
        except TimeoutError as error:
            late = f"nothing within {self._reply_deadline_s} s (rollout.prompts.rewardDeadlineSeconds)"
            _fail(batch.pop(0), RewardFailed("RewardTimedOut", late))
            raise ProcessLost(late) from error
        except ProcessLost:
            batch[0].deaths += 1
            if batch[0].deaths >= DEATHS_PER_REQUEST:
                _fail(batch.pop(0), RewardFailed("RewardProcessDied", "the process that works on it died, twice"))
            raise
        finally:
            for request in batch:  # lost with the process, or cancelled
                self._requests.put_nowait(request)

    def _fail_all(self, error: TaskUnusable) -> None:
        while not self._requests.empty():
            _fail(self._requests.get_nowait(), error)


def _resolve(request: _Request, reply: TaskReply) -> None:
    if request.reply.done():  # the caller has gone
        return
    if reply.error is not None:
        request.reply.set_exception(RewardFailed(reply.reason, reply.error))
        return
    try:
        request.reply.set_result(request.kind.validate_python(reply.value))
    except pydantic.ValidationError as error:
        fault = error.errors(include_url=False)[0]["msg"]
        request.reply.set_exception(RewardFailed("ReplyGarbled", f"the task process sent no such answer: {fault}"))


def _fail(request: _Request, error: Exception) -> None:
    if not request.reply.done():
        request.reply.set_exception(error)
