"""Connect to one task process: the controller's end of `task_wire`, and the life of the process.

The task server starts a process for each connection, and ends it when the connection is closed. Lines are untrusted:
one of another shape, or one that is too long, ends the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pydantic

from colocated_rl_api import names
from colocated_rl_api.job import EvaluationSet
from colocated_rl_api.prompts import Prompts, environments_of, sources_of
from colocated_rl_rollout.tasks.task_wire import Data, Greeting, TaskReply

START_DEADLINE_S = 900.0  # data may have to be fetched, and all of it is read
RESTART_S = 1.0  # before a process that died is replaced; with jitter
MAX_LINE_BYTES = 64 * 1024  # of a reward, or the error in its place
MAX_ROWS_BYTES = 64 * 1024 * 1024  # of a row, or several prompts
OTHER_DATA = (
    "the rows are not those that the job began with, and what was asked is not found again among them: put the former "
    "files back, or make a new job"
)


class TaskUnusable(Exception):
    """The task can't be made as the job describes it. The user has to fix the job."""


class ProcessLost(Exception):
    """The process ended, or must: its connection is closed, and another one takes over."""


@dataclass(frozen=True)
class TaskConnection:
    """Connects to one process, and owns its life: the task server ends it when the connection is closed."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    @asynccontextmanager
    async def open(cls, socket: Path) -> AsyncIterator[TaskConnection]:
        """Connect to a new process, and close the connection at the end. Raises ProcessLost."""
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                reader, writer = await asyncio.open_unix_connection(socket, limit=MAX_LINE_BYTES)
        except (OSError, TimeoutError) as error:
            what = f"no task process: {socket} does not answer: {error}"
            raise ProcessLost(f"{what}; look at the log of container {names.REWARDS_CONTAINER}") from error
        try:
            yield cls(reader, writer)
        finally:
            writer.transport.abort()

    async def greet(
        self,
        prompts: Prompts,
        *,
        sets: Sequence[EvaluationSet] = (),
        filters: Sequence[str] = (),
        count: int,
        model: str | None = None,
    ) -> Data:
        """Return the process's data; it is one of `count` that answer, or with a model one of `count` that play.

        Raises ProcessLost, TaskUnusable.
        """
        processes = 2 * count if environments_of(sources_of(prompts, sets)) else count
        greeting = Greeting(prompts=prompts, sets=tuple(sets), filters=tuple(filters), processes=processes, model=model)
        try:
            line = greeting.model_dump_json(by_alias=True).encode() + b"\n"
            await self.send(line, deadline_s=START_DEADLINE_S)
            reply = await self.receive(deadline_s=START_DEADLINE_S)
        except TimeoutError as error:
            raise ProcessLost(f"task process not ready within {START_DEADLINE_S:.0f} s") from error
        if reply.error is not None:
            raise TaskUnusable(f"spec.{reply.error}")
        try:
            return Data.model_validate(reply.value)
        except pydantic.ValidationError as error:
            raise ProcessLost("task process did not say how many rows it has") from error

    async def send(self, lines: bytes, *, deadline_s: float) -> None:
        """Send lines. Raises ProcessLost, TimeoutError."""
        self.post(lines)
        try:
            async with asyncio.timeout(deadline_s):
                await self.writer.drain()
        except ConnectionError as error:
            raise ProcessLost("task process closed its input") from error

    def post(self, lines: bytes) -> None:
        """Send lines that are answered one after the other, without waiting until they are taken: a process that writes
        an answer takes no further line until the answer is read. Raises ProcessLost.
        """
        if self.writer.is_closing():  # uvloop's transport raises RuntimeError then
            raise ProcessLost("task process closed its input")
        self.writer.write(lines)

    async def receive(self, *, deadline_s: float | None, most_bytes: int = MAX_LINE_BYTES) -> TaskReply:
        """Return the next line. Raises ProcessLost, TimeoutError."""
        try:
            async with asyncio.timeout(deadline_s):
                line = await self._line(most_bytes)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise ProcessLost("task process ended") from error
        try:
            return TaskReply.model_validate_json(line)
        except pydantic.ValidationError as error:
            raise ProcessLost("task process wrote what is no reply") from error

    async def _line(self, most_bytes: int) -> bytes:
        """Read a line; hold no more of it than its limit, and what the reader takes at a time."""
        line = bytearray()
        while len(line) <= most_bytes:
            try:
                return bytes(line + await self.reader.readuntil())
            except asyncio.LimitOverrunError as longer:
                line += await self.reader.readexactly(longer.consumed)
        raise ProcessLost(f"task process wrote a line of more than {most_bytes} bytes")
