"""What tests of the operator's loop share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fakes.world import SPEC, World, open_world


@pytest.fixture
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Indirect parameters replace parts of the job's spec."""
    async with open_world(tmp_path, SPEC | getattr(request, "param", {})) as world:
        yield world
