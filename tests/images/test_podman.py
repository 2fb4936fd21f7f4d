"""Podman builds the three small images, and they start as a cluster starts them.

Podman's files are apart from the machine's own, and gone afterwards. The base is the stand-in of `base-image.sh`, so no
registry is asked. Libraries come from the package index.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from setup.layout import CHECKOUT

BASE = CHECKOUT.build / "base-image.tar"
BUILD_S, COMMAND_S = 1800.0, 120.0
SOURCE = "https://git.example.com/colocated-rl"
USERS = ("65532:65532", "1000670000:0")  # the image's own; one that OpenShift may choose
OCI = "org.opencontainers.image."
ANSWERS = {  # to --help: the exit status, and how the answer begins; the operator reads variables alone
    "operator": (2, "colocated-rl operator: environment variable OPERATOR_NAMESPACE"),
    "agent": (0, "usage: python -m colocated_rl_agent"),
    "rollout": (0, "usage: python -m colocated_rl_rollout"),
}
STORAGE = """
[storage]
driver = "overlay"
graphroot = "{place}/store"
runroot = "{place}/run"
[storage.options.overlay]
skip_mount_home = "true" # a mount of podman's own, which would outlive the tests
"""
CONTAINERS = """
[engine]
cgroup_manager = "cgroupfs" # works without systemd too
events_logger = "file"
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"] # podman's defaults may be above its own limits
"""
TRUSTED = {  # a machine that has certificates of its own says so in SSL_CERT_FILE, and pip and uv each want to be told
    "pip.conf": ("/etc/pip.conf", "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n"),
    "uv.toml": ("/etc/uv/uv.toml", "system-certs = true\n"),
}


@dataclass(frozen=True)
class Podman:
    environment: dict[str, str]

    def __call__(self, *words: str | Path) -> str:
        done = self.run("podman", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def run(
        self, *words: str | Path, timeout_s: float = COMMAND_S, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = self.environment | variables
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture(scope="session")
def podman() -> Iterator[Podman]:
    with tempfile.TemporaryDirectory(dir=CHECKOUT.build, prefix="podman-") as place:
        storage, containers = Path(place, "storage.conf"), Path(place, "containers.conf")
        storage.write_text(STORAGE.format(place=place))
        containers.write_text(CONTAINERS)
        files = {"CONTAINERS_STORAGE_CONF": str(storage), "CONTAINERS_CONF": str(containers)}
        yield Podman({**os.environ, **files})


@pytest.fixture(scope="session")
def build_args(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The base by its digest, and the certificates that this machine trusts, which are in no image."""
    podman("import", "--quiet", BASE, "localhost/python:3.11")
    digest = podman("image", "inspect", "--format={{.Digest}}", "localhost/python:3.11")
    words = ["--network=host", f"--build-arg=PYTHON_IMAGE=localhost/python@{digest}"]
    if bundle := os.environ.get("SSL_CERT_FILE"):
        words.append(f"--volume={bundle}:/etc/ssl/certs/ca-certificates.crt:ro")
        for name, (target, text) in TRUSTED.items():
            file = tmp_path_factory.mktemp("trusted") / name
            file.write_text(text)
            words.append(f"--volume={file}:{target}:ro")
    return " ".join(words)


@pytest.fixture(scope="module", params=ANSWERS)
def name(podman: Podman, build_args: str, request: pytest.FixtureRequest) -> str:
    """The name of an image that has been built."""
    built = podman.run(
        CHECKOUT.root / "workloads/images/build.sh", request.param, timeout_s=BUILD_S,
        BUILDER="podman", REPOSITORY="localhost/rl", TAG="test", SOURCE=SOURCE, BUILD_ARGS=build_args,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    found: str = request.param
    return found


@pytest.mark.parametrize("user", USERS)
def test_process_starts_under_the_restricted_standard_on_a_read_only_root(podman: Podman, name: str, user: str) -> None:
    status, begin = ANSWERS[name]
    answered = podman.run(
        *("podman", "run", "--rm", f"--user={user}", "--network=none", "--read-only", "--read-only-tmpfs=false"),
        *("--cap-drop=all", "--security-opt=no-new-privileges", f"localhost/rl/{name}:test", "--help"),
    )
    assert (status, begin) == (answered.returncode, (answered.stdout + answered.stderr)[: len(begin)])


def test_nobody_but_root_may_write_what_is_run(podman: Podman, name: str) -> None:
    """The environment may be written by its owner alone, and no file of the image by everybody."""
    of_ours = ("-path", "/opt/*", "!", "-type", "l", "-perm", "/0022")
    of_all = ("-type", "f", "-perm", "/0002")
    found = podman(
        *("run", "--rm", "--user=0", "--network=none", "--entrypoint=find", f"localhost/rl/{name}:test"),
        *("/", "-xdev", *of_ours, "-o", *of_all),
    )
    assert "" == found


def test_labels_say_what_an_image_is_and_of_which_commit(podman: Podman, name: str) -> None:
    found = podman("image", "inspect", "--format={{json .Labels}}", f"localhost/rl/{name}:test")
    labels = {label.removeprefix(OCI): value for label, value in json.loads(found).items() if label.startswith(OCI)}
    assert {
        "licenses": "Apache-2.0",
        "revision": podman.run("git", "-C", CHECKOUT.root, "rev-parse", "HEAD").stdout.strip(),
        "source": SOURCE,
        "title": name,
        "version": (CHECKOUT.root / "operator/VERSION").read_text().strip(),
    } == labels
