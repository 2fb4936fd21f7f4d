"""A job's gang by the scheduler of scheduler-plugins, built from its module; what kinds of others say to what is made.

The kinds are Volcano's and cert-manager's own; neither of them runs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from racks import RACK, TWO_NODES, racks_of

from colocated_rl_operator.clients.cluster import ClusterAccess
from real_operator import Body, cluster_without_nodes, kubeconfig_of
from setup.layout import CHECKOUT

BUILT = CHECKOUT.build / "gangs"
CHART = CHECKOUT.root / "charts/colocated-rl"
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


@pytest.fixture(scope="module")
def gang_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterAccess]:
    """A cluster with the kinds of all of them, and with that scheduler."""
    place = tmp_path_factory.mktemp("c")
    with cluster_without_nodes(place / "c", *TWO_NODES) as access:
        kubeconfig = place / "kubeconfig"
        kubeconfig.write_text(kubeconfig_of(access))
        kubectl(kubeconfig, "apply", "--server-side", "-f", BUILT / "crds")
        kubectl(kubeconfig, "wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        config = place / "coscheduling.yaml"
        config.write_text(yaml.safe_dump(COSCHEDULING | {"clientConnection": {"kubeconfig": str(kubeconfig)}}))
        with running(place, "coscheduling", f"--config={config}", "--secure-port=0"):
            yield access


@contextmanager
def running(place: Path, name: str, *words: str) -> Iterator[None]:
    """Run a scheduler. Its log is what pytest shows of a test that fails."""
    with (
        (place / f"{name}.log").open("wb") as log,
        subprocess.Popen([BUILT / "bin" / name, *words], stdout=log, stderr=log) as it,
    ):
        try:
            yield
        finally:
            it.terminate()
            it.wait(60)
            print((place / f"{name}.log").read_text()[-20_000:])  # noqa: T201 - for the person who reads the failure


def kubectl(kubeconfig: Path, *words: str | Path, stdin: str | None = None) -> str:
    command: list[str | Path] = [CHECKOUT.localcluster, "kubectl", "--kubeconfig", kubeconfig, *words]
    return subprocess.run(command, input=stdin, check=True, capture_output=True, text=True, timeout=120).stdout


async def test_a_gang_of_two_with_room_for_one_holds_no_device_and_is_placed_once_there_is_room(
    gang_cluster: ClusterAccess, tmp_path: Path
) -> None:
    async with racks_of(gang_cluster, tmp_path, SCHEDULERS | {"GANGS": "Coscheduling"}) as racks:
        await racks.wait_for_room()
        (group,) = await racks.api.all(GROUPS["Coscheduling"])
        assert ("ColocatedRLJob", 2) == (group["metadata"]["ownerReferences"][0]["kind"], group["spec"]["minMember"])


async def test_volcano_s_kind_takes_a_gang_and_its_topology_as_they_are_made(
    gang_cluster: ClusterAccess, tmp_path: Path
) -> None:
    async with racks_of(gang_cluster, tmp_path, SCHEDULERS | {"GANGS": "Volcano"}) as racks:
        await racks.submit(scheduling={"topology": {"required": RACK}})
        (group,) = await racks.api.all(GROUPS["Volcano"])
        topology = {"mode": "hard", "highestTierName": RACK}
        assert {"minMember": 2, "queue": "default", "networkTopology": topology} == group["spec"]
        pods = await racks.pods()
        names = {pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] for pod in pods}
        assert ({group["metadata"]["name"]}, {"volcano"}) == (names, {pod["spec"]["schedulerName"] for pod in pods})


def test_the_server_takes_the_certificate_and_the_issuer_that_the_chart_renders(
    gang_cluster: ClusterAccess, tmp_path: Path
) -> None:
    """Strictly, by cert-manager's own kinds: no unknown field, no wrong type."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(kubeconfig_of(gang_cluster))
    for values in ((), ("--values", CHART / "ci/cert-manager-values.yaml")):
        words = ("template", "rl", CHART, "--set", "authority.certManager.enabled=true", *values)
        command = [CHECKOUT.localcluster, "helm", *words, "--show-only", "templates/certificate.yaml"]
        rendered = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
        kubectl(kubeconfig, "apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=rendered)
