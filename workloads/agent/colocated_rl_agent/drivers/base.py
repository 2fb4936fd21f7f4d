"""What can become of a call to an engine or a trainer, and the deadline that every one of them has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp


class DriverError(Exception):
    """DriverError
    ├─ CallRefused      the neighbour answered no: it says why, the effect did not happen as asked
    ├─ OutcomeUnknown   no answer in time, or the connection broke: the effect may hold or not. Never send it again
    └─ Unsuitable       it answers, but is not what a switch needs: the message names the flag or package to change
    """


class CallRefused(DriverError):
    pass


class OutcomeUnknown(DriverError):
    pass


class Unsuitable(DriverError):
    pass


@asynccontextmanager
async def within(deadline_s: float, call: str) -> AsyncIterator[None]:
    """Give a call until the deadline. Raises OutcomeUnknown past it, or when the connection fails."""
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError as error:
        raise OutcomeUnknown(f"{call} not confirmed after {deadline_s:g} s") from error
    except aiohttp.ClientError as error:
        raise OutcomeUnknown(f"{call} not confirmed: {error!r}") from error
