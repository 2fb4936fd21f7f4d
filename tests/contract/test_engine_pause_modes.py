"""These tests show what a switch could spare of the requests in an engine, and what it would do again all the same.

The agent aborts all, and the rollout controller sends the tokens again. Pause mode `retract` would keep requests in the
engine over a switch; it keeps none of their cache, so all of their tokens are prefilled again in either case. Somebody
else's requests could go on, beside an abort that names those of the job; but then nothing proves the engine idle.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from waiting import until

from colocated_rl_agent.drivers.sglang import SGLang
from colocated_rl_api.rungs import WeightVersion
from engines import ADMIN_KEY, EngineProcess, engine_process
from fakes.engine_model import write_engine_export
from fakes.sse import json_events

pytestmark = pytest.mark.slow
OLD, NEW = WeightVersion(0, 1), WeightVersion(1, 1)
CALL_S = 120.0
REQUESTS, PROMPT_TOKENS, BEFORE, LIMIT = 3, 200, 8, 400
ENDLESS = 3000  # tokens, which take the engine many times as long as all that is done meanwhile
NEW_TOKENS = re.compile(r"Prefill batch.*?#new-token: (\d+)")


@dataclass
class Scene:
    client: SGLang
    session: aiohttp.ClientSession
    process: EngineProcess
    exports: Path

    @property
    def prefilled(self) -> int:
        """Tokens that the engine has prefilled in its life, by its log."""
        return sum(map(int, NEW_TOKENS.findall(self.process.output.read_text())))

    async def generate(
        self, ids: list[int], begun: asyncio.Event | None = None, *, limit: int = LIMIT, rid: str | None = None
    ) -> dict[str, Any]:
        """The last chunk of an answer. begun: set once some tokens are there."""
        limits = {"max_new_tokens": limit, "ignore_eos": True, "stream_interval": 1}
        body = {"stream": True, "input_ids": ids, "sampling_params": limits, "rid": rid}
        last: dict[str, Any] = {}
        async with self.session.post(f"{self.client.url}/generate", json=body) as answer:
            async for last in json_events(answer.content):
                if begun and len(last["output_ids"]) >= BEFORE:
                    begun.set()
        return last

    async def begin(
        self, prompts: list[list[int]], *, limit: int = LIMIT, owner: str | None = None
    ) -> list[asyncio.Task[dict[str, Any]]]:
        """Requests that have some tokens. owner: their ids begin with it; without one the engine gives them ids."""
        begun = [asyncio.Event() for _ in prompts]
        rids = [f"{owner}-{number}" if owner else None for number in range(len(prompts))]
        tasks = [
            asyncio.create_task(self.generate(ids, event, limit=limit, rid=rid))
            for ids, event, rid in zip(prompts, begun, rids, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        return tasks

    async def post(self, route: str, **body: Any) -> int:
        """Return the status of the answer."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        async with self.session.post(f"{self.client.url}{route}", json=body, headers=headers) as answer:
            return answer.status

    async def update(self, version: WeightVersion) -> None:
        await self.client.update(self.exports / str(version), version)
        await self.client.continue_()


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineProcess, Path]]:
    root = tmp_path_factory.mktemp("engine")
    exports = root / "weights"
    for version in (OLD, NEW):
        write_engine_export(exports / str(version), version=version, seed=version.step)
    flags = ("--max-total-tokens", "8192", "--log-level", "info")
    with engine_process(exports / str(OLD), version=OLD, root=root, flags=flags) as it:
        it.wait_until_up()
        yield it, exports


@pytest.fixture
async def scene(process: tuple[EngineProcess, Path]) -> AsyncIterator[Scene]:
    """Serving, with an empty cache."""
    it, exports = process
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S)) as session:
        client = SGLang(session, url=it.url, admin_key=ADMIN_KEY, call_s=CALL_S)
        await client.flush()
        yield Scene(client, session, it, exports)


def prompts() -> list[list[int]]:
    """Prompts that have no beginning in common."""
    return [
        [5 + (number * 31 + place * (number + 1)) % 90 for place in range(PROMPT_TOKENS)] for number in range(REQUESTS)
    ]


async def test_requests_that_the_engine_keeps_are_prefilled_again_and_it_is_never_seen_idle(scene: Scene) -> None:
    tasks = await scene.begin(prompts())
    assert 200 == await scene.post("/pause_generation", mode="retract")
    assert 400 == await scene.post("/flush_cache?timeout=0.2")
    before = scene.prefilled
    await scene.update(NEW)
    spans = [(await task)["meta_info"]["weight_versions"] for task in tasks]
    assert {(str(OLD), str(NEW))} == {tuple(span["version"] for span in each) for each in spans}
    at_pause = sum(each[0]["end"] for each in spans)
    await until(lambda: REQUESTS * PROMPT_TOKENS + at_pause == scene.prefilled - before)


async def test_requests_that_come_back_after_an_abort_are_prefilled_as_far(scene: Scene) -> None:
    tasks = await scene.begin(prompts())
    await scene.client.abort_all()
    partial = [(await task)["output_ids"] for task in tasks]
    await scene.client.pause()
    await scene.client.flush()
    before = scene.prefilled
    await scene.update(OLD)
    await asyncio.gather(*(scene.generate(ids + more) for ids, more in zip(prompts(), partial, strict=True)))
    await until(lambda: REQUESTS * PROMPT_TOKENS + sum(map(len, partial)) == scene.prefilled - before)


async def test_f87_requests_of_somebody_else_can_go_on_and_then_keep_the_engine_from_being_idle(scene: Scene) -> None:
    """They end by themselves, or are interrupted too: released while it is busy, an engine dies (H2)."""
    [other] = await scene.begin(prompts()[:1], owner="other", limit=ENDLESS)
    own = await scene.begin(prompts(), owner="own")
    await asyncio.gather(*(scene.client.abort(f"own-{number}") for number in range(REQUESTS)))
    assert {"abort"} == {ending(await task) for task in own}
    assert 400 == await scene.post("/flush_cache?timeout=0.2")
    assert not other.done()
    await scene.client.abort("other-0")
    assert "abort" == ending(await other)
    await scene.client.flush()


def ending(answer: dict[str, Any]) -> str:
    return str(answer["meta_info"]["finish_reason"]["type"])
