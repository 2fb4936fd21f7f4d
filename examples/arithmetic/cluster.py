"""The local cluster and its command line tools, as processes: up for as long as the demo runs, and gone with it.

The supervisor holds the other end of a pipe of this process and ends when that closes: however this process ends, by a
kill -9 too, the cluster ends with it. Nothing here knows what runs in the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

READY_DEADLINE_S = 180.0
DOWN_DEADLINE_S = 60.0
COMMAND_DEADLINE_S = 120.0
MAX_LINE_BYTES = 4 * 1024 * 1024
LOOK_S = 0.2
NOT_RUNNING = 3  # exit code of `localcluster status`


class ClusterError(Exception):
    """The cluster did not come up, or a command failed. The message holds what it said."""


@dataclass(frozen=True)
class LocalCluster:
    """A cluster that is up."""

    binary: Path
    directory: Path

    async def kubectl(self, *args: str, stdin: str | None = None, deadline_s: float = COMMAND_DEADLINE_S) -> str:
        """Standard output of kubectl. Raises ClusterError."""
        return await self._run("kubectl", *args, stdin=stdin, deadline_s=deadline_s)

    async def helm(self, *args: str, deadline_s: float = COMMAND_DEADLINE_S) -> str:
        """Standard output of helm. Raises ClusterError."""
        return await self._run("helm", *args, stdin=None, deadline_s=deadline_s)

    async def follow(self, *args: str) -> AsyncGenerator[str, None]:
        """Lines of a kubectl that goes on, until it ends or nobody listens any more."""
        process = await self._start("kubectl", *args, stdin=DEVNULL, stderr=DEVNULL)
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                yield line.decode(errors="replace")
        finally:
            await _end(process)

    async def _run(self, *args: str, stdin: str | None, deadline_s: float) -> str:
        process = await self._start(*args, stdin=PIPE, stderr=PIPE)
        try:
            async with asyncio.timeout(deadline_s):
                out, error = await process.communicate((stdin or "").encode())
        except TimeoutError as late:
            raise ClusterError(f"{' '.join(args)}: no answer within {deadline_s:.0f} s") from late
        finally:
            await _end(process)
        if process.returncode:
            raise ClusterError(f"{' '.join(args)}: {error.decode(errors='replace').strip()}")
        return out.decode()

    async def _start(self, *args: str, stdin: int, stderr: int) -> Process:
        return await asyncio.create_subprocess_exec(
            self.binary,
            *("--dir", str(self.directory), *args),
            stdin=stdin,
            stdout=PIPE,
            stderr=stderr,
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is for this process alone, which ends the others in order
        )


@asynccontextmanager
async def local_cluster(
    binary: Path, directory: Path, *, images: Path, say: Callable[[str], None]
) -> AsyncIterator[LocalCluster]:
    """A new cluster in `directory`, which is removed with it. Raises ClusterError."""
    await _refuse_if_running(binary, directory)
    with _emptied(directory) as log:
        supervisor = await asyncio.create_subprocess_exec(
            *(binary, "--dir", directory, "up", "--images", images, "--stop-on-eof"),
            stdin=PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        await _wait_until_ready(supervisor, directory)
        yield LocalCluster(binary, directory)
    finally:
        say("cluster: ending it")
        await asyncio.shield(_end_supervisor(supervisor, directory))


async def _refuse_if_running(binary: Path, directory: Path) -> None:
    status = await asyncio.create_subprocess_exec(binary, "--dir", directory, "status", stdout=DEVNULL, stderr=DEVNULL)
    if await status.wait() != NOT_RUNNING:
        raise ClusterError(f"a cluster runs in {directory}: end that demo first, its cluster ends seconds after it")


async def _wait_until_ready(supervisor: Process, directory: Path) -> None:
    log = directory.parent / "cluster.log"
    try:
        async with asyncio.timeout(READY_DEADLINE_S):
            while not (directory / "kubeconfig").exists():
                if supervisor.returncode is not None:
                    raise ClusterError(f"the cluster ended with code {supervisor.returncode}: {_tail(log)}")
                await asyncio.sleep(LOOK_S)
    except TimeoutError as late:
        raise ClusterError(f"the cluster is not ready after {READY_DEADLINE_S:.0f} s: {_tail(log)}") from late


async def _end_supervisor(supervisor: Process, directory: Path) -> None:
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    try:
        async with asyncio.timeout(DOWN_DEADLINE_S):
            await supervisor.wait()
    except TimeoutError:
        print(f"cluster: not ended after {DOWN_DEADLINE_S:.0f} s, killed", file=sys.stderr)
        await _end(supervisor)
    shutil.rmtree(directory, ignore_errors=True)


async def _end(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await process.wait()


def _emptied(directory: Path) -> BinaryIO:
    """The directory, made anew, and a log beside it."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return (directory.parent / "cluster.log").open("wb")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]
