"""This driver calls a trainer rank over its Unix socket, by `colocated_rl_api.trainer_wire`.

Requests are idempotent and awaited: the answer is the event. While a request is awaited, the driver polls the rank's
state: the length of a step is unknown, so its deadline counts from the last progress, and a rank that does not even
answer loses its lease. The caller stops a rank that fails; the operator then starts a new lineage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Literal

import aiohttp
from pydantic import BaseModel, ValidationError

from colocated_rl_agent.drivers.base import (
    CallRefused,
    NothingDone,
    NotRetriable,
    OutcomeUnknown,
    Unsuitable,
    read_body,
    within,
    wrong_fields,
)
from colocated_rl_api.facts import TrainerState
from colocated_rl_api.member_wire import Rendezvous
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.trainer_wire import (
    NOT_RETRIABLE,
    PROTOCOL,
    ExportRequest,
    FinishRequest,
    MirrorRequest,
    SaveRequest,
    ScoreRequest,
    Standstill,
    TrainerEnvironment,
    TrainerError,
    TrainerStatus,
    TrainRequest,
)

STATE_S = 10.0  # the state is answered at any time, also during a step
HEARTBEAT_S = 5.0
LEASE_S = 120.0  # without an answer; a long call into a device can hold a Python program for a while
MAX_STATUS_BYTES = 1024 * 1024
STALLED_S, STALLED_TIMES = 60.0, 10.0  # a step stalls when it stands still for both: seconds, and times its usual ones


STEPS = ("/v1/score", "/v1/train")  # no rank of the group gets on with one that does not


def is_stall(standstill: Standstill) -> bool:
    """Return whether a step stands still for far longer than this process's finished ones did between two moves."""
    usual_s = standstill.usual_s
    return usual_s is not None and standstill.seconds >= max(STALLED_S, STALLED_TIMES * usual_s)


def trainer_environment(
    *,
    socket: Path,
    config: Path,
    job: Path,
    model: Path,
    checkpoints: Path,
    lineage: int,
    rank: int,
    local_rank: int,
    rendezvous: Rendezvous,
    gpus: int,
    former: Path | None = None,
    mirrors: Path | None = None,
) -> dict[str, str | None]:
    """Return the environment variables of a starting rank; None: not set.

    former: of a job with spec.restoreFrom. mirrors: of one with spec.checkpoint.inMemory.
    """
    return {
        TrainerEnvironment.SOCKET: str(socket),
        TrainerEnvironment.CONFIG: str(config),
        TrainerEnvironment.JOB: str(job),
        TrainerEnvironment.MODEL: str(model),
        TrainerEnvironment.CHECKPOINTS: str(checkpoints),
        TrainerEnvironment.FORMER: None if former is None else str(former),
        TrainerEnvironment.MIRRORS: None if mirrors is None else str(mirrors),
        TrainerEnvironment.LINEAGE: str(lineage),
        TrainerEnvironment.RANK: str(rank),
        TrainerEnvironment.WORLD_SIZE: str(rendezvous.world_size),
        TrainerEnvironment.LOCAL_RANK: str(local_rank),
        TrainerEnvironment.MASTER_ADDR: rendezvous.address,
        TrainerEnvironment.MASTER_PORT: str(rendezvous.port),
        TrainerEnvironment.DEVICE: f"cuda:{local_rank}" if gpus else "cpu",
    }


class TrainerRank:
    """A TrainerRank is the client of one rank.

    progress_s: deadline of each request that takes work, from its last progress. lease_s: deadline from the rank's last
    answer. must_score: the job has a reference model. stalls: called with the standstill of a step or of scores, at
    each look at it for as long as it lasts beyond what is usual, and with None when it does not.
    """

    def __init__(
        self,
        socket: Path,
        *,
        progress_s: float,
        heartbeat_s: float = HEARTBEAT_S,
        lease_s: float = LEASE_S,
        must_score: bool = False,
        stalls: Callable[[Standstill | None], None] = lambda standstill: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(socket), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        )
        self._progress_s = progress_s
        self._heartbeat_s, self._lease_s = heartbeat_s, lease_s
        self._must_score = must_score
        self._stalls = stalls
        self._clock = clock

    async def close(self) -> None:
        await self._session.close()

    async def status(self) -> TrainerStatus:
        """Return the rank's status. Raises OutcomeUnknown while the socket is not there yet."""
        return await self._call("GET", "/v1/state", None, STATE_S)

    async def onload(self) -> TrainerStatus:
        return await self._work("/v1/onload", {})

    async def offload(self) -> TrainerStatus:
        return await self._work("/v1/offload", {})

    async def score(self, step: int, shard: Path, scores: Path) -> TrainerStatus:
        return await self._work("/v1/score", ScoreRequest(step=step, shard=str(shard), scores=str(scores)))

    async def train(self, step: int, shard: Path) -> TrainerStatus:
        return await self._work("/v1/train", TrainRequest(step=step, shard=str(shard)))

    async def export(self, version: WeightVersion, directory: Path) -> TrainerStatus:
        return await self._work("/v1/export", ExportRequest(version=version, directory=str(directory)))

    async def save(self, step: int, *, keep: int) -> TrainerStatus:
        return await self._work("/v1/save", SaveRequest(step=step, keep=keep))

    async def mirror(self, step: int) -> TrainerStatus:
        return await self._work("/v1/mirror", MirrorRequest(step=step))

    async def finish(self, version: WeightVersion, export: Path, directory: Path) -> TrainerStatus:
        body = FinishRequest(version=version, export=str(export), directory=str(directory))
        return await self._work("/v1/finish", body)

    async def _work(self, path: str, body: BaseModel | Mapping[str, object]) -> TrainerStatus:
        """Send a request and await it. Raises OutcomeUnknown past a deadline; CallRefused, NothingDone, Unsuitable."""
        request = asyncio.create_task(self._call("POST", path, body, None), name=path)
        alive = progressed = self._clock()
        progress, standstill = 0, None
        try:
            while not request.done():
                now = self._clock()
                if now >= progressed + self._progress_s:
                    where = f", it is in {standstill.where}" if standstill and standstill.where else ""
                    raise OutcomeUnknown(f"trainer {path}: no progress for {self._progress_s:g} s{where}")
                if now >= alive + self._lease_s:
                    raise OutcomeUnknown(f"trainer {path}: no sign of life for {self._lease_s:g} s")
                wait_s = min(self._heartbeat_s, progressed + self._progress_s - now, alive + self._lease_s - now)
                await asyncio.wait({request}, timeout=wait_s)
                if request.done():
                    break
                try:
                    status = await self._call("GET", "/v1/state", None, min(STATE_S, self._heartbeat_s))
                except OutcomeUnknown:
                    continue
                alive, standstill = self._clock(), status.standstill
                if path in STEPS:
                    self._stalls(standstill if standstill and is_stall(standstill) else None)
                if status.progress != progress:
                    progress, progressed = status.progress, alive
            return await request
        finally:
            self._stalls(None)
            request.cancel()
            await asyncio.wait({request})

    async def _call(
        self,
        method: Literal["GET", "POST"],
        path: str,
        body: BaseModel | Mapping[str, object] | None,
        deadline_s: float | None,
    ) -> TrainerStatus:
        """Send one request and return the status. deadline_s: None if the caller enforces one. Raises DriverError."""
        payload = body.model_dump(mode="json", by_alias=True) if isinstance(body, BaseModel) else body
        async with (
            within(deadline_s, f"trainer {path}"),
            self._session.request(method, f"http://trainer{path}", json=payload) as answer,
        ):
            text = await read_body(answer, f"trainer {path}", most_bytes=MAX_STATUS_BYTES)
        if answer.status != 200:
            raise _refusal(answer.status, path, text)
        try:
            status = TrainerStatus.model_validate_json(text)
        except ValidationError as error:
            raise Unsuitable(f"trainer {path} answered no TrainerStatus, see {wrong_fields(error)}") from None
        if status.protocol != PROTOCOL:
            raise Unsuitable(
                f"the trainer speaks protocol {status.protocol}, this agent {PROTOCOL}: use matching images"
            )
        if status.state is TrainerState.ABSENT:
            raise Unsuitable(f"trainer {path} answered that it is {TrainerState.ABSENT}, which only the dead are")
        if self._must_score and status.state is not TrainerState.STARTING and not status.can_score:
            raise Unsuitable(
                "the trainer can't score (canScore is false), and the job has a reference: give its loop a `score`, or "
                "make a job without spec.reference"
            )
        return status


def _refusal(status: int, path: str, text: bytes) -> CallRefused:
    try:
        error = TrainerError.model_validate_json(text)
    except ValidationError:
        return CallRefused(f"trainer {path}: HTTP {status}, {len(text)} bytes that are no TrainerError")
    if status == HTTPStatus.INTERNAL_SERVER_ERROR and error.error == NOT_RETRIABLE:
        return NotRetriable(error.message)
    refusal = NothingDone if status == HTTPStatus.SERVICE_UNAVAILABLE else CallRefused
    return refusal(f"trainer {path}: {error.error}: {error.message}")
