"""Keep kopf's watches going for as long as the process lives, whatever errors end them and whatever jobs have in them.

Most errors with which an API server may end a watch end kopf's operator: an event of type ERROR that is not 410
("etcdserver: no leader"), a status of 410, any other one after some tries. So does a 401 to any other request: kopf
then closes the session that its watches read from, and aiohttp reports that as a RuntimeError. kopf has no setting for
any of these, so its own generator is wrapped in one that lists and watches again, as infinite_watch does for the errors
that it knows. It waits longer each time, because a missing resource, such as a CRD that was removed, may be away for
long.

kopf reads all jobs and pods at once. One that Python can't read would end it, and each operator after it, and so would
some that take more memory than there is. So it reads jobs by `bounded_json`, and pods by `pod_text`.

All that is replaced is private to kopf. A test fails once a release of kopf no longer calls it; docs/design.md has the
way out.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from kopf._cogs.clients import api, errors, watching

from colocated_rl_api import names
from colocated_rl_api.bounded_json import ALONE, LISTED, WATCHED, read_objects
from colocated_rl_api.logs import log
from colocated_rl_operator.clients.pod_text import is_list, read_pods

LOG = logging.getLogger(__name__)

AGAIN_S, MAX_AGAIN_S = 1.0, 30.0

CLOSED = "Connection closed."  # by aiohttp's StreamReader, to whoever reads from it while its session is closed

_OF_POD = re.compile(r'\{"type":"[A-Z]+","object":\{"kind":"Pod",')  # the server writes kinds of its own like this

Watch = Callable[..., AsyncIterator[Any]]


def patient(watch: Watch, *, rest: Callable[[float], Awaitable[None]] = asyncio.sleep) -> Watch:
    """Return a watch like `watch` that ends only if that one ends in order. rest: sleeps until the next try."""

    async def watch_patiently(**options: Any) -> AsyncIterator[Any]:
        again_s, logged = AGAIN_S, ""
        while True:
            try:
                async for event in watch(**options):
                    if isinstance(event, dict) and event["type"] is not None:  # a change, and not an item of the list
                        again_s, logged = AGAIN_S, ""
                    yield event
                return
            except (errors.APIError, watching.WatchingError) as error:
                reason = repr(error)
            except RuntimeError as error:
                if str(error) != CLOSED:
                    raise
                reason = repr(error)
            if reason != logged:
                log(LOG, "watch ended", logging.WARNING, reason=reason)
            logged = reason
            await rest(again_s)
            again_s = min(2 * again_s, MAX_AGAIN_S)

    return watch_patiently


def bounded(request: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a request of kopf's like `request`, whose answer reads jobs by `bounded_json` and pods by `pod_text`."""

    async def request_objects(method: str, url: str, **options: Any) -> Any:
        answer = await request(method, url, **options)
        if method == "get" and is_list(url.partition("?")[0]):
            answer.json = partial(answer.json, loads=partial(read_pods, level=LISTED))
        elif f"/{names.PLURAL}" in url:
            level = LISTED if method == "get" else ALONE
            answer.json = partial(answer.json, loads=partial(read_objects, level=level))
        return answer

    return request_objects


def read_event(text: str) -> Any:
    """Read a line of a watch. Raises ValueError."""
    return read_pods(text, level=WATCHED) if _OF_POD.match(text) else read_objects(text, level=WATCHED)


def keep_watching() -> None:
    """Make kopf's watches patient, and its reading bounded, in the whole process, from now on."""
    watching.continuous_watch = patient(watching.continuous_watch)
    vars(api).update(request=bounded(api.request), json=SimpleNamespace(loads=read_event))
