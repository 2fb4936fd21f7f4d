"""This module holds what tests of the operator's loop share, and the event loops of tests of the data path."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop
from e2e.conftest import pytest_runtest_makereport  # noqa: F401 - a failure shows what the operator said here too
from loops import LoopFactory, TidyLoop

from colocated_rl_operator.clients.cluster import ClusterAccess
from fakes.world import SPEC, FakeWorld, open_world
from real_operator import account_of_chart, cluster_without_nodes

DATA_PATH = {"test_listening.py", "test_agent_data_port.py", "test_agent_gate.py"}


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    """Give tests of the data path the loop of an agent beside that of all tests."""
    here: dict[str, LoopFactory] = {"asyncio": TidyLoop}
    return here | {"uvloop": uvloop.new_event_loop} if item.path.name in DATA_PATH else here


@pytest.fixture
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FakeWorld]:
    """Indirect parameters replace parts of the job's spec."""
    async with open_world(tmp_path, SPEC | getattr(request, "param", {})) as world:
        yield world


@pytest.fixture(scope="session")
def access(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterAccess]:
    """A real API server whose nodes run nothing."""
    with cluster_without_nodes(tmp_path_factory.mktemp("cluster")) as access:
        yield access


@pytest.fixture(scope="session")
def operators(access: ClusterAccess, tmp_path_factory: pytest.TempPathFactory) -> ClusterAccess:
    """The same server for an operator that has the chart's rights, and is bound by the chart's policies."""
    return account_of_chart(access, tmp_path_factory.mktemp("chart"))
