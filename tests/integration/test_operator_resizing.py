"""A job goes on with another number of replicas, under the operator's process and a real API server.

Pods are real objects that no node runs: `FakeKubelet` plays their kubelet, with members on loopback. A pod that it
blocks is one without a node.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from real_world import RealWorld, open_real_world

from colocated_rl_api.member_wire import PodTarget, RolloutTarget
from colocated_rl_operator.clients.cluster import ClusterAccess
from real_operator import JOBS, NAMESPACE, PODS, Body

pytestmark = pytest.mark.cluster

MERGE = "application/merge-patch+json"
BUDGETS = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets"
SPEC: Body = {"replicas": 2, "steps": 4, "checkpoint": {"everySteps": 100}, "evaluation": None, "backoffLimit": 0}
ELASTIC: Body = {"elasticPolicy": {"minReplicas": 1, "shrinkAfterSeconds": 10}}


@pytest.fixture
async def world(
    request: pytest.FixtureRequest, access: ClusterAccess, operators: ClusterAccess, tmp_path: Path
) -> AsyncIterator[RealWorld]:
    """Operators have the account of the chart. Indirect parameters replace parts of the job's spec."""
    spec = SPEC | getattr(request, "param", {})
    async with open_real_world(access, tmp_path, spec, operators=operators) as world:
        yield world


async def ask_for(world: RealWorld, replicas: int) -> None:
    """A person edits the job, and the operator has seen it."""
    job = await world.api.call("PATCH", f"{JOBS}/sums", {"spec": {"replicas": replicas}}, MERGE)
    world.group.resize(replicas)
    await world.until(lambda: world.status["observedGeneration"] == job["metadata"]["generation"])


def stay_at_step(world: RealWorld, step: int) -> None:
    """No batch is sealed for a later one."""
    world.kubelet.hold(
        "rollout", under=lambda target: isinstance(target, RolloutTarget) and target.trained_step >= step
    )


async def resized_at_step_2(world: RealWorld, replicas: int) -> None:
    """A person edits the job at step 1, and step 2 is done by the group of the other size."""
    await world.until(lambda: world.status.get("step") == 1)
    await ask_for(world, replicas)
    stay_at_step(world, 2)
    world.kubelet.wake_all()
    await world.until(lambda: (world.status["step"], world.status["groupReplicas"]) == (2, replicas))


def world_sizes(world: RealWorld) -> list[int]:
    """Return the number of trainers in each target of the first pod, each once in a row."""
    targets = (target for target in world.kubelet.of_seat("gpu-0").seen if isinstance(target, PodTarget))
    sizes = [target.rendezvous.world_size for target in targets if target.rendezvous]
    return [size for before, size in zip([None, *sizes], sizes, strict=False) if size != before]


def is_to_save(world: RealWorld) -> bool:
    """Return whether the group is asked for a checkpoint: it will have another size from the next step on."""
    newest = world.kubelet.of_seat("gpu-0").seen[-1]
    return isinstance(newest, PodTarget) and newest.saves


async def names_of_pods(world: RealWorld) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in await world.api.all(PODS))


async def test_a_person_shrinks_a_job_that_runs_and_no_step_is_trained_twice(world: RealWorld) -> None:
    """Its checkpoints are due at step 100: those of the steps before a change are made for it."""
    stay_at_step(world, 1)
    async with world.operator():
        await resized_at_step_2(world, 1)
        assert "Resized" == world.status["cause"]
        await world.until(lambda: "gpu-1" not in {member.pod.seat for member in world.kubelet.members.values()})
        budget = f"{BUDGETS}/sums-{world.job['metadata']['uid']}"
        assert 1 == (await world.api.call("GET", budget))["spec"]["minAvailable"], "of two pods"
        with pytest.raises(AssertionError, match=r"replicas can\\?'t change from one to more"):
            await ask_for(world, 2)
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
        assert ["sums-gpu-0-0", "sums-rollout-0"] == await names_of_pods(world)
    assert {1: [1], 2: [2, 3, 4]} == world.group.trained_in
    assert (0, "4-2") == (world.status["restarts"], world.status["weightVersion"])


@pytest.mark.parametrize("world", [{"replicas": 3}], indirect=True, ids=["of three"])
async def test_a_job_grows_once_the_pods_that_are_asked_for_are_there(world: RealWorld) -> None:
    stay_at_step(world, 1)
    async with world.operator():
        await resized_at_step_2(world, 2)
        await ask_for(world, 3)
        await world.until(lambda: is_to_save(world))
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
        assert [3, 2, 3] == world_sizes(world)
    assert {1: [1], 2: [2], 3: [3, 4]} == world.group.trained_in
    assert 3 == world.status["groupReplicas"]


@pytest.mark.parametrize("world", [ELASTIC], indirect=True, ids=["elastic"])
async def test_a_job_goes_on_without_a_node_and_takes_its_replica_in_again_when_there_is_another(
    world: RealWorld,
) -> None:
    """The operator is killed, and the next one finds the group as it is."""
    stay_at_step(world, 1)
    async with world.operator():
        await world.until(lambda: world.status.get("step") == 1)
        world.kubelet.blocked = {"sums-gpu-1-1"}
        await world.api.call("DELETE", f"{PODS}/sums-gpu-1-0")
        await world.until(lambda: (world.status["groupReplicas"], world.status.get("lineage")) == (1, 2))
        stay_at_step(world, 2)
        world.kubelet.wake_all()
        await world.until(lambda: world.status["step"] == 2)
        await world.until(lambda: "1 of 2 replicas" in world.condition("PodsReady")["message"])
    async with world.operator():
        await world.until(lambda: world.status["cause"] == "OperatorRestarted" and world.status["phase"] == "Rollout")
        assert 1 == world.status["groupReplicas"]
        world.kubelet.blocked = set()
        await world.api.call("PATCH", f"{PODS}/sums-gpu-1-1", {"metadata": {"annotations": {"a": "node"}}}, MERGE)
        await world.until(lambda: is_to_save(world))
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
        assert [2, 1, 2] == world_sizes(world)
    assert {1: [1], 2: [1, 2], 3: [3, 4]} == world.group.trained_in, "the loss alone costs a step"
    assert (0, 2) == (world.status["restarts"], world.status["groupReplicas"])


SPARE = "sums-gpu-1024-0"


@pytest.mark.parametrize("world", [{"spares": 1}], indirect=True, ids=["a spare"])
async def test_a_lost_pod_gets_the_room_of_the_spare_and_the_spare_another(world: RealWorld) -> None:
    """The operator is killed meanwhile. Only the node that the spare leaves has room."""
    stay_at_step(world, 1)
    async with world.operator():
        await world.until(lambda: (world.status.get("step"), world.status.get("readySpares")) == (1, 1))
        assert SPARE in await names_of_pods(world)
        world.kubelet.blocked = {"sums-gpu-1-1"}
        await world.api.call("DELETE", f"{PODS}/sums-gpu-1-0")
        await world.until(lambda: "gpu-1024" not in {member.pod.seat for member in world.kubelet.members.values()})
    world.kubelet.blocked = {SPARE}  # one that knows of no attempt begins with the first
    async with world.operator():
        await world.api.call("PATCH", f"{PODS}/sums-gpu-1-1", {"metadata": {"annotations": {"a": "node"}}}, MERGE)
        await world.until(lambda: world.status.get("lineage") == 2 and world.status["phase"] == "Rollout")
        await world.until(lambda: "0 of 1 spares hold room" in world.condition("PodsReady")["message"])
        assert (2, 0, 0) == (world.status["groupReplicas"], world.status["readySpares"], world.status["restarts"])
        world.kubelet.blocked = set()
        await world.api.call("PATCH", f"{PODS}/{SPARE}", {"metadata": {"annotations": {"a": "node"}}}, MERGE)
        await world.until(lambda: world.status["readySpares"] == 1)
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
    assert [2] == world_sizes(world)
