"""A pod of a resident job, steps long: real agent, real runner, real TLS; engine and trainer are fakes that may die."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from waiting import until

from colocated_rl_api.facts import EngineState, PodFacts, TrainerState
from colocated_rl_api.ladder import RESIDENT
from colocated_rl_api.rungs import Rung, WeightVersion
from fakes.device import FakeDevice
from fakes.pod import Network, PodGroup, PodProcesses, make_job, network, pod

V0, V1, V2, V3 = (WeightVersion(step, 1) for step in range(4))
PROMPT = [5, 6, 7]


@pytest.fixture
async def net(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Network]:
    async with network(tmp_path_factory.mktemp("n")) as it:
        yield it


def resident_job(**changes: Any) -> Any:
    return make_job(**{"rollout": {"offload": []}} | changes)


def stands(facts: PodFacts, at: WeightVersion) -> Rung:
    return RESIDENT.standing(facts, at)


async def served_version(it: PodProcesses) -> tuple[int, str]:
    status, answer = await it.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 2})
    return status, answer["meta_info"]["weight_version"]


def identities(it: PodProcesses) -> tuple[str | None, str | None]:
    assert it.now is not None
    return it.now.engines[0].incarnation, it.now.trainers[0].incarnation


async def train_without_end(group: PodGroup, it: PodProcesses) -> tuple[str | None, str | None]:
    """A step is under way beside rollout; the engine and the trainer of before."""
    await group.climb(V0)
    first = identities(it)
    it.trainer_fault("train", "hang")
    await group.set_out(V1, Rung.TRAINED, after=Rung.SEALED)
    await it.until(lambda facts: facts.trainers[0].state is TrainerState.TRAINING, "training")
    return first


def trainer_routes(it: PodProcesses) -> list[str]:
    return (it.directories.sockets / "asked").read_text().split()


async def test_engine_takes_new_weights_step_after_step_and_nothing_is_ever_released(net: Network) -> None:
    async with pod(net, resident_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        before, calls = identities(it), len(await it.engine_calls())
        for version in (V1, V2, V3):
            await group.climb(version)
            assert (200, str(version)) == await served_version(it)
            rungs = it.standings(version, epoch=group.epoch)
            assert rungs == [rung for rung in RESIDENT.rungs if rung in rungs]
        assert before == identities(it), "engine and trainer stay"
        update = ["/pause_generation", "/flush_cache", "/update_weights_from_disk", "/flush_cache"]
        checksum = ["/weights_checker"]
        step = [*update[:3], *checksum, update[3], "/continue_generation", "/generate", "/generate"]  # probe, and test
        assert 3 * step == (await it.engine_calls())[calls:]
        assert "offload" not in trainer_routes(it)
        assert 1 == trainer_routes(it).count("onload"), "it is on the device from its first export on"
        await it.until(lambda facts: facts.trainers[0].saved == 2, "saved from the device")
        await until(lambda: ["3-1"] == sorted(path.name for path in it.directories.weights.iterdir()))


async def test_rollout_goes_on_beside_training_and_is_interrupted_for_the_update_alone(net: Network) -> None:
    async with pod(net, resident_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        long = asyncio.create_task(it.generate(input_ids=PROMPT, sampling_params=endless()))
        await it.generating(1)
        await group.climb(V1, to=Rung.EXPORTED)
        assert (200, "0-1") == await served_version(it), "weights that are there close no gate by themselves"
        assert not long.done()
        await group.go_on(V1, to=Rung.DRAINED)
        status, answer = await long
        assert (200, "abort") == (status, answer["meta_info"]["finish_reason"]["type"])
        assert len(answer["output_ids"]) > 0
        assert (503, {"error": "closed", "epoch": 2}) == await it.generate(input_ids=PROMPT)
        await group.go_on(V1)
        assert (200, "1-1") == await served_version(it)


async def test_no_gate_closes_before_every_pod_has_the_new_weights(net: Network) -> None:
    job = resident_job(replicas=2)
    async with pod(net, job) as fast, pod(net, job, replica=1) as slow:
        group = PodGroup([fast, slow])
        await group.climb(V0)
        slow.trainer_fault("export", "held")
        climbing = asyncio.create_task(group.climb(V1))
        await slow.trainer_has_failed()
        assert (await fast.until(lambda facts: stands(facts, V1) is Rung.EXPORTED, "exported")).gate.open
        assert (200, "0-1") == await served_version(fast)
        slow.trainer_goes_on()
        await climbing
        assert all(facts.gate.open for facts in fast.facts if stands(facts, V1) is Rung.EXPORTED)
        assert (200, "1-1") == await served_version(fast)


async def test_engine_that_dies_beside_training_comes_back_on_the_weights_that_it_served(net: Network) -> None:
    async with pod(net, resident_job()) as it:
        group = PodGroup([it])
        first = await train_without_end(group, it)
        it.kill("sglang")
        again = await it.until(lambda facts: facts.gate.open and facts.engines[0].incarnation != first[0], "open again")
        assert (V0, TrainerState.TRAINING) == (again.engines[0].version, again.trainers[0].state)
        assert (200, "0-1") == await served_version(it)
        await group.climb(WeightVersion(1, 2))  # the step that hangs is given up
        assert (200, "1-2") == await served_version(it)


async def test_engine_that_dies_in_the_update_starts_on_the_new_weights(net: Network) -> None:
    async with pod(net, resident_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        await group.climb(V1, to=Rung.DRAINED)
        await it.fault("/update_weights_from_disk", "crash")
        await group.go_on(V1)
        assert (200, "1-1") == await served_version(it)
        engines = [engine for facts in it.facts for engine in facts.engines]
        assert {V0, V1} == {engine.starts_on for engine in engines if engine.state is EngineState.STARTING}


async def test_h50_update_that_is_never_answered_costs_the_engine_and_is_not_sent_again(net: Network) -> None:
    async with pod(net, resident_job(switch={"engineCallSeconds": 5})) as it:
        group = PodGroup([it])
        await group.climb(V0)
        first = identities(it)
        await it.fault("/update_weights_from_disk", "act_then_hang")
        await group.climb(V1)
        assert first[0] != identities(it)[0]
        assert (200, "1-1") == await served_version(it)


@pytest.mark.parametrize(
    ("rung", "number"),
    [
        (Rung.SEALED, signal.SIGKILL),
        (Rung.TRAINED, signal.SIGKILL),
        (Rung.EXPORTED, signal.SIGTERM),
        (Rung.PAUSED, signal.SIGKILL),
        (Rung.DRAINED, signal.SIGKILL),
        (Rung.UPDATED, signal.SIGKILL),
    ],
)
async def test_agent_that_is_restarted_in_a_step_goes_on(net: Network, rung: Rung, number: signal.Signals) -> None:
    async with pod(net, resident_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        before = identities(it)
        await group.climb(V1, to=rung)
        await it.restart_agent(number)
        await it.until(lambda facts: bool(facts.engines), "attached")
        await group.go_on(V1)
        assert before == identities(it), "engine and trainer outlive the agent"
        assert (200, "1-1") == await served_version(it)
        await group.climb(V2)
        assert before == identities(it)
        assert (200, "2-1") == await served_version(it)


async def test_engine_and_agent_that_die_together_beside_training_are_back_before_the_step_is_done(
    net: Network,
) -> None:
    """The new agent has seen no export: it takes the one that the trainers name, and reads it first."""
    async with pod(net, resident_job()) as it:
        group = PodGroup([it])
        first = await train_without_end(group, it)
        it.kill("sglang")
        await it.restart_agent()
        await it.send(group.target(V1, Rung.TRAINED))
        again = await it.until(lambda facts: facts.gate.open and facts.engines[0].incarnation != first[0], "open again")
        assert V0 == again.engines[0].version
        assert (200, "0-1") == await served_version(it)


async def test_rollout_goes_on_when_a_trainer_dies_and_while_the_next_one_loads(net: Network) -> None:
    async with pod(net, resident_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        engine, _ = identities(it)
        it.trainer_fault("train", "crash")
        await group.set_out(V1, Rung.TRAINED, after=Rung.SEALED)
        await it.until(lambda facts: facts.trainers[0].exit_code is not None, "trainer dead")
        seen = len(it.facts)
        assert (200, "0-1") == await served_version(it)
        lineage = WeightVersion(1, 2)
        await group.climb(lineage, to=Rung.EXPORTED)
        assert all(facts.gate.open for facts in it.facts[seen:]), "no gate closed for it"
        await group.go_on(lineage)
        assert engine == identities(it)[0]
        assert (200, "1-2") == await served_version(it)


async def test_switch_that_is_given_up_opens_the_gate_on_the_weights_that_are_there(net: Network) -> None:
    async with pod(net, resident_job()) as it:
        group = PodGroup([it])
        await group.climb(V0)
        engine, _ = identities(it)
        await group.climb(V1, to=Rung.DRAINED)
        it.kill("fakes.trainer")
        await it.until(lambda facts: facts.trainers[0].exit_code is not None, "trainer dead")
        lineage = WeightVersion(1, 2)
        group.epoch += 1
        await it.send(group.target(lineage, Rung.SEALED))
        await it.until(lambda facts: facts.gate.open, "open again")
        assert (200, "0-1") == await served_version(it)
        await group.go_on(lineage)
        assert engine == identities(it)[0]
        assert (200, "1-2") == await served_version(it)


async def test_memory_of_devices_is_nobodys_business_where_nothing_is_released(net: Network, tmp_path: Any) -> None:
    """Engine and trainer hold their memory together; nothing is measured against what a release had freed."""
    rollout = {"offload": [], "engine": {"args": ["--mem-fraction-static", "0.4"]}}
    async with pod(net, make_job(rollout=rollout, gpus={"count": 1}), device=FakeDevice(tmp_path)) as it:
        group = PodGroup([it])
        await group.climb(V0)
        assert "--enable-memory-saver" not in it.command("sglang").split("\0")
        started = len(it.facts)  # until then its runner may be waited for
        await group.climb(V1)
        assert (200, "1-1") == await served_version(it)
        assert not [facts.problem for facts in it.facts[started:] if facts.problem]


def endless() -> dict[str, object]:
    return {"max_new_tokens": 4000, "ignore_eos": True, "stream_interval": 1}
