"""Two nodes that run containerd, with kube-proxy and CoreDNS, and the chart, of whose values only images are named.

Podman builds the images, of the last commit. Nothing of the environments of other tests is in their containers. The
cluster's directory is in `.build/`, so that its nodes can link the files of images that are kept there.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from cluster import Cluster
from containerd.image_store import PROGRAMS, ImageStore
from documents.blocks import blocks, under
from e2e.conftest import HELM_S, OPERATOR_NAMESPACE, SCENARIOS, command_line, prepare
from e2e.running_job import KubectlCall
from e2e.terminal import RecordedTerminal
from podman import REPOSITORY, TAG, Podman

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


@pytest.fixture(scope="session")
def podman() -> Podman:
    return Podman.of_checkout()


@pytest.fixture(scope="session")
def images(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The chart's names of images, and ours, which podman has, and the other two."""
    names = {of_chart: f"{REPOSITORY}/{kind}:{TAG}" for of_chart, kind in IMAGES.items()}
    make_pause(podman, tmp_path_factory.mktemp("pause"))
    podman.build(IMAGES["operator"])  # and the wheels of all
    with ThreadPoolExecutor(1) as beside:
        largest = beside.submit(podman.build, IMAGES["gpu"])
        podman.build(IMAGES["agent"])
        podman.build(IMAGES["rollout"])
        make_environment(podman, names["rollout"], tmp_path_factory.mktemp("environment"))
        largest.result()
    return names


@pytest.fixture(scope="session")
def cluster(podman: Podman, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    store, place = ImageStore(PLACE / "images"), PLACE / "cluster"
    if (place / "lock").exists():
        remove_old(place)
    shutil.rmtree(place, ignore_errors=True)  # of a cluster that did not come to its start
    store.bring(podman, {image: further_names(image, images) for image in (PAUSE, *images.values(), ENVIRONMENT)})
    for node in NODES:
        store.share(place / "nodes" / node / "runtime/root")
    options = (f"--containerd={PROGRAMS}", "--services", f"--nodes={len(NODES)}")
    with Cluster.up(place, options=options) as cluster:
        prepare(cluster)
        install(cluster, tmp_path_factory.mktemp("install"))
        yield cluster


def further_names(image: str, images: dict[str, str]) -> list[str]:
    """Names under which nodes have an image too: with another tag, and as jobs of other tests name it."""
    if image not in images.values():
        return []
    return [image.removesuffix(TAG) + NEXT, *([AGENT] if image == images["agent"] else [])]


@pytest.fixture(scope="session")
def kubectl(cluster: Cluster) -> KubectlCall:
    return cluster.kubectl


def install(cluster: Cluster, place: Path) -> None:
    """Install the chart as the page says, with the names of our images in the file that it shows."""
    (place / "charts").symlink_to(CHECKOUT.root / "charts")
    (place / "values.yaml").write_text(yaml.safe_dump(values(TAG)))
    [command] = under("docs/install.md", "The chart")
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
