"""An endpoint for rewards: what it is asked, and what is made of whatever it answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from waiting import until

from colocated_rl_api.member_wire import JobFile
from colocated_rl_api.prompts import HttpReward
from colocated_rl_rollout.rewards.reward_endpoint import MAX_REPLY_BYTES, MAX_REQUEST_BYTES, RewardEndpoint
from colocated_rl_rollout.rewards.rewards import RewardFailed
from colocated_rl_rollout.tasks.task_wire import RewardAnswer
from fakes.rollout import JOB_UID, make_spec

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class ScriptedJudge:
    """An endpoint that answers one after another of `answers`, the last one again and again."""

    answers: list[Answer]
    asked: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.tokens.append(request.headers.get("Authorization"))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self.answers[min(len(self.asked), len(self.answers)) - 1](request)
        finally:
            self.at_once -= 1


def answers_with(body: str, status: int = 200, **headers: str) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(text=body, status=status, headers=headers)

    return answer


async def hangs(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def hangs_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


HALF = RewardAnswer(reward=0.5)
GOOD = answers_with('{"reward": 0.5, "why": "half of it"}')


@asynccontextmanager
async def endpoint(
    judge: ScriptedJudge, tokens: Path = Path("/nowhere"), **fields: Any
) -> AsyncIterator[RewardEndpoint]:
    application = web.Application(client_max_size=2 * MAX_REQUEST_BYTES)
    application.add_routes([web.post("/score", judge.answer)])
    job = JobFile(name="job", namespace="us", uid=JOB_UID, created=datetime.now(UTC), spec=make_spec())
    async with TestServer(application) as server, aiohttp.ClientSession(trust_env=False) as session:
        reward = HttpReward(url=str(server.make_url("/score")), **{"attempts": 3, **fields})
        async with asyncio.timeout(60):
            yield RewardEndpoint(reward, job, session, tokens=tokens, first_pause_s=0.001)


async def test_it_is_asked_with_prompt_response_row_and_job() -> None:
    judge = ScriptedJudge([GOOD])
    async with endpoint(judge) as made:
        assert HALF == await made.score("2 + 2?", {"prompt": "2 + 2?", "answer": 4}, "four")
    assert [
        {
            "prompt": "2 + 2?",
            "response": "four",
            "fields": {"prompt": "2 + 2?", "answer": 4},
            "job": {"name": "job", "namespace": "us", "uid": JOB_UID},
        }
    ] == judge.asked
    assert [None] == judge.tokens


async def test_the_token_of_its_secret_is_sent_along_and_may_change(tmp_path: Path) -> None:
    (tmp_path / "judge").mkdir()
    judge = ScriptedJudge([GOOD])
    async with endpoint(judge, tmp_path, secretName="judge") as made:
        for token in ("first", "second\n"):
            (tmp_path / "judge/reward-token").write_text(token)
            await made.score("", {}, "")
    assert ["Bearer first", "Bearer second"] == judge.tokens


@pytest.mark.parametrize("token", [b"two\nlines", b"\xff\xfe", "schlüssel".encode()])
async def test_what_is_no_token_is_a_problem_and_not_the_end_of_the_controller(tmp_path: Path, token: bytes) -> None:
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge/reward-token").write_bytes(token)
    judge = ScriptedJudge([GOOD])
    async with endpoint(judge, tmp_path, secretName="judge", attempts=1) as made:
        asked = asyncio.create_task(made.score("?", {}, "!"))
        await until(lambda: made.problem)
        assert made.problem is not None
        assert "key reward-token of Secret judge is no token" in made.problem.message
        assert "two" not in made.problem.message
        assert [] == judge.tokens
        (tmp_path / "judge/reward-token").write_text("a-token")
        assert HALF == await asked


PAGE = "<p>" * MAX_REPLY_BYTES  # for people: an error with a long traceback, for instance


@pytest.mark.parametrize(
    "trouble",
    [answers_with("busy", 503), answers_with("", 429), answers_with("", 500), answers_with(PAGE, 500), hangs_up],
)
async def test_what_may_pass_is_tried_again(trouble: Answer) -> None:
    """An error that came as a long page failed its sample at once."""
    judge = ScriptedJudge([trouble, trouble, GOOD])
    async with endpoint(judge) as made:
        asked = asyncio.create_task(made.score("", {}, ""))
        assert HALF == await asked
        assert made.problem is None
    assert 3 == len(judge.asked)


async def test_pauses_grow_and_are_as_long_as_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are never longer than a minute."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(pause_s: float) -> None:
        pauses.append(pause_s)
        await sleep(0)

    busy = answers_with("busy", 503)
    asks = [answers_with("", 429, **{"Retry-After": seconds}) for seconds in ("7", "3600", "-7", "soon", "²")]
    async with endpoint(ScriptedJudge([*[busy] * 4, *asks, GOOD]), attempts=10) as made:
        made._first_pause_s = 0.1
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "sleep", noted)
            assert HALF == await made.score("", {}, "")
    for number, pause_s in enumerate([*pauses[:4], *[0.0] * 2, *pauses[6:]]):
        assert 0.05 * 2**number <= pause_s <= 0.15 * 2**number or number in (4, 5)
    assert [7, 60] == pauses[4:6]


@pytest.mark.parametrize(
    ("trouble", "timeout_s", "message"),
    [
        (answers_with("busy", 503), 60, "/score: it answers 503 and 4 bytes"),
        (answers_with(PAGE, 502), 60, "/score: it answers 502 and more than 65536 bytes"),
        (answers_with("who are you?", 401), 60, "/score: it answers 401 and 12 bytes"),
        (answers_with("", 404), 60, "/score: it answers 404 and 0 bytes"),
        (
            answers_with("", 302, Location="http://elsewhere/"),
            60,
            "answers 302 and sends elsewhere, which isn't followed",
        ),
        (hangs, 1, "/score: no answer within 1 s"),
        (hangs_up, 60, "/score: ServerDisconnectedError at "),
    ],
)
async def test_while_it_answers_nobody_a_response_waits_for_it_and_it_is_a_problem(
    trouble: Answer, timeout_s: int, message: str
) -> None:
    has_looked = asyncio.Event()

    async def good_later(request: web.Request) -> web.StreamResponse:
        await has_looked.wait()
        return await GOOD(request)

    judge = ScriptedJudge([*[trouble] * 5, good_later])
    async with endpoint(judge, timeoutSeconds=timeout_s, attempts=2) as made:
        asked = asyncio.create_task(made.score("", {}, ""))
        await until(lambda: len(judge.asked) > 5)
        assert made.problem is not None
        assert message in made.problem.message
        assert made.problem.message.endswith("; it is asked again")
        made._reward = made._reward.model_copy(update={"timeout_seconds": 60})  # on a slow machine 1 s may be too short
        has_looked.set()
        assert HALF == await asked
        assert made.problem is None


async def test_a_response_that_gets_no_answer_while_others_do_fails_after_so_many_attempts() -> None:
    """A response can be what the endpoint breaks of."""

    async def breaks_of_one(request: web.Request) -> web.StreamResponse:
        bad = (await request.json())["response"] == "bad"
        return await (answers_with("", 500) if bad else GOOD)(request)

    judge = ScriptedJudge([breaks_of_one])
    async with endpoint(judge, attempts=3) as made:
        asked = asyncio.create_task(made.score("", {}, "bad"))
        while not asked.done():
            assert HALF == await made.score("", {}, "good")
        with pytest.raises(RewardFailed, match="0 bytes, 3 times, while others were answered") as failed:
            await asked
    assert "RewardUnavailable" == failed.value.reason
    assert 3 == [each["response"] for each in judge.asked].count("bad")


@pytest.mark.parametrize(
    ("answer", "reason", "message"),
    [
        (answers_with("too odd", 422), "RewardRefused", "answers 422 and 7 bytes"),
        (
            answers_with("0.5"),
            "RewardGarbled",
            r"should answer \{\"reward\": NUMBER\}, perhaps with .*, not 200 and 3 bytes: it: model_type",
        ),
        (answers_with('{"reward": NaN}'), "RewardGarbled", "should answer"),
        (answers_with('{"reward": "much"}'), "RewardGarbled", "not 200 and 18 bytes: reward: float_parsing"),
        (answers_with('{"reward": 1, "figures": {"my secret": 1}}'), "RewardGarbled", "42 bytes: figures: string_pat"),
        (answers_with('{"reward": 1, "figures": {"format": null}}'), "RewardGarbled", "42 bytes: figures: float_type"),
        (answers_with("[" * 50_000), "RewardGarbled", "should answer"),
        (answers_with("x" * (MAX_REPLY_BYTES + 1)), "RewardGarbled", "answers 200 and more than 65536 bytes"),
    ],
)
async def test_what_will_not_pass_fails_the_sample_at_once(answer: Answer, reason: str, message: str) -> None:
    judge = ScriptedJudge([answer])
    async with endpoint(judge) as made:
        with pytest.raises(RewardFailed, match=message) as failed:
            await made.score("", {}, "")
    assert reason == failed.value.reason
    assert 1 == len(judge.asked)


async def test_figures_come_beside_the_reward() -> None:
    async with endpoint(
        ScriptedJudge([answers_with('{"reward": 0.5, "figures": {"format": 1}, "why": "half"}')])
    ) as made:
        assert RewardAnswer(reward=0.5, figures={"format": 1.0}) == await made.score("", {}, "")


async def test_a_row_that_cannot_be_sent_fails_its_sample_and_nobody_is_asked() -> None:
    judge = ScriptedJudge([GOOD])
    async with endpoint(judge) as made:
        for fields in ({"value": float("nan")}, {"value": "x" * MAX_REQUEST_BYTES}):
            with pytest.raises(RewardFailed) as failed:
                await made.score("", fields, "")
            assert "RewardNotAsked" == failed.value.reason
    assert [] == judge.asked


async def test_no_more_are_asked_at_once_than_the_job_says() -> None:
    waiting, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def waits(_: web.Request) -> web.StreamResponse:
        waiting.release()
        await go_on.wait()
        return web.json_response({"reward": 1})

    judge = ScriptedJudge([waits])
    async with endpoint(judge, maxConcurrency=2) as made:
        asked = [asyncio.create_task(made.score("", {}, str(number))) for number in range(10)]
        for _ in range(2):
            await waiting.acquire()
        go_on.set()
        assert [RewardAnswer(reward=1.0)] * 10 == await asyncio.gather(*asked)
    assert 2 == judge.most_at_once
