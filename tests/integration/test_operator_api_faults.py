"""The operator's process behind a real API server that misbehaves, and one that is away. See `fakes.unruly_api`.

Only the operator meets the faults: the kubelet of these tests, their watches and whoever edits the job do not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from real_world import CANDIDATE, RealWorld, open_real_world

from builders import make_manifest
from colocated_rl_api import names
from colocated_rl_api.member_wire import PodTarget
from colocated_rl_api.rungs import Rung
from colocated_rl_operator.clients.cluster import ClusterAccess
from fakes.unruly_api import UnrulyApi
from real_operator import JOBS, NAMESPACE, AdminApi, Body, RealOperator

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

LOG = logging.getLogger(__name__)

SPEC: Body = {"replicas": 2, "steps": 3, "checkpoint": {"everySteps": 2}, "evaluation": {"everySteps": 2}}
LEASE: dict[str, str] = {}  # as the chart has it
PATIENT = {"LEASE_DURATION_S": "45", "LEASE_RENEW_DEADLINE_S": "30", "LEASE_RETRY_S": "1"}  # luck is not to decide
AWAY_S = 60.0
MET_S = 600.0  # each fault, as chance deals them
GONE_S = 300.0  # a finalizer that could not be dropped is tried again after 45 s, and garbage is collected later
OWNED = {
    "Pod": "/api/v1/namespaces/{}/pods",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "PersistentVolumeClaim": "/api/v1/namespaces/{}/persistentvolumeclaims",
}
RETAINED = {"PersistentVolumeClaim": 2}


@pytest.fixture
async def proxy(access: ClusterAccess, tmp_path: Path) -> AsyncIterator[UnrulyApi]:
    async with UnrulyApi(access, tmp_path / "proxy", seed=5) as proxy:
        yield proxy


async def count_owned(api: AdminApi, uid: str) -> dict[str, int]:
    """Objects of the job, by kind."""
    found: dict[str, int] = {}
    for kind, path in OWNED.items():
        items = await api.all(path.format(NAMESPACE))
        ours = [item for item in items if item["metadata"].get("labels", {}).get(names.JOB_UID_LABEL) == uid]
        found |= {kind: len(ours)} if ours else {}
    return found


async def until_gone(api: AdminApi, uid: str) -> None:
    """All of the job but what it retains."""
    async with asyncio.timeout(GONE_S):
        while await count_owned(api, uid) != RETAINED:  # noqa: ASYNC110 - no watch tells of all kinds at once
            await asyncio.sleep(0.2)


async def test_a_job_goes_in_order_through_every_fault_of_its_api_server(
    access: ClusterAccess, proxy: UnrulyApi, tmp_path: Path
) -> None:
    """Each fault is met; nothing is made twice, nothing is left over, and the process never ends."""
    async with open_real_world(access, tmp_path, SPEC | {"steps": 1000}, operators=proxy.access) as world:
        uid = world.job["metadata"]["uid"]
        proxy.misbehaves = True
        async with world.operator(PATIENT) as operator:
            await world.until(lambda: not proxy.missing, deadline_s=MET_S)
            steps = int(world.status["step"]) + 1
            await world.api.call("PATCH", f"{JOBS}/sums", {"spec": {"steps": steps}}, "application/merge-patch+json")
            await world.until(lambda: world.is_complete, deadline_s=MET_S)
            trained, restarts = world.group.trained_in, world.status["restarts"]
            made = await count_owned(world.api, uid)
            await world.api.call("DELETE", f"{JOBS}/sums")
            await world.until(lambda: not world.job, deadline_s=GONE_S)
            await until_gone(world.api, uid)
            assert operator.process.returncode is None, "it crashed"
            assert 0 == await operator.end()
        climbs = list(world.group.stood.values())[:-1]
        LOG.info("faults met: %s", {f"{kind} {fault}": count for (kind, fault), count in sorted(proxy.dealt.items())})
    assert [1] == [*trained], "no step was rolled back"
    assert [*range(1, len(trained[1]) + 1)] == trained[1], "each batch once, in order"
    assert len(trained[1]) >= steps
    assert 0 == restarts
    assert ["gpu-0", "gpu-1", "rollout"] == sorted(pod.seat for pod in world.group.everybody), "none was made again"
    others = {"ConfigMap": 1, "NetworkPolicy": 3, "PodDisruptionBudget": 1, "PersistentVolumeClaim": 2}
    assert {"Pod": 3, "Secret": 3 + 1} | others == made, "one Secret for each pod and one for clients"
    assert all({Rung.SERVING} == set(stood.values()) for stood in climbs)


@asynccontextmanager
async def kept_running(world: RealWorld) -> AsyncIterator[list[RealOperator]]:
    """One replica, started again whenever it ends, as kubelet does. Its starts."""
    starts: list[RealOperator] = []

    async def run() -> None:
        while True:
            async with world.operator(LEASE) as operator:
                starts.append(operator)
                await operator.process.wait()

    running = asyncio.create_task(run(), name="replica")
    try:
        yield starts
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def all_know_its_epoch(world: RealWorld) -> bool:
    """Return whether all members have targets of the epoch that is recorded."""
    targets = [member.pod.target for member in world.kubelet.members.values()]
    return {world.status["epoch"]} == {target and target.epoch for target in targets}


@pytest.mark.release
async def test_an_api_server_that_is_away_for_a_minute_costs_a_job_nothing(
    access: ClusterAccess, proxy: UnrulyApi, tmp_path: Path
) -> None:
    """It goes once all members know of a switch, which ends without it; so does the next batch. Of two replicas the
    leader ends once, both wait, and one of them goes on where the members are.
    """
    async with open_real_world(access, tmp_path, SPEC, operators=proxy.access) as world:
        world.kubelet.hold("gpu-1", under=lambda target: isinstance(target, PodTarget) and target.step == 2)
        world.stay_in_rollout()
        async with kept_running(world) as first:
            await world.until(lambda: first and first[0].logged("lease taken"))
            async with kept_running(world) as second:
                await world.until(lambda: second and second[0].logged(CANDIDATE))
                world.kubelet.release("rollout")  # not before: who is held up for long is taken for one that hangs
                await world.until(lambda: world.status.get("targetStep") == 2 and all_know_its_epoch(world))
                members = {*world.kubelet.members}
                until = asyncio.get_running_loop().time() + AWAY_S
                await proxy.leave()
                world.kubelet.release("gpu-1")
                await world.until(lambda: world.group.sealed == 3)
                assert {1: [1, 2]} == world.group.trained_in
                await world.until(lambda: len(first) == 2 and first[1].logged(CANDIDATE))
                await asyncio.sleep(until - asyncio.get_running_loop().time())
                assert (2, members) == (world.status["targetStep"], {*world.kubelet.members})
                await proxy.come_back()
                await world.until(lambda: world.is_complete)
                assert (2, 1) == (len(first), len(second)), "starts of each"
                assert 1 == sum(len(operator.logged("lease taken")) for operator in (first[1], second[0]))
                assert ("3-1", 0) == (world.status["weightVersion"], world.status["restarts"])
    assert {1: [1, 2, 3]} == world.group.trained_in


async def test_jobs_whose_requests_are_never_answered_hold_up_no_other(
    access: ClusterAccess, proxy: UnrulyApi, tmp_path: Path
) -> None:
    """A webhook may hang so: of one job all requests hang, of the other those that follow kopf's."""
    proxy.stalls = lambda path, body: "/held" in path or "/stuck/status" in path or b"stuck-" in body
    async with open_real_world(access, tmp_path, SPEC, operators=proxy.access) as world:
        for name in ("held", "stuck"):
            await world.api.call("POST", JOBS, make_manifest(name, **SPEC))
        async with world.operator():
            await world.until(lambda: proxy.stalled >= 2)
            begun = proxy.stalled
            await world.until(lambda: world.is_complete)
            LOG.info("requests without an answer: %d, %d of them at the end", proxy.stalled, proxy.stalled - begun)
        others = [job for job in await world.api.all(JOBS) if job["metadata"]["name"] != "sums"]
        assert 2 == len(others)
        assert {None} == {job.get("status", {}).get("phase") for job in others}
    assert {1: [1, 2, 3]} == world.group.trained_in
