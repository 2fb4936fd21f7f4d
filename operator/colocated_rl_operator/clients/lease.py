"""Elect the leader by one Lease. A thread renews it, and ends the process rather than lead a moment too long.

The thread renews only while the event loop's heartbeat is fresh: a blocked loop stops leading before another process
may start. Another process's lease is over when its record has not changed for its duration by our own monotonic clock;
no wall clock counts. A candidate that can't reach the API server waits; a leader that can't renew within its deadline
ends. The deadline holds several attempts, so that one hanging request does not cost the leadership. Nor does a renewal
whose answer was lost: after a conflict, the record shows the holder. An orderly end empties the holder, so that a
standby need not wait.

A leader also ends when the record is older than the one it wrote: etcd was restored from a backup. Watches of versions
from before the restore stay open and report nothing until the server reaches those versions again, and caches keep
what is no longer there. A process that starts reads everything anew. A backup that is younger than the newest renewal,
so a few seconds old, can't be told by that.

A Lease does not fence: a process can be paused and wake late. The epoch does (see `plan`), and the loop awaits
`confirm` before it raises an epoch over another process's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn, Protocol

from colocated_rl_api.logs import in_words, log
from colocated_rl_operator.clients.errors import ApiError, Conflict, NotFound
from colocated_rl_operator.clients.kube import version_of

LOG = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
ATTEMPTS = 3  # at a renewal, within its deadline
RELEASE_DEADLINE_S = 5.0


class LeaseApi(Protocol):
    """This protocol names the calls of `kube.Kube` that a lease needs."""

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
    """The process competes for this lease, and renews it once it leads.

    connect: opens an API connection in the thread's own loop. die: ends the process at once, with no clean-up.
    """

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
        self._attempt_s = terms.renew_deadline_s / ATTEMPTS
        self._watched: tuple[str, float] | None = None  # another's lease: its version, and since when
        self._attempted_at = 0.0  # when the newest attempt at a renewal began
        self._renewed_at: float | None = None  # when the newest successful one began
        self._renewed = asyncio.Event()

    @property
    def age_s(self) -> float | None:
        """Return the seconds since the last renewal; None for a candidate."""
        return None if self._renewed_at is None else time.monotonic() - self._renewed_at

    async def acquire(self) -> None:
        """Start competing; return once this process leads. From then on `keep_beating` must run."""
        loop = asyncio.get_running_loop()
        # daemon: a process that ends for another reason does not wait for it
        self._thread = threading.Thread(target=self._run, args=(loop,), name="lease", daemon=True)
        self._thread.start()
        await self._renewed.wait()

    async def keep_beating(self, *, interval_s: float = HEARTBEAT_S) -> NoReturn:
        """Show the thread, again and again, that the event loop runs."""
        while True:
            self._beat_at = time.monotonic()
            await asyncio.sleep(interval_s)

    async def confirm(self) -> None:
        """Return after a renewal that began after this call; in a process that no longer leads, never return."""
        asked_at = time.monotonic()
        while self._renewed_at is None or self._renewed_at <= asked_at:
            self._renewed.clear()
            await self._renewed.wait()

    async def release(self) -> None:
        """Stop renewing and release the Lease. Call it only after the last target was sent."""
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
                lease = await self._renew(api, lease)
            if lease is not None:
                await self._give_up(api, lease)

    async def _win(self, api: LeaseApi) -> dict[str, Any] | None:
        """Return the lease once this process holds it; None if stopped before."""
        while not self._stopping.is_set():
            asked_at = time.monotonic()
            try:
                async with asyncio.timeout(self._attempt_s):
                    taken = await self._try_to_take(api)
            except (ApiError, TimeoutError) as error:
                log(LOG, "lease not taken, waiting as a candidate", logging.WARNING, reason=in_words(error))
                taken = None
            if taken is not None:
                self._beat_at = time.monotonic()  # a candidate has no heartbeat
                self._renewed_at = self._attempted_at = asked_at
                log(LOG, "lease taken", transitions=taken["spec"]["leaseTransitions"])
                return taken
            await self._pause(self._terms.retry_s / 2)  # an orderly hand-over takes less than retry_s
        return None

    async def _try_to_take(self, api: LeaseApi) -> dict[str, Any] | None:
        """Take the lease and return it; None while another process holds it."""
        asked_at = time.monotonic()
        namespace, name = self._terms.namespace, self._terms.name
        try:
            lease = await api.read_lease(namespace, name)
        except NotFound:
            kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
            blank = {**kind, "metadata": {"name": name, "namespace": namespace}, "spec": {}}
            return await api.create_lease(namespace, self._signed(blank, taken=True))
        version = lease["metadata"]["resourceVersion"]
        if self._watched is None or self._watched[0] != version:
            self._watched = (version, time.monotonic())  # it may be as young as the answer
        if not self._is_free(lease["spec"], asked_at - self._watched[1]):
            return None
        return await api.replace_lease(namespace, self._signed(lease, taken=True))

    def _is_free(self, spec: dict[str, Any], unchanged_s: float) -> bool:
        holder = spec.get("holderIdentity")
        lasts_s = float(spec.get("leaseDurationSeconds") or self._terms.duration_s)
        return not holder or holder == self._terms.identity or unchanged_s > lasts_s

    async def _renew(self, api: LeaseApi, lease: dict[str, Any]) -> dict[str, Any]:
        """Attempt the next renewal, retry_s after the last attempt, or end the process."""
        assert self._renewed_at is not None
        terms, ends_at = self._terms, self._renewed_at + self._terms.renew_deadline_s
        await self._pause(min(self._attempted_at + terms.retry_s, ends_at) - time.monotonic())
        if self._stopping.is_set():
            return lease
        now = self._attempted_at = time.monotonic()
        if now - self._beat_at > terms.renew_deadline_s:
            self._die(f"the event loop has not run for {now - self._beat_at:.1f} s: leadership ends with this process")
        if now >= ends_at:
            self._die(f"lease not renewed for {terms.renew_deadline_s:g} s: leadership ends with this process")
        try:
            async with asyncio.timeout(min(self._attempt_s, ends_at - now)):
                lease = await self._replace(api, lease)
            self._renewed_at = now
        except (ApiError, TimeoutError) as error:
            log(LOG, "lease not renewed, trying again", logging.WARNING, reason=in_words(error))
        return lease

    async def _replace(self, api: LeaseApi, lease: dict[str, Any]) -> dict[str, Any]:
        try:
            return await api.replace_lease(self._terms.namespace, self._signed(lease, taken=False))
        except Conflict:  # another process's write, or our own whose answer was lost
            found = await api.read_lease(self._terms.namespace, self._terms.name)
        if found["spec"].get("holderIdentity") != self._terms.identity:
            self._die("another process holds the lease: this one ends, and comes back as a candidate")
        if version_of(found) < version_of(lease):
            self._die("the API server's store was restored from a backup: this process ends, and reads all of it anew")
        return await api.replace_lease(self._terms.namespace, self._signed(found, taken=False))

    async def _give_up(self, api: LeaseApi, lease: dict[str, Any]) -> None:
        lease["spec"]["holderIdentity"] = ""
        try:
            async with asyncio.timeout(RELEASE_DEADLINE_S):
                await api.replace_lease(self._terms.namespace, lease)
            log(LOG, "lease released")
        except (ApiError, TimeoutError) as error:
            log(LOG, "lease not released", logging.WARNING, reason=in_words(error))

    def _signed(self, lease: dict[str, Any], *, taken: bool) -> dict[str, Any]:
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = dict(lease["spec"])
        spec |= {
            "holderIdentity": self._terms.identity,
            "leaseDurationSeconds": math.ceil(self._terms.duration_s),  # never shorter: it has whole seconds
            "renewTime": at,
        }
        if taken:
            spec |= {"acquireTime": at, "leaseTransitions": int(spec.get("leaseTransitions", 0)) + 1}
        return {**lease, "spec": spec}

    async def _pause(self, wait_s: float) -> None:
        """Wait for wait_s seconds, or less when stopping."""
        await asyncio.to_thread(self._stopping.wait, max(0.0, wait_s))
