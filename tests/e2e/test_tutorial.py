"""The commands of docs/tutorial.md, one after the other, on a cluster of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from e2e.terminal import RecordedTerminal

from setup.layout import CHECKOUT

pytestmark = pytest.mark.release  # `make test-slow`
PAGE = (CHECKOUT.root / "docs/tutorial.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster.up(tmp_path_factory.mktemp("t"), images=CHECKOUT.images) as cluster:
        yield cluster


def test_every_command_of_the_tutorial_does_what_it_says(cluster: Cluster, tmp_path: Path) -> None:
    terminal = RecordedTerminal.opened(tmp_path, cluster.kubeconfig)
    outputs: list[str] = []
    for block in BLOCKS:
        try:
            outputs.append(terminal(block, at=CHECKOUT.root))
        except AssertionError as error:
            error.add_note(f"before:\n{''.join(outputs)}")
            raise
    everything = "".join(outputs)
    assert 3 == everything.count("colocatedrljob.rl.colocate.dev/arithmetic condition met")
    assert "HOLDER" in everything
    assert re.search(r"^0 +held-out +0\.\d+ ", everything, re.MULTILINE), "the evaluation of a pod that is gone"
    assert "arithmetic-rollout-0" in everything
    assert re.search(r"^arithmetic-checkpoints-[0-9a-f]{8}/model-0{5}\d{3}", everything, re.MULTILINE)
    assert (CHECKOUT.root / ".build/timeline.html").stat().st_size > 10_000
