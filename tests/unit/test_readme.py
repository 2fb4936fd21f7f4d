"""README shows what exists."""

from __future__ import annotations

import re

import pytest
import yaml

from colocated_rl_api.job import ColocatedRLJob
from setup.layout import CHECKOUT

README = (CHECKOUT.root / "README.md").read_text()
LINKS = re.findall(r"\]\(([^)#:]+)\)", README)
PATHS = re.findall(r"`((?:operator|workloads|charts|crds|examples|tests)/[^` ]+)`", README)


def test_its_job_is_one_that_the_api_server_accepts() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    assert ["sums"] == [ColocatedRLJob.read(yaml.safe_load(block)).metadata.name for block in blocks]


def test_its_commands_are_targets_of_make() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (CHECKOUT.root / "Makefile").read_text(), flags=re.MULTILINE))
    commands = set(re.findall(r"(?:^    |`)make ([a-z-]+)", README, flags=re.MULTILINE))
    assert {"demo", "test", "help"} <= commands <= targets


@pytest.mark.parametrize("path", sorted({*LINKS, *PATHS}))
def test_what_it_points_to_exists(path: str) -> None:
    assert (CHECKOUT.root / path).exists()
