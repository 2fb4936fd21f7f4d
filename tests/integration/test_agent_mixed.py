"""Engines of both kinds: those of two pods take turns with trainers, and that of a third has devices of its own."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from colocated_rl_agent.files.exports import export_directory
from colocated_rl_api import names
from colocated_rl_api.facts import TrainerState
from colocated_rl_api.holders import PodHolder
from colocated_rl_api.rungs import Rung, WeightVersion
from fakes.small_pod import SmallGroup, SmallPod, small_group

V0, V1, V2 = (WeightVersion(step, 1) for step in range(3))
MEMORY = {"/release_memory_occupation", "/resume_memory_occupation"}


def mixed_group() -> AbstractAsyncContextManager[SmallGroup]:
    return small_group(replicas=2, rollout={"placement": "Both", "replicas": 1})


def beside(group: SmallGroup) -> tuple[SmallPod, ...]:
    """Return the pods whose engines take turns with trainers."""
    return (group.trainers, *group.others)


def held(group: SmallGroup) -> set[WeightVersion | None]:
    return {pod.facts.engines[0].version for pod in (*beside(group), group.engine)}


def routes(pod: SmallPod) -> list[str]:
    assert pod.engine is not None
    return [path.partition("?")[0] for path, _ in pod.engine.calls]


async def test_an_engine_with_devices_of_its_own_serves_on_while_others_release_and_all_take_the_weights() -> None:
    async with mixed_group() as group:
        await group.climb(V0)
        for before, version in ((V0, V1), (V1, V2)):
            for pod in (*beside(group), group.engine):
                assert pod.engine is not None
                pod.engine.calls.clear()
            await group.climb(version, to=Rung.OFFLOADED)
            assert ["closed", "closed"] == [await pod.ask() for pod in beside(group)]
            assert before == group.engine.facts.engines[0].version
            assert "length" == await group.engine.ask(tokens=4), "it generates on"
            assert PodHolder.ROLLOUT is group.engine.agent._holder(), "its GPUs counted as in a switch"
            assert [] == [route for route in routes(group.engine) if route != "/generate"], "nothing reached it"
            assert all(MEMORY & {*routes(pod)} for pod in beside(group))
            await group.climb(version)
            assert {version} == held(group)
            assert ["length"] * 3 == [await pod.ask(tokens=4) for pod in (*beside(group), group.engine)]
            assert not MEMORY & {*routes(group.engine)}
            asked = [route for route in routes(group.engine) if route != "/generate"]
            in_order = ["/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation"]
            assert in_order == [route for route in dict.fromkeys(asked) if route in in_order]
        assert [names.ROLE_GPU, names.ROLE_GPU, names.ROLE_ENGINE] == [
            pod.agent.server._hello.role for pod in (*beside(group), group.engine)
        ]
        volume = Path(group.trainers.directories.weights)
        await group.news(lambda: [str(V2)] == [path.name for path in volume.iterdir()])
        assert [] == group.broken


async def test_weights_that_reach_another_pod_in_part_cost_no_trainer() -> None:
    """Rank 0's pod found them whole: the other reads them again, says so, and takes none before."""
    async with mixed_group() as group:
        await group.climb(V0)
        await group.climb(V1, to=Rung.EXPORTED)
        other = group.others[0]
        assert other.facts.export == V0, "nothing is read before all trainers have exported"
        tensors = export_directory(group.trainers.directories.weights, V1) / "model.safetensors"
        whole = tensors.read_bytes()
        tensors.write_bytes(whole[:-1])
        group.send(V1, Rung.OFFLOADED)
        await group.news(lambda: other.facts.problem is not None and group.engine.facts.problem is not None)
        problem = other.facts.problem
        assert problem is not None
        assert "ExportTorn" == problem.reason
        await group.news(lambda: other.facts.trainers[0].state is TrainerState.OFFLOADED)
        assert Rung.EXPORTED is other.ladder.standing(other.facts, V1)
        tensors.write_bytes(whole)
        assert V1 == await group.climb(V1), "in the same lineage"
        assert {V1} == held(group)
        assert [] == group.broken


@pytest.mark.parametrize("rung", [Rung.EXPORTED, Rung.OFFLOADED, Rung.UPDATED])
@pytest.mark.parametrize("which", [0, 1, 2])
async def test_agents_that_come_again_in_a_step_go_on_with_what_runs(rung: Rung, which: int) -> None:
    async with mixed_group() as group:
        await group.climb(V0)
        await group.climb(V1, to=rung)
        pods = (*beside(group), group.engine)
        engines, trainers = [pod.engine for pod in pods], [pod.trainer for pod in pods]
        await pods[which].restart_agent(orderly=False)
        assert V1 == await group.climb(V1)
        assert (engines, trainers) == ([pod.engine for pod in pods], [pod.trainer for pod in pods])
        assert {V1} == held(group)
        assert [] == group.broken


@pytest.mark.parametrize("rung", [Rung.RELEASED, Rung.OFFLOADED])
@pytest.mark.parametrize("which", [1, 2])
async def test_an_engine_of_either_kind_that_dies_in_a_step_comes_back(rung: Rung, which: int) -> None:
    async with mixed_group() as group:
        await group.climb(V0)
        await group.climb(V1, to=rung)
        pod = (*beside(group), group.engine)[which]
        await pod.runner.end_child("engine-0", -9)
        assert V1 == await group.climb(V1)
        assert {V1} == held(group)
        if pod is group.engine and rung is Rung.RELEASED:
            assert str(V0) == pod.engines_started[-1], "at once, on what the group serves, beside training"
        assert "length" == await pod.ask(tokens=4)
        assert [] == group.broken
