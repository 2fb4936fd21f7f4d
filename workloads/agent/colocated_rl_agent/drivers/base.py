"""This module defines the outcomes of a call to an engine or a trainer, and gives every call a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from colocated_rl_api.logs import failure_of


class DriverError(Exception):
    """DriverError
    ├─ CallRefused      the neighbour refused: the effect did not happen as asked
    │  ├─ NothingDone   and nothing changed: the same call may be sent again
    │  └─ NotRetriable  and would refuse again, until the job's settings change: the message names which
    ├─ OutcomeUnknown   no answer in time, or the connection broke: the effect may hold or not. Never send it again
    └─ Unsuitable       it answers, but does not fit a switch: the message names the flag or package to change
    """


class CallRefused(DriverError):
    """The neighbour refused. detail: its message, for code alone. Never log or show it: it may quote the request."""

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class NothingDone(CallRefused):
    pass


class NotRetriable(CallRefused):
    pass


class OutcomeUnknown(DriverError):
    pass


class Unsuitable(DriverError):
    pass


AnswerT = TypeVar("AnswerT", bound=BaseModel)


async def read_body(answer: aiohttp.ClientResponse, call: str, *, most_bytes: int) -> bytes:
    """Return the whole body. Raises OutcomeUnknown if it is larger than `most_bytes`."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > most_bytes:
            raise OutcomeUnknown(f"{call} answered with more than {most_bytes} bytes")
    return bytes(body)


def read_answer(model: type[AnswerT], answer: object, call: str) -> AnswerT:
    """Return the answer as a model. Raises OutcomeUnknown for one of another shape."""
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        raise OutcomeUnknown(f"{call} answered something else than expected, see {wrong_fields(error)}") from None


def wrong_fields(error: ValidationError) -> str:
    """Return the names of an answer's invalid fields, without values: those may quote anything."""
    return ", ".join(".".join(map(str, item["loc"])) for item in error.errors(include_input=False)) or "its body"


@asynccontextmanager
async def within(deadline_s: float | None, call: str) -> AsyncIterator[None]:
    """Limit a call to the deadline. Raises OutcomeUnknown past it, or when the connection fails."""
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError as error:
        raise OutcomeUnknown(f"{call} not confirmed after {deadline_s} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise OutcomeUnknown(f"{call} not confirmed: {failure_of(error)}") from error
