"""The job's whole loop with a reference in pods of its own, which are no members: nobody waits for them but samples."""

from __future__ import annotations

from typing import Any

import pytest

from builders import RESIDENT_ROLLOUT
from colocated_rl_api.member_wire import RolloutTarget
from fakes.world import FakeWorld, change, condition, stay_in_rollout

REFERENCE: dict[str, Any] = {"reference": {"placement": "OwnDevices", "replicas": 2}}
apart = pytest.mark.parametrize("world", [REFERENCE], indirect=True, ids=["time-sliced"])


def references(world: FakeWorld) -> dict[str, str | None]:
    """Pods of it, and when each was told to go."""
    pods = {pod["metadata"]["name"]: pod["metadata"] for pod in world.api.all("pods")}
    return {name: each.get("deletionTimestamp") for name, each in pods.items() if "-reference-" in name}


def named_references(world: FakeWorld) -> list[str]:
    """Return the reference pods that the rollout controller is told to use."""
    targets = [member.pod.target for member in world.kubelet.members.values() if member.pod.seat == "rollout"]
    return [each.pod for target in targets if isinstance(target, RolloutTarget) for each in target.references]


@pytest.mark.parametrize(
    "world", [REFERENCE, REFERENCE | {"rollout": RESIDENT_ROLLOUT}], indirect=True, ids=["time-sliced", "resident"]
)
async def test_a_job_completes_and_its_reference_goes_with_it(world: FakeWorld) -> None:
    async with world.operator():
        await world.until(lambda: len(named_references(world)) == 2)
        await world.until(lambda: world.status.get("phase") == "Complete")
        await world.until(lambda: not references(world))
    assert {1: [1, 2, 3]} == world.group.trained_in
    assert ("3-1", 0, "OwnDevices") == (
        world.status["weightVersion"], world.status["restarts"], world.status["reference"]["placement"],
    )  # fmt: skip


@apart
async def test_steps_are_trained_before_it_is_ready_and_status_says_who_is_waited_for(world: FakeWorld) -> None:
    """The fake controller seals batches without waiting for scores: what is sealed counts as scored."""
    world.kubelet.loads.clear()
    world.kubelet.hold("rollout", under=lambda target: isinstance(target, RolloutTarget) and target.trained_step == 2)
    async with world.operator():
        await world.until(lambda: (world.status.get("step") or 0) == 2)
        await world.until(lambda: world.status["reference"]["readyReplicas"] == 0)
        assert ("False", "PodsStarting") == condition(world, "PodsReady")
        assert "True" == condition(world, "Ready")[0]
        (message,) = [item["message"] for item in world.status["conditions"] if item["type"] == "PodsReady"]
        assert "reference-0 (pod Running, not ready)" in message
        world.kubelet.loads.set()
        await world.until(lambda: world.status["reference"]["readyReplicas"] == 2)
        assert "True" == condition(world, "PodsReady")[0]
    assert [1, 2] == world.group.trained_in[1]


@apart
async def test_a_lost_one_is_made_again_and_rollout_gets_its_address(world: FakeWorld) -> None:
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: len(named_references(world)) == 2 and world.status.get("phase") == "Rollout")
        epoch = world.status["epoch"]
        world.api.remove("/api/v1/namespaces/default/pods/sums-reference-1-0")
        await world.until(lambda: "sums-reference-1-1" in named_references(world))
        assert ["sums-reference-0-0", "sums-reference-1-1"] == named_references(world)
        await world.until(lambda: world.status["reference"]["readyReplicas"] == 2)
    assert (epoch, 1, 0) == (world.status["epoch"], world.status["lineage"], world.status["restarts"])


@apart
async def test_a_job_that_is_suspended_has_none_of_it(world: FakeWorld) -> None:
    async with world.operator():
        await world.until(lambda: len(references(world)) == 2)
        change(world, suspend=True)
        await world.until(lambda: world.status.get("phase") == "Suspended")
    assert not world.api.all("pods")
