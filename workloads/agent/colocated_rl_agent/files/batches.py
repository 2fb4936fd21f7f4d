"""This module fetches shards of sealed batches from the rollout controller, checks them, and writes them for trainers.

A shard is immutable and served any number of times, so a failed fetch is simply tried again, after a back-off. A group
with another number of ranks has other shards of the same step.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path

import aiohttp

from colocated_rl_api.batch import DIGEST_HEADER
from colocated_rl_api.logs import failure_of
from colocated_rl_api.member_wire import Endpoint
from colocated_rl_member.data import DataClient

FETCH_AGAIN_S = 1.0
MAX_SHARD_BYTES = 16 * 1024**3
PIECE_BYTES = 1024 * 1024
SILENCE = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=30)  # a gone address may not even refuse


class ShardUnavailable(Exception):
    """The shard could not be fetched whole. Trying again later is safe."""


class Shards:
    """The Shards are those of a pod's ranks.

    fetch_after: end of the back-off, on the clock of `time.monotonic`.
    """

    def __init__(self, client: DataClient, directory: Path, ranks: range, *, deadline_s: float) -> None:
        self._client = client
        self._directory = directory
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._there: tuple[int, int] | None = None  # step and number of ranks
        self.fetch_after = 0.0

    def step_of(self, world_size: int) -> int | None:
        """Return the step whose shards are there for every rank, in a group of so many ranks."""
        return self._there[0] if self._there and self._there[1] == world_size else None

    async def fetch(self, endpoint: Endpoint, step: int, *, world_size: int) -> None:
        """Fetch the shards of a step for all ranks, and remove those of earlier steps. Raises ShardUnavailable.

        world_size: the number of ranks to which the batch is dealt.
        """
        self._there = None
        try:
            await asyncio.to_thread(remove_shards, self._directory, below=step)
            for rank in self._ranks:
                await fetch_shard(
                    self._client,
                    endpoint,
                    self._directory,
                    step=step,
                    rank=rank,
                    world_size=world_size,
                    deadline_s=self._deadline_s,
                )
        except (ShardUnavailable, OSError) as error:
            self.fetch_after = time.monotonic() + FETCH_AGAIN_S
            raise ShardUnavailable(str(error)) from error
        self._there = step, world_size


def shard_path(directory: Path, *, step: int, rank: int) -> Path:
    return directory / f"batch-{step}-{rank}.safetensors"


def scores_path(directory: Path, *, step: int, rank: int) -> Path:
    """Return where a rank keeps its reference scores of the batch: the agent only names and later removes the file."""
    return directory / f"batch-{step}-{rank}.scores"


async def fetch_shard(
    client: DataClient,
    endpoint: Endpoint,
    directory: Path,
    *,
    step: int,
    rank: int,
    world_size: int,
    deadline_s: float,
    most_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Fetch one rank's shard of the batch and return its path; the file is whole then. Raises ShardUnavailable."""
    path = shard_path(directory, step=step, rank=rank)
    what = f"shard {rank} of batch {step} from {endpoint.pod} at {endpoint.address}:{endpoint.port}"
    draft = path.with_suffix(".draft")
    digest = hashlib.sha256()
    try:
        async with (
            asyncio.timeout(deadline_s),
            client.request(
                "GET", endpoint, f"/v1/batches/{step}?shard={rank}&of={world_size}", timeout=SILENCE
            ) as answer,
        ):
            if answer.status != 200:
                raise ShardUnavailable(f"{what}: HTTP {answer.status}")
            expected = answer.headers.get(DIGEST_HEADER)
            size = 0
            draft.unlink(missing_ok=True)
            with draft.open("xb") as stream:  # through no link: a trainer with a reference writes here too
                async for piece in answer.content.iter_chunked(PIECE_BYTES):
                    size += len(piece)
                    if size > most_bytes:
                        raise ShardUnavailable(f"{what}: larger than {most_bytes} bytes")
                    digest.update(piece)
                    await asyncio.to_thread(stream.write, piece)  # gigabytes: a slow disk blocks its writer
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ShardUnavailable(f"{what}: {failure_of(error)}") from error
    if digest.hexdigest() != expected:
        raise ShardUnavailable(
            f"{what}: digest {digest.hexdigest()[:16]}, the header declares {(expected or 'nothing')[:16]}"
        )
    draft.replace(path)
    return path


def remove_shards(directory: Path, *, below: int) -> None:
    """Remove shards of steps before `below`, with their scores and drafts."""
    for path in directory.glob("batch-*-*"):
        step = path.name.split("-")[1]
        if step.isdecimal() and int(step) < below:
            path.unlink()
