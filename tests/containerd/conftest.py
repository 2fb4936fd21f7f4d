"""Two nodes that run containerd, with kube-proxy and CoreDNS, and the chart, of whose values only images are named.

Podman builds the images, of the last commit. Nothing of the environments of other tests is in their containers. The
cluster's directory is in `.build/`, so that its nodes can link the files of images that are kept there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster
from containerd.image_store import PROGRAMS, ImageStore
from documents.blocks import blocks, under
from e2e.conftest import HELM_S, NAMESPACE, OPERATOR_NAMESPACE, SCENARIOS, command_line, prepare
from e2e.running_job import KubectlCall, RunningJob
from e2e.terminal import RecordedTerminal
from podman import REPOSITORY, TAG, Podman

from colocated_rl_api import names
from examples.arithmetic.cluster import remove_old
from setup.layout import CHECKOUT

__all__ = ["command_line"]  # a fixture of other tests

PLACE = CHECKOUT.build / "containerd"
IMAGES = {"operator": "operator", "agent": "agent", "rollout": "rollout", "gpu": "gpu-cpu"}  # of the chart: of ours
ENVIRONMENT = "docker.io/colocated-rl/environment:dev"  # that jobs of other tests name, and
AGENT = "docker.io/colocated-rl/agent:dev"  # in a container of their own
PAUSE = "localhost/pause:1"
NODES = ("node1", "node2")
NEXT = "next"  # tag of the same images
CACHE_MIB = 32  # that a pod of a job may keep


@pytest.fixture(scope="session")
def podman() -> Podman:
    return Podman.of_checkout()


@pytest.fixture(scope="session")
def images(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The chart's names of images, and ours. Podman has them, and the two images that are no part of the chart."""
    ours = {of_chart: f"{REPOSITORY}/{kind}:{TAG}" for of_chart, kind in IMAGES.items()}
    make_pause(podman, tmp_path_factory.mktemp("pause"))
    podman.build(IMAGES["operator"])  # and the wheels of all
    with ThreadPoolExecutor(1) as beside:
        others = beside.map(podman.build, (IMAGES["gpu"], IMAGES["agent"]))
        podman.build(IMAGES["rollout"])
        make_environment(podman, ours["rollout"], tmp_path_factory.mktemp("environment"))
        list(others)
    return ours


@pytest.fixture(scope="session")
def cluster(podman: Podman, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    store, place = ImageStore(PLACE / "images"), PLACE / "cluster"
    if (place / "lock").exists():
        remove_old(place)
    shutil.rmtree(place, ignore_errors=True)  # of a cluster that did not come to its start
    further = {image: [image.removesuffix(TAG) + NEXT] for image in images.values()}
    further[images["agent"]].append(AGENT)
    store.bring(podman, {PAUSE: [], **further, ENVIRONMENT: []})
    for node in NODES:
        store.share(place / "nodes" / node / "runtime/root")
    options = (f"--containerd={PROGRAMS}", "--services", f"--nodes={len(NODES)}")
    with Cluster.up(place, options=options) as cluster:
        prepare(cluster)
        install(cluster, tmp_path_factory.mktemp("install"))
        yield cluster


@pytest.fixture(scope="session")
def kubectl(cluster: Cluster) -> KubectlCall:
    return cluster.kubectl


@pytest.fixture(scope="session")
def elsewhere(kubectl: KubectlCall, images: dict[str, str]) -> RunningJob:
    """Names a digest that its image has not."""
    manifest = two_pods("elsewhere")
    manifest["spec"]["gpus"]["image"] = f"{images['gpu'].rpartition(':')[0]}@sha256:{'0' * 64}"
    return create(kubectl, manifest)


@pytest.fixture(scope="session")
def two(kubectl: KubectlCall) -> RunningJob:
    return create(kubectl, two_pods("two"))


def two_pods(name: str) -> dict[str, Any]:
    """The job of other tests with a pod on each node, and a bound on what a pod keeps in its cache."""
    manifest: dict[str, Any] = yaml.safe_load((SCENARIOS / "two-pods.yaml").read_text())
    manifest["metadata"]["name"] = name
    labels = {"matchLabels": {names.JOB_NAME_LABEL: name, names.ROLE_LABEL: names.ROLE_GPU}}
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": labels}
    manifest["spec"]["podTemplates"]["gpu"]["spec"] |= {
        "volumes": [{"name": "cache", "emptyDir": {"sizeLimit": f"{CACHE_MIB}Mi"}}],
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
    }
    return manifest


def create(kubectl: KubectlCall, manifest: dict[str, Any]) -> RunningJob:
    kubectl("-n", NAMESPACE, "create", "-f", "-", stdin=json.dumps(manifest))
    return RunningJob(kubectl, namespace=NAMESPACE, name=manifest["metadata"]["name"])


def install(cluster: Cluster, place: Path) -> None:
    """Install the chart as the page says, with the names of our images in the file that it shows."""
    (place / "charts").symlink_to(CHECKOUT.root / "charts")
    (place / "values.yaml").write_text(yaml.safe_dump(values(TAG)))
    command, *_ = (each for each in under("docs/install.md", "The chart") if each.startswith("helm"))
    RecordedTerminal.opened(place, cluster.kubeconfig)(command)
    cluster.kubectl(
        *("-n", OPERATOR_NAMESPACE, "rollout", "status", "deployment/colocated-rl", f"--timeout={HELM_S:.0f}s"),
        deadline_s=HELM_S + 30,
    )


def values(tag: str) -> dict[str, dict[str, dict[str, str]]]:
    return {"images": {name: {"repository": f"{REPOSITORY}/{kind}", "tag": tag} for name, kind in IMAGES.items()}}


def make_pause(podman: Podman, place: Path) -> None:
    archive = place / "pause.tar"
    subprocess.run(["tar", "-C", PROGRAMS, "-cf", archive, "pause"], check=True)
    podman("import", "--quiet", '--change=ENTRYPOINT ["/pause"]', "--change=USER 65535:65535", archive, PAUSE)


def make_environment(podman: Podman, rollout: str, place: Path) -> None:
    """Build the page's environment on our rollout controller's image, with the environments of those tests in it."""
    [text] = [block.text for block in blocks("docs/environments.md") if block.language == "dockerfile"]
    on_ours = re.sub(r"^FROM .*", f"FROM {rollout}", text)
    (place / "Dockerfile").write_text(f"{on_ours}COPY additions.py /opt/environments/\n")
    examples = CHECKOUT.root / "examples/environments"
    for file in (examples / "stockroom.py", examples / "uv", SCENARIOS / "own_environment/additions.py"):
        shutil.copy(file, place)
    podman.build_folder(place, ENVIRONMENT)


def kill(cluster: Cluster, component: str) -> int:
    """Kill a component of the cluster, which is started again; the process that it was."""
    [pid] = [each["pid"] for each in cluster.status()["components"] if each["name"] == component]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return int(pid)


def runs_anew(cluster: Cluster, component: str, *, instead_of: int) -> bool:
    found = {each["name"]: each["pid"] for each in cluster.status()["components"]}
    return found[component] not in (None, instead_of)
