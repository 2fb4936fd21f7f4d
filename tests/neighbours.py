"""Programs of others that run beside the operator: schedulers, issuers, each built from its module."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from setup.layout import CHECKOUT


@contextmanager
def running(program: Path, place: Path, *words: str) -> Iterator[None]:
    """Run a program until the end of the block. Its log is what pytest shows of a test that fails."""
    written = place / f"{program.name}.log"
    with (
        written.open("wb") as log,
        subprocess.Popen([program, *words], stdout=log, stderr=log) as it,
    ):
        try:
            yield
        finally:
            it.terminate()
            it.wait(60)
            print(written.read_text()[-20_000:])  # noqa: T201 - for the person who reads the failure


def kubectl(kubeconfig: Path, *words: str | Path, stdin: str | None = None) -> str:
    command: list[str | Path] = [CHECKOUT.localcluster, "kubectl", "--kubeconfig", kubeconfig, *words]
    return subprocess.run(command, input=stdin, check=True, capture_output=True, text=True, timeout=120).stdout


def add_kinds(kubeconfig: Path, folder: Path) -> None:
    """Add the kinds of a folder to the cluster, and wait until it has them."""
    kubectl(kubeconfig, "apply", "--server-side", "-f", folder)
    kubectl(kubeconfig, "wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
