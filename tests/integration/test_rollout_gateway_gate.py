"""The gateway over an agent's own gate and an engine with SGLang's habits: what verl's tests publish of auto-resume."""

from __future__ import annotations

import asyncio
import base64
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai.types import Completion
from waiting import DEADLINE_S, until

from colocated_rl_agent.gate.data_port import DataPort
from colocated_rl_agent.gate.entrance import Backend
from colocated_rl_agent.gate.gate import Gate
from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.rungs import WeightVersion
from fakes.engine import EngineRequest, FakeEngine
from fakes.gateway import controller_running, extra
from fakes.rollout import JobOnDisk, make_spec
from fakes.serving import listen
from fakes.weights import experts_of, logprob, write_export

GENERATIONS = 16
LIMIT = 200


class HeldEngine(FakeEngine):
    """Holds requests. hold: tokens that each request gets before it waits for an abort; None: all of them."""

    hold: int | None = None

    async def make_token(self, sample: EngineRequest) -> None:
        while self.hold is not None and len(sample.output) >= self.hold and not sample.abort_asked:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)
        await super().make_token(sample)


@dataclass
class GatePod:
    """An agent's gate with its engine. Weights of a step are the number `step / 8`."""

    engine: HeldEngine
    gate: Gate
    url: str
    endpoint: Endpoint

    def open(self, step: int) -> None:
        version = WeightVersion(step, 1)
        self.engine.version = self.engine.shown_version = str(version)
        self.engine.weight = step / 8

        async def abort(rid: str) -> None:
            self.engine.abort(rid, everything=False)

        self.gate.open(Backend(self.url, f"a{step}", version, abort))

    async def close(self) -> None:
        """Close the gate as a switch does: refuse, abort, wait until nothing is in flight."""
        self.gate.close()
        self.engine.abort("", everything=True)
        async with asyncio.timeout(DEADLINE_S):
            await self.gate.settled()
        assert await self.engine.idle(DEADLINE_S)


@dataclass
class GatesScene:
    pods: list[GatePod]
    client: openai.AsyncOpenAI

    async def generate(self, number: int, **options: Any) -> Completion:
        return await self.client.completions.create(
            model="job", prompt=[5, 6, 7 + number], logprobs=0, extra_body={"return_token_ids": True, **options}
        )

    def open(self, step: int, *, hold: int | None = None) -> None:
        for pod in self.pods:
            pod.engine.hold = hold
            pod.open(step)

    async def close(self) -> None:
        await asyncio.gather(*(pod.close() for pod in self.pods))

    async def made(self, tokens: int, generations: int = GENERATIONS) -> None:
        """Each generation is under way, and has so many tokens more."""

        def samples() -> list[EngineRequest]:
            return [sample for pod in self.pods for sample in pod.engine.running]

        await until(lambda: len(samples()) == generations and all(len(each.output) >= tokens for each in samples()))


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[GatesScene]:
    spec = make_spec(maxResponseTokens=LIMIT, engine={"args": ["--enable-return-routed-experts"]})
    job = JobOnDisk.write(tmp_path, spec)
    write_export(tmp_path / "export", version="0-1", weight=0.0)
    async with AsyncExitStack() as stack:
        pods = [await pod_of(stack, job, number) for number in range(2)]
        running = controller_running(job, [pod.endpoint for pod in pods])
        _, _, client = await stack.enter_async_context(running)
        yield GatesScene(pods, client)


async def pod_of(stack: AsyncExitStack, job: JobOnDisk, number: int) -> GatePod:
    engine = HeldEngine(job.directory / "export", "0-1", admin_key="", memory_saver=False, token_s=0.002)
    gate = Gate()
    url = f"http://127.0.0.1:{await listen(stack, engine.app())}"
    data = DataPort(gate.serve, admits=job.tls.admits).listening("127.0.0.1", 0, job.tls.data_context)
    port = await stack.enter_async_context(data)
    return GatePod(engine, gate, url, Endpoint(pod=f"job-gpu-{number}-0", address="127.0.0.1", port=port))


def steps_of(completion: Completion) -> list[tuple[int, int, int]]:
    """Step, first and last token of each span."""
    extras: dict[str, Any] = (completion.model_extra or {})["colocated_rl"]
    return [
        (WeightVersion.parse(span["version"]).step, span["start"], span["end"]) for span in extras["weight_versions"]
    ]


def check(completion: Completion) -> None:
    """Each token has the log-probability that the weights of its version give it."""
    (choice,) = completion.choices
    ids: list[int] = (choice.model_extra or {})["token_ids"]
    prompt: list[int] = (completion.model_extra or {})["prompt_token_ids"]
    spans = steps_of(completion)
    assert [0, *(end for _, _, end in spans)] == [*(start for _, start, _ in spans), len(ids)]
    pairs = list(itertools.pairwise([prompt[-1], *ids]))
    expected = [logprob(step / 8, *pairs[place]) for step, start, end in spans for place in range(start, end)]
    assert choice.logprobs is not None
    assert expected == pytest.approx(choice.logprobs.token_logprobs)


def check_experts(completion: Completion) -> None:
    """Each token but the last has where the weights that read it sent it: those that drew the next one."""
    (choice,) = completion.choices
    prompt: list[int] = (completion.model_extra or {})["prompt_token_ids"]
    ids = [*prompt, *(choice.model_extra or {})["token_ids"]]
    drawn_by = [step for step, start, end in steps_of(completion) for _ in range(start, end)]
    read_by = [drawn_by[max(0, place + 1 - len(prompt))] for place in range(len(ids) - 1)]
    expected = [experts_of(token, step / 8) for token, step in zip(ids[:-1], read_by, strict=True)]
    experts = extra(completion)["routed_experts"]
    assert (
        expected
        == np.frombuffer(base64.b64decode(experts["data"]), "<i4").reshape(experts["rows"], experts["width"]).tolist()
    )


async def test_verl_without_resume_every_output_is_an_abort_of_the_step_before(scene: GatesScene) -> None:
    """verl's published case has steps 1 to 3, with 16 generations each."""
    for step in (1, 2, 3):
        scene.open(step - 1, hold=2)
        asked = [asyncio.create_task(scene.generate(number, resume=False)) for number in range(GENERATIONS)]
        await scene.made(2)
        await scene.close()
        completions = await asyncio.gather(*asked)
        assert {"abort"} == {each.choices[0].finish_reason for each in completions}
        assert {step - 1} == {version for each in completions for version, _, _ in steps_of(each)}
        for each in completions:
            check(each)


async def test_verl_with_resume_every_output_is_whole_over_three_updates(scene: GatesScene) -> None:
    """verl's published case has 16 generations once, with updates 4, 5 and 6 within them."""
    scene.open(3, hold=2)
    asked = [asyncio.create_task(scene.generate(number)) for number in range(GENERATIONS)]
    for step in (4, 5, 6):
        await scene.made(2)
        await scene.close()
        scene.open(step, hold=None if step == 6 else 2)
    completions = await asyncio.gather(*asked)
    for each in completions:
        check(each)
        assert "stop" == each.choices[0].finish_reason
        versions = [version for version, _, _ in steps_of(each)]
        assert (3, sorted(versions)) == (versions[0], versions)
        assert versions[-1] > versions[0]


async def test_verl_eight_that_are_aborted_together_all_return(scene: GatesScene) -> None:
    scene.open(0, hold=2)
    asked = [asyncio.create_task(scene.generate(number, resume=False)) for number in range(8)]
    await scene.made(2, generations=8)
    await scene.close()
    async with asyncio.timeout(DEADLINE_S):
        assert ["abort"] * 8 == [each.choices[0].finish_reason for each in await asyncio.gather(*asked)]


@pytest.mark.parametrize("updates", [0, 3])
async def test_verl_routed_experts_of_later_attempts_are_their_tail_alone(scene: GatesScene, updates: int) -> None:
    """verl's published case gives each token its own experts once, as the engine reports
    them, and passes a single attempt through.
    """
    scene.open(0, hold=2 if updates else None)
    asked = [asyncio.create_task(scene.generate(number, return_routed_experts=True)) for number in range(GENERATIONS)]
    for step in range(1, updates + 1):
        await scene.made(2)
        await scene.close()
        scene.open(step, hold=None if step == updates else 2)
    for each in await asyncio.gather(*asked):
        check(each)
        check_experts(each)


async def test_experts_that_a_lost_engine_did_not_report_the_next_one_does(scene: GatesScene) -> None:
    """It is asked from where they end."""
    scene.open(0)
    for pod in scene.pods:
        pod.engine.faults["/generate"] = "cut"
    completion = await scene.generate(1, return_routed_experts=True)
    assert 2 == extra(completion)["segments"]
    check_experts(completion)


async def test_experts_that_are_not_as_many_as_before_are_asked_for_again(scene: GatesScene) -> None:
    """The completion failed as of a bug of the controller, and what earlier attempts had brought was lost."""
    scene.open(0, hold=2)
    asked = asyncio.create_task(scene.generate(1, return_routed_experts=True))
    await until(lambda: any(len(sample.output) >= 2 for pod in scene.pods for sample in pod.engine.running))
    await scene.close()
    for pod in scene.pods:
        pod.engine.faults["widen"] = "once"
    scene.open(1)
    completion = await asked
    check(completion)
    check_experts(completion)
    assert [0, 1] == [step for step, _, _ in steps_of(completion)]
    assert any("widen" not in pod.engine.faults for pod in scene.pods)


async def test_a_stream_reports_the_experts_at_its_end(scene: GatesScene) -> None:
    scene.open(0)
    whole = await scene.generate(1, return_routed_experts=True)
    more = {"return_routed_experts": True}
    stream = await scene.client.completions.create(model="job", prompt=[5, 6, 8], stream=True, extra_body=more)
    reports = [
        event.model_extra["colocated_rl"] async for event in stream if "colocated_rl" in (event.model_extra or {})
    ]
    assert [extra(whole)] == reports


async def test_verl_update_without_an_interruption_in_it_changes_nothing(scene: GatesScene) -> None:
    scene.open(0)
    before = await scene.generate(1)
    await scene.close()
    scene.open(1)
    after = await scene.generate(1)
    assert [[0], [1]] == [[version for version, _, _ in steps_of(each)] for each in (before, after)]


@pytest.mark.parametrize("seed", range(3))
async def test_switches_and_lost_engines_at_any_instant_are_not_seen(scene: GatesScene, seed: int) -> None:
    chance = random.Random(seed)
    scene.open(0)
    asked = [asyncio.create_task(scene.generate(number)) for number in range(GENERATIONS)]
    for step in range(1, 8):
        await asyncio.wait(asked, timeout=chance.random() / 50)
        pod = chance.choice(scene.pods)
        if chance.random() < 0.5:
            pod.engine.faults["/generate"] = chance.choice(["cut", "torn"])
        await pod.close() if chance.random() < 0.3 else await scene.close()
        scene.open(step)
    for each in await asyncio.gather(*asked):
        check(each)
        assert "stop" == each.choices[0].finish_reason
        assert [version for version, _, _ in steps_of(each)] == sorted(version for version, _, _ in steps_of(each))
