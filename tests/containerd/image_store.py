"""Images as nodes have them: brought from podman into a containerd once, and kept in `.build/` for the runs to come.

A layer that came with an image of another commit is not brought again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from podman import Podman

from setup.layout import CHECKOUT

PROGRAMS = CHECKOUT.build / "containerd/bin"
STARTED_S, IMPORT_S = 60.0, 600.0
CONFIG = """
version = 3
root = "{place}/root"
state = "{place}/state"
disabled_plugins = ["io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"]
[grpc]
  address = "{place}/socket"
"""


@dataclass(frozen=True)
class ImageStore:
    place: Path

    def bring(self, podman: Podman, images: Mapping[str, Sequence[str]]) -> None:
        """Have these images, and no others, under their names and further ones."""
        whole = self.place / "whole"
        if not whole.exists():  # the first time, or the last one was cut short
            shutil.rmtree(self.place, ignore_errors=True)
            (self.place / "layout/blobs/sha256").mkdir(parents=True)
        whole.unlink(missing_ok=True)
        with self._containerd():
            names, blobs = set[str](), set[str]()
            for image, further in images.items():
                digest, parts = self._bring(podman, image)
                names |= {image, f"{image.rpartition(':')[0]}@{digest}", *further}
                blobs |= parts
                for name in further:
                    self._ctr("images", "tag", "--force", image, name)
            others = {*self._ctr("images", "list", "--quiet").split()} - names
            if others:
                self._ctr("images", "remove", "--sync", *others)
        for blob in (self.place / "layout/blobs/sha256").iterdir():
            if f"sha256:{blob.name}" not in blobs:
                blob.unlink()
        whole.touch()

    def share(self, root: Path) -> None:
        """Make the files of a containerd that has these images: links to the same ones, and databases of its own."""
        root.mkdir(parents=True)
        subprocess.run(["cp", "--archive", "--link", f"{self.place}/root/.", root], check=True)
        for database in root.glob("*/*.db"):
            database.unlink()
            shutil.copyfile(self.place / "root" / database.relative_to(root), database)

    def _bring(self, podman: Podman, image: str) -> tuple[str, set[str]]:
        """Import an image but for what came before; the digests of its manifest, and of all its parts."""
        layout = self.place / "layout"
        before = {*layout.glob("blobs/sha256/*")}
        (layout / "index.json").unlink(missing_ok=True)
        podman("save", "--quiet", "--format=oci-dir", "--uncompressed", f"--output={layout}", image)
        [listed] = json.loads((layout / "index.json").read_text())["manifests"]
        manifest = json.loads((layout / "blobs" / listed["digest"].replace(":", "/")).read_text())
        new = {*layout.glob("blobs/sha256/*")} - before
        files = [layout / "oci-layout", layout / "index.json", *new]
        archive: list[str | Path] = [
            "tar",
            "--create",
            f"--directory={layout}",
            *(str(file.relative_to(layout)) for file in files),
        ]
        with subprocess.Popen(archive, stdout=subprocess.PIPE) as archived:
            named = ("--digests", f"--base-name={image.rpartition(':')[0]}")
            self._ctr("images", "import", "--local", "--discard-unpacked-layers", *named, "-", stdin=archived)
        assert archived.returncode == 0
        for blob in new:  # of which podman only looks at name and size from now on
            size = blob.stat().st_size
            os.truncate(blob, 0)
            os.truncate(blob, size)
        return listed["digest"], {each["digest"] for each in (listed, manifest["config"], *manifest["layers"])}

    @contextmanager
    def _containerd(self) -> Iterator[None]:
        (self.place / "config.toml").write_text(CONFIG.format(place=self.place))
        with (self.place / "log").open("wb") as log:
            command = [str(PROGRAMS / "containerd"), f"--config={self.place}/config.toml"]
            daemon = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            until = time.monotonic() + STARTED_S
            while self._run("version").returncode != 0:
                assert time.monotonic() < until, f"containerd does not answer: {self.place}/log says why"
                assert daemon.poll() is None, f"containerd has ended: {self.place}/log says why"
            yield
        finally:
            daemon.terminate()
            daemon.wait(STARTED_S)

    def _ctr(self, *words: str, stdin: subprocess.Popen[bytes] | None = None) -> str:
        done = self._run(*words, stdin=stdin)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def _run(self, *words: str, stdin: subprocess.Popen[bytes] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PROGRAMS / "ctr", f"--address={self.place}/socket", "--namespace=k8s.io", *words],
            stdin=stdin.stdout if stdin else None, capture_output=True, text=True, timeout=IMPORT_S, check=False,
        )  # fmt: skip
