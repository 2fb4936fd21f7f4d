"""Two builders, and what they made: podman, whose layers stay in `.build/`, and BuildKit, which is docker's."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from podman import BUILD_S, REPOSITORY, SOURCE, TAG, Podman

from setup.layout import CHECKOUT

PROGRAMS = CHECKOUT.build / "containerd/bin"
BUILDKIT_S = 60.0
TOLD = pytest.StashKey[dict[str, str]]()


@dataclass(frozen=True)
class Image:
    podman: Podman
    kind: str  # operator, agent, ...
    name: str
    base: str

    def layers(self) -> list[int]:
        """Bytes of each layer that the base has not, the lowest first."""
        of_base, of_all = (self.podman.layers(name) for name in (self.base, self.name))
        assert of_base == of_all[: len(of_base)], "the image stands on another base"
        made = json.loads(self.podman("history", "--format=json", self.name))
        return [each["size"] for each in made if each["size"] > 0][::-1][len(of_base) :]


@pytest.fixture(scope="session")
def podman() -> Podman:
    return Podman.of_checkout()


@pytest.fixture(scope="session")
def buildkit(podman: Podman) -> Iterator[dict[str, str]]:
    """The variables under which `buildkit.sh` is a builder. Its base has the certificates that this machine trusts."""
    with tempfile.TemporaryDirectory(dir=CHECKOUT.build, prefix="buildkit-") as folder:
        place, layout = Path(folder), Path(folder, "base")
        trusted = podman.trusted()
        copied = "".join(f"COPY {Path(target).name} {target}\n" for target in trusted)
        for target, file in trusted.items():
            (place / Path(target).name).write_bytes(file.read_bytes())
        (place / "Dockerfile").write_text(f"FROM {podman.base()}\n{copied}")
        podman("build", "--quiet", "--tag=localhost/python:trusting", place)
        podman("save", "--quiet", "--format=oci-dir", f"--output={layout}", "localhost/python:trusting")
        digest = json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
        address = f"unix://{place}/socket"
        search = {"PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}", "BUILDKIT_HOST": address}
        command = [
            *("buildkitd", f"--addr={address}", f"--root={place}/root", "--oci-worker-net=host"),
            *("--oci-worker-binary=runc", "--containerd-worker=false", "--oci-worker-snapshotter=overlayfs"),
        ]
        with (CHECKOUT.build / "buildkit.log").open("wb") as log:
            daemon = subprocess.Popen(command, env=os.environ | search, stdout=log, stderr=log)
        try:
            until = time.monotonic() + BUILDKIT_S
            while podman.run("buildctl", "debug", "workers", timeout_s=BUILDKIT_S, **search).returncode != 0:
                assert time.monotonic() < until, "BuildKit does not answer: .build/buildkit.log says why"
                assert daemon.poll() is None, "BuildKit has ended: .build/buildkit.log says why"
            yield search | {"BASE": str(layout), "BASE_DIGEST": digest, "IMAGE": str(place / "image.tar")}
        finally:
            daemon.terminate()
            daemon.wait(BUILDKIT_S)


@pytest.fixture(
    scope="session",
    params=[
        *(("podman", kind) for kind in ("operator", "agent", "rollout", "gpu-cpu")),
        *(("buildkit", kind) for kind in ("operator", "agent", "rollout")),
    ],
    ids="-".join,
)
def image(podman: Podman, request: pytest.FixtureRequest) -> Image:
    """One that has been built of the last commit."""
    builder, kind = request.param
    began = time.monotonic()
    if builder == "podman":
        built = Image(podman, kind, podman.build(kind), podman.base())
    else:
        built = built_by_buildkit(podman, request.getfixturevalue("buildkit"), kind)
    megabytes = [round(size / 1e6) for size in built.layers()]
    size = int(podman("image", "inspect", "--format={{.Size}}", built.name)) / 1e6
    added, took_s = " + ".join(map(str, megabytes)), time.monotonic() - began
    summary = f"{size:.0f} MB, of which above the base {added}, after {took_s:.0f} s"
    request.config.stash.setdefault(TOLD, {})[f"{kind} by {builder}"] = summary
    return built


def built_by_buildkit(podman: Podman, buildkit: dict[str, str], kind: str) -> Image:
    builder = {"BUILDER": str(Path(__file__).with_name("buildkit.sh")), "BUILD_ARGS": ""}
    names = {"REPOSITORY": f"{REPOSITORY}-buildkit", "TAG": TAG, "SOURCE": SOURCE}
    script = CHECKOUT.root / "workloads/images/build.sh"
    built = podman.run(script, kind, timeout_s=BUILD_S, **buildkit, **builder, **names)
    assert built.returncode == 0, built.stdout + built.stderr
    podman("load", "--quiet", f"--input={buildkit['IMAGE']}")
    return Image(podman, kind, f"{REPOSITORY}-buildkit/{kind}:{TAG}", "localhost/python:trusting")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section("images")
    for name, summary in config.stash.get(TOLD, {}).items():
        terminalreporter.write_line(f"{name}: {summary}")
