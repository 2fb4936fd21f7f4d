"""A pod with several engines: the real agent, its gate and its journal, and no processes."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from typing import Any

import pytest

from builders import TOGETHER
from colocated_rl_agent.planner.views import engine_name
from colocated_rl_api.facts import EngineFacts, EngineState
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from fakes.small_pod import PROMPT, SmallPod, small_pod

V0, V1, V2 = (WeightVersion(step, 1) for step in range(3))
ENGINES = 4
MANY = 1000
SOON_S = 0.2  # without an answer of a volume
HANGS_S = 3.0  # deadline of calls where one is left without an answer
NAMES = [engine_name(index) for index in range(ENGINES)]
OFFLOAD: dict[Placement, list[str]] = {
    Placement.TIME_SLICED: ["Weights", "KVCache", "CUDAGraph"],
    Placement.RESIDENT: [],
}
both_ladders = pytest.mark.parametrize("placement", TOGETHER)


def several(placement: Placement, *, engines: int = ENGINES, **changes: Any) -> Any:
    return small_pod(rollout={"offload": OFFLOAD[placement], "engine": {"perPod": engines}}, **changes)


def facts(pod: SmallPod) -> dict[str, EngineFacts]:
    return {engine.name: engine for engine in pod.facts.engines}


def serve(pod: SmallPod) -> set[str]:
    """Return the engines that answer and whose part of the gate is open."""
    ready = {name for name, engine in facts(pod).items() if engine.state is EngineState.READY}
    return {name for name, entrance in zip(NAMES, pod.agent._gate.entrances, strict=True) if entrance.is_open} & ready


async def answered(pod: SmallPod, requests: int) -> Counter[str]:
    """Return how many of so many requests for different prompts each engine generates, then let them end."""
    asking = [asyncio.create_task(pod.ask(input_ids=[number, *PROMPT])) for number in range(requests)]
    await pod.news(lambda: pod.agent._gate.in_flight == requests)
    entrances = zip(NAMES, pod.agent._gate.entrances, strict=True)
    found = Counter({name: entrance.in_flight for name, entrance in entrances})
    assert {"abort"} == await ended(pod, asking)
    return +found


async def ended(pod: SmallPod, asking: list[asyncio.Task[str]]) -> set[str]:
    """Abort everything until all requests have ended, some of which may be on their way to an engine (H3)."""
    while not all(task.done() for task in asking):
        for engine in pod.engines.values():
            engine.abort("", everything=True)
        await asyncio.sleep(0.01)
    return {task.result() for task in asking}


@both_ladders
async def test_all_engines_serve_are_switched_and_serve_the_new_weights(placement: Placement) -> None:
    async with several(placement) as pod:
        await pod.climb(V0)
        assert dict.fromkeys(NAMES, 2) == await answered(pod, 2 * ENGINES)
        before = dict(pod.engines)
        asking = [asyncio.create_task(pod.ask(input_ids=[number, *PROMPT])) for number in range(ENGINES)]
        await pod.news(lambda: pod.agent._gate.in_flight == ENGINES)
        await pod.climb(V1)
        assert ["abort"] * ENGINES == await asyncio.gather(*asking)
        assert before == pod.engines, "none was replaced"
        assert dict.fromkeys(NAMES, V1) == {name: engine.version for name, engine in facts(pod).items()}
        assert dict.fromkeys(NAMES, 1) == await answered(pod, ENGINES)
        assert [] == pod.broken


@both_ladders
async def test_engine_that_dies_stops_no_other_and_serves_again(placement: Placement) -> None:
    async with several(placement) as pod:
        await pod.climb(V0)
        asking = [asyncio.create_task(pod.ask(input_ids=[number, *PROMPT])) for number in range(ENGINES)]
        await pod.news(lambda: pod.agent._gate.in_flight == ENGINES)
        others = {name: engine for name, engine in pod.engines.items() if name != NAMES[1]}
        pod.engine_fails_at_start = 1
        await pod.runner.end_child(NAMES[1], -9)
        await pod.news(lambda: facts(pod)[NAMES[1]].state is EngineState.ABSENT)
        assert Rung.SERVING is pod.ladder.standing(pod.facts, V0)
        await pod.news(lambda: pod.agent._gate.in_flight == ENGINES - 1)
        await pod.news(lambda: serve(pod) == {*NAMES})
        assert None is pod.facts.problem, "it was said for as long as no rung was gained, and none was lost"
        assert others.items() <= pod.engines.items()
        assert {"abort"} == await ended(pod, asking)
        assert "length" == await pod.ask(tokens=4)
        assert [] == pod.broken


async def lose_the_second_engine(pod: SmallPod) -> None:
    """Let both serve, and then one die that does not start again."""
    await pod.climb(V0)
    pod.engine_fails_at_start = MANY
    await pod.runner.end_child(NAMES[1], -9)
    await pod.news(lambda: facts(pod)[NAMES[1]].failures >= 3)


@both_ladders
async def test_agent_and_operator_agree_where_a_pod_stands_while_an_engine_is_out(placement: Placement) -> None:
    """The agent counted it: its metrics said that all other pods waited for this one."""
    async with several(placement, engines=2) as pod:
        await lose_the_second_engine(pod)
        assert Rung.SERVING is pod.ladder.standing(pod.facts, V0)
        assert (Rung.SERVING, None) == (pod.agent._climb.rung, pod.agent._below_target())


@both_ladders
async def test_next_agent_serves_by_the_other_engines_while_one_is_out(placement: Placement) -> None:
    """It took the one that was out for one that starts for the first time, and waited for it."""
    async with several(placement, engines=2) as pod:
        await lose_the_second_engine(pod)
        await pod.restart_agent(orderly=True)
        await pod.climb(V0)
        assert [True, False] == [entrance.is_open for entrance in pod.agent._gate.entrances]
        pod.engine_fails_at_start = 0
        await pod.news(lambda: all(entrance.is_open for entrance in pod.agent._gate.entrances))


@both_ladders
async def test_pod_switches_without_an_engine_that_does_not_start_and_it_joins_the_new_weights(
    placement: Placement,
) -> None:
    async with several(placement) as pod:
        await pod.climb(V0)
        pod.engine_fails_at_start = MANY
        await pod.runner.end_child(NAMES[2], -9)
        await pod.news(lambda: pod.engine_fails_at_start < MANY)
        await pod.climb(V1)
        assert {*NAMES} - {NAMES[2]} == serve(pod)
        pod.engine_fails_at_start = 0
        await pod.news(lambda: serve(pod) == {*NAMES})
        assert V1 == facts(pod)[NAMES[2]].version
        assert [] == pod.broken


@both_ladders
@pytest.mark.parametrize("fault", ["error", "crash", "act_then_hang"])
@pytest.mark.parametrize(
    "route",
    [
        "/abort_request", "/pause_generation", "/flush_cache", "/release_memory_occupation",
        "/resume_memory_occupation", "/update_weights_from_disk", "/continue_generation", "/weights_checker",
    ],
)  # fmt: skip
async def test_engine_that_fails_in_a_call_of_a_switch_is_replaced_alone(
    placement: Placement, route: str, fault: str
) -> None:
    """At every rung: the other one is the same as before, and both serve in the end."""
    if placement is Placement.RESIDENT and "memory_occupation" in route:
        return
    deadlines = {"gives_up_s": HANGS_S} if "hang" in fault else {}
    async with several(placement, engines=2, **deadlines) as pod:
        await pod.climb(V0)
        engine, other = pod.engines[NAMES[0]], pod.engines[NAMES[1]]
        asking = asyncio.create_task(pod.ask())
        await pod.news(lambda: pod.agent._gate.in_flight == 1)
        engine.faults[route] = fault
        version = await pod.climb(V1)
        await pod.climb(WeightVersion(2, version.lineage))
        await pod.news(lambda: all(entrance.is_open for entrance in pod.agent._gate.entrances))
        assert other is pod.engines[NAMES[1]]
        assert engine is not pod.engines[NAMES[0]], "it failed"
        assert "length" == await pod.ask(tokens=4)
        assert {"abort", "broken"} >= {await asking}
        assert [] == pod.broken


@both_ladders
@pytest.mark.parametrize("orderly", [True, False])
@pytest.mark.parametrize("rung", [Rung.SERVING, Rung.DRAINED, Rung.TRAINED])
async def test_next_agent_finds_every_engine(placement: Placement, rung: Rung, orderly: bool) -> None:
    async with several(placement) as pod:
        await pod.climb(V0)
        before = dict(pod.engines)
        await pod.climb(V1, rung)
        await pod.restart_agent(orderly=orderly)
        await pod.climb(V1)
        assert before == pod.engines
        assert {*NAMES} == serve(pod)
        assert [] == pod.broken


async def test_next_agent_looks_at_all_engines_at_once() -> None:
    """One that answers late keeps no other waiting."""
    async with several(Placement.TIME_SLICED, gives_up_s=HANGS_S) as pod:
        await pod.climb(V0)
        for engine in pod.engines.values():
            engine.faults["/weights_checker"] = "hang"
        unknown: list[int] = []  # engines, whenever one is asked

        def count(route: str) -> None:
            if route == "/weights_checker":
                unknown.append(sum(engine.view.is_absent for engine in pod.agent._engines))

        pod.on_call = count
        await pod.restart_agent(orderly=True)
        await pod.news(lambda: len(unknown) >= ENGINES)
        assert [ENGINES] * ENGINES == unknown[:ENGINES]


async def test_engines_release_and_update_side_by_side() -> None:
    """The slowest engine takes the time of a switch, and not all of them one after another."""
    async with several(Placement.TIME_SLICED) as pod:
        await pod.climb(V0)
        together: dict[str, int] = {}

        def count(route: str) -> None:
            called = [action for (lane, _), (action, _) in pod.agent._lanes.items() if lane == "engine"]
            together[route] = max(together.get(route, 0), len(called))

        pod.on_call = count
        await pod.climb(V1)
        for route in ("/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_disk"):
            assert ENGINES == together[route]
        assert [] == pod.broken


async def test_samples_of_one_prompt_go_to_one_engine() -> None:
    async with several(Placement.TIME_SLICED) as pod:
        await pod.climb(V0)
        asking = [asyncio.create_task(pod.ask()) for _ in range(8)]
        await pod.news(lambda: pod.agent._gate.in_flight == 8)
        busy = [entrance.in_flight for entrance in pod.agent._gate.entrances if entrance.in_flight]
        await ended(pod, asking)
        assert [8] == busy
        assert [] == pod.broken


async def test_model_whose_heads_the_engines_can_not_divide_is_named_with_what_can() -> None:
    async with small_pod(mode="RolloutOnly", gpus={"count": 6}, rollout={"engine": {"perPod": 2}}) as pod:
        (pod.directories.model / "config.json").write_text(json.dumps({"num_attention_heads": 28}))
        pod.send(pod.target(V0, Rung.SERVING, epoch=1))
        await pod.news(lambda: pod.facts.problem is not None and pod.facts.problem.reason == "EngineLost")
        assert pod.facts.problem is not None
        assert "28 attention heads" in pod.facts.problem.message
        assert "perPod to 3 or 6, of 6 devices" in pod.facts.problem.message
        assert {} == pod.engines


async def test_engine_whose_model_can_not_be_read_is_not_waited_for_silently() -> None:
    """The file is a pipe, whose opening waits in the kernel for a writer: nothing said so, nor could the agent end."""

    def soon(pod: SmallPod) -> None:
        pod._silent_s = SOON_S

    engines = {"engine": {"perPod": 2}}
    async with small_pod(mode="RolloutOnly", gpus={"count": 6}, rollout=engines, prepare=soon) as pod:
        config = pod.directories.model / "config.json"
        os.mkfifo(config)
        try:
            pod.send(pod.target(V0, Rung.SERVING, epoch=1))
            await pod.news(lambda: pod.facts.problem is not None and pod.facts.problem.reason == "VolumeSilent")
            assert pod.facts.problem is not None
            assert f"{pod.directories.model} does not answer" in pod.facts.problem.message
        finally:
            file = os.open(config, os.O_RDWR)  # waits for nobody
            config.unlink()
            config.write_text(json.dumps({"num_attention_heads": 28}))
            os.close(file)
        await pod.news(lambda: pod.facts.problem is not None and pod.facts.problem.reason == "EngineLost")
