"""The job's whole loop: real doors, real TLS to members, an API server in memory; only kopf is not there.

Members move as fast as they can, so what is measured is the operator's own time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from kopf import DaemonStoppingReason
from prometheus_client import Histogram

from builders import MIXED_ROLLOUT, PLACED, RESIDENT_ROLLOUT, make_manifest
from colocated_rl_api import names
from colocated_rl_api.job_status import ColocatedRLJobStatus
from colocated_rl_api.ladder import MIXED, RESIDENT, Ladder
from colocated_rl_api.member_wire import Goal, PodTarget, RolloutTarget
from colocated_rl_api.rungs import Placement, Rung
from colocated_rl_api.seats import ROLLOUT_SEAT
from colocated_rl_operator.clients.errors import ApiUnreachable, NotAdmitted
from colocated_rl_operator.clients.kube import Kube
from colocated_rl_operator.loop.claim import claim
from colocated_rl_operator.loop.deletion import DELETE_TRIES, expire_again_s
from colocated_rl_operator.loop.drive import drive_job, note_job, note_pod
from colocated_rl_operator.loop.objects import FAILS_S, STALL_RETRY_S
from colocated_rl_operator.loop.reconcile import AGAIN_S
from colocated_rl_operator.manifests.profiles import Profile, Profiles
from colocated_rl_operator.manifests.resources import PodImages
from colocated_rl_operator.metrics import OperatorMetrics
from colocated_rl_operator.planner.plan import STOP_DEADLINE_S
from colocated_rl_operator.planner.status import PROGRESS_S
from fakes.world import (
    DEADLINE_S,
    JOB_PATH,
    SPEC,
    FakeWorld,
    Stopper,
    WorldOperator,
    change,
    condition,
    has_failed,
    stay_in_rollout,
    stood,
)

resident = pytest.mark.parametrize("world", [{"rollout": RESIDENT_ROLLOUT}], indirect=True, ids=["resident"])


# --------------------------------------------------------------------------------------------------------------- whole
async def test_a_job_runs_its_steps_and_completes(world: FakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with world.operator() as operator:
        await world.until(lambda: world.status.get("phase") == "Complete")
        barriers = operator.metrics.barrier_s
    status = world.status
    assert ("True", "Completed") == condition(world, "Ready")
    assert ("True", "Completed") == condition(world, "Complete")
    assert {1: [1, 2, 3]} == world.group.trained_in
    assert (3, "3-1", 0) == (status["step"], status["weightVersion"], status["restarts"])
    assert {"Succeeded"} == {pod["status"]["phase"] for pod in world.api.all("pods")}
    logging.getLogger(__name__).info("operator's own time per barrier: %.2f ms over %d barriers", *mean_ms(barriers))


async def test_f16_weights_are_evaluated_before_the_first_step_as_often_as_the_job_asks_and_after_the_last(
    world: FakeWorld,
) -> None:
    """Every second step of three."""
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Complete")
        targets = [target for target in world.kubelet.of_seat("rollout").seen if isinstance(target, RolloutTarget)]
    asked = [target.evaluate for target in targets if target.evaluate is not None]
    assert [0, 2, 3] == sorted(set(asked), key=asked.index)
    assert 3 == world.status["evaluations"][0]["step"]


def assert_ran_on(ladder: Ladder, world: FakeWorld, seen: Iterable[dict[str, Any]]) -> None:
    """Check that a job of three steps has run on a ladder on which engines serve while trainers work, and said so.

    seen: what its status was.
    """
    assert {1: [1, 2, 3]} == world.group.trained_in
    assert (3, "3-1", 0) == (world.status["step"], world.status["weightVersion"], world.status["restarts"])
    placed = [status for status in seen if status.get("placement")]
    assert {ladder.placement} == {status["placement"] for status in placed}
    assert {*map(str, (Rung.UNKNOWN, *ladder.rungs)), None} >= {status.get("rung") for status in placed}
    assert "Trainer" not in {status["gpuHolder"] for status in placed}


@resident
async def test_a_resident_job_runs_its_steps_and_says_so(world: FakeWorld) -> None:
    seen: list[dict[str, Any]] = []
    world.api.watch(names.PLURAL, lambda event, body: seen.append(body.get("status", {})))
    world.kubelet.hold("gpu-1", under=lambda target: isinstance(target, PodTarget) and target.step == 2)
    async with world.operator():
        await world.until(lambda: world.status.get("gpuHolder") == "Both")  # a status that is overtaken is not written
        world.kubelet.release("gpu-1")
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert_ran_on(RESIDENT, world, seen)


@pytest.mark.parametrize("world", [{"rollout": MIXED_ROLLOUT}], indirect=True, ids=["mixed"])
async def test_in_a_mixed_job_an_engine_with_devices_of_its_own_generates_while_others_train(world: FakeWorld) -> None:
    seen: list[dict[str, Any]] = []
    world.api.watch(names.PLURAL, lambda event, body: seen.append(body.get("status", {})))

    def trains(target: object) -> bool:
        return isinstance(target, PodTarget) and (target.step, target.rung) == (2, Rung.TRAINED)

    world.kubelet.hold("gpu-1", under=trains)
    async with world.operator():
        await world.until(lambda: world.status.get("gpuHolder") == "Both")
        gates = {pod.seat: pod.state.gate_open for pod in world.group.pods}
        assert {"gpu-0": False, "gpu-1": False, "engine-0": True} == gates
        world.kubelet.release("gpu-1")
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert_ran_on(MIXED, world, seen)
    claims = {
        claim["metadata"]["name"]: claim["spec"]["accessModes"] for claim in world.api.all("persistentvolumeclaims")
    }
    assert ["ReadWriteMany"] in [modes for name, modes in claims.items() if "-weights-" in name]


@pytest.mark.parametrize("world", [{"mode": "RolloutOnly"}], indirect=True)
async def test_a_job_that_only_records_never_starts_a_trainer_and_says_who_has_the_devices(world: FakeWorld) -> None:
    seen: list[dict[str, Any]] = []
    world.api.watch(names.PLURAL, lambda event, body: seen.append(body.get("status", {})))
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert (0, {}) == (world.group.store_trained, world.group.trained_in), "what is recorded is not trained"
    assert (3, "0-1", 0) == (world.status["step"], world.status["weightVersion"], world.status["restarts"])
    assert "all 3 batches are recorded" == message(world, "Complete")
    placed = [status for status in seen if status.get("placement")]
    assert {"RolloutOnly"} == {status["placement"] for status in placed}
    assert {"Nobody", "Switching", "Rollout"} >= {status["gpuHolder"] for status in placed}


@pytest.mark.parametrize(
    "world",
    [
        PLACED[Placement.TRAIN_ONLY] | {"evaluation": None},
        PLACED[Placement.TRAIN_ONLY] | {"evaluation": None, "reference": {}},
    ],
    indirect=True,
    ids=["plain", "reference"],
)
async def test_a_job_that_only_trains_never_starts_an_engine_and_says_who_has_the_devices(world: FakeWorld) -> None:
    seen: list[dict[str, Any]] = []
    world.api.watch(names.PLURAL, lambda event, body: seen.append(body.get("status", {})))
    async with world.operator():
        await world.until(lambda: (world.status.get("step") or 0) > 0)
    async with world.operator():  # after a kill
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert [1, 2, 3] == [step for steps in world.group.trained_in.values() for step in steps]
    assert (3, "3-1", 0) == (world.status["step"], world.status["weightVersion"], world.status["restarts"])
    placed = [status for status in seen if status.get("placement")]
    assert {"TrainOnly"} == {status["placement"] for status in placed}
    assert {"Nobody", "Switching", "Trainer"} >= {status["gpuHolder"] for status in placed}


def message(world: FakeWorld, kind: str) -> str:
    return next(str(item["message"]) for item in world.status["conditions"] if item["type"] == kind)


@pytest.mark.parametrize(
    "world",
    [{"reference": {}}, {"reference": {}, "rollout": RESIDENT_ROLLOUT}],
    indirect=True,
    ids=["time-sliced", "resident"],
)
async def test_a_job_with_a_reference_trains_nothing_before_every_pod_has_scored(world: FakeWorld) -> None:
    world.kubelet.hold(
        "gpu-1",
        under=lambda target: isinstance(target, PodTarget) and (target.step, target.rung) == (2, Rung.SCORED),
    )
    async with world.operator():
        await world.until(lambda: any(stood(world, Rung.SCORED, step=2)))
        assert {1: [1]} == world.group.trained_in
        world.kubelet.release("gpu-1")
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert {1: [1, 2, 3]} == world.group.trained_in


@resident
@pytest.mark.parametrize("rung", [Rung.TRAINED, Rung.EXPORTED, Rung.DRAINED, Rung.UPDATED])
async def test_a_killed_operator_of_a_resident_job_is_taken_over_in_any_rung(world: FakeWorld, rung: Rung) -> None:
    async with world.operator():
        await world.until(lambda: any(stood(world, rung, step=2)))
        epoch = world.status["epoch"]
    async with world.operator():
        await world.until(lambda: world.status["epoch"] > epoch)
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert {1: [1, 2, 3]} == world.group.trained_in


def mean_ms(histogram: Histogram) -> tuple[float, int]:
    values = {
        sample.name.rsplit("_", 1)[1]: sample.value for metric in histogram.collect() for sample in metric.samples
    }
    return 1e3 * values["sum"] / values["count"], int(values["count"])


async def test_a_switch_costs_at_most_four_writes_of_the_job(world: FakeWorld) -> None:
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Complete")
    writes = status_writes(world)
    switches = 3
    start_and_end = 8
    assert len(writes) <= 4 * switches + start_and_end, writes


async def test_no_rung_of_a_switch_waits_for_the_api_server(world: FakeWorld) -> None:
    """Each status write, and the event of each epoch, held the job's loop until it was answered."""
    stay_in_rollout(world)

    def is_no_epoch(path: str, body: Any) -> bool:
        if path.endswith("/sums/status"):
            return bool(body[1]["value"]["epoch"] == world.status["epoch"])
        return path.endswith("/events")

    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        world.api.hold(is_no_epoch)
        world.kubelet.release("rollout")
        await world.until(lambda: all(stood(world, Rung.SERVING, step=1)))
        world.api.release()
        await world.until(lambda: world.status.get("phase") == "Complete")


async def test_objects_of_the_job_are_made_before_its_pods(world: FakeWorld) -> None:
    async with world.operator():
        await world.until(lambda: world.api.all("pods"))
    plurals = [line.split("/")[-2] if line.startswith("PATCH") else line.split("/")[-1] for line in world.api.requests]
    for plural in ("secrets", "configmaps", "persistentvolumeclaims", "networkpolicies", "poddisruptionbudgets"):
        assert plurals.index(plural) < plurals.index("pods", plurals.index("configmaps")), plurals


async def test_a_claim_that_somebody_enlarged_stays_as_it_is(world: FakeWorld) -> None:
    """It was applied again with each new pod: a server refuses to make a claim smaller, and the job stalled over it."""
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        [path, *_] = [path for path in world.api.objects if "/persistentvolumeclaims/" in path]
        claim = world.api.objects[path]
        larger = {**claim, "spec": {**claim["spec"], "resources": {"requests": {"storage": "9Ti"}}}}
        world.api.put(path, larger)
        kept = world.api.objects[path]
        change(world, suspend=True)
        await world.until(lambda: world.status.get("phase") == "Suspended")
        change(world, suspend=False)
        await world.until(lambda: world.status.get("phase") == "Rollout")
    assert kept == world.api.objects[path]
    assert not [line for line in world.api.requests if line.startswith("PATCH") and "/persistentvolumeclaims/" in line]


async def suspended(world: FakeWorld) -> None:
    change(world, suspend=True)
    await world.until(lambda: world.status.get("phase") == "Suspended")


def claim_path(world: FakeWorld, volume: str) -> str:
    return next(path for path in world.api.objects if f"/persistentvolumeclaims/sums-{volume}-" in path)


@pytest.mark.parametrize("volumes", [("store",), ("checkpoints",), ("store", "checkpoints")], ids="+".join)
async def test_a_volume_that_somebody_deleted_is_not_begun_anew(world: FakeWorld, volumes: tuple[str, ...]) -> None:
    """Empty ones were made in their place: the trainers began with the model again, asked for batches that were in no
    store, and the job was Recovering until its restarts were used up, because "batch 1 is not kept".
    """

    def is_half_way(target: Any) -> bool:
        return isinstance(target, RolloutTarget) and target.goal is Goal.CLIMB and target.trained_step == 1

    world.kubelet.hold("rollout", under=is_half_way)
    passed_s = 0.0
    async with world.operator(clock=lambda: time.monotonic() + passed_s) as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout" and world.status.get("step") == 1)
        await suspended(world)
        lost = {path: world.api.objects[path] for path in (claim_path(world, volume) for volume in volumes)}
        for path in lost:
            world.api.remove(path)
        change(world, suspend=False)
        await world.until(lambda: condition(world, "Stalled") == ("True", "VolumeLost"))
        words = condition_message(world, "Stalled")
        assert all(f"claim {path.rsplit('/', 1)[1]} is gone" in words for path in lost)
        assert len(lost) == words.count("is gone, ")
        assert ({"VolumeLost": 1}, []) == (stalled(operator.metrics), world.api.all("pods"))
        await world.until(lambda: "VolumeLost" in reasons_of_events(world))
        assert not [path for path in lost if path in world.api.objects]
        for path, claim in lost.items():
            world.api.put(path, claim)
        world.kubelet.release("rollout")
        passed_s = STALL_RETRY_S
        operator.context.wakeups.wake(world.body["metadata"]["uid"])
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert ("False", "NotStalled") == condition(world, "Stalled")
    assert [1, 2, 3] == sorted({step for steps in world.group.trained_in.values() for step in steps})


async def test_where_nobody_can_tell_whether_a_volume_is_there_none_is_made(world: FakeWorld) -> None:
    """A quota answers first. What frees it, a moment later, may be the very claim that is gone."""
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        await suspended(world)
        path = claim_path(world, "store")
        world.api.remove(path)
        world.api.refused_trial = lambda body: "exceeded quota" if body["kind"] == "PersistentVolumeClaim" else None
        change(world, suspend=False)
        await world.until(lambda: len(world.api.all("pods")) == 3)
    assert path not in world.api.objects


async def test_a_job_that_has_begun_does_not_wait_for_the_secret_for_clients(world: FakeWorld) -> None:
    """A quota hides that it is there, and no pod was made again."""
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        world.api.is_over_quota = lambda body: body["metadata"]["name"].startswith("sums-client")
        world.api.remove("/api/v1/namespaces/default/pods/sums-gpu-1-0")
        await world.until(lambda: world.status["cause"] == "PodReplaced" and world.status["readyReplicas"] == 2)
    assert ("False", "NotStalled") == condition(world, "Stalled")


@pytest.mark.parametrize("world", [{"spares": 1}], indirect=True)
async def test_a_spare_that_a_quota_refuses_is_asked_for_seldom_and_stalls_nothing(world: FakeWorld) -> None:
    world.api.is_over_quota = lambda body: body["metadata"]["name"].startswith("sums-gpu-1024")
    async with world.operator():
        await world.until(lambda: (world.status.get("step") or 0) >= 2)
        assert ("False", "NotStalled") == condition(world, "Stalled")
        message = next(each["message"] for each in world.status["conditions"] if each["type"] == "PodsReady")
        assert "0 of 1 spares hold room for the group (" in message
        assert "quota" in message
    made = [request for request in world.api.requests if request.startswith("POST") and "/pods" in request]
    assert len(made) < 8, "three pods, each tried before, and the spare once"


@pytest.mark.parametrize("world", [{"mode": "RolloutOnly"}], indirect=True)
async def test_a_volume_that_held_nothing_is_made_again(world: FakeWorld) -> None:
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        await suspended(world)
        path = claim_path(world, "checkpoints")
        world.api.remove(path)
        change(world, suspend=False)
        await world.until(lambda: world.status.get("phase") == "Rollout")
    assert path in world.api.objects


@pytest.mark.parametrize("plural", ["networkpolicies", "configmaps", "poddisruptionbudgets"])
async def test_what_somebody_deleted_or_changed_comes_back_while_the_job_runs(world: FakeWorld, plural: str) -> None:
    """Only the next pod or the next edit of the job brought it back: until then anybody could reach its ports."""

    def found() -> Any:
        return {each["metadata"]["name"]: {**each, "metadata": None} for each in world.api.all(plural)}

    stay_in_rollout(world)
    world.api.watch(plural, lambda event, body: world.kubelet.moved.set())
    async with world.operator(repair_s=0.05):
        await world.until(lambda: world.status.get("phase") == "Rollout")
        before, [path, *_] = found(), [path for path in world.api.objects if f"/{plural}/" in path]
        world.api.remove(path)
        await world.until(lambda: before == found())
        world.api.put(path, {**world.api.objects[path], "spec": {}, "data": {}})
        await world.until(lambda: before == found())


async def test_a_switch_does_not_wait_for_repairs(world: FakeWorld) -> None:
    world.kubelet.hold("gpu-1", under=lambda target: isinstance(target, PodTarget) and target.step == 2)
    async with world.operator(repair_s=0):
        await world.until(lambda: world.status.get("phase") == "Switching" and world.status["targetStep"] == 2)
        world.api.hold(lambda path, body: "/configmaps/" in path)
        world.kubelet.release("gpu-1")
        await world.until(lambda: all(stood(world, Rung.SERVING, step=2)))
        world.api.release()
        await world.until(lambda: world.status.get("phase") == "Complete")


async def test_another_operator_sends_targets_before_it_applies_what_the_former_one_has(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It applied all objects first: with 500 jobs that was 4,000 calls, and the last job had targets after 24 s."""
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
    world.api.hold(lambda path, body: "/networkpolicies/" in path)
    epoch = world.status["epoch"]
    async with world.operator():
        await world.until(lambda: all(pod.target and pod.target.epoch > epoch for pod in world.group.pods))
    world.api.release()
    path = next(path for path in world.api.objects if "/networkpolicies/" in path)
    world.api.remove(path)
    world.api.watch("networkpolicies", lambda event, body: world.kubelet.moved.set())
    monkeypatch.setattr("colocated_rl_operator.loop.job_state.TAKE_OVER_S", 0.0)
    async with world.operator():
        await world.until(lambda: path in world.api.objects)


async def test_pod_that_is_made_again_has_the_token_of_its_peers_whatever_became_of_their_secrets(
    world: FakeWorld,
) -> None:
    """The next pod of the job had another one than the members that went on: nobody let it in, nor it anybody."""

    def token() -> str:
        [token] = {secret["stringData"][names.DATA_TOKEN_FILE] for secret in world.api.all("secrets")}
        return str(token)

    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        before = token()
        for path in [path for path in world.api.objects if "/secrets/" in path]:
            world.api.remove(path)
        lost = world.kubelet.of_seat("gpu-1")
        world.kubelet.end(lost.pod.uid)
        world.api.remove(f"/api/v1/namespaces/default/pods/{lost.server.hello.pod}")
        await world.until(lambda: world.status["cause"] == "PodReplaced")
    assert before == token()


# --------------------------------------------------------------------------------------------------------------- faults
@pytest.mark.parametrize("rung", [Rung.PAUSED, Rung.RELEASED, Rung.TRAINED, Rung.EXPORTED, Rung.UPDATED])
async def test_a_killed_operator_is_taken_over_in_the_middle_of_a_switch(world: FakeWorld, rung: Rung) -> None:
    async with world.operator():
        await world.until(lambda: any(stood(world, rung, step=2)))
        epoch = world.status["epoch"]
    async with world.operator():
        await world.until(lambda: world.status["epoch"] > epoch)
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert {1: [1, 2, 3]} == world.group.trained_in


async def test_one_slow_pod_holds_the_other_at_the_barrier(world: FakeWorld) -> None:
    async with world.operator():
        world.kubelet.hold("gpu-1", under=lambda target: target.type == "podTarget" and target.step == 1)
        await world.until(lambda: any(stood(world, Rung.PAUSED, step=1)))
        newest = world.kubelet.of_seat("gpu-0").seen[-1]
        assert isinstance(newest, PodTarget)
        assert Rung.PAUSED is newest.rung
        world.kubelet.release("gpu-1")
        await world.until(lambda: world.status.get("phase") == "Complete")


async def test_f40_a_barrier_is_granted_to_every_pod_before_any_of_them_answers(world: FakeWorld) -> None:
    """A switch therefore costs as much as its slowest pod, however many there are."""
    seats = ("gpu-0", "gpu-1")

    def granted() -> list[Rung]:
        """Return the rung of the newest target of each pod that has one."""
        sent = [member.seen[-1] for member in world.kubelet.members.values() if member.seen]
        return [target.rung for target in sent if isinstance(target, PodTarget) and target.step == 1]

    async with world.operator():
        for barrier in (Rung.PAUSED, Rung.RELEASED, Rung.UPDATED):
            for seat in seats:
                world.kubelet.hold(seat, under=partial(is_for, barrier))
            await world.until(lambda at=barrier: granted() == [at, at])  # type: ignore[misc]
            for seat in seats:
                world.kubelet.release(seat)
        await world.until(lambda: world.status.get("phase") == "Complete")


def is_for(barrier: Rung, target: PodTarget | RolloutTarget) -> bool:
    return isinstance(target, PodTarget) and target.rung is barrier


async def test_a_lost_pod_is_made_anew_and_the_trainers_start_together_again(world: FakeWorld) -> None:
    async with world.operator() as operator:
        world.kubelet.hold("rollout", under=lambda target: target.type == "rolloutTarget" and target.trained_step == 1)
        await world.until(lambda: world.status.get("phase") == "Rollout" and world.status.get("step", 0) >= 1)
        victim = world.kubelet.of_seat("gpu-1")
        path = f"/api/v1/namespaces/default/pods/{victim.server.hello.pod}"
        world.kubelet.end(victim.pod.uid)
        world.api.set_status(path, {"phase": "Failed", "reason": "Evicted"})
        await world.until(lambda: world.status["cause"] == "PodReplaced")
        await world.until(lambda: world.status.get("phase") == "Rollout" and world.status.get("lineage") == 2)
        assert 1 == mean_ms(operator.metrics.switch_s)[1], "to come back after a loss is no switch"
        world.kubelet.release("rollout")
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert 3 == mean_ms(operator.metrics.switch_s)[1]
    assert "/api/v1/namespaces/default/pods/sums-gpu-1-1" in world.api.objects
    assert (2, 0) == (world.status["lineage"], world.status["restarts"])


def made_of(world: FakeWorld, seat: str) -> set[tuple[str, str]]:
    """Return image and pull policy of all containers of the newest pod in a seat."""
    pods = {str(pod["metadata"]["name"]): pod for pod in world.api.all("pods")}
    spec = pods[max(name for name in pods if f"-{seat}-" in name)]["spec"]
    return {(each["image"], each["imagePullPolicy"]) for each in (*spec["initContainers"], *spec["containers"])}


async def test_a_pod_that_lost_its_label_is_deleted_though_the_server_fails_at_that_first(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was forgotten by then, and kept its devices beside the pod in its seat."""
    stay_in_rollout(world)
    lost, refusals, delete = "sums-gpu-1-0", [ApiUnreachable("the server is too busy", 503)], Kube.delete_pod

    async def delete_later(self: Kube, namespace: str, name: str, **options: Any) -> None:
        if name == lost and refusals:
            raise refusals.pop()
        await delete(self, namespace, name, **options)

    monkeypatch.setattr(Kube, "delete_pod", delete_later)
    async with world.operator() as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        note_pod({"type": "DELETED", "object": world.api.objects[pod_path(lost)]}, operator.context)
        await world.until(lambda: pod_path("sums-gpu-1-1") in world.api.objects)
        assert [] == refusals
        assert (
            "deletionTimestamp"
            in world.api.objects.get(pod_path(lost), {"metadata": {"deletionTimestamp"}})["metadata"]
        )


@pytest.mark.parametrize("is_older", [False, True], ids=["somebody deleted it", "an older operator made none"])
async def test_without_a_record_of_its_templates_a_pod_made_again_has_the_images_of_its_start(
    world: FakeWorld, is_older: bool
) -> None:
    old = PodImages(agent="rl/agent:1", rollout="rl/rollout:1", gpu="rl/gpu:1", pull_policy="IfNotPresent")
    new = replace(old, agent="rl/agent:2", rollout="rl/rollout:2", gpu="rl/gpu:2", pull_policy="Always")
    stay_in_rollout(world)
    async with world.operator(images=old, version="1.0"):
        await world.until(lambda: world.status.get("phase") == "Rollout")
    [record] = [path for path in world.api.objects if "/controllerrevisions/" in path]
    if is_older:
        start = {name: value for name, value in world.status["start"].items() if name != "revision"}
        world.api.set_status(JOB_PATH, world.status | {"start": start})
    else:
        world.api.remove(record)
    async with world.operator(images=new, version="2.0"):
        await world.until(lambda: world.status["cause"] == "OperatorRestarted")
        world.kubelet.end(world.kubelet.of_seat("gpu-1").pod.uid)
        world.api.set_status(pod_path("sums-gpu-1-0"), {"phase": "Failed", "reason": "Evicted"})
        await world.until(lambda: world.status.get("lineage") == 2)
        assert {("rl/agent:1", "Always"), ("rl/gpu:1", "Always")} == made_of(world, "gpu-1")
        assert "1.0" == world.status["start"]["operator"]
        world.kubelet.release("rollout")
        await world.until(lambda: world.status.get("phase") == "Complete")


async def test_a_dead_trainer_starts_a_new_lineage(world: FakeWorld) -> None:
    async with world.operator():
        await world.until(lambda: any(stood(world, Rung.RELEASED, step=1)))
        member = world.kubelet.of_seat("gpu-0")
        assert not isinstance(member.pod, str)
        await world.until(lambda: world.group.trainer_dies(member.pod))  # type: ignore[arg-type]
        member.wake()
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert (2, 1) == (world.status["lineage"], world.status["restarts"])
    assert (1, "TrainerDied") == (world.status["failures"]["step"], world.status["failures"]["cause"])


async def test_a_deleted_job_is_dismissed_at_once(world: FakeWorld) -> None:
    stay_in_rollout(world)
    async with world.operator() as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        operator.stopper.set(DaemonStoppingReason.RESOURCE_DELETED)
        async with asyncio.timeout(DEADLINE_S):
            await operator.task
        await world.until(lambda: not world.api.all("pods"))
    assert all(pod.stopped for pod in world.group.pods)


async def test_a_job_whose_members_are_all_dead_is_dismissed_too(world: FakeWorld) -> None:
    stay_in_rollout(world)
    async with world.operator() as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        for uid in list(world.kubelet.members):
            world.kubelet.end(uid)
        operator.stopper.set(DaemonStoppingReason.RESOURCE_DELETED)
        async with asyncio.timeout(DEADLINE_S):
            await operator.task
    assert all(pod["metadata"]["deletionTimestamp"] for pod in world.api.all("pods"))


async def test_gpu_pods_of_a_deleted_job_do_not_wait_for_a_node_that_is_gone(world: FakeWorld) -> None:
    """Nobody looked after them any more, and their GPUs stayed taken until somebody removed the node."""
    stay_in_rollout(world)
    async with world.operator(force_after_s=0.1) as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        for uid in list(world.kubelet.members):
            world.kubelet.end(uid)  # and no kubelet says that they ended
        operator.stopper.set(DaemonStoppingReason.RESOURCE_DELETED)
        await world.until(lambda: ["sums-rollout-0"] == [pod["metadata"]["name"] for pod in world.api.all("pods")])
    assert "deletionTimestamp" in world.api.all("pods")[0]["metadata"]


async def test_of_a_deleted_job_no_pod_is_deleted_but_its_own_whatever_their_labels(world: FakeWorld) -> None:
    """A person's copy of a pod went with the job; a pod without its role's label ended the burial of all others."""
    stay_in_rollout(world)
    async with world.operator(force_after_s=0.1) as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        for pod in world.api.all("pods"):
            metadata = pod["metadata"]
            labels = {key: value for key, value in metadata["labels"].items() if key != names.ROLE_LABEL}
            world.api.put(pod_path(metadata["name"]), {**pod, "metadata": {**metadata, "labels": labels}})
        copied = {"name": "copy", "labels": {names.JOB_UID_LABEL: world.body["metadata"]["uid"]}}
        world.api.put(pod_path("copy"), {"metadata": copied, "spec": {}, "status": {"phase": "Running"}})
        for uid in list(world.kubelet.members):
            world.kubelet.end(uid)
        operator.stopper.set(DaemonStoppingReason.RESOURCE_DELETED)
        left = {"copy", "sums-rollout-0"}
        await world.until(lambda: left == {pod["metadata"]["name"] for pod in world.api.all("pods")})
    assert "deletionTimestamp" not in world.api.objects[pod_path("copy")]["metadata"]


def pod_path(name: str) -> str:
    return f"/api/v1/namespaces/default/pods/{name}"


@pytest.mark.parametrize("code", [429, 500])
async def test_a_hiccup_of_the_api_server_leaves_no_pod_of_a_deleted_job(world: FakeWorld, code: int) -> None:
    """One deletion that failed took back the others, and all were left to garbage collection."""
    stay_in_rollout(world)
    async with world.operator() as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        for uid in list(world.kubelet.members):
            world.kubelet.end(uid)
        world.api.refuse_next(code)
        operator.stopper.set(DaemonStoppingReason.RESOURCE_DELETED)
        async with asyncio.timeout(DEADLINE_S):
            await operator.task
    assert all(pod["metadata"].get("deletionTimestamp") for pod in world.api.all("pods"))


async def test_a_job_whose_end_takes_longer_than_kopf_waits_is_forgotten_too(world: FakeWorld) -> None:
    """It was counted for ever, as stalled if it had been, and nobody forgot its pods on a node that was gone."""
    stay_in_rollout(world)
    async with world.operator(force_after_s=0.1) as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        assert {"Rollout": 1} == counted(operator)
        world.api.panics = lambda method, path: method == "DELETE"
        for uid in list(world.kubelet.members):
            world.kubelet.end(uid)  # and no kubelet says that they ended
        operator.stopper.set(DaemonStoppingReason.RESOURCE_DELETED)
        await world.until(lambda: any(request.startswith("DELETE") for request in world.api.requests))
        operator.task.cancel()
        await asyncio.wait([operator.task])
        assert {} == counted(operator)
        world.api.panics = lambda method, path: False
        await world.until(lambda: ["sums-rollout-0"] == [pod["metadata"]["name"] for pod in world.api.all("pods")])


def counted(operator: WorldOperator) -> dict[str, float]:
    """Return the number of jobs in each phase that has some."""
    samples = [each for metric in operator.metrics._jobs.collect() for each in metric.samples]
    return {each.labels["phase"]: each.value for each in samples if each.value}


async def test_a_job_with_a_broken_spec_is_dismissed_too(world: FakeWorld) -> None:
    stay_in_rollout(world)
    async with world.operator() as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        broken = make_manifest(**SPEC)
        broken["spec"]["rollout"] = broken["spec"]["rollout"] | {"maxConcurrency": 1000}
        world.api.put(JOB_PATH, {**world.api.objects[JOB_PATH], "spec": broken["spec"]})
        await world.until(lambda: condition(world, "Stalled")[0] == "True")
        operator.stopper.set(DaemonStoppingReason.RESOURCE_DELETED)
        async with asyncio.timeout(DEADLINE_S):
            await operator.task
    assert all(pod["metadata"].get("deletionTimestamp") for pod in world.api.all("pods"))


# ------------------------------------------------------------------------------ what a watch says in disorder, or never
def event_of(world: FakeWorld, kind: str) -> dict[str, Any]:
    return {"type": kind, "object": json.loads(json.dumps(world.api.objects[JOB_PATH]))}


def delete_job(world: FakeWorld) -> None:
    """Mark the job as deleted, as the server does for as long as it has a finalizer."""
    job = world.api.objects[JOB_PATH]
    marked = {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [names.FINALIZER]}
    world.api.put(JOB_PATH, {**job, "metadata": {**job["metadata"], **marked}})


async def ended(operator: WorldOperator) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await operator.task


async def test_a_state_of_the_past_takes_nothing_back_of_what_a_person_wrote(world: FakeWorld) -> None:
    """The loop went by what came last: a job that was to be suspended ran on."""
    stay_in_rollout(world)
    async with world.operator() as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        before = event_of(world, "MODIFIED")
        change(world, suspend=True)
        note_job(before, operator.context)
        await world.until(lambda: world.status.get("phase") == "Suspended")


async def test_a_job_whose_deletion_was_not_reported_is_released(world: FakeWorld) -> None:
    """Deleted before it had a finalizer, and kopf stops no loop for that. It read a job that is not there, for ever."""
    stay_in_rollout(world)
    async with world.operator() as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        world.api.remove(JOB_PATH)
        await ended(operator)
        await world.until(lambda: not world.api.all("pods"))


async def test_pods_of_a_job_that_is_found_gone_have_their_grace(world: FakeWorld) -> None:
    """They were left to garbage collection, and forgotten 45 s later though their own grace was not over."""
    stay_in_rollout(world)
    async with world.operator() as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        changed = event_of(world, "MODIFIED")
        changed["object"]["metadata"] |= {"generation": 7, "resourceVersion": "1000000"}
        for uid in list(world.kubelet.members):
            world.kubelet.end(uid)
        del world.api.objects[JOB_PATH]  # and no watch says so
        note_job(changed, operator.context)
        await ended(operator)
    assert {30} == {pod["metadata"]["deletionGracePeriodSeconds"] for pod in world.api.all("pods")}


async def test_a_job_of_the_past_is_not_begun_again(world: FakeWorld) -> None:
    """Its last state but one came after its deletion: a loop began, and made its pods anew."""
    stay_in_rollout(world)
    async with world.operator() as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        before = event_of(world, "MODIFIED")
        delete_job(world)
        await ended(operator)
        await world.until(lambda: not world.api.all("pods"))
        for is_there in (True, False):
            if not is_there:
                world.api.remove(JOB_PATH)
            note_job(before, operator.context)
            async with asyncio.timeout(DEADLINE_S):
                await drive_job(before["object"], Stopper(), operator.context, was_deleted=lambda: False)
    assert [] == world.api.all("pods")


@pytest.mark.parametrize("failures", [0, DELETE_TRIES + 1])
async def test_a_finalizer_that_kopf_could_not_drop_is_dropped_after_a_while(world: FakeWorld, failures: int) -> None:
    """It is dropped also where the server fails for longer than anybody waits: the
    job stayed until somebody changed it.
    """
    left = iter(range(failures))
    world.api.panics = lambda method, path: (method, path) == ("PATCH", JOB_PATH) and next(left, None) is not None
    stay_in_rollout(world)
    async with world.operator(force_after_s=0.1) as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        delete_job(world)
        await ended(operator)
        await world.until(lambda: JOB_PATH not in world.api.objects)


# ------------------------------------------------------------------------------------------------- suspend and resume
def stays(world: FakeWorld) -> int:
    """Return how many pods the job's disruption budget keeps."""
    (budget,) = world.api.all("poddisruptionbudgets")
    kept: int = budget["spec"]["minAvailable"]
    return kept


async def test_a_suspended_job_has_no_pods_and_goes_on_where_it_was_under_the_next_operator(world: FakeWorld) -> None:
    def is_half_way(target: Any) -> bool:
        return isinstance(target, PodTarget) and target.goal is Goal.CLIMB and target.step == 2

    world.kubelet.hold("gpu-1", under=is_half_way)
    async with world.operator():
        await world.until(lambda: any(stood(world, Rung.PAUSED, step=2)))
        change(world, suspend=True)
        await world.until(lambda: world.status.get("phase") == "Suspended")
    assert ("True", "Suspended") == condition(world, "Suspended")
    assert [] == world.api.all("pods")
    assert all(pod.stopped for pod in world.group.everybody)
    assert 2 == len(world.api.all("persistentvolumeclaims"))
    assert "startTime" not in world.status
    assert 0 == stays(world), "the budget of a job without pods would be an alert"
    epoch, events = world.status["epoch"], [event["type"] for event in world.api.all("events")]
    assert {"Normal"} == set(events), "nothing went wrong"
    world.kubelet.release("gpu-1")
    async with world.operator() as operator:
        await world.until(lambda: operator.context.wakeups.of(world.body["metadata"]["uid"]))
        change(world, suspend=False)
        await world.until(lambda: stays(world) == 2)
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert 0 == stays(world)
    assert epoch < world.status["epoch"]
    assert {1: [1], 2: [1, 2, 3]} == world.group.trained_in
    assert (2, 0, "False") == (world.status["lineage"], world.status["restarts"], condition(world, "Suspended")[0])
    assert "startTime" in world.status


@pytest.mark.parametrize("world", [SPEC | {"reference": {"placement": "OwnDevices", "replicas": 1}}], indirect=True)
async def test_a_suspended_job_is_resumed_with_other_pods_of_its_reference(world: FakeWorld) -> None:
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        await suspended(world)
        gpus = {"image": "registry.example.com/rl/gpu:1.1"}
        change(world, reference={"placement": "OwnDevices", "replicas": 2, "gpus": gpus}, suspend=False)
        await world.until(lambda: world.status.get("reference", {}).get("readyReplicas") == 2)
        pods = [pod["spec"] for pod in world.api.all("pods") if "-reference-" in pod["metadata"]["name"]]
        world.kubelet.release("rollout")
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert [gpus["image"]] * 2 == [pod["containers"][0]["image"] for pod in pods]
    assert 0 == world.status["restarts"]


async def test_a_job_that_is_made_suspended_has_no_pods_until_it_is_resumed(world: FakeWorld) -> None:
    change(world, suspend=True)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Suspended")
        assert [] == [line for line in world.api.requests if line.startswith("POST") and line.endswith("/pods")]
        change(world, suspend=False)
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert (1, 0) == (world.status["lineage"], world.status["restarts"])


async def test_a_job_is_suspended_while_its_pods_are_still_coming(world: FakeWorld) -> None:
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.api.all("pods"))
        change(world, suspend=True)
        await world.until(lambda: world.status.get("phase") == "Suspended")
        assert [] == world.api.all("pods")
        change(world, suspend=False)
        world.kubelet.release("rollout")
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert 0 == world.status["restarts"]


async def test_a_suspended_job_can_be_deleted(world: FakeWorld) -> None:
    change(world, suspend=True)
    async with world.operator() as operator:
        await world.until(lambda: world.status.get("phase") == "Suspended")
        operator.stopper.set(DaemonStoppingReason.RESOURCE_DELETED)
        async with asyncio.timeout(DEADLINE_S):
            await operator.task


# -------------------------------------------------------------------------------------------------------------- its end
def has_freed_everything(world: FakeWorld) -> bool:
    """A pod that has ended holds no device."""
    return {"Succeeded", "Failed"} >= {pod["status"]["phase"] for pod in world.api.all("pods")}


async def test_a_job_past_its_deadline_fails_and_frees_its_pods_in_order(world: FakeWorld) -> None:
    stay_in_rollout(world)
    change(world, activeDeadlineSeconds=3600)
    clock = MovedClock()
    async with world.operator(wall=clock.wall):
        await world.until(lambda: world.status.get("phase") == "Rollout")
    clock.passed = timedelta(seconds=3600)
    async with world.operator(wall=clock.wall):  # the next one knows from the status alone when the job began
        await world.until(lambda: has_failed(world))
    assert "completionTime" not in world.status
    assert ("True", "DeadlineExceeded") == condition(world, "Failed")
    assert ("True", "DeadlineExceeded") == condition(world, "Stalled")
    assert has_freed_everything(world)
    assert all(pod.stopped for pod in world.group.everybody)


@dataclass
class MovedClock:
    """A wall clock that a test moves."""

    passed: timedelta = field(default_factory=timedelta)

    def wall(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + self.passed


async def test_a_failed_job_frees_its_pods(world: FakeWorld) -> None:
    change(world, backoffLimit=0)
    async with world.operator():
        await world.until(lambda: any(stood(world, Rung.RELEASED, step=1)))
        member = world.kubelet.of_seat("gpu-0")
        await world.until(lambda: world.group.trainer_dies(member.pod))  # type: ignore[arg-type]
        member.wake()
        await world.until(lambda: has_failed(world))
    assert ("True", "BackoffLimitExceeded") == condition(world, "Failed")
    assert has_freed_everything(world)


async def test_a_finished_job_is_deleted_when_its_time_is_over_also_by_the_next_operator(world: FakeWorld) -> None:
    change(world, ttlSecondsAfterFinished=3600)
    clock = MovedClock()
    async with world.operator(wall=clock.wall):
        await world.until(lambda: world.status.get("completionTime"))
    assert has_freed_everything(world)
    clock.passed = timedelta(seconds=3600)
    async with world.operator(wall=clock.wall):
        await world.until(lambda: JOB_PATH not in world.api.objects)
    assert "DELETE" == next(line for line in world.api.requests[::-1] if line.endswith("/sums")).split()[0]


async def test_a_pod_that_outlives_its_job_goes_and_the_others_keep_their_logs(world: FakeWorld) -> None:
    """A webhook had put a container into it that knew of no end: the GPUs of a complete job were never free again."""
    clock, path = MovedClock(), "/api/v1/namespaces/default/pods/sums-gpu-1-0"
    async with world.operator(wall=clock.wall):
        await world.until(lambda: world.status.get("completionTime"))
        await world.until(lambda: has_freed_everything(world))
    world.api.set_status(path, {"phase": "Running", "podIP": "127.0.0.1"})
    async with world.operator(wall=clock.wall) as operator:
        await world.until(lambda: operator.context.doors.pods.of(world.body["metadata"]["uid"]))
        assert path in world.api.objects
    clock.passed = timedelta(seconds=STOP_DEADLINE_S)
    async with world.operator(wall=clock.wall):
        await world.until(lambda: path not in world.api.objects)
        await world.until(lambda: "PodDeleted" in reasons_of_events(world))
    assert {"Succeeded"} == {pod["status"]["phase"] for pod in world.api.all("pods")}
    assert 2 == len(world.api.all("pods"))


async def test_a_job_without_time_to_live_after_its_end_is_seen_complete_before_it_goes(world: FakeWorld) -> None:
    change(world, ttlSecondsAfterFinished=0)
    phases: list[str | None] = []
    world.api.watch(names.PLURAL, lambda event, body: phases.append(body.get("status", {}).get("phase")))
    async with world.operator():
        await world.until(lambda: JOB_PATH not in world.api.objects)
    assert "Complete" == phases[-1]


async def test_a_deletion_that_the_server_refuses_is_reported_once_and_not_asked_for_all_the_time(
    world: FakeWorld,
) -> None:
    """An expired job was deleted, and its status written, each second, with a line in the log each time. Then events
    alone said so, which are gone after an hour.
    """
    change(world, ttlSecondsAfterFinished=0)
    tries = 0

    def is_deletion(method: str, path: str) -> bool:
        nonlocal tries
        is_it = (method, path) == ("DELETE", JOB_PATH)
        tries += is_it
        world.kubelet.moved.set()
        return is_it

    world.api.forbidden = is_deletion
    async with world.operator() as operator:
        await world.until(lambda: "ObjectRefused" in reasons_of_events(world))
        await world.until(lambda: condition(world, "Stalled") == ("True", "ObjectRefused"))
        assert ("True", "Completed") == condition(world, "Complete")
        writes = len(status_writes(world))
        before = tries
        operator.context.wakeups.wake(world.body["metadata"]["uid"])
        await world.until(lambda: tries > before)
        assert writes == len(status_writes(world))
        assert not [line for line in world.api.requests if line.startswith("PATCH") and "/events/" in line]
        world.api.forbidden = lambda method, path: False
        operator.context.wakeups.wake(world.body["metadata"]["uid"])
        await world.until(lambda: JOB_PATH not in world.api.objects)


async def test_a_failed_job_whose_deletion_the_server_refuses_says_so_too(world: FakeWorld) -> None:
    """Its status told of the failure alone, and no alert counted it: `_expire` came before all that counts."""
    change(world, ttlSecondsAfterFinished=0, backoffLimit=0)
    world.api.forbidden = lambda method, path: (method, path) == ("DELETE", JOB_PATH)
    async with world.operator() as operator:
        await world.until(lambda: any(stood(world, Rung.RELEASED, step=1)))
        member = world.kubelet.of_seat("gpu-0")
        await world.until(lambda: world.group.trainer_dies(member.pod))  # type: ignore[arg-type]
        member.wake()
        await world.until(lambda: has_failed(world) and condition(world, "Stalled") == ("True", "ObjectRefused"))
        assert ("True", "BackoffLimitExceeded") == condition(world, "Failed")
        assert "trainer died" in condition_message(world, "Failed")
        assert {"ObjectRefused": 1} == stalled(operator.metrics)


def test_an_expired_job_is_asked_for_less_and_less_often() -> None:
    waits, overdue_s = [], 0.0
    for _ in range(9):
        waits.append(expire_again_s(overdue_s=overdue_s))
        overdue_s += waits[-1]
    assert [30, 30, 60, 120, 240, 480, 960, 1920, 3600] == waits


def status_writes(world: FakeWorld) -> list[str]:
    return [line for line in world.api.requests if line.startswith("PATCH") and line.endswith("/sums/status")]


# ------------------------------------------------------------------------------------------------------- two operators
def reasons_of_events(world: FakeWorld) -> set[str]:
    return {event["reason"] for event in world.api.all("events")}


async def test_a_second_operator_leaves_a_job_alone_that_the_first_one_has(world: FakeWorld) -> None:
    """They raised the epoch over each other for ever."""
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        epoch = world.status["epoch"]
        async with world.operator(release="others/lease"):
            await world.until(lambda: "AnotherOperator" in reasons_of_events(world))
            assert (epoch, "operators/lease") == (world.status["epoch"], world.status["operator"])
            world.kubelet.release("rollout")
            await world.until(lambda: world.status.get("phase") == "Complete")
    assert {1: [1, 2, 3]} == world.group.trained_in
    assert 1 + 3 + 1 == world.status["epoch"]


async def test_a_job_that_another_operator_has_is_looked_at_once_in_a_while(world: FakeWorld) -> None:
    """Each change of one of its pods had the job read, its pods listed and an event repeated."""
    stay_in_rollout(world)
    now = time.monotonic()
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        world.kubelet.moved.set()
        return now

    def listed() -> int:
        return sum(line == "GET /api/v1/namespaces/default/pods" for line in world.api.requests)

    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        async with world.operator(release="others/lease", clock=clock) as second:
            await world.until(lambda: "AnotherOperator" in reasons_of_events(world))
            so_far = listed()
            for after_s, expected in ((0, 0), (AGAIN_S - 1, 0), (1, 1)):
                now += after_s
                before, least = looks, so_far + expected
                second.context.wakeups.wake(world.body["metadata"]["uid"])
                await world.until(lambda before=before, least=least: before < looks and least <= listed())  # type: ignore[misc]
                assert least == listed()


async def test_of_two_operators_that_see_a_new_job_one_has_it(world: FakeWorld) -> None:
    async with world.operator(), world.operator(release="others/lease"):
        await world.until(lambda: world.status.get("phase") == "Complete")
        await world.until(lambda: "AnotherOperator" in reasons_of_events(world))
    assert {1: [1, 2, 3]} == world.group.trained_in
    assert 1 + 3 + 1 == world.status["epoch"]


JOBS = "colocated_rl_operator_jobs"
TAKES_OVER = {"release": "others/lease", "takes_over": frozenset({"operators/lease", "others/lease"})}  # and its own


async def test_a_job_is_taken_over_from_an_operator_that_is_gone(world: FakeWorld) -> None:
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
    async with world.operator(**TAKES_OVER):
        world.kubelet.release("rollout")
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert "others/lease" == world.status["operator"]
    assert {1: [1, 2, 3]} == world.group.trained_in


async def test_an_operator_that_names_itself_among_those_whose_jobs_it_takes_takes_none_twice() -> None:
    """One list serves all operators of a cluster. The status was written in each pass."""
    status, committed = ColocatedRLJobStatus(operator="old/lease"), list[ColocatedRLJobStatus]()

    async def commit(newer: ColocatedRLJobStatus) -> None:
        committed.append(newer)
        state.status = newer

    state: Any = SimpleNamespace(status=status, record=SimpleNamespace(commit=commit))
    doors: Any = SimpleNamespace(release="own/lease", takes_over=frozenset({"old/lease", "own/lease"}))
    for _ in range(3):
        assert await claim(state, doors)
    assert ["own/lease"] == [each.operator for each in committed]


async def test_a_job_is_taken_over_from_an_operator_that_still_runs(world: FakeWorld) -> None:
    """The other one learns of it by the job, and does nothing more under it; the job goes on as it stands.

    It kept its connections, and the two took them from each other for ever. It also went on to count the job, as it had
    seen it last: a job that had waited or stalled under it was an alert for as long as it ran.
    """
    stay_in_rollout(world)
    async with world.operator() as former:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        async with world.operator(**TAKES_OVER):
            await world.until(lambda: world.status["operator"] == "others/lease")
            await world.until(lambda: "AnotherOperator" in reasons_of_events(world))
            await world.until(lambda: not former.context.doors.members.answers(world.body["metadata"]["uid"]))
            await world.until(lambda: 0 == former.metrics.registry.get_sample_value(JOBS, {"phase": "Rollout"}))
            world.kubelet.release("rollout")
            await world.until(lambda: world.status.get("phase") == "Complete")
    assert "others/lease" == world.status["operator"]
    assert {1: [1, 2, 3]} == world.group.trained_in


# ------------------------------------------------------------------------------------------------------- the API server
async def test_refused_objects_stall_the_job_with_the_servers_words_and_are_tried_again(world: FakeWorld) -> None:
    world.api.set_status(JOB_PATH, {"operator": "operators/lease"})
    world.api.refuse_next(403)
    passed_s = 0.0
    async with world.operator(clock=lambda: time.monotonic() + passed_s) as operator:
        await world.until(lambda: world.status.get("conditions"))
        await world.until(lambda: condition(world, "Stalled")[0] == "True")
        assert ("True", "ObjectRefused") == condition(world, "Stalled")
        assert {"ObjectRefused": 1} == stalled(operator.metrics)
        passed_s = STALL_RETRY_S
        operator.context.wakeups.wake(world.body["metadata"]["uid"])
        await world.until(lambda: world.status.get("phase") == "Complete")
        assert {} == stalled(operator.metrics)
    assert ("False", "NotStalled") == condition(world, "Stalled")


async def test_a_pod_that_a_quota_refuses_keeps_the_others_from_nothing(world: FakeWorld) -> None:
    """Nobody made the keys of the pods beside it, which kubelet did not start for as long as the quota had no room."""
    world.api.is_over_quota = lambda body: body["metadata"]["name"].startswith("sums-gpu-1-")
    passed_s = 0.0
    async with world.operator(clock=lambda: time.monotonic() + passed_s) as operator:
        await world.until(lambda: {"gpu-0", ROLLOUT_SEAT} == {each.pod.seat for each in world.kubelet.members.values()})
        await world.until(lambda: "ObjectRefused" in str(world.status.get("conditions")))
        world.api.is_over_quota = lambda body: False
        passed_s = STALL_RETRY_S
        operator.context.wakeups.wake(world.body["metadata"]["uid"])
        await world.until(lambda: world.status.get("phase") == "Complete")


async def test_what_was_refused_is_asked_for_once_in_a_while_and_when_a_pod_has_made_room(world: FakeWorld) -> None:
    """Each pass asked for it and for all objects of the job, and a group that starts has hundreds of passes."""
    over_quota = {"sums-gpu-1-1", "sums-gpu-1-2"}
    world.api.is_over_quota = lambda body: body["metadata"]["name"] in over_quota
    stay_in_rollout(world)
    passes = 0

    def looks() -> float:
        nonlocal passes
        passes += 1
        world.kubelet.moved.set()
        return time.monotonic()

    def asked() -> list[str]:
        return [line for line in world.api.requests if "/events" not in line and not line.endswith("/status")]

    async with world.operator(clock=looks) as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        world.api.remove(pod_path("sums-gpu-1-0"))
        await world.until(lambda: "ObjectRefused" in reasons_of_events(world))
        so_far = asked()
        for _ in range(3):
            before = passes
            operator.context.wakeups.wake(world.body["metadata"]["uid"])
            await world.until(lambda before=before: passes > before + 1)  # type: ignore[misc]
        assert so_far == asked()
        world.api.is_over_quota = lambda body: False
        world.api.remove(pod_path("sums-gpu-0-0"))
        await world.until(lambda: world.status["cause"] == "PodReplaced" and world.status["readyReplicas"] == 2)


async def test_pods_that_somebody_deletes_as_they_come_are_made_again_less_and_less_often(world: FakeWorld) -> None:
    """They were made as fast as the API server could, whose calls all jobs share."""

    def delete(event: str, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        if event == "ADDED" and name.startswith("sums-gpu-1-"):
            world.api.remove(pod_path(name))  # before anybody has seen it

    now, looks = 1000.0, 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        world.kubelet.moved.set()
        return now

    world.api.watch("pods", delete)
    async with world.operator(clock=clock) as operator:
        for attempt, delay_s in enumerate([0, 1, 2, 4], start=1):
            now += delay_s
            for _ in range(3):
                before = looks
                operator.context.wakeups.wake(world.body["metadata"]["uid"])
                await world.until(lambda attempt=attempt, before=before: attempt <= made(world) and before < looks)  # type: ignore[misc]
            assert attempt == made(world)


def made(world: FakeWorld) -> int:
    """Return how many pods of the second seat were made, besides one of each other seat."""
    return world.api.requests.count("POST /api/v1/namespaces/default/pods") - 2


@pytest.mark.parametrize("world", [{"spares": 1}], indirect=True)
async def test_a_pod_that_is_refused_cancels_no_deletion_beside_it(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls for pods that were not answered yet were given up at the first refusal, and asked for again 30 s later."""
    stay_in_rollout(world)
    spare, refused, create, delete = pod_path("sums-gpu-1024-0"), asyncio.Event(), Kube.create_pod, Kube.delete_pod

    async def create_and_note(self: Kube, namespace: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        try:
            return await create(self, namespace, body, **options)
        except NotAdmitted:
            task = asyncio.current_task()
            assert task is not None
            task.add_done_callback(lambda _: refused.set())  # not before everybody else knows
            raise

    async def delete_afterwards(self: Kube, namespace: str, name: str, **options: Any) -> None:
        refused.clear()
        await refused.wait()
        await delete(self, namespace, name, **options)

    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout" and spare in world.api.objects)
        world.api.is_over_quota = lambda body: body["metadata"]["name"].startswith("sums-gpu-1-")
        world.api.remove(pod_path("sums-gpu-1-0"))
        await world.until(lambda: "ObjectRefused" in str(world.status["conditions"]))
        monkeypatch.setattr(Kube, "create_pod", create_and_note)
        monkeypatch.setattr(Kube, "delete_pod", delete_afterwards)
        change(world, spares=0)
        await world.until(lambda: spare not in world.api.objects)


@pytest.mark.parametrize("world", [{"spares": 1}], indirect=True)
async def test_a_pod_that_the_server_fails_to_delete_keeps_no_other_from_its_keys(world: FakeWorld) -> None:
    """A webhook for deletions was down, and kubelet started no pod that was made meanwhile."""
    stay_in_rollout(world)
    spare = pod_path("sums-gpu-1024-0")

    def is_deletion(method: str, path: str) -> bool:
        world.kubelet.moved.set()
        return (method, path) == ("DELETE", spare)

    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout" and spare in world.api.objects)
        world.api.panics = is_deletion
        change(world, spares=0)
        await world.until(lambda: f"DELETE {spare}" in world.api.requests)
        world.api.remove(pod_path("sums-gpu-1-0"))
        await world.until(lambda: world.status["cause"] == "PodReplaced")
    assert spare in world.api.objects


async def test_a_job_that_stops_frees_its_pods_whatever_the_server_refuses_of_its_objects(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy of the cluster came later than the job: a member that did not stop kept its devices for ever."""
    passed_s = 0.0
    monkeypatch.setattr("colocated_rl_operator.loop.job_state.TAKE_OVER_S", 0.0)
    world.kubelet.hold("gpu-1", under=lambda target: target.goal is Goal.STOP)
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
    world.api.forbidden = lambda method, path: method == "PATCH" and "/networkpolicies/" in path
    async with world.operator(clock=lambda: time.monotonic() + passed_s) as operator:
        await world.until(lambda: "ObjectRefused" in str(world.status["conditions"]))
        passed_s += 60.0
        change(world, activeDeadlineSeconds=60)
        await world.until(lambda: world.api.objects[pod_path("sums-gpu-0-0")]["status"]["phase"] == "Succeeded")
        passed_s += 2 * STOP_DEADLINE_S
        operator.context.wakeups.wake(world.body["metadata"]["uid"])
        await world.until(lambda: has_failed(world))


async def test_a_job_that_queues_because_the_server_refused_its_pods_says_so(world: FakeWorld) -> None:
    """It reported that there was no pod for as long as it was queued, and nobody saw the policy that denied them."""
    passed_s = 0.0
    world.api.set_status(JOB_PATH, {"operator": "operators/lease"})
    world.api.refuse_next(403)
    async with world.operator(clock=lambda: time.monotonic() + passed_s) as operator:
        await world.until(lambda: "ObjectRefused" in str(world.status.get("conditions")))
        refused = condition_message(world, "Stalled")
        passed_s = 3600.0
        operator.context.wakeups.wake(world.body["metadata"]["uid"])
        await world.until(lambda: world.status.get("phase") == "Queued")
    assert refused in condition_message(world, "Reconciling")


async def test_what_the_server_fails_at_again_and_again_stalls_the_job_as_what_it_refuses(world: FakeWorld) -> None:
    """A panic over one object, or a webhook that is down: asked again each second for ever, and the job said nothing
    but that its pods were starting.
    """
    passed_s, tries = 0.0, 0

    def is_policy(method: str, path: str) -> bool:
        nonlocal tries
        is_it = method == "PATCH" and "/networkpolicies/" in path
        tries += is_it
        world.kubelet.moved.set()
        return is_it

    async def tried_again(operator: WorldOperator) -> None:
        before = tries
        operator.context.wakeups.wake(world.body["metadata"]["uid"])
        await world.until(lambda: tries > before)

    world.api.panics = is_policy
    async with world.operator(clock=lambda: time.monotonic() + passed_s) as operator:
        await world.until(lambda: tries)
        await tried_again(operator)
        assert not world.status["conditions"], "a moment's failure needs no person"
        passed_s = FAILS_S
        await tried_again(operator)
        await world.until(lambda: world.status.get("conditions"))
        assert ("True", "ObjectRefused") == condition(world, "Stalled")
        assert "500 This request caused apiserver to panic" in condition_message(world, "Stalled")
        assert {"ObjectRefused": 1} == stalled(operator.metrics)
        passed_s += STALL_RETRY_S
        await tried_again(operator)
        await world.until(lambda: "ObjectRefused" in reasons_of_events(world))
        world.api.panics = lambda method, path: False
        passed_s += STALL_RETRY_S
        operator.context.wakeups.wake(world.body["metadata"]["uid"])
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert ("False", "NotStalled") == condition(world, "Stalled")
    assert 1 == [event["reason"] for event in world.api.all("events")].count("ObjectRefused")
    assert not [line for line in world.api.requests if line.startswith("PATCH") and "/events/" in line], "said once"


async def test_an_expired_job_that_the_server_fails_to_delete_says_so(world: FakeWorld) -> None:
    passed_s = 0.0
    change(world, ttlSecondsAfterFinished=0)
    world.api.panics = lambda method, path: (method, path) == ("DELETE", JOB_PATH)
    async with world.operator(clock=lambda: time.monotonic() + passed_s) as operator:
        await world.until(lambda: world.status.get("completionTime"))
        await world.until(lambda: f"DELETE {JOB_PATH}" in world.api.requests)
        passed_s = FAILS_S
        operator.context.wakeups.wake(world.body["metadata"]["uid"])
        await world.until(lambda: condition(world, "Stalled") == ("True", "ObjectRefused"))


@pytest.mark.parametrize(("status", "expected"), [(500, [1, 1, 2, 4, 8, 10, 10]), (None, [1] * 7)])
def test_what_the_server_fails_at_is_asked_for_less_and_less_often(status: int | None, expected: list[float]) -> None:
    """A server that does not answer is called as often as before: it would be found again too late."""
    waits, failing_s = list[float](), 0.0
    for _ in expected:
        waits.append(ApiUnreachable("", status).again_s(failing_s=failing_s))
        failing_s += waits[-1]
    assert expected == waits


def condition_message(world: FakeWorld, kind: str) -> str:
    return str(next(item["message"] for item in world.status["conditions"] if item["type"] == kind))


def stalled(metrics: OperatorMetrics) -> dict[str, float]:
    """Jobs that wait for a person, by why: what the alert goes by."""
    found = (each for each in metrics.registry.collect() if each.name == "colocated_rl_operator_jobs_stalled")
    return {sample.labels["reason"]: sample.value for each in found for sample in each.samples if sample.value}


@pytest.mark.parametrize("suspend", [False, True])
async def test_pods_that_the_server_would_refuse_stall_the_job_before_any_is_made(
    world: FakeWorld, suspend: bool
) -> None:
    """Only the server can judge the free-form maps of a template; a job that waits for its release learns of it too."""
    change(world, suspend=suspend, podTemplates={"rollout": {"spec": {"priorityClassName": "nobody-knows"}}})
    world.api.refused_trial = lambda pod: f"no PriorityClass with name {pod['spec']['priorityClassName']} was found"
    passed_s = 0.0
    async with world.operator(clock=lambda: time.monotonic() + passed_s) as operator:
        await world.until(lambda: world.status.get("conditions") and condition(world, "Stalled")[0] == "True")
        message = next(item["message"] for item in world.status["conditions"] if item["type"] == "Stalled")
        assert "422 no PriorityClass with name nobody-knows was found" in message
        assert [] == world.api.all("pods")
        assert [] == world.api.all("secrets")
        world.api.refused_trial = lambda pod: "the admission webhook does not support dry run"
        passed_s = STALL_RETRY_S
        change(world, suspend=False)
        operator.context.wakeups.wake(world.body["metadata"]["uid"])
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert ("False", "NotStalled") == condition(world, "Stalled")
    trials = [line for line in world.api.requests if line.endswith("/pods?dryRun=All")]
    assert 2 == len(trials), "refused, then taken, and not asked at each look"


def with_profiles(**written: Any) -> PodImages:
    profiles = Profiles({name: Profile.model_validate(each) for name, each in written.items()})
    return PodImages(agent="agent", rollout="rollout", gpu="gpu", pull_policy="IfNotPresent", profiles=profiles)


async def test_defaults_of_an_admin_are_tried_before_any_pod_is_made(world: FakeWorld) -> None:
    """The job's own templates are empty, and what they are laid over is the server's to judge as well."""
    world.api.refused_trial = lambda pod: f"no PriorityClass with name {pod['spec'].get('priorityClassName')} was found"
    usual = {"rollout": {"defaults": {"priorityClassName": "nobody-knows"}}}
    async with world.operator(images=with_profiles(default=usual)):
        await world.until(lambda: world.status.get("conditions") and condition(world, "Stalled")[0] == "True")
        assert "no PriorityClass with name" in condition_message(world, "Stalled")
        assert [] == world.api.all("pods")


NVME = {"spec": {"volumes": [{"name": "nvme", "hostPath": {"path": "/mnt/nvme"}}]}}


async def test_pods_come_by_the_paths_of_their_nodes_that_their_profile_allows(world: FakeWorld) -> None:
    """Whoever may make a job has the operator make its pods: what those may have of nodes is an admin's to say."""
    change(world, podTemplates={"gpu": NVME}, profile="nvme")
    stay_in_rollout(world)
    nvme = {"gpu": {"hostPaths": ["/mnt/nvme"]}}
    async with world.operator(images=with_profiles(default=nvme, nvme=nvme | {"namespaces": ["research"]})):
        await world.until(lambda: world.status.get("conditions") and condition(world, "Stalled")[0] == "True")
        message = condition_message(world, "Stalled")
        assert "spec.profile is nvme, and jobs of namespace default may have default:" in message
        assert "profiles.nvme.namespaces" in message
        assert [] == world.api.all("pods")
    async with world.operator(images=with_profiles(default=nvme, nvme={})):
        refused = "gpu pods of profile nvme may not have /mnt/nvme of their node"
        await world.until(lambda: refused in condition_message(world, "Stalled"))
        assert "profiles.nvme.gpu.hostPaths" in condition_message(world, "Stalled")
        assert [] == world.api.all("pods")
    async with world.operator(images=with_profiles(nvme=nvme)):
        await world.until(lambda: world.status.get("phase") == "Rollout")
        assert ("False", "NotStalled") == condition(world, "Stalled")
        epoch = world.status["epoch"]
    async with world.operator():
        await world.until(lambda: world.status["epoch"] > epoch and world.status["phase"] == "Rollout")
        world.kubelet.end(world.kubelet.of_seat("gpu-1").pod.uid)
        world.api.set_status("/api/v1/namespaces/default/pods/sums-gpu-1-0", {"phase": "Failed", "reason": "Evicted"})
        await world.until(lambda: condition(world, "Stalled")[0] == "True")
        assert "sums-gpu-1-1" not in {pod["metadata"]["name"] for pod in world.api.all("pods")}


async def test_users_of_pods_are_those_of_their_namespace_also_of_one_that_is_made_again(world: FakeWorld) -> None:
    """On OpenShift each namespace has a range of its own, and pods with other users are refused there.

    Users are decided at a start: the next operator stalled a job that ran, because the range was gone since.
    """
    namespace = {"metadata": {"name": "default", "annotations": {}}}
    world.api.put("/api/v1/namespaces/default", namespace)
    stay_in_rollout(world)
    async with world.operator(users_of_namespaces=True):
        await world.until(lambda: world.status.get("conditions") and condition(world, "Stalled")[0] == "True")
        message = condition_message(world, "Stalled")
        assert "namespaceUsers" in message
        assert "in default annotation openshift.io/sa.scc.uid-range is ''" in message
        assert [] == world.api.all("pods")
    given = {"openshift.io/sa.scc.uid-range": "1000660000/10000", "openshift.io/sa.scc.supplemental-groups": "77/10000"}
    world.api.put("/api/v1/namespaces/default", {"metadata": {"name": "default", "annotations": given}})

    async def is_made_again(attempt: int) -> None:
        async with world.operator(users_of_namespaces=True):
            await world.until(lambda: (world.status["phase"], world.status.get("lineage")) == ("Rollout", attempt + 1))
            world.kubelet.end(world.kubelet.of_seat("gpu-1").pod.uid)
            world.api.set_status(pod_path(f"sums-gpu-1-{attempt}"), {"phase": "Failed", "reason": "Evicted"})
            await world.until(lambda: world.status["lineage"] == attempt + 2)
            assert ("False", "NotStalled") == condition(world, "Stalled")

    await is_made_again(0)
    world.api.put("/api/v1/namespaces/default", namespace)
    await is_made_again(1)
    contexts = [pod["spec"]["securityContext"] for pod in world.api.all("pods")]
    assert {(1000660000, 77, 77)} == {(each["runAsUser"], each["runAsGroup"], each["fsGroup"]) for each in contexts}


OF_NEWER_SERVERS = {
    "claims": ({"gpus": {"count": 1, "resourceClaimTemplateName": "one"}}, "no dynamic resource allocation"),
    "image": ({"model": {"image": {"reference": "registry.example.com/small"}}}, "no image volumes"),
}


@pytest.mark.parametrize(("spec", "words"), OF_NEWER_SERVERS.values(), ids=OF_NEWER_SERVERS)
async def test_a_job_that_needs_a_newer_server_says_so_before_any_pod_is_made(
    world: FakeWorld, spec: dict[str, Any], words: str
) -> None:
    """It leaves claims and image volumes out of a pod, which ran without its devices or its model, and failed later."""
    change(world, **spec)
    world.api.left_out = ("resourceClaims", "volumes")
    async with world.operator():
        await world.until(lambda: world.status.get("conditions") and condition(world, "Stalled")[0] == "True")
        assert words in condition_message(world, "Stalled")
        assert [] == world.api.all("pods")


async def test_pods_that_are_there_are_not_tried_again_where_a_quota_has_room_for_no_more(world: FakeWorld) -> None:
    """A new leader's trial was refused, and a job that ran was told to be stalled until the quota grew."""
    change(world, podTemplates={"rollout": {"spec": {"priorityClassName": "high"}}})
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        epoch = world.status["epoch"]
    world.api.refused_trial = lambda pod: "exceeded quota"
    async with world.operator():
        await world.until(lambda: world.status["epoch"] > epoch)
        world.kubelet.release("rollout")
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert not {"ObjectRefused"} & reasons_of_events(world)


TAKEN = "/api/v1/namespaces/default/pods/sums-gpu-0-0"


async def test_a_pod_of_a_deleted_job_of_the_same_name_is_waited_for_and_named(world: FakeWorld) -> None:
    """One on a node that is gone does not end, and all that the job said was that it had no pod there."""
    passed_s = 0.0
    ending = {"name": "sums-gpu-0-0", "labels": {}, "deletionTimestamp": "2026-01-01T00:00:00Z"}
    world.api.put(TAKEN, {"metadata": ending, "status": {"phase": "Running"}})
    world.kubelet.moved.clear()
    async with world.operator(clock=lambda: time.monotonic() + passed_s) as operator:
        await world.until(lambda: len(world.kubelet.members) == 2)
        await world.until(lambda: world.status.get("phase") == "Pending")
        passed_s = PROGRESS_S
        operator.context.wakeups.wake(world.body["metadata"]["uid"])
        words = "gpu-0 (no pod: another pod of the name sums-gpu-0-0, most likely of a deleted job, has not ended)"
        await world.until(lambda: words in condition_message(world, "PodsReady"))
        assert "False" == condition(world, "Stalled")[0]
        world.api.remove(TAKEN)
        await world.until(lambda: world.status.get("phase") == "Complete")


async def test_a_pod_of_somebody_elses_that_has_the_name_is_named(world: FakeWorld) -> None:
    """The job waited for it to go, and told nobody."""
    world.api.put(TAKEN, {"metadata": {"name": "sums-gpu-0-0", "labels": {}}, "status": {"phase": "Running"}})
    async with world.operator() as operator:
        await world.until(lambda: world.status.get("conditions"))
        await world.until(lambda: condition(world, "Stalled") == ("True", "ObjectRefused"))
        assert f"{TAKEN} already exists, and is no pod of this job: delete it" in condition_message(world, "Stalled")
        world.api.remove(TAKEN)
        operator.context.wakeups.wake(world.body["metadata"]["uid"])
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert ("False", "NotStalled") == condition(world, "Stalled")


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        (
            {"maxConcurrency": 1000},
            "spec.rollout: maxConcurrency is 1000, and no more than (maxStaleness + 1) * batchSize + spareGroups = 8 "
            "groups are ever admitted: write at most that",
        ),
        (
            {"engine": {"args": ["--port=1"]}},
            "spec.rollout.engine.args.0: --port=1 is or abbreviates a flag of SGLang 0.5.23 that the operator sets, "
            "that no switch survives or that is not supported yet: remove it",
        ),
    ],
    ids=["a rule of the models", "a flag of the engine"],
)
async def test_a_spec_that_the_server_took_and_that_can_t_run_is_named_in_a_condition(
    world: FakeWorld, rollout: dict[str, Any], expected: str
) -> None:
    broken = make_manifest(**SPEC)
    broken["spec"]["rollout"] = broken["spec"]["rollout"] | rollout
    world.api.put(JOB_PATH, broken)
    async with world.operator() as operator:
        await world.until(lambda: world.status.get("conditions"))
        assert {"InvalidSpec": 1} == stalled(operator.metrics)
    assert ("True", "InvalidSpec") == condition(world, "Stalled")
    message = next(item["message"] for item in world.status["conditions"] if item["type"] == "Stalled")
    assert expected == message
    assert not world.api.all("pods")


async def test_an_older_operator_touches_nothing_that_it_does_not_understand(world: FakeWorld) -> None:
    """After a roll-back its loop ended by an error again and again, and only its log said so."""
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
    epoch, pods = world.status["epoch"], world.api.all("pods")
    world.api.set_status(JOB_PATH, {**world.status, "cause": "Moved"})
    async with world.operator():
        await world.until(lambda: condition(world, "Stalled")[0] == "True")
    message = next(item["message"] for item in world.status["conditions"] if item["type"] == "Stalled")
    assert "status.cause is Moved, which this operator does not know" in message
    assert (epoch, "Moved", pods) == (world.status["epoch"], world.status["cause"], world.api.all("pods"))


@pytest.mark.parametrize(
    "newer",
    [{"phase": "Moving"}, {"gpuHolder": "Reference"}, {"placement": "Other", "reference": {"placement": "Other"}}],
)
async def test_words_for_people_that_only_a_newer_operator_knows_keep_an_older_one_from_nothing(
    world: FakeWorld, newer: dict[str, Any]
) -> None:
    """Its loop ended by an error again and again, and only its log said so."""
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
    world.api.set_status(JOB_PATH, {**world.status, **newer})
    world.kubelet.release("rollout")
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert {1: [1, 2, 3]} == world.group.trained_in


async def test_a_change_of_the_spec_in_between_does_not_lose_the_epoch(world: FakeWorld) -> None:
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        change(world, steps=4)
        world.kubelet.release("rollout")
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert 4 == world.status["step"]


async def test_steps_that_are_lowered_complete_the_job(world: FakeWorld) -> None:
    world.kubelet.hold("rollout", under=lambda target: target.type == "rolloutTarget" and target.trained_step == 2)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout" and world.status.get("step") == 2)
        change(world, steps=1, evaluation=None)
        rollout = world.kubelet.of_seat("rollout")
        await world.until(lambda: isinstance(rollout.seen[-1], RolloutTarget) and rollout.seen[-1].last_step == 1)
        world.kubelet.release("rollout")
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert (2, 2) == (world.status["step"], world.status["targetStep"])


async def test_a_step_that_is_made_the_last_one_after_the_fact_is_saved_all_the_same(world: FakeWorld) -> None:
    world.kubelet.hold("rollout", under=lambda target: target.type == "rolloutTarget" and target.trained_step == 1)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout" and world.status.get("step") == 1)
        assert 0 == world.group.saved
        change(world, steps=1)
        world.kubelet.release("rollout")
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert world.group.saved == world.status["step"]


async def test_an_epoch_raised_by_somebody_else_is_gone_beyond_after_a_look_at_the_lease(world: FakeWorld) -> None:
    stay_in_rollout(world)
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
        stolen = world.status["epoch"] + 10
        world.api.set_status(JOB_PATH, {**world.status, "epoch": stolen})
        world.kubelet.release("rollout")
        await world.until(lambda: world.status.get("phase") == "Complete")
    assert world.status["epoch"] > stolen
