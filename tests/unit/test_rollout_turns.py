"""These tests bound how long a client's completion waits, and how many are held."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict
from prometheus_client import CollectorRegistry

from bench import virtual_time
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.clients import CLIENT_S, PIECE_BYTES, send_within_deadline
from colocated_rl_rollout.engines.engine_client import AttemptLost, Generated, GenerateRequest
from colocated_rl_rollout.gateway.openai_requests import CompletionRequest, RequestRefused
from colocated_rl_rollout.gateway.turns import EXPERTS_WEIGH, TOKENS_HELD_AT_MOST, Turns
from colocated_rl_rollout.metrics import RolloutMetrics
from colocated_rl_rollout.rules.chat import Chat
from colocated_rl_rollout.rules.resume import ATTEMPTS_AT_MOST
from colocated_rl_rollout.rules.samples import Finish, Span, Tokens
from fakes.rollout import write_model

PARKED_S = 60.0
LOST: Literal["lost"] = "lost"


def turns_of(chat: Chat) -> Turns:
    metrics = RolloutMetrics(CollectorRegistry())
    return Turns(chat, metrics, keeps=True, changed=lambda: None, at_most=9, parked_at_most_s=PARKED_S)


class SlowEngines:
    """One engine, that takes an hour for an attempt.

    endings: of attempts. None: interrupted. LOST: its connection broke. tokens: of the first one; each later one
    brings one token.
    """

    name = "a"

    def __init__(self, *endings: Finish | Literal["lost"] | None, tokens: int = 1) -> None:
        self._endings = iter(endings)
        self._tokens = tokens

    def pick(self, *, preferred: str | None, at_most: int) -> SlowEngines:
        return self

    def send(
        self, group: asyncio.TaskGroup, engine: object, attempt: Coroutine[Any, Any, None], *, name: str
    ) -> asyncio.Task[None]:
        return group.create_task(attempt, name=name)

    async def generate(self, request: GenerateRequest, grew: object) -> Generated:
        await asyncio.sleep(3600)
        if (ending := next(self._endings)) == LOST:
            raise AttemptLost("its connection broke")
        count, self._tokens = self._tokens, 1
        spans = (Span(WeightVersion(0, 1), 0, count),)
        return Generated(Tokens(np.full(count, 7, np.int32), np.full(count, -1, np.float32), spans), ending)


@pytest.mark.parametrize(("waits_s", "is_told"), [((0, 0), False), ((58, 58), False), ((0, 61), True), ((61,), True)])
def test_only_time_without_an_engine_counts_and_at_a_stretch(
    tmp_path: Path, waits_s: tuple[float, ...], is_told: bool
) -> None:
    chat = Chat(write_model(tmp_path / "model"))

    async def main() -> Finish | None:
        turns = turns_of(chat)
        engines: Any = SlowEngines(None, Finish.STOP)
        with turns.begin(CompletionRequest(np.array([5], np.int32), 9, 1.0)) as turn:
            async with asyncio.TaskGroup() as group:
                for wait_s in waits_s:
                    await asyncio.sleep(wait_s)
                    turns.send(engines, group, at_most=9)
                    await asyncio.sleep(3601)
            await turn.wait_done()
        assert 2 == turn.segments
        return turn.finish

    if is_told:
        with pytest.raises(RequestRefused, match="no engine took it within 60 s") as refused:
            virtual_time.run(main())
        assert 504 == refused.value.status
    else:
        assert Finish.STOP is virtual_time.run(main())


class SlowReader(AbstractStreamWriter):
    """Takes a piece of an answer in most of the time that there is for one."""

    taken = 0

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        await asyncio.sleep(CLIENT_S * 0.9 * len(chunk) / PIECE_BYTES)
        self.taken += len(chunk)

    async def write_eof(self, chunk: bytes = b"") -> None:
        await self.write(chunk)

    async def drain(self) -> None: ...

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None: ...

    def enable_chunking(self) -> None: ...

    def enable_compression(self, encoding: str = "deflate", strategy: int | None = None) -> None: ...


def test_a_client_that_reads_steadily_gets_the_whole_of_a_large_answer() -> None:
    """The time for a piece was that for all of it."""
    reader, body = SlowReader(), b"x" * (10 * PIECE_BYTES + 1)
    request = make_mocked_request("GET", "/", writer=reader)
    response = virtual_time.run(send_within_deadline(request, web.Response(body=body)))
    assert (len(body), len(body)) == (reader.taken, int(response.headers["Content-Length"]))


def test_a_turn_of_the_jobs_own_episode_waits_as_samples_do(tmp_path: Path) -> None:
    """A step that took longer failed all episodes that were under way."""
    chat = Chat(write_model(tmp_path / "model"))

    async def main() -> Finish | None:
        turns = turns_of(chat)
        engines: Any = SlowEngines(Finish.STOP)
        with turns.begin(CompletionRequest(np.array([5], np.int32), 9, 1.0), is_own=True) as turn:
            await asyncio.sleep(100 * PARKED_S)
            async with asyncio.TaskGroup() as group:
                turns.send(engines, group, at_most=9)
            await turn.wait_done()
        return turn.finish

    assert Finish.STOP is virtual_time.run(main())


async def test_turns_of_the_jobs_own_episodes_take_no_clients_room(tmp_path: Path) -> None:
    """A client's only request was refused for as long as many episodes were played."""
    turns = turns_of(Chat(write_model(tmp_path / "model")))
    small = CompletionRequest(np.array([5], np.int32), 9, 1.0)
    large = CompletionRequest(np.array([5], np.int32), TOKENS_HELD_AT_MOST, 1.0)
    with ExitStack() as held:
        for asked in (large, *[small] * 9):
            held.enter_context(turns.begin(asked, is_own=True))
        for _ in range(9):
            held.enter_context(turns.begin(small))
        with pytest.raises(RequestRefused, match="send it later"), turns.begin(small):
            pass
    with turns.begin(large):
        assert 1 == turns.demand


def test_a_long_completion_is_not_sent_again_for_ever(tmp_path: Path) -> None:
    """Almost all of it comes at once, and then a token in fifteen attempts."""
    chat = Chat(write_model(tmp_path / "model"))

    async def main() -> int:
        turns = turns_of(chat)
        engines: Any = SlowEngines(*[None, *[LOST] * 14] * 4, tokens=28)
        with turns.begin(CompletionRequest(np.array([5], np.int32), 32, 1.0)) as turn:
            async with asyncio.TaskGroup() as group:
                while not turn.ended:
                    turns.send(engines, group, at_most=9)
                    await asyncio.sleep(3601)
            with pytest.raises(RequestRefused, match="tokens were sent again, with a limit of 32") as refused:
                await turn.wait_done()
        assert 503 == refused.value.status
        return turn.attempts

    assert virtual_time.run(main()) < ATTEMPTS_AT_MOST


@pytest.mark.parametrize("wants_experts", [False, True])
async def test_so_many_tokens_are_held_and_one_completion_whatever_its_size(
    tmp_path: Path, wants_experts: bool
) -> None:
    """Prompts and limits together; with routed experts a token is many times as large."""
    turns = turns_of(Chat(write_model(tmp_path / "model")))
    size = TOKENS_HELD_AT_MOST // (EXPERTS_WEIGH if wants_experts else 1)

    def asked(tokens: int) -> CompletionRequest:
        return CompletionRequest(np.array([5], np.int32), tokens - 1, 1.0, experts=wants_experts)

    with turns.begin(asked(2 * size)), pytest.raises(RequestRefused, match="send it later"), turns.begin(asked(2)):
        pass
    with turns.begin(asked(size - 4)), turns.begin(asked(4)):
        with pytest.raises(RequestRefused) as refused, turns.begin(asked(2)):
            pass
        assert 429 == refused.value.status
