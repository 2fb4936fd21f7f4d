"""The operator process against a real API server: kopf, the Lease, server-side apply, deletion, take-over.

Pods are real objects that no node runs (it is cordoned): `FakeKubelet` plays their kubelet, with members on loopback.
The namespace of the job enforces the restricted pod security profile.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
import yaml
from contract.api_server import Helm, Kubectl

from builders import make_job, make_manifest
from colocated_rl_api import names
from colocated_rl_api.ladder import Rung
from colocated_rl_api.member_wire import Goal, PodTarget
from colocated_rl_operator.authority import SECRET_NAME
from colocated_rl_operator.cluster import ClusterAccess
from fakes.group import GpuPod, Group
from fakes.member import FakeKubelet
from real_operator import (
    JOBS,
    NAMESPACE,
    OPERATORS,
    PODS,
    Api,
    Body,
    Operator,
    cluster_without_nodes,
    kubeconfig_of,
    running_operator,
)
from setup.layout import CHECKOUT

pytestmark = pytest.mark.cluster

SPEC: Body = {"replicas": 2, "steps": 3, "checkpoint": {"everySteps": 2}, "evaluation": {"everySteps": 2}}
DEADLINE_S = 40.0
CANDIDATE = "waiting for the lease"
LEASE = {"LEASE_DURATION_S": "3", "LEASE_RENEW_DEADLINE_S": "2", "LEASE_RETRY_S": "0.5"}
LONG_LEASE = LEASE | {"LEASE_DURATION_S": "600"}  # only who is given it gets it in a test's time


@dataclass
class World:
    api: Api
    group: Group
    kubelet: FakeKubelet
    kubeconfig: Path
    job: Body = field(default_factory=dict)
    operators: int = 0

    @property
    def status(self) -> Body:
        status: Body = self.job.get("status", {})
        return status

    @property
    def is_complete(self) -> bool:
        return self.status.get("phase") == "Complete"

    def condition(self, kind: str) -> Body:
        found: Body = next((item for item in self.status.get("conditions", []) if item["type"] == kind), {})
        return found

    def note_job(self, event: str, job: Body) -> None:
        if job["metadata"]["name"] != self.group.job.name:
            return
        self.job = {} if event == "DELETED" else job
        self.kubelet.moved.set()

    async def until(self, what: Callable[[], object], *, deadline_s: float = DEADLINE_S) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while not what():
                    self.kubelet.moved.clear()
                    await self.kubelet.moved.wait()
        except TimeoutError:
            pytest.fail(f"did not happen in {deadline_s} s; status {json.dumps(self.status, indent=1)}")

    @asynccontextmanager
    async def operator(self, lease: Mapping[str, str] = LEASE) -> AsyncIterator[Operator]:
        self.operators += 1
        name = f"operator-{self.operators}"
        async with running_operator(self.kubeconfig, name, lease, self.kubelet.moved.set) as operator:
            yield operator


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterAccess]:
    with cluster_without_nodes(tmp_path_factory.mktemp("cluster")) as access:
        yield access


@pytest.fixture
async def world(access: ClusterAccess, tmp_path: Path) -> AsyncIterator[World]:
    """A job on the cluster, with a kubelet for its pods; afterwards nothing of it is left."""
    connector = aiohttp.TCPConnector(ssl=access.ssl_context())
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
        api = Api(access, session)

        async def set_status(pod: Body, status: Body) -> None:
            path = f"{PODS}/{pod['metadata']['name']}/status"
            status = status | {"podIPs": [{"ip": status["podIP"]}]}
            await api.call("PATCH", path, {"status": status}, "application/merge-patch+json")

        async def read_secret(name: str) -> dict[str, str]:
            secret = await api.call("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets/{name}")
            return {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}

        async def ended(pod: Body) -> None:
            return None  # the server forgets a pod without a node at once

        group = Group(make_job(**SPEC))
        kubelet = FakeKubelet(group, tmp_path, read_secret=read_secret, set_status=set_status, ended=ended, tasks=tasks)
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(kubeconfig_of(access))
        kubeconfig.chmod(0o600)
        world = World(api, group, kubelet, kubeconfig)
        watches = [
            tasks.create_task(api.watch(PODS, kubelet.note)),
            tasks.create_task(api.watch(JOBS, world.note_job)),
        ]
        try:
            world.job = await api.call("POST", JOBS, make_manifest(**SPEC))
            yield world
        finally:
            await _clean(api)
            kubelet.end_all()
            for watch in watches:
                watch.cancel()


async def _clean(api: Api) -> None:
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{OPERATORS}/leases/colocated-rl-operator"
    for job in await api.all(JOBS):
        path = f"{JOBS}/{job['metadata']['name']}"
        await api.call("PATCH", path, {"metadata": {"finalizers": None}}, "application/merge-patch+json")
        await api.call("DELETE", path)
    for pod in await api.all(PODS):
        await api.call("DELETE", f"{PODS}/{pod['metadata']['name']}", {"gracePeriodSeconds": 0})
    await api.call("DELETE", lease)


# ---------------------------------------------------------------------------------------------------------------- whole
async def test_a_job_completes_under_the_real_operator(world: World) -> None:
    async with world.operator() as operator:
        await world.until(lambda: world.is_complete)
        assert 0 == await operator.end()
    assert {1: [1, 2, 3]} == world.group.trained_in
    climbs = list(world.group.stood.values())[:-1]
    assert all({Rung.SERVING} == set(stood.values()) for stood in climbs)
    assert [names.FINALIZER] == world.job["metadata"]["finalizers"]
    assert {} == world.job["metadata"].get("annotations", {})
    assert ("True", "Completed") == (world.condition("Ready")["status"], world.condition("Ready")["reason"])
    assert world.job["metadata"]["generation"] == world.status["observedGeneration"]
    events = await world.api.all(f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events")
    ours = [event["reason"] for event in sorted(events, key=lambda event: str(event["eventTime"])) if _is_ours(event)]
    assert ["FirstStart", "NextStep", "NextStep", "NextStep", "AllStepsDone", "Completed"] == ours
    assert not operator.said("pass not finished, trying again")


AsyncKubectl = Callable[..., Coroutine[None, None, str]]


@pytest.fixture
def kubectl(world: World) -> AsyncKubectl:
    """The command itself, beside the members of this process."""
    run = Kubectl(CHECKOUT.localcluster, world.kubeconfig)
    return lambda *words: asyncio.to_thread(run, *words)


def stay_in_rollout(world: World) -> None:
    """No batch is sealed."""
    world.kubelet.hold("rollout", under=lambda target: target.goal is Goal.CLIMB)


async def claims_of(world: World, uid: str) -> list[Body]:
    claims = await world.api.all(f"/api/v1/namespaces/{NAMESPACE}/persistentvolumeclaims")
    return [claim for claim in claims if claim["metadata"]["labels"].get(names.JOB_UID_LABEL) == uid]


def _is_ours(event: Body) -> bool:
    return event.get("reportingController") == f"{names.GROUP}/operator"


async def test_a_killed_operator_is_taken_over_by_the_standby_in_the_middle_of_a_switch(world: World) -> None:
    world.kubelet.hold("gpu-1", under=lambda target: isinstance(target, PodTarget) and target.step == 2)
    async with world.operator() as leader:
        await world.until(lambda: leader.said("lease taken"))
        async with world.operator() as standby:
            await world.until(lambda: standby.said(CANDIDATE))
            await world.until(lambda: world.status.get("phase") == "Switching" and world.status["targetStep"] == 2)
            epoch = world.status["epoch"]
            await leader.kill()
            await world.until(lambda: world.status["epoch"] > epoch)
            world.kubelet.let_go("gpu-1")
            await world.until(lambda: world.is_complete)
            assert standby.said("lease taken")
    assert {1: [1, 2, 3]} == world.group.trained_in


async def test_an_operator_that_ends_in_order_hands_over_at_once(world: World) -> None:
    stay_in_rollout(world)
    async with world.operator(LONG_LEASE) as leader:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        async with world.operator(LONG_LEASE) as standby:
            await world.until(lambda: standby.said(CANDIDATE))
            world.kubelet.let_go("rollout")
            assert 0 == await leader.end()
            await world.until(lambda: world.is_complete)
            assert standby.said("lease taken")


async def test_a_restart_writes_no_object_again_and_keeps_the_authority(world: World) -> None:
    async def objects() -> dict[str, str]:
        core, policies = "/api/v1", "/apis/networking.k8s.io/v1"
        found = [await world.api.call("GET", f"{core}/namespaces/{OPERATORS}/secrets/{SECRET_NAME}")]
        for path in (f"{core}/namespaces/{NAMESPACE}/configmaps", f"{policies}/namespaces/{NAMESPACE}/networkpolicies"):
            everything = await world.api.all(path)
            found += [item for item in everything if world.job["metadata"]["uid"] in str(item["metadata"])]
        assert len(found) == 3
        return {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in found}

    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        before = await objects()
    world.kubelet.let_go("rollout")
    async with world.operator():
        await world.until(lambda: world.is_complete)
        assert before == await objects()


async def test_a_deleted_job_leaves_retained_volumes_alone_and_nothing_else_of_itself(world: World) -> None:
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        uid = world.job["metadata"]["uid"]
        await world.api.call("DELETE", f"{JOBS}/sums")
        await world.until(lambda: not world.job)
        await world.until(lambda: not world.kubelet.members)
        assert all(pod.stopped for pod in world.group.pods)
    ours = await claims_of(world, uid)
    assert {f"sums-store-{uid[:8]}", f"sums-checkpoints-{uid[:8]}"} == {claim["metadata"]["name"] for claim in ours}
    assert all("ownerReferences" not in claim["metadata"] for claim in ours)


async def test_a_job_whose_members_are_dead_goes_all_the_same(world: World) -> None:
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        world.kubelet.end_all()
        await world.api.call("DELETE", f"{JOBS}/sums")
        await world.until(lambda: not world.job)
    assert not await world.api.all(PODS)


async def test_a_job_that_was_deleted_while_no_operator_ran_is_let_go_by_the_next_one(world: World) -> None:
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
    await world.api.call("DELETE", f"{JOBS}/sums")
    assert world.job, "the finalizer holds it"
    async with world.operator():
        await world.until(lambda: not world.job)
        await world.until(lambda: not world.kubelet.members)


async def test_a_job_is_suspended_and_resumed_by_kubectl(world: World, kubectl: AsyncKubectl) -> None:
    """As a queue does it, and as people wait for it."""
    stay_in_rollout(world)
    job = f"{names.SHORT_NAME}/sums"
    async with world.operator():
        await kubectl("wait", "--for=condition=Ready", job, "--timeout=30s")
        started = world.status["startTime"]
        await kubectl("patch", job, "--type=merge", "--patch", '{"spec": {"suspend": true}}')
        await kubectl("wait", "--for=condition=Suspended", job, "--timeout=30s")
        assert not await world.api.all(PODS)
        assert all(pod.stopped for pod in world.group.pods)
        assert 2 == len(await claims_of(world, world.job["metadata"]["uid"]))
        await kubectl("patch", job, "--type=merge", "--patch", '{"spec": {"suspend": false}}')
        world.kubelet.let_go("rollout")
        await kubectl("wait", "--for=condition=Complete", job, "--timeout=30s")
        await world.until(lambda: world.is_complete)
    assert (2, 0) == (world.status["lineage"], world.status["restarts"])
    assert started <= world.status["startTime"]
    assert "False" == world.condition("Suspended")["status"]


async def test_a_job_comes_back_with_fewer_pods(world: World, kubectl: AsyncKubectl) -> None:
    stay_in_rollout(world)
    job, fewer = f"{names.SHORT_NAME}/sums", '{"spec": {"replicas": 1}}'
    async with world.operator():
        await kubectl("wait", "--for=condition=Ready", job, "--timeout=30s")
        await kubectl("patch", job, "--type=merge", "--patch", '{"spec": {"suspend": true}}')
        await kubectl("wait", "--for=condition=Suspended", job, "--timeout=30s")
        await kubectl("patch", job, "--type=merge", "--patch", fewer)
        world.group.resize(1)
        assert 1 == world.group.job.spec.replicas
        await kubectl("patch", job, "--type=merge", "--patch", '{"spec": {"suspend": false}}')
        world.kubelet.let_go("rollout")
        await kubectl("wait", "--for=condition=Complete", job, "--timeout=30s")
        await world.until(lambda: world.is_complete)
        pods = await world.api.all(PODS)
    assert ["sums-gpu-0", "sums-rollout"] == sorted(pod["metadata"]["name"].rpartition("-")[0] for pod in pods)
    assert ("0/1", 2) == (world.status["ready"], world.status["lineage"]), "of one pod, which has ended"


async def test_a_finished_job_goes_with_its_pods_after_its_time_and_leaves_its_volumes(world: World) -> None:
    uid = world.job["metadata"]["uid"]
    patch = {"spec": {"ttlSecondsAfterFinished": 1}}
    await world.api.call("PATCH", f"{JOBS}/sums", patch, "application/merge-patch+json")
    phases: list[str | None] = []
    async with world.operator():
        while world.job:
            await world.until(lambda: phases[-1:] != [world.status.get("phase")])
            phases.append(world.status.get("phase"))
        await world.until(lambda: not world.kubelet.members)
    assert ["Complete", None] == phases[-2:]
    assert 2 == len(await claims_of(world, uid))


async def test_a_job_of_another_controller_is_left_alone(world: World) -> None:
    theirs = make_manifest("theirs", **SPEC, managedBy="kueue.x-k8s.io/multikueue")
    await world.api.call("POST", JOBS, theirs)
    async with world.operator():
        await world.until(lambda: world.is_complete)
        [job] = [job for job in await world.api.all(JOBS) if job["metadata"]["name"] == "theirs"]
        assert ({"observedGeneration": -1}, None) == (job["status"], job["metadata"].get("finalizers"))
        assert not [pod for pod in await world.api.all(PODS) if "theirs" in pod["metadata"]["name"]]
        await world.api.call("DELETE", f"{JOBS}/theirs")
        assert not [job for job in await world.api.all(JOBS) if job["metadata"]["name"] == "theirs"]


async def test_kubectl_waits_for_a_failure(world: World, kubectl: AsyncKubectl) -> None:
    patch = {"spec": {"backoffLimit": 0}}
    await world.api.call("PATCH", f"{JOBS}/sums", patch, "application/merge-patch+json")
    world.kubelet.hold("gpu-1", under=lambda target: isinstance(target, PodTarget) and target.step == 1)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Switching")
        member = world.kubelet.of_seat("gpu-0")
        assert isinstance(member.pod, GpuPod)
        world.group.trainer_dies(member.pod)
        member.poke()
        world.kubelet.let_go("gpu-1")
        await kubectl("wait", "--for=condition=Failed", f"{names.SHORT_NAME}/sums", "--timeout=30s")
        await kubectl("wait", "--for=condition=Stalled", f"{names.SHORT_NAME}/sums", "--timeout=30s")
    assert "BackoffLimitExceeded" == world.condition("Failed")["reason"]


async def test_helm_waits_until_the_job_serves(world: World, tmp_path: Path) -> None:
    """By kstatus. The job is there before, and helm takes it over; its generation stays."""
    chart = tmp_path / "chart"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("{apiVersion: v2, name: sums, version: 0.0.1}")
    (chart / "templates/job.yaml").write_text(yaml.safe_dump(make_manifest(**SPEC)))
    helm = Helm(CHECKOUT.localcluster, world.kubeconfig)
    options = ("--take-ownership", "--force-conflicts", "--wait", "--timeout", "60s")
    stay_in_rollout(world)
    world.kubelet.hold("gpu-1", under=lambda target: isinstance(target, PodTarget))
    installing = asyncio.create_task(asyncio.to_thread(helm, "install", "sums", chart, *options))
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Starting")
        await world.until(lambda: "meta.helm.sh/release-name" in world.job["metadata"].get("annotations", {}))
        assert not installing.done()
        world.kubelet.let_go("gpu-1")
        async with asyncio.timeout(DEADLINE_S):
            await installing
    assert "True" == world.condition("Ready")["status"]


async def test_two_releases_that_watch_one_namespace_do_not_fight_over_its_job(world: World) -> None:
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        async with world.operator(LEASE | {"LEASE_NAME": "another"}) as other:
            await world.until(lambda: other.said("lease taken"))
            world.kubelet.let_go("rollout")
            await world.until(lambda: world.is_complete)
            assert not other.said("epoch raised")
    assert (f"{OPERATORS}/colocated-rl-operator", 5) == (world.status["operator"], world.status["epoch"])


async def test_an_evicted_pod_is_replaced_while_the_other_goes_on(world: World) -> None:
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        victim = world.kubelet.of_seat("gpu-1")
        await world.api.call("DELETE", f"{PODS}/{victim.server.hello.pod}")
        await world.until(lambda: world.status.get("cause") == "PodReplaced")
        world.kubelet.let_go("rollout")
        await world.until(lambda: world.is_complete)
    assert (1, "3-2") == (world.status["restarts"], world.status["weightVersion"])
