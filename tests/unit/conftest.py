"""The event loops on which tests run: asyncio's, and for the data path also the one that an agent has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

DATA_PATH = {"test_agent_data_port.py", "test_agent_gate.py"}


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    here: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    return here | {"uvloop": uvloop.new_event_loop} if item.path.name in DATA_PATH else here
