"""Leadership: one Lease, renewed by a thread of its own that ends the process rather than lead a moment too long.

The thread renews only while the event loop's heartbeat is fresh: a blocked loop stops leading before anybody else may
start. Another's lease is over when its record has not changed for its duration by our own monotonic clock; nobody's
wall clock counts. A candidate that can't reach the API server waits; a leader that can't renew within its deadline
ends. An orderly end empties the holder, so that a standby need not wait.

A Lease does not fence: a process can be paused and wake late. The epoch does (see `plan`), and `confirm` is asked
before an epoch is raised over somebody else's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn, Protocol

from colocated_rl_api.logs import log
from colocated_rl_operator.errors import ApiError, Conflict, NotFound

LOG = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
RELEASE_DEADLINE_S = 5.0


class LeaseApi(Protocol):
    """The calls of `kube.Kube` that are needed here."""

    async def read_lease(self, namespace: str, name: str) -> dict[str, Any]: ...
    async def create_lease(self, namespace: str, lease: dict[str, Any]) -> dict[str, Any]: ...
    async def replace_lease(self, namespace: str, lease: dict[str, Any]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class LeaseTerms:
    namespace: str
    name: str
    identity: str
    duration_s: float = 15.0
    renew_deadline_s: float = 10.0
    retry_s: float = 2.0


class Lease:
    """connect: opens an API connection in the thread's own loop. die: ends the process at once, with no clean-up."""

    def __init__(
        self,
        terms: LeaseTerms,
        connect: Callable[[], AbstractAsyncContextManager[LeaseApi]],
        die: Callable[[str], NoReturn],
    ) -> None:
        self._terms = terms
        self._connect = connect
        self._die = die
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._beat_at = time.monotonic()
        self._renewed_at: float | None = None  # when the newest successful renewal was sent
        self._renewed = asyncio.Event()

    @property
    def is_held(self) -> bool:
        return self._renewed_at is not None

    @property
    def age_s(self) -> float | None:
        """Since the last renewal; None while candidate."""
        return None if self._renewed_at is None else time.monotonic() - self._renewed_at

    async def acquire(self) -> None:
        """Start competing; returns once this process leads. From then on `keep_beating` must run."""
        loop = asyncio.get_running_loop()
        # daemon: a process that ends for another reason does not wait for it
        self._thread = threading.Thread(target=self._run, args=(loop,), name="lease", daemon=True)
        self._thread.start()
        await self._renewed.wait()

    async def keep_beating(self, *, interval_s: float = HEARTBEAT_S) -> NoReturn:
        """Shows the thread that the event loop runs."""
        while True:
            self._beat_at = time.monotonic()
            await asyncio.sleep(interval_s)

    async def confirm(self) -> None:
        """Returns after a renewal that began after this call; a process that is no leader any more does not return."""
        asked_at = time.monotonic()
        while self._renewed_at is None or self._renewed_at <= asked_at:
            self._renewed.clear()
            await self._renewed.wait()

    async def release(self) -> None:
        """Stop renewing and let the next one have it. Only after the last target was sent."""
        self._stopping.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, RELEASE_DEADLINE_S)

    # --------------------------------------------------------------------------------------------- in the thread's loop
    def _run(self, owner: asyncio.AbstractEventLoop) -> None:
        try:
            asyncio.run(self._compete(owner))
        finally:
            if not self._stopping.is_set():
                self._die("the thread of the lease ended by an error: leadership ends with this process")

    async def _compete(self, owner: asyncio.AbstractEventLoop) -> None:
        async with self._connect() as api:
            lease = await self._win(api)
            while lease is not None and not self._stopping.is_set():
                owner.call_soon_threadsafe(self._renewed.set)
                await self._pause()
                lease = await self._renew(api, lease)
            if lease is not None:
                await self._give_up(api, lease)

    async def _win(self, api: LeaseApi) -> dict[str, Any] | None:
        """The lease, held by us; None when stopped before."""
        watched: tuple[str, float] | None = None  # its resourceVersion, and since when it has that
        while not self._stopping.is_set():
            asked_at = time.monotonic()
            try:
                lease = await api.read_lease(self._terms.namespace, self._terms.name)
                version = lease["metadata"]["resourceVersion"]
                if watched is None or watched[0] != version:
                    watched = (version, asked_at)
                if self._is_free(lease["spec"], asked_at - watched[1]):
                    taken = await api.replace_lease(self._terms.namespace, self._signed(lease, taken=True))
                    self._renewed_at = asked_at
                    log(LOG, "lease taken", transitions=taken["spec"]["leaseTransitions"])
                    return taken
            except NotFound:
                watched = None
                if (made := await self._create(api)) is not None:
                    self._renewed_at = asked_at
                    return made
            except Conflict:
                continue  # another candidate was first: look again
            except ApiError as error:
                log(LOG, "lease not readable, waiting as a candidate", logging.WARNING, reason=str(error))
            await self._pause()
        return None

    def _is_free(self, spec: dict[str, Any], unchanged_s: float) -> bool:
        holder = spec.get("holderIdentity")
        lasts_s = float(spec.get("leaseDurationSeconds") or self._terms.duration_s)
        return not holder or holder == self._terms.identity or unchanged_s > lasts_s

    async def _create(self, api: LeaseApi) -> dict[str, Any] | None:
        name, namespace = self._terms.name, self._terms.namespace
        blank = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {},
        }
        try:
            made = await api.create_lease(namespace, self._signed(blank, taken=True))
        except ApiError as error:
            log(LOG, "lease not created, waiting as a candidate", logging.WARNING, reason=str(error))
            return None
        log(LOG, "lease taken", transitions=made["spec"]["leaseTransitions"])
        return made

    async def _renew(self, api: LeaseApi, lease: dict[str, Any]) -> dict[str, Any]:
        """One renewal, or the end of the process."""
        now, deadline_s = time.monotonic(), self._terms.renew_deadline_s
        assert self._renewed_at is not None
        if now - self._beat_at > deadline_s:
            self._die(f"the event loop has not run for {now - self._beat_at:.1f} s: leadership ends with this process")
        try:
            async with asyncio.timeout(max(0.1, self._renewed_at + deadline_s - now)):
                lease = await api.replace_lease(self._terms.namespace, self._signed(lease, taken=False))
            self._renewed_at = now
        except Conflict:
            self._die("another process holds the lease: this one ends, and comes back as a candidate")
        except (ApiError, TimeoutError) as error:
            if time.monotonic() - self._renewed_at > deadline_s:
                self._die(f"lease not renewed for {deadline_s:g} s ({error!r}): leadership ends with this process")
            log(LOG, "lease not renewed, trying again", logging.WARNING, reason=repr(error))
        return lease

    async def _give_up(self, api: LeaseApi, lease: dict[str, Any]) -> None:
        lease["spec"]["holderIdentity"] = ""
        try:
            async with asyncio.timeout(RELEASE_DEADLINE_S):
                await api.replace_lease(self._terms.namespace, lease)
            log(LOG, "lease released")
        except (ApiError, TimeoutError) as error:
            log(LOG, "lease not released, it runs out by itself", logging.WARNING, reason=repr(error))

    def _signed(self, lease: dict[str, Any], *, taken: bool) -> dict[str, Any]:
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = dict(lease["spec"])
        spec |= {
            "holderIdentity": self._terms.identity,
            "leaseDurationSeconds": max(1, round(self._terms.duration_s)),
            "renewTime": at,
        }
        if taken:
            spec |= {"acquireTime": at, "leaseTransitions": int(spec.get("leaseTransitions", 0)) + 1}
        return {**lease, "spec": spec}

    async def _pause(self) -> None:
        """retry_s, or less when stopping."""
        await asyncio.to_thread(self._stopping.wait, self._terms.retry_s)
