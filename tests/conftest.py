"""What holds for every layer of the tests."""

from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")  # how long an example takes says how busy the machine is


def pytest_sessionstart(session: pytest.Session) -> None:
    """Tests interrupt programs. Who is started in the background ignores that signal, and so would all it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
