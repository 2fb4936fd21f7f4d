"""A trainer rank over its Unix socket: `colocated_rl_api.trainer_wire`.

Requests are idempotent and awaited: the answer is the event, nothing is polled but the start of the process. A rank
whose request fails or outlasts its deadline is stopped by the caller; the operator then starts a new lineage.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import aiohttp
from pydantic import BaseModel, ValidationError

from colocated_rl_agent.drivers.base import CallRefused, Unsuitable, within
from colocated_rl_api.ladder import WeightVersion
from colocated_rl_api.member_wire import JobFile, Rendezvous
from colocated_rl_api.trainer_wire import (
    PROTOCOL,
    ExportRequest,
    SaveRequest,
    TrainerEnvironment,
    TrainerError,
    TrainerStatus,
    TrainRequest,
)

STATE_S = 10.0  # answered at any time, also during a step


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
) -> dict[str, str | None]:
    """What a rank is told at its start."""
    return {
        TrainerEnvironment.SOCKET: str(socket),
        TrainerEnvironment.CONFIG: str(config),
        TrainerEnvironment.JOB: str(job),
        TrainerEnvironment.MODEL: str(model),
        TrainerEnvironment.CHECKPOINTS: str(checkpoints),
        TrainerEnvironment.LINEAGE: str(lineage),
        TrainerEnvironment.RANK: str(rank),
        TrainerEnvironment.WORLD_SIZE: str(rendezvous.world_size),
        TrainerEnvironment.LOCAL_RANK: str(local_rank),
        TrainerEnvironment.MASTER_ADDR: rendezvous.address,
        TrainerEnvironment.MASTER_PORT: str(rendezvous.port),
        TrainerEnvironment.DEVICE: f"cuda:{local_rank}" if gpus else "cpu",
    }


def model_directory(root: Path, job: JobFile) -> Path:
    return root / job.spec.model.path


class TrainerRank:
    """One incarnation of a rank. progress_s: deadline of each request that takes work."""

    def __init__(self, socket: Path, *, progress_s: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(socket), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        )
        self._progress_s = progress_s

    async def close(self) -> None:
        await self._session.close()

    async def status(self) -> TrainerStatus:
        """Raises OutcomeUnknown while the socket is not there yet."""
        return await self._call("GET", "/v1/state", None, STATE_S)

    async def onload(self) -> TrainerStatus:
        return await self._call("POST", "/v1/onload", {}, self._progress_s)

    async def offload(self) -> TrainerStatus:
        return await self._call("POST", "/v1/offload", {}, self._progress_s)

    async def train(self, step: int, shard: Path) -> TrainerStatus:
        return await self._call("POST", "/v1/train", TrainRequest(step=step, shard=str(shard)), self._progress_s)

    async def export(self, version: WeightVersion, directory: Path) -> TrainerStatus:
        request = ExportRequest(version=version, directory=str(directory))
        return await self._call("POST", "/v1/export", request, self._progress_s)

    async def save(self, step: int, *, keep: int) -> TrainerStatus:
        return await self._call("POST", "/v1/save", SaveRequest(step=step, keep=keep), self._progress_s)

    async def _call(
        self,
        method: Literal["GET", "POST"],
        path: str,
        body: BaseModel | Mapping[str, object] | None,
        deadline_s: float,
    ) -> TrainerStatus:
        payload = body.model_dump(mode="json", by_alias=True) if isinstance(body, BaseModel) else body
        async with (
            within(deadline_s, f"trainer {path}"),
            self._session.request(method, f"http://trainer{path}", json=payload) as answer,
        ):
            text = await answer.read()
        if answer.status != 200:
            raise CallRefused(f"trainer {path}: {_reason(answer.status, text)}")
        try:
            status = TrainerStatus.model_validate_json(text)
        except ValidationError as error:
            raise Unsuitable(f"trainer {path} answered no TrainerStatus: {error}") from error
        if status.protocol != PROTOCOL:
            raise Unsuitable(
                f"the trainer speaks protocol {status.protocol}, this agent {PROTOCOL}: use matching images"
            )
        return status


def _reason(status: int, text: bytes) -> str:
    try:
        error = TrainerError.model_validate_json(text)
    except ValidationError:
        return f"HTTP {status} {text[:500].decode(errors='replace')}"
    return f"{error.error}: {error.message}"
