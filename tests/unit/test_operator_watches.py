"""kopf's watches go on whatever an API server says to them, and ask it no more often than they must."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kopf._cogs.clients import api, watching
from kopf._cogs.clients.errors import APINotFoundError
from kopf._cogs.clients.watching import WatchingError

from colocated_rl_operator.watches import AGAIN_S, patient
from setup.layout import CHECKOUT

Event = dict[str, Any]

NO_CRD = APINotFoundError("the server could not find the requested resource", status=404, headers={})
NO_LEADER = WatchingError("etcdserver: no leader")


LISTED: Event = {"type": None, "object": {}}
CHANGED: Event = {"type": "MODIFIED", "object": {}}


async def watched(*tries: list[Event | Exception], caplog: pytest.LogCaptureFixture) -> tuple[list[float], int]:
    """Watch through these tries, each some events and the error that ends it. Returns the
    rests between them, and the log lines.
    """
    rests, left = list[float](), list(tries)

    async def watch(**_: object) -> AsyncIterator[Event]:
        for each in left.pop(0):
            if isinstance(each, Exception):
                raise each
            yield each

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    with caplog.at_level(logging.WARNING):
        events = [event async for event in patient(watch, rest=rest)(resource="jobs")]
    assert ([each for one in tries for each in one if not isinstance(each, Exception)], []) == (events, left)
    return rests, len(caplog.records)


async def test_a_kind_that_is_gone_is_asked_for_less_and_less_often_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was listed each second for ever while there was no CRD, with a line in the log each time."""
    tries: list[list[Event | Exception]] = [[NO_CRD] for _ in range(8)]
    rests, lines = await watched(*tries, [LISTED], caplog=caplog)
    assert ([1, 2, 4, 8, 16, 30, 30, 30], 1) == (rests, lines)


async def test_a_watch_that_saw_a_change_is_begun_again_soon_and_its_end_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rests, lines = await watched(
        [LISTED, NO_LEADER], [LISTED, NO_LEADER], [LISTED, CHANGED, NO_LEADER], [LISTED], caplog=caplog
    )
    assert ([AGAIN_S, 2 * AGAIN_S, AGAIN_S], 2) == (rests, lines)


async def test_another_reason_is_reported_too(caplog: pytest.LogCaptureFixture) -> None:
    _, lines = await watched([NO_LEADER], [NO_CRD], [NO_CRD], [LISTED], caplog=caplog)
    assert 2 == lines


async def test_a_watch_whose_session_was_closed_for_new_credentials_is_begun_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A 401 to one request made kopf close the session of all: watches ended with RuntimeError, kopf with them."""
    begun, over = asyncio.Event(), asyncio.Event()

    async def changes(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        begun.set()
        await over.wait()
        return answer

    app = web.Application()
    app.add_routes([web.get("/", changes)])
    async with TestServer(app) as server:
        session = aiohttp.ClientSession()
        answer = await session.get(server.make_url("/"))
        await begun.wait()
        await session.close()
        with pytest.raises(RuntimeError) as closed:
            await answer.content.read(1)
        answer.close()
        over.set()
    assert ([AGAIN_S], 1) == await watched([LISTED, closed.value], [LISTED], caplog=caplog)


def names_in(function: Callable[..., Any]) -> set[str]:
    """Globals and attributes that the function uses by name."""
    return set(inspect.unwrap(function).__code__.co_names)


@pytest.mark.parametrize(
    ("name", "callers"),
    [
        ("continuous_watch", [watching.infinite_watch]),
        ("request", [api.get, api.post, api.patch, api.delete, api.stream]),
        ("json", [api.stream]),
    ],
)
def test_kopf_calls_what_is_replaced_by_the_name_under_which_it_is(
    name: str, callers: list[Callable[..., Any]]
) -> None:
    """To replace a function that nobody calls any more changes nothing, and nothing would say so."""
    others = [caller.__qualname__ for caller in callers if name not in names_in(caller)]
    assert [] == others, (
        f"kopf {version('kopf')} no longer calls `{name}` there: watches.py replaces it in vain, and an error of the "
        "API server, or a job that nobody can read, would end the operator again. See whether kopf has a setting for "
        "it by now, else follow docs/design.md, 'kopf's watches'"
    )


def test_nothing_else_of_kopf_s_private_names_is_used() -> None:
    """The test above looks at all of them."""
    users = {
        path.name: sorted(set(re.findall(r"kopf\._[\w.]+", path.read_text())))
        for path in (CHECKOUT.root / "operator").rglob("*.py")
        if "kopf._" in path.read_text()
    }
    assert {"watches.py": ["kopf._cogs.clients"]} == users


async def test_an_error_of_the_code_ends_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        await watched([LISTED, RuntimeError("a bug")], caplog=caplog)
