"""kopf's watches, for as long as the process lives.

kopf takes most of what an API server may say to a watch for the end of the operator: an event of type ERROR that is not
410 ("etcdserver: no leader"), a status of 410, any other after some tries. It has no setting for that, so its own
generator is put into one that lists and watches again: what infinite_watch does for what it knows of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from kopf._cogs.clients import errors, watching

from colocated_rl_api.logs import log

LOG = logging.getLogger(__name__)

AGAIN_S = 1.0

_watch = watching.continuous_watch


async def _watch_patiently(**options: Any) -> AsyncIterator[Any]:
    try:
        async for event in _watch(**options):
            yield event
    except (errors.APIError, watching.WatchingError) as error:
        log(LOG, "watch ended by the API server: listing again", logging.WARNING, reason=repr(error))
        await asyncio.sleep(AGAIN_S)


def keep_watching() -> None:
    """From now on, in all of this process."""
    watching.continuous_watch = _watch_patiently
