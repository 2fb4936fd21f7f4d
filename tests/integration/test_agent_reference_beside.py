"""Pods of engines with a reference beside them: the real agent, its gate and its sockets, and no processes."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from colocated_rl_agent.drivers.reference import Scored
from colocated_rl_agent.gate import gate as gate_module
from colocated_rl_agent.gate.data_port import DataPort
from colocated_rl_agent.gate.gate import Gate
from colocated_rl_agent.lanes import reference
from colocated_rl_api.gate_wire import MAX_REQUEST_BYTES
from colocated_rl_api.ladder import RESIDENT
from colocated_rl_api.member_wire import Goal
from colocated_rl_api.reference_wire import SCORE_PATH, SCORE_TYPE
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_api.seats import FIRST_SPARE
from fakes.small_pod import SmallGroup, SmallPod, small_group, small_pod

V0, V1 = (WeightVersion(step, 1) for step in range(2))
DEADLINE_S = 60.0
SAMPLE = bytes(range(16))


def beside(**options: Any) -> AbstractAsyncContextManager[SmallGroup]:
    return small_group(reference={"placement": "WithRollout"}, **options)


def engine_of(group: SmallGroup) -> tuple[str | None, int, bool]:
    facts = group.engine.facts
    return facts.engines[0].incarnation, facts.engines[0].failures, facts.gate.open


async def failure_of_reference(group: SmallGroup) -> str:
    def message() -> str:
        problem = group.engine.facts.problem
        return problem.message if problem and problem.reason == "ReferenceFailed" else ""

    await group.engine.news(lambda: message() != "")
    return message()


# ------------------------------------------------------------------------------------------------- beside an engine
async def test_it_goes_on_through_a_switch_and_belongs_to_engine_pods_alone() -> None:
    async with beside() as group:
        await group.climb(V0)
        await group.engine.news(lambda: group.engine.facts.reference_ready is True)
        await group.climb(V1)
        assert (1, 0) == (group.engine.references_started, group.trainers.references_started)
        assert (True, None) == (group.engine.facts.reference_ready, group.trainers.facts.reference_ready)
        assert [] == group.broken


async def test_an_engine_starts_once_its_device_holds_the_reference() -> None:
    """Chance would decide what the engine finds free when it starts, if both loaded at once."""
    async with beside(prepare=lambda pod: pod.reference_loads.clear()) as group:
        climbing = asyncio.create_task(group.climb(V0))
        await group.engine.news(lambda: group.engine.facts.export == V0 and group.engine.references_started == 1)
        assert [] == group.engine.engines_started
        group.engine.reference_loads.set()
        assert V0 == await climbing
        assert ["0-1"] == group.engine.engines_started


async def test_an_engine_does_not_wait_for_ever_for_one_that_never_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "ENGINE_WAITS_S", 0.2)
    async with beside(prepare=lambda pod: pod.reference_loads.clear()) as group:
        assert V0 == await group.climb(V0)
        assert (False, ["0-1"]) == (group.engine.facts.reference_ready, group.engine.engines_started)


async def test_one_that_can_not_start_is_reported_and_started_again_while_the_engine_serves() -> None:
    def fails_once(pod: SmallPod) -> None:
        pod.reference_fails_at_start = 1

    async with beside(prepare=fails_once) as group:
        assert "it ended with code 1" in await failure_of_reference(group)
        assert V0 == await group.climb(V0)
        await group.engine.news(lambda: group.engine.facts.reference_ready is True)
        assert (2, None) == (group.engine.references_started, group.engine.facts.problem)


async def test_one_that_does_not_load_in_time_is_killed_and_started_again() -> None:
    switch = {"trainerStartSeconds": 1}
    async with beside(prepare=lambda pod: pod.reference_loads.clear(), switch=switch) as group:
        assert "it has not loaded its model within 1 s" in await failure_of_reference(group)
        group.engine.reference_loads.set()
        await group.engine.news(lambda: group.engine.facts.reference_ready is True)
        assert (2, 1) == (group.engine.references_started, group.engine.agent._reference._failures)


async def test_its_death_is_no_concern_of_the_engine() -> None:
    async with beside() as group:
        await group.climb(V0)
        await group.engine.news(lambda: group.engine.facts.reference_ready is True)
        before = engine_of(group)
        await group.engine.runner.end_child(reference.NAME, -9)
        assert "it ended with code -9" in await failure_of_reference(group)
        assert (before, False) == (engine_of(group), group.engine.facts.reference_ready)
        await group.engine.news(lambda: group.engine.facts.reference_ready is True)
        assert (before, 2) == (engine_of(group), group.engine.references_started)
        assert [] == group.broken


async def test_a_container_that_restarts_has_it_again() -> None:
    async with beside() as group:
        await group.engine.news(lambda: group.engine.facts.reference_ready is True)
        await group.engine.restart_container()
        await group.engine.news(lambda: group.engine.references_started == 2)
        await group.engine.news(lambda: group.engine.facts.reference_ready is True)
        assert group.engine.facts.problem is None


@pytest.mark.parametrize("failures", [0, 3])
async def test_no_engine_waits_for_one_that_is_not_started_again_yet(failures: int) -> None:
    """It waited for the back-off of a reference that had failed before, and then for its start."""
    async with beside() as group:
        await group.engine.news(lambda: group.engine.facts.reference_ready is True)
        lane = group.engine.agent._reference
        lane._failures = failures
        lane.attach(None)
        assert (failures == 0) == (lane.awaited_until > 0)


async def test_it_is_not_started_again_in_a_pod_that_ends() -> None:
    async with beside() as group:
        await group.climb(V0)
        await group.engine.news(lambda: group.engine.facts.reference_ready is True)
        group.engine.epoch += 1
        group.engine.send(group.engine.target(V0, Rung.SERVING, goal=Goal.STOP))
        await group.engine.news(lambda: group.engine.facts.stopped)
        assert (1, 0) == (group.engine.references_started, group.engine.runner.exit_code)
        assert group.engine.facts.problem is None


# ------------------------------------------------------------------------------------- beside an engine and trainers
def resident(**options: Any) -> AbstractAsyncContextManager[SmallPod]:
    return small_pod(rollout={"offload": []}, reference={"placement": "WithRollout"}, **options)


async def test_it_stays_beside_engine_and_trainers_through_a_switch_and_no_trainer_scores() -> None:
    async with resident() as pod:
        assert RESIDENT is pod.ladder
        await pod.climb(V0)
        await pod.news(lambda: pod.facts.reference_ready is True)
        assert pod.trainer is not None
        pod.trainer.faults["score"] = "crash"
        assert V1 == await pod.climb(V1)
        assert (1, True, [], None) == (
            pod.references_started, pod.facts.reference_ready, pod.broken, pod.facts.problem,
        )  # fmt: skip


async def test_an_engine_beside_trainers_starts_once_the_device_holds_the_reference_too() -> None:
    async with resident(prepare=lambda pod: pod.reference_loads.clear()) as pod:
        climbing = asyncio.create_task(pod.climb(V0))
        await pod.news(lambda: pod.facts.export == V0 and pod.references_started == 1)
        assert [] == pod.engines_started
        pod.reference_loads.set()
        assert V0 == await climbing
        assert ["0-1"] == pod.engines_started


@pytest.mark.parametrize(("reference", "residue"), [("WithTrainer", 5), ("WithRollout", None)])
async def test_what_it_holds_of_a_device_is_no_residue_of_engine_and_trainers(
    reference: str, residue: int | None
) -> None:
    def holds_five_bytes(pod: SmallPod) -> None:
        pod.runner.devices = [{"index": 0, "total_bytes": 9, "used_bytes": 5}]

    spec: dict[str, Any] = {"rollout": {"offload": []}, "reference": {"placement": reference}, "gpus": {"count": 1}}
    async with small_pod(prepare=holds_five_bytes, **spec) as pod:
        await pod.climb(V0)
        assert [(5, residue)] == [(device.used_bytes, device.residue_bytes) for device in pod.facts.devices]


@pytest.mark.parametrize(
    "options",
    [{"replica": FIRST_SPARE}, {"mode": "TrainOnly", "recorded": {"claimName": "recording"}}],
    ids=["spare", "train-only"],
)
async def test_none_is_started_where_nothing_is_generated(options: dict[str, Any]) -> None:
    async with resident(**options) as pod:
        await pod.news(lambda: pod.agent._runner_known)
        assert (None, 0) == (pod.facts.reference_ready, pod.references_started)
        assert SCORE_PATH not in pod.agent._gate._routes


# ------------------------------------------------------------------------------------------------- at the gate
class ScoredAtGate:
    """A gate without an open entrance, and a reference that the test holds."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.url = ""
        self.asked: list[tuple[str, bytes]] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.gate = Gate(score=self.score)

    async def score(self, query: str, sample: bytes) -> Scored:
        self.asked.append((query, sample))
        await self.goes_on.wait()
        return Scored(503, b'{"error":"Late"}') if query == "late" else Scored(200, sample[::-1])

    async def post(self, data: bytes = SAMPLE, query: str = "start=1") -> tuple[int, str, bytes]:
        async with self.session.post(f"{self.url}{SCORE_PATH}?{query}", data=io.BytesIO(data)) as answer:
            return answer.status, answer.content_type, await answer.read()


@pytest.fixture
async def scene() -> AsyncIterator[ScoredAtGate]:
    async with served_scores() as it:
        yield it


@asynccontextmanager
async def served_scores() -> AsyncIterator[ScoredAtGate]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
        it = ScoredAtGate(session)
        async with DataPort(it.gate.serve).listening("127.0.0.1", 0) as port:
            it.url = f"http://127.0.0.1:{port}"
            yield it
            it.goes_on.set()


async def test_a_sample_is_passed_on_and_its_scores_come_back_though_the_gate_is_closed(scene: ScoredAtGate) -> None:
    assert (200, SCORE_TYPE, SAMPLE[::-1]) == await scene.post()
    assert (503, "application/json", b'{"error":"Late"}') == await scene.post(query="late")
    assert [("start=1", SAMPLE), ("late", SAMPLE)] == scene.asked
    assert (0, 0, True) == (scene.gate._held_bytes, scene.gate.in_flight, not scene.gate.is_open)


async def test_samples_beyond_what_can_be_held_are_sent_away_for_now(scene: ScoredAtGate) -> None:
    scene.gate._held_bytes = full = gate_module.MAX_HELD_BYTES - 2 * len(SAMPLE) + 1
    assert 429 == (await scene.post())[0]
    assert ([], full) == (scene.asked, scene.gate._held_bytes)
    scene.gate._held_bytes -= 1
    assert 200 == (await scene.post())[0]


async def test_what_is_larger_than_any_request_reaches_no_reference(scene: ScoredAtGate) -> None:
    assert 413 == (await scene.post(bytes(MAX_REQUEST_BYTES + 1)))[0]
    assert [] == scene.asked


async def test_a_caller_that_leaves_lets_go_of_what_was_held(scene: ScoredAtGate) -> None:
    scene.goes_on.clear()
    leaving = asyncio.create_task(scene.post())
    async with asyncio.timeout(DEADLINE_S):
        while not scene.asked:  # noqa: ASYNC110 - it is another's task
            await asyncio.sleep(0.002)
        assert 2 * len(SAMPLE) == scene.gate._held_bytes
        leaving.cancel()
        while scene.gate._held_bytes:  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0.002)


async def test_a_gate_without_a_reference_has_no_scores(scene: ScoredAtGate) -> None:
    async with (
        DataPort(Gate().serve).listening("127.0.0.1", 0) as port,
        scene.session.post(f"http://127.0.0.1:{port}{SCORE_PATH}", data=SAMPLE) as answer,
    ):
        assert 404 == answer.status
    async with scene.session.get(f"{scene.url}{SCORE_PATH}") as answer:
        assert (405, "POST") == (answer.status, answer.headers["Allow"])
