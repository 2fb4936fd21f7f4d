"""What tests of the operator's loop share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from colocated_rl_operator.cluster import ClusterAccess
from fakes.world import SPEC, World, open_world
from real_operator import cluster_without_nodes


@pytest.fixture
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Indirect parameters replace parts of the job's spec."""
    async with open_world(tmp_path, SPEC | getattr(request, "param", {})) as world:
        yield world


@pytest.fixture(scope="session")
def access(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterAccess]:
    """A real API server whose nodes run nothing."""
    with cluster_without_nodes(tmp_path_factory.mktemp("cluster")) as access:
        yield access
