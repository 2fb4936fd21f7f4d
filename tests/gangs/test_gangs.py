"""A job's gang by the schedulers of scheduler-plugins and of Volcano, built from their modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from neighbours import add_kinds, kubectl, running
from racks import RACK, TWO_NODES, Racks, racks_of

from colocated_rl_operator.clients.cluster import ClusterAccess
from real_operator import Body, cluster_without_nodes, kubeconfig_of
from setup.layout import CHECKOUT

BUILT = CHECKOUT.build / "gangs"
GROUPS = {
    "Coscheduling": "/apis/scheduling.x-k8s.io/v1alpha1/namespaces/default/podgroups",
    "Volcano": "/apis/scheduling.volcano.sh/v1beta1/namespaces/default/podgroups",
}
SCHEDULERS = {"GANG_SCHEDULERS": "Coscheduling=coscheduling,Volcano=volcano"}

COSCHEDULING: Body = {
    "apiVersion": "kubescheduler.config.k8s.io/v1",
    "kind": "KubeSchedulerConfiguration",
    "leaderElection": {"leaderElect": False},
    "profiles": [
        {
            "schedulerName": "coscheduling",
            "plugins": {
                "multiPoint": {"enabled": [{"name": "Coscheduling"}]},
                "queueSort": {"enabled": [{"name": "Coscheduling"}], "disabled": [{"name": "*"}]},
            },
            "pluginConfig": [{"name": "Coscheduling", "args": {"permitWaitingTimeSeconds": 10}}],
        }
    ],
}


VOLCANO: Body = {  # as its chart has it
    "actions": "enqueue, allocate, backfill",
    "tiers": [
        {"plugins": [{"name": "priority"}, {"name": "gang", "enablePreemptable": False}, {"name": "conformance"}]},
        {
            "plugins": [
                *({"name": "overcommit"}, {"name": "drf", "enablePreemptable": False}, {"name": "predicates"}),
                *({"name": "proportion"}, {"name": "nodeorder"}, {"name": "binpack"}),
                {"name": "network-topology-aware"},
            ]
        },
    ],
}
DISCOVERY: Body = {  # of racks, by the label of nodes
    "networkTopologyDiscovery": [
        {
            "source": "label",
            "enabled": True,
            "interval": "1s",
            "config": {
                "networkTopologyTypes": {"racks": [{"nodeLabel": RACK}, {"nodeLabel": "kubernetes.io/hostname"}]}
            },
        }
    ]
}
OF_VOLCANO: Body = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "volcano-controller-configmap", "namespace": "volcano-system"},
    "data": {"volcano-controller.conf": yaml.safe_dump(DISCOVERY)},
}
HYPER_NODES = "/apis/topology.volcano.sh/v1alpha1/hypernodes"


@pytest.fixture(scope="module")
def gang_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterAccess]:
    """A cluster with the kinds of all of them, and with both schedulers."""
    place = tmp_path_factory.mktemp("c")
    with cluster_without_nodes(place / "c", *TWO_NODES) as access:
        kubeconfig = place / "kubeconfig"
        kubeconfig.write_text(kubeconfig_of(access))
        add_kinds(kubeconfig, BUILT / "crds")
        config = place / "coscheduling.yaml"
        config.write_text(yaml.safe_dump(COSCHEDULING | {"clientConnection": {"kubeconfig": str(kubeconfig)}}))
        tiers = place / "volcano.yaml"
        tiers.write_text(yaml.safe_dump(VOLCANO))
        kubectl(kubeconfig, "create", "namespace", "volcano-system")
        kubectl(kubeconfig, "apply", "-f", "-", stdin=yaml.safe_dump(OF_VOLCANO))
        alone = (f"--kubeconfig={kubeconfig}", "--leader-elect=false")
        with (
            running(BUILT / "bin/coscheduling", place, f"--config={config}", "--secure-port=0"),
            running(BUILT / "bin/volcano-controller-manager", place, *alone),
            running(BUILT / "bin/volcano-scheduler", place, f"--scheduler-conf={tiers}", *alone),
        ):
            yield access


async def test_a_gang_of_two_with_room_for_one_holds_no_device_and_is_placed_once_there_is_room(
    gang_cluster: ClusterAccess, tmp_path: Path
) -> None:
    async with racks_of(gang_cluster, tmp_path, SCHEDULERS | {"GANGS": "Coscheduling"}) as racks:
        await racks.wait_for_room()
        (group,) = await racks.api.all(GROUPS["Coscheduling"])
        assert ("ColocatedRLJob", 2) == (group["metadata"]["ownerReferences"][0]["kind"], group["spec"]["minMember"])


async def group_of(racks: Racks) -> Body:
    """Return the spec of the PodGroup that the pods are in: that of a former job may not be gone yet."""
    pods = await racks.pods()
    assert {"volcano"} == {pod["spec"]["schedulerName"] for pod in pods}
    (name,) = {pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] for pod in pods}
    groups = {group["metadata"]["name"]: group for group in await racks.api.all(GROUPS["Volcano"])}
    spec: Body = groups[name]["spec"]
    return spec


async def test_volcano_places_a_gang_of_two_at_once_or_not_at_all(gang_cluster: ClusterAccess, tmp_path: Path) -> None:
    async with racks_of(gang_cluster, tmp_path, SCHEDULERS | {"GANGS": "Volcano"}) as racks:
        await racks.wait_for_room()
        assert {"minMember": 2, "queue": "default"} == await group_of(racks)


async def test_volcano_keeps_a_gang_in_one_rack_where_that_is_required(
    gang_cluster: ClusterAccess, tmp_path: Path
) -> None:
    """Its discovery by labels makes the racks, and names their tier by the label, as the job does."""
    async with racks_of(gang_cluster, tmp_path, SCHEDULERS | {"GANGS": "Volcano"}) as racks:

        async def found() -> list[str | None]:
            return [each["spec"].get("tierName") for each in await racks.api.all(HYPER_NODES)]

        async def are_gone() -> bool:
            return RACK not in await found()

        async def are_found() -> bool:
            return (await found()).count(RACK) == 2

        await racks.until(are_gone, "those of a former test are gone")
        await racks.place("a", "b")
        await racks.until(are_found, "both racks are found")
        await racks.submit(scheduling={"topology": {"required": RACK}})
        made, resolved = {"highestTierName": RACK}, {"highestTierAllowed": 1}  # as Volcano writes it back
        group = await group_of(racks)
        assert group.pop("networkTopology") in [{"mode": "hard", **tier} for tier in (made, resolved)]
        assert {"minMember": 2, "queue": "default"} == group
        await racks.until(racks.is_refused, "the scheduler has tried")
        assert [] == await racks.nodes()
        await racks.place("b", "b")
        await racks.until(racks.are_placed, "both are placed")
