"""The report of a failed episode has everything but words that may quote the model."""

from __future__ import annotations

import re
import traceback
from types import SimpleNamespace

from colocated_rl_rollout.tasks.environments import fault

SECRET = "what was generated\nTraceback of nothing"


class TaskError(Exception):
    pass


def tool() -> None:
    raise ValueError(SECRET)


def scored() -> str:
    """Return an error as verifiers wraps what an environment raises."""
    try:
        try:
            tool()
        except ValueError as error:
            raise TaskError(f"reward: {error}") from error
    except TaskError:
        return traceback.format_exc()
    raise AssertionError


def test_a_failure_is_reported_by_its_first_cause_and_its_place_without_its_words() -> None:
    error = SimpleNamespace(type="TaskError", message=SECRET, status_code=None, traceback=scored())
    words = fault(SimpleNamespace(errors=[], traces=[SimpleNamespace(errors=[error])]))
    here = re.escape(__file__)
    assert re.fullmatch(rf"TaskError: ValueError at {here}:\d+, called at {here}:\d+", words)


def test_a_failure_without_a_place_is_reported_by_its_type() -> None:
    error = SimpleNamespace(type="ProviderError", message=SECRET, status_code=400, traceback=None)
    assert "ProviderError (HTTP 400)" == fault(SimpleNamespace(errors=[error], traces=[]))
    assert "it failed without an error" == fault(SimpleNamespace(errors=[], traces=[]))
