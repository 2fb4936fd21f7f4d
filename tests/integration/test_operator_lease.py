"""Leadership: who has it, who waits, who ends. Real threads and HTTP, short terms."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest

from colocated_rl_operator.cluster import ClusterAccess
from colocated_rl_operator.errors import ApiUnreachable
from colocated_rl_operator.kube import Kube
from colocated_rl_operator.lease import Lease, LeaseTerms
from fakes.api_server import FakeApiServer

PATH = "/apis/coordination.k8s.io/v1/namespaces/operators/leases/colocated-rl-operator"
DEADLINE_S = 60.0


@dataclass
class Deaths:
    """Why `os._exit` would have ended the process. `die` does not come back either: the thread stands still."""

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
    api: FakeApiServer, identity: str, deaths: Deaths | None = None, *, door: type[Kube] = Kube, scale: float = 1.0
) -> Lease:
    """scale: of its times, which are short."""
    times = {"duration_s": scale * 1.0, "renew_deadline_s": scale * 0.6, "retry_s": scale * 0.1}
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


async def test_a_released_lease_is_taken_at_once(api: FakeApiServer) -> None:
    first, second = (make_lease(api, each, scale=2 * DEADLINE_S) for each in "ab")
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
                await asyncio.sleep(0.15)  # less than an attempt may take
                answered_at.append(time.monotonic())
            return await super().read_lease(namespace, name)

    api.put(PATH, {"metadata": {"name": "colocated-rl-operator"}, "spec": {"holderIdentity": "gone"}})
    lease = make_lease(api, "b", door=Slow)
    async with asyncio.timeout(DEADLINE_S):
        await lease.acquire()
    assert time.monotonic() - answered_at[0] >= 1.0
    await lease.release()


async def test_a_candidate_waits_while_the_api_is_away(api: FakeApiServer) -> None:
    api.refuse_next(503, 503, 503)
    lease, deaths = make_lease(api, "a", deaths := Deaths()), deaths
    async with asyncio.timeout(DEADLINE_S):
        await lease.acquire()
    assert [] == deaths.reasons
    await lease.release()


async def test_a_leader_that_cannot_renew_ends_before_the_lease_runs_out(api: FakeApiServer) -> None:
    lease = make_lease(api, "a", deaths := Deaths())
    await lease.acquire()
    api.refuse_next(*[503] * 1000)
    async with beating(lease):
        await died(deaths)
    assert "not renewed for 0.6 s" in deaths.reasons[0]


async def test_a_leader_whose_event_loop_is_blocked_ends(api: FakeApiServer) -> None:
    lease = make_lease(api, "a", deaths := Deaths())
    await lease.acquire()  # and nobody shows that the loop runs
    await died(deaths)
    assert "event loop has not run" in deaths.reasons[0]


async def test_a_leader_that_finds_another_holder_ends(api: FakeApiServer) -> None:
    lease = make_lease(api, "a", deaths := Deaths())
    await lease.acquire()
    api.put(PATH, {**api.objects[PATH], "spec": {**api.objects[PATH]["spec"], "holderIdentity": "thief"}})
    async with beating(lease):
        await died(deaths)
    assert "another process holds the lease" in deaths.reasons[0]


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
    lease = make_lease(api, "a", deaths := Deaths(), door=door, scale=5.0)
    await lease.acquire()
    async with beating(lease), asyncio.timeout(DEADLINE_S):
        await lease.confirm()
    assert [] == deaths.reasons
    await lease.release()


async def test_a_candidate_that_waited_long_has_time_to_show_that_its_loop_runs(api: FakeApiServer) -> None:
    """The heartbeat counted from the start of the process, and nobody beats for a candidate."""
    first, second = make_lease(api, "a"), make_lease(api, "b", deaths := Deaths())
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    async with beating(first):
        for _ in range(10):  # longer than the deadline of a heartbeat
            await first.confirm()
        await first.release()
    await waiting
    async with asyncio.timeout(DEADLINE_S):
        await second.confirm()
    assert [] == deaths.reasons
    await second.release()


async def died(deaths: Deaths) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not deaths.reasons:
            await asyncio.to_thread(lambda: None)


async def test_who_leads_no_more_gets_no_confirmation(api: FakeApiServer) -> None:
    lease = make_lease(api, "a", deaths := Deaths())
    await lease.acquire()
    api.refuse_next(*[409] * 10)
    async with beating(lease):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await lease.confirm()
    await died(deaths)
