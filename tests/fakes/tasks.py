"""The real task server, in a thread, and the controller's end of its processes."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from colocated_rl_api.job import EvaluationSet
from colocated_rl_api.prompts import Prompts
from colocated_rl_rollout.rewards.rewards import RewardService, TaskProcesses
from colocated_rl_rollout.tasks.task_server import COMMAND, listen, serve

START_S = 300.0  # the libraries of some tasks take seconds of a processor, which others may share


async def are_up(processes: TaskProcesses) -> None:
    """Wait for the task processes before a deadline of a test begins."""
    async with asyncio.timeout(START_S):
        await processes.data()


@contextmanager
def task_server(
    directory: Path,
    *,
    command: Sequence[str] = COMMAND,
    container_bytes: int | None = None,
    path: Path | None = None,
) -> Iterator[Path]:
    """The socket of a server whose processes find claims in `directory`, in a container of that memory."""
    with tempfile.TemporaryDirectory(prefix="tasks-") as folder:  # a socket's path has to be short
        limit = Path(folder, "memory.max")
        limit.write_text("max\n" if container_bytes is None else f"{container_bytes}\n")
        listener = listen(path or Path(folder, "tasks.sock"))
        serving = threading.Thread(
            target=serve, args=(listener, [*command, str(directory), str(Path(folder, "cache")), str(limit)])
        )
        serving.start()
        try:
            yield Path(listener.getsockname())
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            serving.join()


@asynccontextmanager
async def task_processes(
    prompts: Prompts,
    directory: Path,
    *,
    sets: Sequence[EvaluationSet] = (),
    filters: Sequence[str] = (),
    count: int = 1,
    command: Sequence[str] = COMMAND,
    container_bytes: int | None = None,
    endpoints: Mapping[int, RewardService] | None = None,
    path: Path | None = None,
) -> AsyncIterator[TaskProcesses]:
    """Processes that are kept up until the end of the block."""
    with task_server(directory, command=command, container_bytes=container_bytes, path=path) as socket_path:
        made = TaskProcesses(prompts, sets=sets, filters=filters, count=count, socket=socket_path, endpoints=endpoints)
        running = asyncio.create_task(made.run())
        try:
            yield made
        finally:
            running.cancel()
            await asyncio.wait([running])
