"""Podman and BuildKit build the images, and they start as a cluster starts them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from images.conftest import Image
from podman import SOURCE, Podman

from setup.layout import CHECKOUT

USERS = ("65532:65532", "1000670000:0")  # the image's own; one that OpenShift may choose
OCI = "org.opencontainers.image."
ENGINE_AND_TRAINER = """
import torch, sglang.srt.entrypoints.http_server, colocated_rl_trainer
print((torch.eye(2) @ torch.eye(2)).tolist(), torch.cuda.is_available())
"""
# what is added to the entrypoint, the exit status, and a part of the answer; the operator reads variables alone
STARTS = {
    "operator": (("--help",), 2, "colocated-rl operator: environment variable OPERATOR_NAMESPACE"),
    "agent": (("--help",), 0, "usage: python -m colocated_rl_agent"),
    "rollout": (("--help",), 0, "usage: python -m colocated_rl_rollout"),
    "gpu-cpu": (("-W", "ignore", "-c", ENGINE_AND_TRAINER), 0, "[[1.0, 0.0], [0.0, 1.0]] False"),
}
LIBRARIES_MB = {"operator": 70, "agent": 50, "rollout": 600, "gpu-cpu": 2500}
OURS_MB = 5  # all that a node pulls whose image is of another commit


@pytest.mark.parametrize("user", USERS)
def test_process_starts_under_the_restricted_standard_on_a_read_only_root(image: Image, user: str) -> None:
    """The process has /tmp and the HOME that pods have."""
    words, status, part = STARTS[image.kind]
    answered = image.podman.run(
        *("podman", "run", "--rm", f"--user={user}", "--network=none", "--read-only", "--read-only-tmpfs=false"),
        *("--cap-drop=all", "--security-opt=no-new-privileges", "--tmpfs=/tmp", "--env=HOME=/tmp", image.name, *words),
    )
    assert status == answered.returncode, answered.stderr
    assert part in answered.stdout + answered.stderr


def test_nobody_but_root_may_write_what_is_run(image: Image) -> None:
    """The environment may be written by its owner alone, and no file of the image by everybody."""
    of_ours = ("-path", "/opt/*", "!", "-type", "l", "-perm", "/0022")
    of_all = ("-type", "f", "-perm", "/0002")
    assert "" == find(image, "/", "-xdev", *of_ours, "-o", *of_all)


def test_labels_say_what_an_image_is_and_of_which_commit(image: Image, podman: Podman) -> None:
    found = podman("image", "inspect", "--format={{json .Labels}}", image.name)
    labels = {label.removeprefix(OCI): value for label, value in json.loads(found).items() if label.startswith(OCI)}
    assert {
        "licenses": "Apache-2.0",
        "revision": podman.run("git", "-C", CHECKOUT.root, "rev-parse", "HEAD").stdout.strip(),
        "source": SOURCE,
        "title": image.kind,
        "version": (CHECKOUT.root / "operator/VERSION").read_text().strip(),
    } == labels


def test_image_adds_two_layers_to_its_base_ours_is_small_and_nothing_is_beside_what_is_run(image: Image) -> None:
    libraries, ours = image.layers()
    assert libraries < LIBRARIES_MB[image.kind] * 1e6
    assert ours < OURS_MB * 1e6
    assert "" == find(image, "/source", "/wheels", "/ours", "/root/.cache", "-type", "f")
    of_cuda = find(image, "/opt/colocated-rl", "-path", "*/nvidia/*.so*", "-size", "+1024k")
    assert "" == of_cuda, "CUDA's libraries, of which an image without GPUs needs the names alone"


def test_image_of_another_commit_differs_in_its_last_layer_alone(podman: Podman, tmp_path: Path) -> None:
    """The builder has the libraries of the image before."""
    git = ("git", "-c", "user.name=test", "-c", "user.email=test@example.com", "-C", tmp_path)
    subprocess.run([*git, "clone", "--quiet", CHECKOUT.root, "."], check=True)
    with (tmp_path / "workloads/agent/colocated_rl_agent/__init__.py").open("a") as file:
        file.write("CHANGED = True\n")
    subprocess.run([*git, "commit", "--quiet", "--all", "--message=agent: change"], check=True)
    before, after = podman.build("agent"), podman.build("agent", checkout=tmp_path, tag="changed")
    *libraries, ours = podman.layers(before)
    *same, other = podman.layers(after)
    assert libraries == same
    assert ours != other


def find(image: Image, *words: str) -> str:
    """Return what `find` prints as root. A place that does not exist has no files."""
    run = ("podman", "run", "--rm", "--user=0", "--network=none", "--entrypoint=find", image.name)
    return image.podman.run(*run, *words).stdout
