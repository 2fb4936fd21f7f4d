"""A pod with one side alone: real agent, real runner, real TLS; engine and trainer are fakes that may die."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator

import pytest
from waiting import until

from builders import PLACED
from colocated_rl_api.facts import EngineState, TrainerState
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from fakes.pod import Network, PodGroup, PodProcesses, make_job, network, pod
from fakes.weights import write_export

V0, V1, V2, V3 = (WeightVersion(step, 1) for step in range(4))
ALONE = {
    placement: {key: value for key, value in PLACED[placement].items() if key != "rollout"} for placement in PLACED
}


@pytest.fixture
async def net(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Network]:
    async with network(tmp_path_factory.mktemp("n")) as it:
        yield it


async def answers(it: PodProcesses) -> tuple[int, str]:
    status, answer = await it.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 2})
    return status, answer["meta_info"]["weight_version"] if status == 200 else str(answer)


async def test_an_engine_alone_serves_the_model_as_it_is_and_no_trainer_starts(net: Network) -> None:
    async with pod(
        net, make_job(model={"claim": {"name": "model", "path": "small"}}, **ALONE[Placement.ROLLOUT_ONLY])
    ) as it:
        write_export(it.directories.model / "small", version="0-0", weight=5)
        group = PodGroup([it])
        await group.climb(V0)
        assert (200, "0-1") == await answers(it)
        words = it.command("launch_server").split("\0")
        assert str(it.directories.model / "small") == words[words.index("--model-path") + 1]
        assert "--enable-memory-saver" not in words, "nothing is ever released"
        it.kill("launch_server")
        await it.until(lambda facts: not facts.gate.open, "closed")
        await group.go_on(V0)
        assert (200, "0-1") == await answers(it)
        engine = it.now.engines[0].incarnation if it.now else None
        await it.restart_agent(signal.SIGKILL)
        await it.until(lambda facts: facts.epoch == 0, "the next agent's")
        await group.climb(WeightVersion(0, 2))
        assert (200, "0-1") == await answers(it), "the same weights, by the name that they had"
        assert it.now is not None
        assert engine == it.now.engines[0].incarnation, "it was never replaced"
        assert {TrainerState.ABSENT} == {rank.state for facts in it.facts for rank in facts.trainers}
        await group.stop()
        await it.until(lambda facts: facts.stopped, "stopped")


async def test_a_trainer_alone_makes_step_after_step_and_no_engine_starts(net: Network) -> None:
    async with pod(net, make_job(**ALONE[Placement.TRAIN_ONLY])) as it:
        group = PodGroup([it])
        for version in (V0, V1, V2):
            await group.climb(version, to=Rung.EXPORTED)
        rungs = it.standings(V2, epoch=group.epoch)
        assert [Rung.SEALED, Rung.TRAINED, Rung.EXPORTED] == [rung for rung in rungs if rung is not Rung.UNKNOWN]
        facts = await it.until(lambda facts: facts.trainers[0].saved == 2, "saved")
        assert (TrainerState.ONLOADED, 2) == (facts.trainers[0].state, facts.trainers[0].step)
        it.kill("fakes.trainer")
        await it.until(lambda facts: facts.trainers[0].state is TrainerState.ABSENT, "gone")
        await group.climb(WeightVersion(3, 2), to=Rung.EXPORTED)
        assert [f"/v1/batches/{step}?shard=0&of=1" for step in (1, 2, 3)] == net.served, "from the checkpoint on"
        assert {EngineState.ABSENT} == {engine.state for each in it.facts for engine in each.engines}
        assert not any(each.gate.open for each in it.facts)
        await until(lambda: ["2-1", "3-2"] == sorted(path.name for path in it.directories.weights.iterdir()))
        last = WeightVersion(3, 2)
        await it.send(group.target(last, Rung.EXPORTED).model_copy(update={"is_last": True}))
        await it.until(lambda facts: facts.trainers[0].finished == last, "its model is left")
        assert (it.directories.checkpoints / "model-00000003" / "model.safetensors").is_file()
