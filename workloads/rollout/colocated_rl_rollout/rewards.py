"""Processes that make questions and score answers, so that neither holds up generation.

Each process works off requests in batches, in order; the reply to each has a deadline. A process that misses it, or
dies, is replaced: the request it was at fails if it missed the deadline, or if a second process died of it; all others
are asked again. A task that can't be set up at all is the user's to mend: `TaskUnusable`, to whoever asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colocated_rl_api.job import Prompts, ReasoningGym
from colocated_rl_api.logs import log
from colocated_rl_api.member_wire import Problem

Question = str | list[dict[str, Any]]
"""What a user asks, or a conversation up to where the policy speaks."""

LOG = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-W", "ignore", "-m", "colocated_rl_rollout.task_process")
START_DEADLINE_S = 120.0
REPLY_DEADLINE_S = 30.0
RESTART_S = 1.0  # before a process that died is replaced; with jitter
KILL_DEADLINE_S = 5.0
AT_ONCE = 32  # requests on the way to one process
MAX_LINE_BYTES = 64 * 1024 * 1024
DEATHS_PER_REQUEST = 2


class RewardFailed(Exception):
    """One request has no answer: `reason` is CamelCase and stable. The sample fails, the rest go on."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class TaskUnusable(Exception):
    """The task can't be made as the job describes it. The user mends the job."""


class _ProcessLost(Exception):
    """The process ended or was ended; another one takes over."""


@dataclass(eq=False)
class _Request:
    line: bytes
    reply: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    deaths: int = 0


class TaskProcesses:
    """`count` processes of one source of prompts; `run` keeps them up.

    cache: a directory for what their libraries keep between starts. directory: where the claim of a file is mounted.
    memory_bytes: of each; one that wants more fails that request, or ends.
    command: of a process that speaks the lines of `task_process`.
    """

    def __init__(
        self,
        prompts: Prompts,
        *,
        count: int,
        cache: Path,
        directory: Path,
        memory_bytes: int | None = None,
        command: Sequence[str] = COMMAND,
        reply_deadline_s: float = REPLY_DEADLINE_S,
    ) -> None:
        self._prompts = prompts
        self._arguments = (str(directory), *([] if memory_bytes is None else [str(memory_bytes)]))
        self._size: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._count = count
        self._cache = cache
        self._command = command
        self._reply_deadline_s = reply_deadline_s
        self._requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._unusable: TaskUnusable | None = None
        self.problem: Problem | None = None

    async def size(self) -> int:
        """Rows of the data. Raises TaskUnusable."""
        return await asyncio.shield(self._size)

    async def questions(self, start: int, count: int) -> list[tuple[int, Question]]:
        """Index and question of the positions [start, start + count). Raises RewardFailed, TaskUnusable."""
        return [(index, question) for index, question in await self._ask({"questions": [start, count]})]

    async def score(self, index: int, response: str) -> float:
        """Reward of a response to the question of row `index`. Raises RewardFailed, TaskUnusable."""
        return float(await self._ask({"score": [index, response]}))

    async def run(self) -> None:
        """Keep the processes up until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._keep_up(), name=f"task-process-{number}")

    async def _ask(self, request: dict[str, Any]) -> Any:
        if self._unusable is not None:
            raise self._unusable
        asked = _Request(json.dumps(request).encode() + b"\n")
        self._requests.put_nowait(asked)
        return await asked.reply

    # ------------------------------------------------------------------------------------------------- one process
    async def _keep_up(self) -> None:
        while self._unusable is None:
            process = await self._spawn()
            try:
                await self._greet(process)
                while True:
                    await self._work_off(process)
            except _ProcessLost as error:
                log(LOG, "task process replaced", logging.WARNING, reason=str(error))
                self.problem = Problem(reason="TaskProcessLost", message=f"{error}; it is started again")
            except TaskUnusable as error:
                self._unusable = error
                self.problem = Problem(reason="PromptsUnusable", message=str(error)[:1024])
                if not self._size.done():
                    self._size.set_exception(error)
                    self._size.exception()  # whoever asks is told; perhaps nobody does
                self._fail_all(error)
            finally:
                await _end(process)
            await asyncio.sleep(RESTART_S * (0.5 + random.random()))

    async def _spawn(self) -> Process:
        self._cache.mkdir(parents=True, exist_ok=True)
        return await asyncio.create_subprocess_exec(
            *self._command,
            *self._arguments,
            stdin=PIPE,
            stdout=PIPE,
            limit=MAX_LINE_BYTES,
            # a library of the tasks keeps a font list; another one would start a thread for each of the node's cores
            env={**os.environ, "MPLCONFIGDIR": str(self._cache), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    async def _greet(self, process: Process) -> None:
        greeting = self._prompts.model_dump_json(by_alias=True).encode() + b"\n"
        try:
            reply = await _exchange(process, greeting, deadline_s=START_DEADLINE_S)
        except TimeoutError as error:
            raise _ProcessLost(f"task process not ready within {START_DEADLINE_S:.0f} s") from error
        if "error" in reply:
            raise TaskUnusable(f"spec.rollout.prompts.{_told(self._prompts)} can't be used: {reply['error']}")
        if not self._size.done():
            self._size.set_result(reply["value"])
        self.problem = None

    async def _work_off(self, process: Process) -> None:
        """Answer what is waiting, at most AT_ONCE requests."""
        batch = [await self._requests.get()]
        while len(batch) < AT_ONCE and not self._requests.empty():
            batch.append(self._requests.get_nowait())
        try:
            reply = await _exchange(process, b"".join(request.line for request in batch), self._reply_deadline_s)
            while True:
                _resolve(batch.pop(0), reply)
                if not batch:
                    return
                reply = await _read(process, deadline_s=self._reply_deadline_s)
        except TimeoutError as error:
            late = f"no reward within {self._reply_deadline_s:.0f} s"
            _fail(batch.pop(0), RewardFailed("RewardTimedOut", late))
            raise _ProcessLost(late) from error
        except _ProcessLost:
            batch[0].deaths += 1
            if batch[0].deaths >= DEATHS_PER_REQUEST:
                _fail(batch.pop(0), RewardFailed("RewardProcessDied", "the process that scores it died, twice"))
            raise
        finally:
            for request in batch:  # lost with the process, or cancelled
                self._requests.put_nowait(request)

    def _fail_all(self, error: TaskUnusable) -> None:
        while not self._requests.empty():
            _fail(self._requests.get_nowait(), error)


def _told(prompts: Prompts) -> str:
    source = prompts.source
    return f"reasoningGym {source.name!r}" if isinstance(source, ReasoningGym) else f"file {source.path!r}"


async def _exchange(process: Process, lines: bytes, deadline_s: float) -> dict[str, Any]:
    """Send lines and read the first reply. Raises _ProcessLost, TimeoutError."""
    if process.stdin is None:
        raise TypeError("a task process is started with a pipe")
    try:
        async with asyncio.timeout(deadline_s):
            process.stdin.write(lines)
            await process.stdin.drain()
    except ConnectionError as error:
        raise _ProcessLost("task process closed its input") from error
    return await _read(process, deadline_s=deadline_s)


async def _read(process: Process, *, deadline_s: float) -> dict[str, Any]:
    if process.stdout is None:
        raise TypeError("a task process is started with a pipe")
    async with asyncio.timeout(deadline_s):
        line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise _ProcessLost(f"task process ended with code {process.returncode}")
    reply: dict[str, Any] = json.loads(line)
    return reply


def _resolve(request: _Request, reply: dict[str, Any]) -> None:
    if request.reply.done():  # whoever asked has gone
        return
    if "error" in reply:
        request.reply.set_exception(RewardFailed("VerifierFailed", reply["error"]))
    else:
        request.reply.set_result(reply["value"])


def _fail(request: _Request, error: Exception) -> None:
    if not request.reply.done():
        request.reply.set_exception(error)


async def _end(process: Process) -> None:
    """Kill and reap; also when cancelled in between, so that none is left behind."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    reaping = asyncio.create_task(process.wait())
    try:
        await asyncio.wait([reaping], timeout=KILL_DEADLINE_S)
    except asyncio.CancelledError:
        await asyncio.wait([reaping], timeout=KILL_DEADLINE_S)
        raise
