"""Leadership: who has it, who waits, who ends. Real threads and HTTP.

No lease here runs out while a slow machine stands still: where one has to, the test says that so much time has passed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest

from colocated_rl_operator.clients.cluster import ClusterAccess
from colocated_rl_operator.clients.errors import ApiUnreachable
from colocated_rl_operator.clients.kube import Kube
from colocated_rl_operator.clients.lease import Lease, LeaseTerms
from fakes.api_server import FakeApiServer

PATH = "/apis/coordination.k8s.io/v1/namespaces/operators/leases/colocated-rl-operator"
DEADLINE_S = 60.0
LONG_S = 2 * DEADLINE_S


@dataclass
class Deaths:
    """A Deaths keeps why `os._exit` would have ended the process. `die` does not
    return either: the thread stands still.
    """

    reasons: list[str] = field(default_factory=list)

    def die(self, reason: str) -> NoReturn:
        self.reasons.append(reason)
        while True:
            threading.Event().wait()


@pytest.fixture
async def api() -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer() as api:
        yield api


def make_lease(
    api: FakeApiServer,
    identity: str,
    deaths: Deaths | None = None,
    *,
    door: type[Kube] = Kube,
    duration_s: float = 2 * LONG_S,
) -> Lease:
    times = {"duration_s": duration_s, "renew_deadline_s": LONG_S, "retry_s": 0.1}
    terms = LeaseTerms("operators", "colocated-rl-operator", identity, **times)
    return Lease(terms, connect=lambda: door(api.access), die=(deaths or Deaths()).die)


@asynccontextmanager
async def beating(lease: Lease) -> AsyncIterator[None]:
    task = asyncio.create_task(lease.keep_beating(interval_s=0.1))
    try:
        yield
    finally:
        task.cancel()


def holder(api: FakeApiServer) -> str:
    spec = api.objects[PATH]["spec"]
    return f"{spec['holderIdentity']} {spec['leaseTransitions']}"


async def until(api: FakeApiServer, what: str) -> None:
    changed = asyncio.Event()
    api.watch("leases", lambda event, body: changed.set())
    async with asyncio.timeout(DEADLINE_S):
        while holder(api) != what:
            changed.clear()
            await changed.wait()


async def it_is_so(what: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not what():  # noqa: ASYNC110 - a thread makes it so
            await asyncio.sleep(0.01)


def renewals(api: FakeApiServer) -> int:
    """Return how many renewals were tried."""
    return api.requests.count(f"PUT {PATH}")


def not_renewed_for_long(lease: Lease) -> None:
    assert lease._renewed_at is not None
    lease._renewed_at -= LONG_S


def not_beaten_for_long(lease: Lease) -> None:
    lease._beat_at -= 2 * LONG_S


async def test_the_first_candidate_leads_and_renews(api: FakeApiServer) -> None:
    lease = make_lease(api, "a")
    async with asyncio.timeout(DEADLINE_S):
        await lease.acquire()
    async with beating(lease):
        assert "a 1" == holder(api)
        version = api.objects[PATH]["metadata"]["resourceVersion"]
        async with asyncio.timeout(DEADLINE_S):
            await lease.confirm()
        assert version != api.objects[PATH]["metadata"]["resourceVersion"]
    await lease.release()
    assert " 1" == holder(api)


async def test_others_wait_no_shorter_than_the_duration_whose_seconds_are_not_whole(api: FakeApiServer) -> None:
    """A Lease has whole seconds: 10.4 were written as 10, and a leader of 10.2 to renew in led beside the next one."""
    lease = make_lease(api, "a", duration_s=LONG_S + 0.4)
    async with asyncio.timeout(DEADLINE_S):
        await lease.acquire()
    assert LONG_S + 1 == api.objects[PATH]["spec"]["leaseDurationSeconds"]
    await lease.release()


async def test_a_released_lease_is_taken_at_once(api: FakeApiServer) -> None:
    first, second = (make_lease(api, each) for each in "ab")
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    async with beating(first):
        await first.release()
    async with asyncio.timeout(DEADLINE_S):  # less than the duration
        await waiting
    assert "b 2" == holder(api)
    await second.release()


async def test_a_holder_that_is_gone_loses_the_lease_after_its_duration(api: FakeApiServer) -> None:
    far = "2999-01-01T00:00:00Z"  # clocks of others count for nothing
    spec = {"holderIdentity": "gone", "leaseDurationSeconds": 1, "leaseTransitions": 4, "renewTime": far}
    api.put(PATH, {"metadata": {"name": "colocated-rl-operator"}, "spec": spec})
    lease = make_lease(api, "b")
    started = asyncio.get_running_loop().time()
    async with asyncio.timeout(DEADLINE_S):
        await lease.acquire()
    assert asyncio.get_running_loop().time() - started >= 1.0
    assert "b 5" == holder(api)
    await lease.release()


async def test_a_lease_is_as_young_as_the_answer_that_tells_of_it(api: FakeApiServer) -> None:
    """It counted from the question: its holder may have renewed it while the answer was on its way."""
    answered_at: list[float] = []

    class Slow(Kube):
        async def read_lease(self, namespace: str, name: str) -> dict[str, Any]:
            if not answered_at:
                await asyncio.sleep(0.15)
                answered_at.append(time.monotonic())
            return await super().read_lease(namespace, name)

    api.put(PATH, {"metadata": {"name": "colocated-rl-operator"}, "spec": {"holderIdentity": "gone"}})
    lease = make_lease(api, "b", door=Slow, duration_s=1.0)
    async with asyncio.timeout(DEADLINE_S):
        await lease.acquire()
    assert time.monotonic() - answered_at[0] >= 1.0
    await lease.release()


async def test_a_candidate_waits_while_the_api_is_away(api: FakeApiServer) -> None:
    api.refuse_next(503, 503, 503)
    lease = make_lease(api, "a", deaths := Deaths())
    async with asyncio.timeout(DEADLINE_S):
        await lease.acquire()
    assert [] == deaths.reasons
    await lease.release()


async def test_a_leader_that_cannot_renew_ends_before_the_lease_runs_out(api: FakeApiServer) -> None:
    lease = make_lease(api, "a", deaths := Deaths())
    await lease.acquire()
    before = renewals(api)
    api.refuse_next(*[503] * 1000)
    async with beating(lease):
        await it_is_so(lambda: renewals(api) > before + 2)
        assert [] == deaths.reasons, "it tries again"
        not_renewed_for_long(lease)
        await it_is_so(lambda: deaths.reasons)
    assert f"not renewed for {LONG_S:g} s" in deaths.reasons[0]


async def test_a_leader_whose_event_loop_is_blocked_ends(api: FakeApiServer) -> None:
    lease = make_lease(api, "a", deaths := Deaths())
    await lease.acquire()
    not_beaten_for_long(lease)
    await it_is_so(lambda: deaths.reasons)
    assert "event loop has not run" in deaths.reasons[0]


async def test_a_leader_that_finds_another_holder_ends(api: FakeApiServer) -> None:
    lease = make_lease(api, "a", deaths := Deaths())
    await lease.acquire()
    api.put(PATH, {**api.objects[PATH], "spec": {**api.objects[PATH]["spec"], "holderIdentity": "thief"}})
    async with beating(lease):
        await it_is_so(lambda: deaths.reasons)
    assert "another process holds the lease" in deaths.reasons[0]


async def test_a_leader_that_finds_an_older_lease_ends(api: FakeApiServer) -> None:
    """After a restore of etcd a leader went on, and its watches reported nothing."""
    lease = make_lease(api, "a", deaths := Deaths())
    await lease.acquire()
    backup = api.objects[PATH]
    async with beating(lease), asyncio.timeout(DEADLINE_S):
        await lease.confirm()
        api.objects[PATH] = backup
        await it_is_so(lambda: deaths.reasons)
    assert "restored from a backup" in deaths.reasons[0]


class Faulty(Kube):
    """Its second change of the lease, the first renewal, goes wrong in `_fault`."""

    def __init__(self, access: ClusterAccess) -> None:
        super().__init__(access)
        self.changes = 0

    async def create_lease(self, namespace: str, lease: dict[str, Any]) -> dict[str, Any]:
        self.changes += 1
        return await super().create_lease(namespace, lease)

    async def replace_lease(self, namespace: str, lease: dict[str, Any]) -> dict[str, Any]:
        self.changes += 1
        if self.changes == 2:
            await self._fault(namespace, lease)
        return await super().replace_lease(namespace, lease)

    async def _fault(self, namespace: str, lease: dict[str, Any]) -> None:
        raise NotImplementedError


class Hanging(Faulty):
    async def _fault(self, namespace: str, lease: dict[str, Any]) -> None:
        await asyncio.Event().wait()


class Deaf(Faulty):
    async def _fault(self, namespace: str, lease: dict[str, Any]) -> None:
        await Kube.replace_lease(self, namespace, lease)
        raise ApiUnreachable("the answer is lost")


@pytest.mark.parametrize("door", [Hanging, Deaf])
async def test_a_renewal_that_gets_no_answer_is_tried_again_within_the_deadline(
    api: FakeApiServer, door: type[Faulty]
) -> None:
    """A request that hung used up the whole deadline; one that took effect unheard looked like a rival's."""
    lease = make_lease(api, "a", deaths := Deaths(), door=door)
    assert 3 * lease._attempt_s <= LONG_S, "attempts that fit into it"
    lease._attempt_s = 0.5
    await lease.acquire()
    async with beating(lease), asyncio.timeout(DEADLINE_S):
        await lease.confirm()
    assert [] == deaths.reasons
    await lease.release()


async def test_a_candidate_that_waited_long_has_time_to_show_that_its_loop_runs(api: FakeApiServer) -> None:
    """The heartbeat counted from the start of the process, and nobody beats for a candidate."""
    first, second = make_lease(api, "a"), make_lease(api, "b", deaths := Deaths())
    not_beaten_for_long(second)
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    async with beating(first):
        await first.release()
    async with asyncio.timeout(DEADLINE_S):
        await waiting
        await second.confirm()
    assert [] == deaths.reasons
    await second.release()


async def test_who_leads_no_more_gets_no_confirmation(api: FakeApiServer) -> None:
    lease = make_lease(api, "a", deaths := Deaths())
    await lease.acquire()
    api.refuse_next(*[409] * 1000)
    async with beating(lease):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await lease.confirm()
        not_renewed_for_long(lease)
        await it_is_so(lambda: deaths.reasons)
