"""Engines with pods of their own: a pod of trainers and one of an engine, which share a volume of weights."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Generator
from pathlib import Path, PosixPath
from typing import ClassVar

import aiohttp
import pytest

from colocated_rl_agent.files.exports import VERIFY_AGAIN_S, export_directory
from colocated_rl_api import names
from colocated_rl_api.facts import EngineState, TrainerState
from colocated_rl_api.rungs import Rung, WeightVersion
from fakes.small_pod import SmallGroup, SmallPod, small_group

V0, V1, V2 = (WeightVersion(step, 1) for step in range(3))
SOON_S = 0.1  # for a volume that never answers; on a slow machine one that does may be late too


def volume(group: SmallGroup) -> list[str]:
    return sorted(path.name for path in Path(group.trainers.directories.weights).iterdir())


def export_of(group: SmallGroup, version: WeightVersion) -> Path:
    return export_directory(group.trainers.directories.weights, version)


def engine_version(group: SmallGroup) -> WeightVersion | None:
    return group.engine.facts.engines[0].version


async def settled_volume(group: SmallGroup, *versions: WeightVersion) -> None:
    await group.news(lambda: volume(group) == [str(version) for version in versions])


async def test_engine_takes_over_the_volume_what_trainers_of_another_pod_have_written() -> None:
    async with small_group() as group:
        for version in (V0, V1, V2):
            await group.climb(version)
            assert version == engine_version(group) == group.engine.facts.export
            assert "length" == await group.engine.ask(tokens=4)
            await settled_volume(group, version)
        facts = group.trainers.facts
        assert ((), False) == (facts.engines, facts.gate.open)
        assert TrainerState.ONLOADED is facts.trainers[0].state, "nothing makes it leave its devices"
        assert () == group.engine.facts.trainers
        roles = [pod.agent.server._hello.role for pod in (group.trainers, group.engine)]
        assert [names.ROLE_TRAINER, names.ROLE_ENGINE] == roles
        assert "closed" == await group.trainers.ask()
        assert [] == group.broken


async def test_weights_that_an_engine_may_still_start_on_stay_until_all_have_newer_ones() -> None:
    async with small_group() as group:
        await group.climb(V0)
        await group.climb(V1, to=Rung.DRAINED)
        assert Rung.SERVING is group.trainers.ladder.standing(group.trainers.facts, V1), "the trainers' part is done"
        assert [str(V0), str(V1)] == volume(group)
        await group.engine.runner.end_child("engine-0", -9)
        await group.climb(V1)
        await settled_volume(group, V1)
        assert [] == group.broken


@pytest.mark.parametrize("with_agent", [False, True])
async def test_engine_that_dies_beside_training_starts_on_the_weights_that_all_serve(with_agent: bool) -> None:
    async with small_group() as group:
        await group.climb(V0)
        await group.climb(V1)
        group.epoch += 1
        group.send(V2, Rung.SEALED)
        if with_agent:
            await group.engine.stop_agent(orderly=False)
        await group.engine.runner.end_child("engine-0", -9)
        if with_agent:
            await group.engine.start_agent()
            group.send(V2, Rung.SEALED)
        await group.news(lambda: group.engine.facts.gate.open)
        assert V1 == engine_version(group)
        await group.climb(V2)
        assert "length" == await group.engine.ask(tokens=4)
        assert [] == group.broken


@pytest.mark.parametrize("rung", [Rung.TRAINED, Rung.EXPORTED, Rung.DRAINED, Rung.UPDATED])
@pytest.mark.parametrize("which", ["trainers", "engine"])
async def test_agents_that_come_again_in_a_step_go_on_with_what_runs(rung: Rung, which: str) -> None:
    async with small_group() as group:
        await group.climb(V0)
        await group.climb(V1, to=rung)
        engine, trainer = group.engine.engine, group.trainers.trainer
        await getattr(group, which).restart_agent(orderly=False)
        assert V1 == await group.climb(V1)
        assert (engine, trainer) == (group.engine.engine, group.trainers.trainer)
        assert "length" == await group.engine.ask(tokens=4)
        assert [] == group.broken


async def test_engine_takes_no_torn_export_says_so_and_serves_on_until_it_is_whole() -> None:
    """An export that the trainers' agent found whole may reach another node late, or in part."""
    async with small_group() as group:
        await group.climb(V0)
        await group.climb(V1, to=Rung.TRAINED)
        group.trainers.send(group.trainers.target(V1, Rung.EXPORTED, epoch=group.epoch, weights=V0))
        await group.news(lambda: group.trainers.facts.trainers[0].exported == V1)
        tensors = export_of(group, V1) / "model.safetensors"
        whole = tensors.read_bytes()
        tensors.write_bytes(whole[:-1])
        began = time.monotonic()
        group.send(V1, Rung.EXPORTED)
        await group.news(lambda: group.engine.facts.problem is not None)
        problem = group.engine.facts.problem
        assert problem is not None
        assert "ExportTorn" == problem.reason
        assert "model.safetensors" in problem.message
        assert Rung.TRAINED is group.engine.ladder.standing(group.engine.facts, V1)
        assert "length" == await group.engine.ask(tokens=4), "it serves what it has"
        assert group.trainers.facts.trainers[0].state is not TrainerState.ABSENT, "nobody else is hurt"
        reads = group.engine.agent._exports._failures
        assert time.monotonic() - began >= (2 ** (reads - 1) - 1) * VERIFY_AGAIN_S, "no busy loop"
        tensors.write_bytes(whole)
        await group.climb(V1)
        assert V1 == engine_version(group)
        assert None is group.engine.facts.problem
        assert [] == group.broken


async def test_torn_export_is_seen_beside_the_trainers_first_and_no_engine_is_asked_to_read_it() -> None:
    async with small_group() as group:
        await group.climb(V0)
        engine = group.engine.engine
        assert group.trainers.trainer is not None
        group.trainers.trainer.faults["export"] = "torn"
        again = await group.climb(V1)
        assert WeightVersion(1, 2) == again == engine_version(group)
        assert engine is group.engine.engine
        assert [] == group.broken


class Away(PosixPath):
    """A directory whose listing does not come back as long as its server is away."""

    is_reachable: ClassVar[threading.Event] = threading.Event()

    def iterdir(self) -> Generator[Away, None, None]:
        assert self.is_reachable.wait(60)
        yield from super().iterdir()


def message(pod: SmallPod) -> str:
    """Return the message of its problem."""
    return pod.facts.problem.message if pod.facts.problem else ""


async def state_page(pod: SmallPod) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{pod.agent.server.ports.pages}/v1/state") as answer,
    ):
        return await answer.text()


async def test_agent_whose_volume_does_not_answer_says_so_and_goes_on_when_it_does() -> None:
    """It listed the volume in its loop: all that the agent does stood still."""
    Away.is_reachable.clear()
    async with small_group(volume=Away, silent_s=SOON_S) as group:
        try:
            group.epoch += 1
            group.send(V0, Rung.EXPORTED)
            silent = f"{group.trainers.directories.weights} does not answer: to list exports took"
            # once it has loaded: a rung that is gained ends a problem, until the volume is looked at again
            await group.news(lambda: [0] == [rank.step for rank in group.trainers.facts.trainers])
            await group.news(lambda: silent in message(group.trainers))
            problem = group.trainers.facts.problem
            assert problem is not None
            assert "VolumeSilent" == problem.reason
            assert problem.message in await state_page(group.trainers)
            assert None is group.trainers.facts.trainers[0].exported, "nobody knows whether there is room"
        finally:
            Away.is_reachable.set()
        await group.climb(V0)
        await group.news(lambda: group.trainers.facts.problem is None)
        assert "length" == await group.engine.ask(tokens=4)
        assert [] == group.broken


async def test_engine_serves_on_while_the_files_of_an_export_can_not_be_read() -> None:
    """The manifest is a pipe here, whose opening waits in the kernel for a writer."""
    async with small_group(silent_s=SOON_S) as group:
        await group.climb(V0)
        await group.climb(V1, to=Rung.TRAINED)
        group.trainers.send(group.trainers.target(V1, Rung.EXPORTED, epoch=group.epoch, weights=V0))
        await group.news(lambda: group.trainers.facts.trainers[0].exported == V1)
        manifest = export_of(group, V1) / "manifest.json"
        whole = manifest.rename(manifest.with_name("whole"))
        os.mkfifo(manifest)
        try:
            group.send(V1, Rung.EXPORTED)
            await group.news(lambda: "to read export 1-1 took" in message(group.engine))
            problem = group.engine.facts.problem
            assert problem is not None
            assert "VolumeSilent" == problem.reason
            assert problem.message in await state_page(group.engine)
            assert "length" == await group.engine.ask(tokens=4), "it serves what it has"
        finally:
            writer = os.open(manifest, os.O_WRONLY | os.O_NONBLOCK)  # fails if nobody waits for it
            whole.replace(manifest)
            os.close(writer)
        await group.climb(V1)
        assert V1 == engine_version(group)
        await group.news(lambda: group.engine.facts.problem is None)
        assert [] == group.broken


async def test_one_pod_of_trainers_writes_for_all_and_the_others_look_at_no_file() -> None:
    async with small_group(replicas=2) as group:
        (other,) = group.others
        for version in (V0, V1):
            await group.climb(version)
            assert version == other.facts.trainers[0].exported == engine_version(group)
            await settled_volume(group, version)
        assert not other.directories.weights.exists()
        await other.restart_agent(orderly=False)
        await group.climb(V2)
        assert V2 == engine_version(group)
        assert [] == group.broken


async def test_volume_that_is_gone_for_a_while_costs_no_engine() -> None:
    async with small_group() as group:
        await group.climb(V0)
        engine, there = group.engine.engine, export_of(group, V0).parent
        gone = there.with_name("gone")
        await group.climb(V1, to=Rung.TRAINED)
        group.trainers.send(group.trainers.target(V1, Rung.EXPORTED, epoch=group.epoch, weights=V0))
        await group.news(lambda: group.trainers.facts.trainers[0].exported == V1)
        await group.trainers.stop_agent(orderly=True)
        there.rename(gone)
        group.engine.send(group.engine.target(V1, Rung.EXPORTED, epoch=group.epoch, weights=V1))
        await group.news(lambda: group.engine.facts.problem is not None)
        assert "length" == await group.engine.ask(tokens=4)
        gone.rename(there)
        await group.trainers.start_agent()
        await group.climb(V1)
        assert engine is group.engine.engine
        assert [] == group.broken


async def test_export_of_a_switch_that_is_given_up_makes_room_and_what_engines_serve_stays() -> None:
    async with small_group() as group:
        await group.climb(V0)
        await group.climb(V1, to=Rung.DRAINED)
        await group.trainers.runner.end_child("trainer-0", 17)
        given_up, again = export_of(group, V1), WeightVersion(1, 2)
        assert again == await group.climb(again, to=Rung.EXPORTED)
        assert not given_up.exists()
        assert [str(V0), str(again)] == volume(group)
        await group.climb(again)
        assert "length" == await group.engine.ask(tokens=4)
        await settled_volume(group, again)
        assert [] == group.broken


async def test_engine_is_never_taken_back_to_older_weights_that_the_group_names() -> None:
    """The operator names older weights after a take-over, when not every engine is known yet."""
    async with small_group() as group:
        await group.climb(V0)
        await group.climb(V1)
        await settled_volume(group, V1)
        shutil.copytree(export_of(group, V1), export_of(group, V0))
        calls = list(group.engine.engine.calls) if group.engine.engine else []
        group.epoch += 1
        group.engine.send(group.engine.target(V2, Rung.SEALED, epoch=group.epoch, weights=V0))
        assert "length" == await group.engine.ask(tokens=4)
        assert group.engine.engine is not None
        asked = [path for path, _ in group.engine.engine.calls[len(calls) :]]
        assert {"/generate"} == {path.partition("?")[0] for path in asked}
        assert (V1, EngineState.READY) == (engine_version(group), group.engine.facts.engines[0].state)


async def test_tensors_are_hashed_where_an_engine_is_and_nowhere_else() -> None:
    """A pod of trainers read each export once more, while the devices waited, for a check that only engines have."""
    async with small_group() as group:
        await group.climb(V0)
        trainers, engine = (pod.agent._exports.tensors for pod in (group.trainers, group.engine))
        assert ([], [V0]) == ([*trainers], [*engine])
