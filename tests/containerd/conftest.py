"""Two nodes that run containerd, with kube-proxy and CoreDNS, and the chart, of whose values only images are named.

Podman builds the images, of the last commit. Nothing of the environments of other tests is in their containers.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import yaml
from cluster import Cluster
from documents.blocks import blocks, under
from e2e.conftest import HELM_S, OPERATOR_NAMESPACE, SCENARIOS, command_line, prepare
from e2e.running_job import KubectlCall
from e2e.terminal import RecordedTerminal
from podman import REPOSITORY, TAG, Podman

from setup.layout import CHECKOUT

__all__ = ["command_line"]  # a fixture of other tests

PROGRAMS = CHECKOUT.build / "containerd/bin"
IMAGES = {"operator": "operator", "agent": "agent", "rollout": "rollout", "gpu": "gpu-cpu"}  # of the chart: of ours
ENVIRONMENT = "docker.io/colocated-rl/environment:dev"  # that jobs of other tests name, and
AGENT = "docker.io/colocated-rl/agent:dev"  # in a container of their own
PAUSE = "localhost/pause:1"
NODES = ("node1", "node2")
NEXT = "next"  # tag of the same images
IMPORT_S = 600.0


@pytest.fixture(scope="session")
def podman() -> Podman:
    return Podman.of_checkout()


@pytest.fixture(scope="session")
def images(podman: Podman) -> dict[str, str]:
    """The chart's names of images, and ours, which podman has."""
    return {of_chart: podman.build(kind) for of_chart, kind in IMAGES.items()}


@pytest.fixture(scope="session")
def cluster(podman: Podman, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    options = (f"--containerd={PROGRAMS}", "--services", f"--nodes={len(NODES)}")
    with Cluster.up(tmp_path_factory.mktemp("cluster") / "c", options=options) as cluster:
        make_pause(podman, tmp_path_factory.mktemp("pause"))
        make_environment(podman, images["rollout"], tmp_path_factory.mktemp("environment"))
        with ThreadPoolExecutor(len(NODES)) as nodes:
            list(nodes.map(partial(bring_all, podman, images, cluster), NODES))
        prepare(cluster)
        install(cluster, tmp_path_factory.mktemp("install"))
        yield cluster


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


def bring_all(podman: Podman, images: dict[str, str], cluster: Cluster, node: str) -> None:
    for image in (PAUSE, *images.values(), ENVIRONMENT):
        bring(podman, image, cluster, node)
    ctr(cluster, node, "images", "tag", images["agent"], AGENT)
    for image in images.values():
        ctr(cluster, node, "images", "tag", image, image.removesuffix(TAG) + NEXT)


def bring(podman: Podman, image: str, cluster: Cluster, node: str) -> None:
    """Copy an image from podman into a node's containerd, which then knows its digest too."""
    saving = ("podman", "save", "--quiet", "--format=docker-archive", image)
    with subprocess.Popen(saving, env=podman.environment, stdout=subprocess.PIPE) as saved:
        named = ("--digests", f"--base-name={image.rpartition(':')[0]}")
        ctr(cluster, node, "images", "import", "--local", "--discard-unpacked-layers", *named, "-", stdin=saved)
    assert saved.returncode == 0


def ctr(cluster: Cluster, node: str, *words: str, stdin: subprocess.Popen[bytes] | None = None) -> None:
    address = cluster.directory / "nodes" / node / "cri.sock"
    done = subprocess.run(
        [PROGRAMS / "ctr", f"--address={address}", "--namespace=k8s.io", *words],
        stdin=stdin.stdout if stdin else None, capture_output=True, text=True, timeout=IMPORT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


def kill(cluster: Cluster, component: str) -> int:
    """Kill a component of the cluster, which is started again; the process that it was."""
    [pid] = [each["pid"] for each in cluster.status()["components"] if each["name"] == component]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return int(pid)


def runs_anew(cluster: Cluster, component: str, *, instead_of: int) -> bool:
    found = {each["name"]: each["pid"] for each in cluster.status()["components"]}
    return found[component] not in (None, instead_of)
