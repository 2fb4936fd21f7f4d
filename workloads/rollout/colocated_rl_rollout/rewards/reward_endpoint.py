"""An HTTP endpoint scores responses: `reward.http` of a source of prompts.

The rollout controller itself asks it, with a bounded number of requests at a time; only the controller has the token.
What says nothing of the response (no answer, a redirect, all of 4xx and 5xx but REFUSES_SAMPLE) is retried with growing
pauses. A sample fails after so many attempts only if others were answered meanwhile: while nobody is, all wait, and an
endpoint that is away for an hour costs no prompt. Every other answer that is no reward fails the sample at once. A
redirect is not followed: the token goes where the job sends it and nowhere else. Messages report an answer by its
status and length only: the text may quote the request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import pydantic

from colocated_rl_api import names
from colocated_rl_api.back_off import doubled_s, retry_after_s
from colocated_rl_api.facts import Problem
from colocated_rl_api.logs import failure_of, log
from colocated_rl_api.member_wire import JobFile
from colocated_rl_api.prompts import HttpReward
from colocated_rl_rollout.rewards.rewards import REWARD_UNAVAILABLE, RewardFailed
from colocated_rl_rollout.tasks.task_wire import Figures, PromptContent, RewardAnswer, RewardValue

LOG = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5  # doubled each time, with jitter
LONGEST_PAUSE_S = 60.0
REFUSES_SAMPLE = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
MAX_REQUEST_BYTES = 16 * 1024 * 1024
MAX_REPLY_BYTES = 64 * 1024


class _EndpointAnswer(pydantic.BaseModel):
    """An endpoint answers with this; it may add fields."""

    reward: RewardValue
    figures: Figures = {}


class _TryAgain(Exception):
    """The endpoint gave no reward this time. pause_s: requested by the endpoint."""

    def __init__(self, message: str, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class RewardEndpoint:
    """Asks one endpoint for rewards. tokens: where Secrets are mounted, each by its name; read for each request, so
    that a token may change.
    """

    def __init__(
        self,
        reward: HttpReward,
        job: JobFile,
        session: aiohttp.ClientSession,
        *,
        tokens: Path,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._reward = reward
        self._job = {"name": job.name, "namespace": job.namespace, "uid": job.uid}
        self._session = session
        self._token = tokens / reward.secret_name / names.REWARD_TOKEN_FILE if reward.secret_name else None
        self._first_pause_s = first_pause_s
        self._places = asyncio.Semaphore(reward.max_concurrency)
        self._answered = 0  # requests that got a reward
        self.problem: Problem | None = None

    async def score(self, prompt: PromptContent, fields: Mapping[str, Any], response: str) -> RewardAnswer:
        """Return the reward of a response, as soon as the endpoint is there. Raises RewardFailed."""
        body = self._body(prompt=prompt, fields=fields, response=response)
        answered = self._answered
        for attempt in itertools.count(1):
            try:
                async with self._places:
                    reward = await self._ask(body)
            except _TryAgain as error:
                why, pause_s = str(error), error.pause_s
                self._report(f"{self._reward.url}: {why}")
            else:
                self._report(None)
                self._answered += 1
                return reward
            if attempt % self._reward.attempts == 0:
                if self._answered > answered:
                    break
                answered = self._answered
            growing_s = doubled_s(self._first_pause_s, attempt - 1, LONGEST_PAUSE_S) * (0.5 + random.random())
            await asyncio.sleep(min(max(growing_s, pause_s), LONGEST_PAUSE_S))
        message = f"{self._reward.url}: {why}, {self._reward.attempts} times, while others were answered"
        raise RewardFailed(REWARD_UNAVAILABLE, message)

    def _body(self, **asked: Any) -> bytes:
        try:
            body = json.dumps({**asked, "job": self._job}, allow_nan=False).encode()
        except ValueError as error:
            raise RewardFailed("RewardNotAsked", "the row can't be written in JSON: a number in it is none") from error
        if len(body) > MAX_REQUEST_BYTES:
            raise RewardFailed(
                "RewardNotAsked", f"the request has {len(body)} bytes, at most {MAX_REQUEST_BYTES} are sent"
            )
        return body

    async def _ask(self, body: bytes) -> RewardAnswer:
        """Make one attempt. Raises _TryAgain, RewardFailed."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        timeout = aiohttp.ClientTimeout(total=self._reward.timeout_seconds)
        try:
            if self._token is not None:
                headers["Authorization"] = f"Bearer {_token_in(self._token)}"
            async with self._session.post(
                self._reward.url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                return _reward_in(answer, await _read(answer), url=self._reward.url)
        except TimeoutError as error:
            raise _TryAgain(f"no answer within {self._reward.timeout_seconds} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _TryAgain(failure_of(error)) from error

    def _report(self, trouble: str | None) -> None:
        if trouble is None:
            if self.problem:
                log(LOG, "reward endpoint recovered", reason=self._reward.url)
            self.problem = None
        elif self.problem is None:
            log(LOG, "reward endpoint lost", logging.WARNING, reason=trouble)
            self.problem = Problem(reason=REWARD_UNAVAILABLE, message=f"{trouble}; it is asked again"[:1024])


def _token_in(path: Path) -> str:
    """Read the token. Raises OSError, _TryAgain."""
    token = path.read_bytes().strip()
    if not (token.isascii() and token.decode().isprintable()):
        raise _TryAgain(f"key {path.name} of Secret {path.parent.name} is no token: one line of ASCII text is")
    return token.decode()


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """Read the body, of one that is too long only the beginning."""
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > MAX_REPLY_BYTES:
            break
    return bytes(body)


def _reward_in(answer: aiohttp.ClientResponse, body: bytes, *, url: str) -> RewardAnswer:
    is_too_long = len(body) > MAX_REPLY_BYTES  # as pages for people are, with which many servers report an error
    answered = f"{answer.status} and {f'more than {MAX_REPLY_BYTES}' if is_too_long else len(body)} bytes"
    if answer.status in REFUSES_SAMPLE:
        raise RewardFailed("RewardRefused", f"{url} answers {answered}")
    if 300 <= answer.status < 400:
        raise _TryAgain(f"it answers {answer.status} and sends elsewhere, which isn't followed: set url to there")
    if answer.status != HTTPStatus.OK:
        raise _TryAgain(f"it answers {answered}", retry_after_s(answer.headers.get("Retry-After")) or 0.0)
    if is_too_long:
        raise RewardFailed("RewardGarbled", f"{url} answers {answered}")
    try:
        given = _EndpointAnswer.model_validate_json(body)
    except pydantic.ValidationError as error:
        kind = _kind_of(error)
        found = f"{answered}: {kind}"
        form = '{"reward": NUMBER}, perhaps with "figures": {NAME: NUMBER}'
        raise RewardFailed("RewardGarbled", f"{url} should answer {form}, not {found}") from error
    return RewardAnswer(reward=given.reward, figures=given.figures)


def _kind_of(error: pydantic.ValidationError) -> str:
    """Describe the fault of an answer without quoting the answer."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return "it is no JSON"
    return f"{first['loc'][0] if first['loc'] else 'it'}: {first['type']}"
