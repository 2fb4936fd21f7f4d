"""Write Kubernetes Events about jobs: one object for each thing that happens, with a count if it happens again.

An event is written after the status that it belongs to was accepted. The loss of an event is no error of the job: it is
only logged. Reasons come from `reasons` and are stable.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from colocated_rl_api import names
from colocated_rl_api.logs import log
from colocated_rl_api.names import JobUid
from colocated_rl_operator.clients.errors import ApiError, NotFound

LOG = logging.getLogger(__name__)

REMEMBERED = 4096
SERIES_S = 600.0  # the same event after this long is a new one
MAX_NOTE_BYTES = 1024


class EventApi(Protocol):
    """This protocol names the calls of `kube.Kube` that events need."""

    async def create_event(self, namespace: str, event: dict[str, Any]) -> dict[str, Any]: ...
    async def repeat_event(self, namespace: str, name: str, series: dict[str, Any]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class About:
    """This value names the job that an event regards."""

    namespace: str
    name: str
    uid: JobUid


@dataclass
class _Written:
    name: str
    at: datetime
    count: int = 1


class Events:
    def __init__(
        self, api: EventApi, *, instance: str, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._api = api
        self._instance = instance
        self._now = now
        self._written: OrderedDict[tuple[About, str, str], _Written] = OrderedDict()

    async def publish(
        self, about: About, kind: Literal["Normal", "Warning"], reason: str, note: str, *, action: str
    ) -> None:
        """Write an event about a job. action: what the operator does about it, as a CamelCase verb phrase."""
        key, now = (about, reason, note), self._now()
        written = self._written.get(key)
        try:
            if written is not None and (now - written.at).total_seconds() < SERIES_S:
                with contextlib.suppress(NotFound):  # somebody deleted it: write a new one
                    await self._repeat(about, written, now)
                    return
            short = note.encode()[:MAX_NOTE_BYTES].decode(errors="ignore")
            event = self._event(about, kind, reason, short, action, now)
            await self._api.create_event(about.namespace, event)
        except ApiError as error:
            log(LOG, "event not written", logging.WARNING, reason=str(error), about=reason)
            return
        self._written[key] = _Written(event["metadata"]["name"], now)
        self._written.move_to_end(key)
        if len(self._written) > REMEMBERED:
            self._written.popitem(last=False)

    async def _repeat(self, about: About, written: _Written, now: datetime) -> None:
        written.count += 1
        written.at = now
        series = {"count": written.count, "lastObservedTime": _micro_time(now)}
        await self._api.repeat_event(about.namespace, written.name, series)

    def _event(self, about: About, kind: str, reason: str, note: str, action: str, now: datetime) -> dict[str, Any]:
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{about.name}.{uuid.uuid4().hex[:16]}", "namespace": about.namespace},
            "eventTime": _micro_time(now),
            "type": kind,
            "reason": reason,
            "action": action,
            "note": note,
            "reportingController": names.OPERATOR,
            "reportingInstance": self._instance[:128],
            "regarding": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "namespace": about.namespace,
                "name": about.name,
                "uid": about.uid,
            },
        }


def _micro_time(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
