"""Podman as tests use it: with files of its own in `.build/`, and the images of this checkout built by it.

The base is the stand-in of `images/base-image.sh`, so no registry is asked. Libraries come from the package index, and
stay as layers for the next run.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from setup.layout import CHECKOUT

BASE = CHECKOUT.build / "base-image.tar"
REPOSITORY, TAG = "localhost/colocated-rl", "test"
SOURCE = "https://git.example.com/colocated-rl"
BUILD_S, COMMAND_S = 3600.0, 300.0
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
runtime = "runc" # crun 1.8, Debian 12's, refuses hybrid control groups
cgroup_manager = "cgroupfs" # works without systemd too
events_logger = "file"
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"] # podman's defaults may be above its own limits
"""
TRUSTED = {  # a machine that has certificates of its own says so in SSL_CERT_FILE, and pip and uv each want to be told
    "/etc/pip.conf": "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n",
    "/etc/uv/uv.toml": "system-certs = true\n",
}


@dataclass(frozen=True)
class Podman:
    place: Path
    environment: dict[str, str]

    @classmethod
    def of_checkout(cls) -> Podman:
        place = CHECKOUT.build / "podman"
        place.mkdir(parents=True, exist_ok=True)
        (place / "storage.conf").write_text(STORAGE.format(place=place))
        (place / "containers.conf").write_text(CONTAINERS)
        files = {"CONTAINERS_STORAGE_CONF": f"{place}/storage.conf", "CONTAINERS_CONF": f"{place}/containers.conf"}
        return cls(place, {**os.environ, **files})

    def __call__(self, *words: str | Path) -> str:
        done = self.run("podman", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def run(
        self, *words: str | Path, timeout_s: float = COMMAND_S, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = self.environment | variables
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)

    def base(self) -> str:
        """The stand-in's name, by its digest."""
        if self.run("podman", "image", "exists", "localhost/python:3.11").returncode != 0:
            self("import", "--quiet", BASE, "localhost/python:3.11")
        return f"localhost/python@{self('image', 'inspect', '--format={{.Digest}}', 'localhost/python:3.11')}"

    def trusted(self) -> dict[str, Path]:
        """Files with the certificates that this machine trusts, by their path in a build; they are in no image."""
        bundle = os.environ.get("SSL_CERT_FILE")
        if not bundle:
            return {}
        files = {"/etc/ssl/certs/ca-certificates.crt": Path(bundle)}
        for target, text in TRUSTED.items():
            files[target] = self.place / Path(target).name
            files[target].write_text(text)
        return files

    def for_a_build(self) -> list[str]:
        """Words for each build here: how it reaches the package index, and whose certificates it trusts."""
        return ["--network=host", *(f"--volume={file}:{target}:ro" for target, file in self.trusted().items())]

    def build(self, image: str, *, checkout: Path = CHECKOUT.root, tag: str = TAG) -> str:
        """Build an image of a checkout's last commit by the project's own script; its name."""
        words = [*self.for_a_build(), f"--build-arg=PYTHON_IMAGE={self.base()}"]
        built = self.run(
            checkout / "workloads/images/build.sh", image, timeout_s=BUILD_S,
            BUILDER="podman", REPOSITORY=REPOSITORY, TAG=tag, SOURCE=SOURCE, BUILD_ARGS=" ".join(words),
        )  # fmt: skip
        assert built.returncode == 0, built.stdout + built.stderr
        return f"{REPOSITORY}/{image}:{tag}"

    def layers(self, image: str) -> list[str]:
        """Digests of an image's layers, the lowest first."""
        found: list[str] = json.loads(self("image", "inspect", "--format={{json .RootFS.Layers}}", image))
        return found

    def build_folder(self, folder: Path, name: str) -> None:
        """Build an image of a folder's Dockerfile."""
        built = self.run("podman", "build", f"--tag={name}", *self.for_a_build(), folder, timeout_s=BUILD_S)
        assert built.returncode == 0, built.stdout + built.stderr
