"""kopf's watches go on whatever an API server says to them, and ask it no more often than they must."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
from kopf._cogs.clients.errors import APINotFoundError
from kopf._cogs.clients.watching import WatchingError

from colocated_rl_operator.watches import AGAIN_S, MAX_AGAIN_S, patient

NO_CRD = APINotFoundError("the server could not find the requested resource", status=404, headers={})
NO_LEADER = WatchingError("etcdserver: no leader")


async def watched(*tries: tuple[Exception | str, float], caplog: pytest.LogCaptureFixture) -> tuple[list[float], int]:
    """What each try comes to, an error or its only event, and after how long. Rests between them; lines in the log."""
    passed_s, rests, left = 0.0, list[float](), list(tries)

    async def watch(**_: object) -> AsyncIterator[str]:
        nonlocal passed_s
        found, took_s = left.pop(0)
        passed_s += took_s
        if isinstance(found, Exception):
            raise found
        yield found

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    with caplog.at_level(logging.WARNING):
        events = [event async for event in patient(watch, clock=lambda: passed_s, rest=rest)(resource="jobs")]
    assert ([found for found, _ in tries if isinstance(found, str)], []) == (events, left)
    return rests, len(caplog.records)


async def test_a_kind_that_is_gone_is_asked_for_less_and_less_often_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without the CRD it was listed each second for ever, with a line in the log each time."""
    rests, lines = await watched(*[(NO_CRD, 0.01)] * 8, ("the CRD is back", 0), caplog=caplog)
    assert ([1, 2, 4, 8, 16, 30, 30, 30], 1) == (rests, lines)


async def test_a_watch_that_was_well_for_a_while_is_begun_again_soon_and_its_end_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    short, well = (NO_LEADER, 0.0), (NO_LEADER, MAX_AGAIN_S)
    rests, lines = await watched(short, short, well, ("an event", 0), caplog=caplog)
    assert ([AGAIN_S, 2 * AGAIN_S, AGAIN_S], 2) == (rests, lines)


async def test_another_reason_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    _, lines = await watched((NO_LEADER, 0), (NO_CRD, 0), (NO_CRD, 0), ("an event", 0), caplog=caplog)
    assert 2 == lines
