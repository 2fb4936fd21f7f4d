"""Write one job's status, and the events about it: one call at a time, in order.

An epoch is recorded before anything is done under it: `commit` returns when the API server has it. All else is noted,
and written beside the job's loop, so that no rung of a switch waits for the API server. The newest status wins: one
that was overtaken before its turn is never written. An event comes after the status that it belongs to.

A status is written over the version that we know. A spec or metadata that somebody changed meanwhile is no obstacle; an
epoch that somebody else raised is one, and `check` raises it in the loop.

Conditions of other controllers are written back as that version has them: nobody's write can come between, so none is
lost, revived or changed. A server-side apply would keep them too. But it needs the version all the same, to fence
epochs, and it can't remove what another manager wrote as well: a backup that was restored would keep a job ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import ValidationError

from colocated_rl_api.job_status import ColocatedRLJobStatus
from colocated_rl_api.logs import log
from colocated_rl_operator.clients.errors import (
    ApiUnreachable,
    Conflict,
    OperatorError,
    StaleEpoch,
)
from colocated_rl_operator.clients.events import About, Events
from colocated_rl_operator.clients.kube import Body
from colocated_rl_operator.planner.reasons import ConditionType, DocumentedReason

LOG = logging.getLogger(__name__)

WRITE_TRIES = 5  # of one status, each after somebody else's change of the object
CLOSE_S = 2.0  # for noted statuses and events, when the process ends
OURS = frozenset(ConditionType)
FOR_PEOPLE = frozenset({"phase", "placement", "gpuHolder", "reference"})  # of a status: derived anew in each pass
MAX_NEWS = 64  # events that wait for their turn; the oldest are dropped first


class StatusApi(Protocol):
    """This protocol names the calls of `kube.Kube` that a record needs."""

    async def read_job(self, namespace: str, name: str) -> Body: ...
    async def write_status(self, namespace: str, name: str, *, resource_version: str, status: Body) -> Body: ...


@dataclass(frozen=True)
class News:
    """This is an event about the job. action: what the operator does about it, as a CamelCase verb phrase."""

    kind: Literal["Normal", "Warning"]
    reason: DocumentedReason
    note: str
    action: str


class Record:
    """A record writes one job's status. `status` is the newest, written or on its way; None before the first read.

    failed: wakes the job's loop. rest: sleeps for the seconds between two tries at one status.
    """

    def __init__(
        self,
        about: About,
        api: StatusApi,
        events: Events,
        failed: Callable[[], None],
        *,
        rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.about = about
        self.status: ColocatedRLJobStatus | None = None
        self._api = api
        self._events = events
        self._failed = failed
        self._rest = rest
        self._written: ColocatedRLJobStatus | None = None
        self._version = ""  # resourceVersion of the object with the written status
        self._others: list[Body] = []  # conditions of other controllers at that version
        self._noted: ColocatedRLJobStatus | None = None
        self._news: deque[News] = deque(maxlen=MAX_NEWS)
        self._one_call = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    def take(self, job: Body) -> None:
        """Take the status as the server has it."""
        self.status = self._written = read_status(job)
        self._know(job)

    def forget(self) -> None:
        """Forget the status, as another process wrote it: nothing is known until the next read."""
        self.status = self._noted = None

    def check(self) -> None:
        """Raise the error that kept a noted status from being written."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    async def commit(self, status: ColocatedRLJobStatus) -> None:
        """Write a status now; it overtakes a noted one. Raises StaleEpoch, ApiError."""
        self._noted = None
        async with self._one_call:
            try:
                await self._write(status)
            except OperatorError:
                self.status = self._written  # not the overtaken one, so that the next report is a difference again
                raise
        self.status = status

    def note(self, status: ColocatedRLJobStatus | None, *news: News) -> None:
        """Write a status when its turn comes, then the events."""
        if status is not None:
            self.status = self._noted = status
        self._news.extend(news)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._catch_up(), name=f"record/{self.about.name}")
            self._writing.add_done_callback(self._ended)

    async def close(self) -> None:
        """Write what is noted, for CLOSE_S at most."""
        if self._writing is None:
            return
        try:
            await asyncio.wait((self._writing,), timeout=CLOSE_S)
        finally:
            self._writing.cancel()

    # ------------------------------------------------------------------------------------------------------ beside
    async def _catch_up(self) -> None:
        while self._noted is not None or self._news:
            if self._noted is not None:
                await self._write_noted()
            else:
                news = self._news.popleft()
                await self._events.publish(self.about, news.kind, news.reason, news.note, action=news.action)

    def _ended(self, writing: asyncio.Task[None]) -> None:
        if not writing.cancelled() and (error := writing.exception()) is not None:
            self.status, self._noted, self._failure = self._written, None, error
            self._failed()

    async def _write_noted(self) -> None:
        failing_s = 0.0
        while True:
            async with self._one_call:
                status = self._noted
                if status is None:
                    return  # overtaken by a commit
                try:
                    await self._write(status)
                except ApiUnreachable as error:
                    log(LOG, "status not written, trying again", logging.WARNING, reason=str(error))
                    again_s = error.again_s(failing_s=failing_s)
                else:
                    if self._noted is status:
                        self._noted = None
                    return
            await self._rest(again_s)
            failing_s += again_s

    async def _write(self, status: ColocatedRLJobStatus) -> None:
        about, ours = self.about, status.model_dump(mode="json", by_alias=True, exclude_none=True)
        known = self._written and self._written.epoch
        for tries_left in reversed(range(WRITE_TRIES)):
            body = ours | {"conditions": [*ours["conditions"], *self._others]}
            try:
                answer = await self._api.write_status(
                    about.namespace, about.name, resource_version=self._version, status=body
                )
                break
            except Conflict:
                if not tries_left:
                    raise
            job = await self._api.read_job(about.namespace, about.name)
            found = read_status(job)
            if job["metadata"]["uid"] != about.uid or found.epoch != known:
                raise StaleEpoch(f"status of {about.name} is of epoch {found.epoch}, not {known}")
            if found.operator not in (None, status.operator):
                raise StaleEpoch(f"operator {found.operator} has {about.name}")
            self._know(job)  # spec, metadata or somebody's condition changed, the epoch is ours
        self._written = status
        self._know(answer)

    def _know(self, job: Body) -> None:
        """Take the version of the object, and what others wrote to it."""
        self._version, self._others = job["metadata"]["resourceVersion"], _conditions(job, ours=False)


def read_status(job: Body) -> ColocatedRLJobStatus:
    """Return the status without the conditions of other controllers, which may say less than ours do.

    A word for people that only a newer operator knows is left out, as nothing follows from it.
    """
    status = (job.get("status") or {}) | {"conditions": _conditions(job, ours=True)}
    try:
        return ColocatedRLJobStatus.model_validate_json(json.dumps(status))
    except ValidationError as error:
        unknown = {each["loc"][0] for each in error.errors(include_url=False)} & FOR_PEOPLE
        known = {field: value for field, value in status.items() if field not in unknown}
        return ColocatedRLJobStatus.model_validate_json(json.dumps(known))


def _conditions(job: Body, *, ours: bool) -> list[Body]:
    conditions = (job.get("status") or {}).get("conditions", [])
    return [each for each in conditions if (each["type"] in OURS) is ours]
