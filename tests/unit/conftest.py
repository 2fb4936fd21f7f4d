"""The event loops on which tests run: asyncio's, and for the data path also the one that an agent has.

And garbage, which is looked for less often than Python would: among the modules and tests of a whole layer that took a
seventh of the time.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping

import pytest
import uvloop

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

DATA_PATH = {"test_listening.py", "test_agent_data_port.py", "test_agent_gate.py"}


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    here: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    return here | {"uvloop": uvloop.new_event_loop} if item.path.name in DATA_PATH else here


def pytest_sessionstart(session: pytest.Session) -> None:
    gc.set_threshold(20_000)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was collected stays to the end."""
    gc.collect()
    gc.freeze()
