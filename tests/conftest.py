"""What holds for every layer of the tests."""

from __future__ import annotations

import signal

import pytest


def pytest_sessionstart(session: pytest.Session) -> None:
    """Tests interrupt programs. Who is started in the background ignores that signal, and so would all it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
