"""Garbage is looked for less often than Python would: among the modules and tests of a whole layer that took a seventh
of the time.
"""

from __future__ import annotations

import gc

import pytest


def pytest_sessionstart(session: pytest.Session) -> None:
    gc.set_threshold(20_000)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep everything that was collected out of the garbage collector: it stays to the end."""
    gc.collect()
    gc.freeze()
