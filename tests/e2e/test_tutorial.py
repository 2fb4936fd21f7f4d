"""The commands of docs/tutorial.md, one after the other, on a cluster of their own."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster

from setup.layout import CHECKOUT

PAGE = (CHECKOUT.root / "docs/tutorial.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
BLOCK_S = 700.0


@pytest.fixture
def shell(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment that the page asks for, with a cluster in another place."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("kubectl", "helm"):
        (tools / name).symlink_to(CHECKOUT.localcluster)
    with Cluster.up(tmp_path_factory.mktemp("t"), images=CHECKOUT.images) as cluster:
        search = os.pathsep.join([str(tools), str(CHECKOUT.python("dev").parent), os.environ["PATH"]])
        yield {**os.environ, "PATH": search, "KUBECONFIG": str(cluster.kubeconfig), "HOME": str(tmp_path)}


def test_every_command_of_the_tutorial_does_what_it_says(shell: dict[str, str]) -> None:
    said: list[str] = []
    for block in BLOCKS:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=CHECKOUT.root, env=shell, capture_output=True, text=True, timeout=BLOCK_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}\nbefore:\n{''.join(said)}"
        said.append(done.stdout)
    everything = "".join(said)
    assert 3 == everything.count("colocatedrljob.rl.colocate.dev/arithmetic condition met")
    assert "HOLDER" in everything
    assert "arithmetic-rollout-0" in everything
    assert re.search(r"^arithmetic-checkpoints-[0-9a-f]{8}/model-0{6}10", everything, re.MULTILINE)
    assert (CHECKOUT.root / ".build/timeline.html").stat().st_size > 10_000
