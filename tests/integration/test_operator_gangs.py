"""A job's gang on the real API server and scheduler: all of its pods are placed or none, and hold nothing before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from racks import MERGE, NODES, RACK, TWO_NODES, VOLUME, Racks, racks_of
from real_world import LEASE, RealWorld, open_real_world

from builders import ROLLOUT
from colocated_rl_api import names
from colocated_rl_operator.clients.cluster import ClusterAccess
from real_operator import JOBS, NAMESPACE, PODS, Body, cluster_without_nodes

pytestmark = [pytest.mark.cluster, pytest.mark.release]
SINCE_1_36 = pytest.mark.since_kubernetes(1, 36)  # the API of gangs as the operator speaks it

GATES = "GenericWorkload=true,GangScheduling=true,TopologyAwareWorkloadScheduling=true"
VERSION = "scheduling.k8s.io/v1alpha2"
GROUPS = f"/apis/{VERSION}/namespaces/{NAMESPACE}/podgroups"
NATIVE = {"GANGS": "Native"}


@pytest.fixture(scope="module")
def gang_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterAccess]:
    """A cluster whose control plane has the alpha API of gangs."""
    options = (*TWO_NODES, f"--feature-gates={GATES}", f"--runtime-config={VERSION}=true")
    with cluster_without_nodes(tmp_path_factory.mktemp("c"), *options) as access:
        yield access


@pytest.fixture
async def racks(gang_cluster: ClusterAccess, tmp_path: Path) -> AsyncIterator[Racks]:
    async with racks_of(gang_cluster, tmp_path, NATIVE) as racks:
        yield racks


@SINCE_1_36
async def test_without_a_gang_one_of_two_pods_holds_devices_while_the_other_waits(racks: Racks) -> None:
    """The case that a gang is for."""
    await racks.place("a", None)
    await racks.submit(scheduling={"gang": "None"})

    async def holds() -> bool:
        return len(await racks.nodes()) == 1

    await racks.until(holds, "one is placed")
    assert [] == await racks.api.all(GROUPS)


@SINCE_1_36
async def test_a_gang_of_two_with_room_for_one_holds_no_device_and_is_placed_once_there_is_room(racks: Racks) -> None:
    await racks.wait_for_room()
    (group,) = await racks.api.all(GROUPS)
    (owner,) = group["metadata"]["ownerReferences"]
    assert ("ColocatedRLJob", 2) == (owner["kind"], group["spec"]["schedulingPolicy"]["gang"]["minCount"])


@SINCE_1_36
async def test_a_pod_of_a_placed_gang_that_is_made_again_joins_the_others(racks: Racks) -> None:
    await racks.place("a", "b")
    await racks.submit()
    await racks.until(racks.are_placed, "both are placed")
    gone, _ = await racks.pods()
    await racks.api.call("DELETE", f"{PODS}/{gone['metadata']['name']}", {"gracePeriodSeconds": 0})

    async def has_come_back() -> bool:
        uids = {pod["metadata"]["uid"] for pod in await racks.pods() if "nodeName" in pod["spec"]}
        return len(uids) == 2 and gone["metadata"]["uid"] not in uids

    await racks.until(has_come_back, "it is placed again")


@SINCE_1_36
async def test_a_gang_waits_for_a_rack_that_has_room_for_all_of_it(racks: Racks) -> None:
    await racks.place("a", "b")
    await racks.submit(scheduling={"topology": {"required": RACK}})
    await racks.until(racks.is_refused, "the scheduler has tried")
    assert [] == await racks.nodes()
    await racks.place("a", "a")
    await racks.until(racks.are_placed, "both are placed")


@SINCE_1_36
async def test_engines_and_trainers_take_devices_of_different_kinds_each_on_nodes_of_its_own(racks: Racks) -> None:
    """The gang waits for both. Nodes of engines are tainted, have a smaller device, and are in another rack: one for
    all pods is required, and engines have a topology of their own.
    """
    trains, serves = [node["metadata"]["name"] for node in await racks.api.all(NODES)]
    await racks.place("trains", "serves")
    added = [{"op": "add", "path": "/status/capacity/example.com~1small", "value": "1"}]
    await racks.api.call("PATCH", f"{NODES}/{serves}/status", added, "application/json-patch+json")
    taint = {"key": "example.com/pool", "value": "serves", "effect": "NoSchedule"}
    await racks.api.call("PATCH", f"{NODES}/{serves}", {"spec": {"taints": [taint]}}, MERGE)

    def on(rack: str, **spec: object) -> Body:
        return {"spec": {"nodeSelector": {RACK: rack}, **spec}}

    tolerated = [{"key": "example.com/pool", "operator": "Equal", "value": "serves", "effect": "NoSchedule"}]
    engines = {"placement": "OwnDevices", "replicas": 1, "gpus": {"count": 1, "resourceName": "example.com/small"}}
    engines |= {"topology": {"required": RACK}}
    try:
        await racks.submit(
            replicas=1,
            rollout=ROLLOUT | engines,
            scheduling={"topology": {"required": RACK}},
            weightSync={"volume": VOLUME["volume"]},
            podTemplates={"gpu": on("trains"), "engine": on("serves", tolerations=tolerated)},
        )
        await racks.until(racks.are_placed, "both are placed")
        placed = {pod["metadata"]["labels"][names.ROLE_LABEL]: pod["spec"]["nodeName"] for pod in await racks.pods()}
        assert {names.ROLE_TRAINER: trains, names.ROLE_ENGINE: serves} == placed
    finally:
        await racks.api.call("PATCH", f"{NODES}/{serves}", {"spec": {"taints": None}}, MERGE)


# ------------------------------------------------------------------------------------------- with a kubelet of the test
@pytest.fixture
async def native(gang_cluster: ClusterAccess, tmp_path: Path) -> AsyncIterator[RealWorld]:
    async with open_real_world(gang_cluster, tmp_path, {"replicas": 2, "steps": 2}) as world:
        yield world


@SINCE_1_36
async def test_a_start_with_other_pods_has_another_group_and_the_former_goes(native: RealWorld) -> None:
    native.stay_in_rollout()
    path = f"{JOBS}/sums"

    async def sizes() -> list[int]:
        groups = await native.api.all(GROUPS)
        return [group["spec"]["schedulingPolicy"]["gang"]["minCount"] for group in groups]

    async with native.operator({**LEASE, "GANGS": "Native"}):
        await native.until(lambda: native.status.get("phase") == "Rollout")
        assert [2] == await sizes()
        await native.api.call("PATCH", path, {"spec": {"suspend": True}}, MERGE)
        await native.until(lambda: native.status.get("phase") == "Suspended" and not native.kubelet.members)
        native.group.resize(1)
        await native.api.call("PATCH", path, {"spec": {"replicas": 1, "suspend": False}}, MERGE)
        await native.until(lambda: native.status.get("phase") == "Rollout")
        assert [1] == await sizes()
    async with native.operator({**LEASE, "GANGS": ""}):  # the admin has another choice by now
        await native.until(lambda: native.status["cause"] == "OperatorRestarted")
        await native.api.call("DELETE", f"{PODS}/sums-gpu-0-1", {"gracePeriodSeconds": 0})
        await native.until(lambda: native.status["cause"] == "PodReplaced")
        again = await native.api.call("GET", f"{PODS}/sums-gpu-0-2")
        (group,) = await native.api.all(GROUPS)
        assert group["metadata"]["name"] == again["spec"]["schedulingGroup"]["podGroupName"]


@pytest.mark.parametrize(
    ("gangs", "scheduling", "words"),
    [
        ("Native", {}, "needs Kubernetes 1.36 with the feature gates GenericWorkload and GangScheduling"),
        ("Volcano", {}, "needs Volcano"),
        ("", {"gang": "Coscheduling"}, "adds it to the chart's value scheduling.gangs"),
    ],
)
async def test_a_gang_that_the_cluster_does_not_have_stalls_its_job_with_what_is_missing(
    access: ClusterAccess, tmp_path: Path, gangs: str, scheduling: Body, words: str
) -> None:
    spec = {"replicas": 2, "steps": 2, "scheduling": scheduling}
    async with open_real_world(access, tmp_path, spec) as world, world.operator({**LEASE, "GANGS": gangs}):
        await world.until(lambda: words in world.condition("Stalled").get("message", ""))
        assert ("True", "ObjectRefused") == (world.condition("Stalled")["status"], world.condition("Stalled")["reason"])
        assert [] == await world.api.all(PODS)


@SINCE_1_36
async def test_a_topology_that_the_server_drops_is_no_start_without_it(tmp_path: Path) -> None:
    """An API server whose gate is off takes the PodGroup and forgets its constraints."""
    options = ("--feature-gates=GenericWorkload=true,GangScheduling=true", f"--runtime-config={VERSION}=true")
    spec = {"replicas": 2, "steps": 2, "scheduling": {"topology": {"required": RACK}}}
    with cluster_without_nodes(tmp_path / "c", *options) as access:
        async with open_real_world(access, tmp_path, spec) as world, world.operator({**LEASE, "GANGS": "Native"}):
            await world.until(lambda: "drops schedulingConstraints" in world.condition("Stalled").get("message", ""))
            assert "TopologyAwareWorkloadScheduling" in world.condition("Stalled")["message"]
            assert [] == await world.api.all(PODS)
