"""Etcd of a running cluster is restored from a snapshot: an administrator's drill, with the real one."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from real_world import LEASE_PATH, RealWorld, open_real_world

from colocated_rl_api.member_wire import PodTarget, RolloutTarget
from colocated_rl_operator.clients.kube import version_of
from fakes.group import GpuPod
from real_operator import PODS, Body, cluster_without_nodes

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

# with the same pods, whichever rank is seen to end first
RETRY: Body = {"onCauses": ["TrainerDied"], "action": "RetryStep"}
SPEC: Body = {"replicas": 2, "steps": 5, "checkpoint": {"everySteps": 1}, "failurePolicy": {"rules": [RETRY]}}
PATCH = "application/merge-patch+json"
ANSWER_S = 120.0
SEEN_S = 60.0  # of a restore


@contextmanager
def stopped(process: int) -> Iterator[None]:
    """Hold what a process has written as it is for a while, as after a kill."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def process_of(program: str, folder: Path) -> int:
    """Return a component of the cluster of that folder: a part of its binary, or a program of an older release."""
    [found] = [
        int(path.parent.name)
        for path in (place / "cmdline" for place in Path("/proc").glob("[0-9]*"))
        if (words := _words(path))
        and (words[1:2] == [program.encode()] or words[0].endswith(f"/{program}".encode()))
        and any(bytes(folder) in word for word in words)
    ]
    return found


def _words(path: Path) -> list[bytes]:
    with suppress(OSError):
        return path.read_bytes().split(b"\0")
    return []


def take_snapshot(cluster: Path, to: Path) -> None:
    with stopped(process_of("etcd", cluster)):
        shutil.copytree(cluster / "etcd", to)


async def restore(cluster: Path, snapshot: Path, world: RealWorld) -> None:
    """Put other data under etcd, and make the API server forget what it knew, as Kubernetes' documentation asks for."""
    etcd, server = process_of("etcd", cluster), process_of("kube-apiserver", cluster)
    os.kill(etcd, signal.SIGSTOP)
    (cluster / "etcd").rename(cluster / "etcd-before")
    shutil.copytree(snapshot, cluster / "etcd")
    os.kill(server, signal.SIGKILL)
    os.kill(etcd, signal.SIGKILL)  # the supervisor starts both again
    async with asyncio.timeout(ANSWER_S):
        while True:
            with suppress(aiohttp.ClientError, AssertionError, OSError):
                await world.api.all(PODS)
                return
            await asyncio.sleep(0.2)  # it is for a server that is asked


async def renewed(world: RealWorld, after: Body) -> None:
    """Wait until the operator has written its Lease once more: a restore of what is no older takes nothing back."""
    async with asyncio.timeout(ANSWER_S):
        while version_of(await world.api.call("GET", LEASE_PATH)) <= version_of(after):  # noqa: ASYNC110
            await asyncio.sleep(0.2)  # it is for a server that is asked


def seal_up_to(world: RealWorld, step: int) -> None:
    """No batch of a later step is sealed."""

    def is_there(target: PodTarget | RolloutTarget) -> bool:
        return isinstance(target, RolloutTarget) and target.trained_step >= step

    world.kubelet.hold("rollout", under=is_there)
    world.kubelet.wake_all()


async def lose_trainer(world: RealWorld, seat: str, *, step: int, lineage: int) -> None:
    """Let the trainer die in that step and lineage: the hold on its pod keeps the group there until then."""
    pod = world.kubelet.of_seat(seat).pod
    assert isinstance(pod, GpuPod)

    def is_in_step(target: PodTarget | RolloutTarget | None) -> bool:
        aim = (target.step, target.lineage) if isinstance(target, PodTarget) else None
        return aim == (step, lineage) and pod.state.rank.lineage == lineage

    world.kubelet.hold(seat, under=is_in_step)
    await world.until(lambda: world.status.get("lineage") == lineage and is_in_step(pod.target))
    assert world.group.trainer_dies(pod)
    world.kubelet.wake_all()


async def in_rollout(world: RealWorld, *, step: int) -> None:
    await world.until(lambda: (step, "Rollout") == (world.status.get("step"), world.status.get("phase")))


async def test_a_job_goes_on_behind_all_that_its_members_know_after_a_restore_of_etcd(tmp_path: Path) -> None:
    """Two lineages and three epochs later etcd knows of none of them, and versions begin again below those known.

    Watches went on from versions that were not there any more, and told of nothing until they were reached again.
    """
    cluster, snapshot = tmp_path / "cluster", tmp_path / "snapshot"
    cluster.mkdir()
    with cluster_without_nodes(cluster) as access:
        async with open_real_world(access, tmp_path, SPEC) as world:
            async with world.operator() as operator:
                seal_up_to(world, 1)
                await in_rollout(world, step=1)
                was = world.status
                take_snapshot(cluster, snapshot)
                lease = await world.api.call("GET", LEASE_PATH)
                seal_up_to(world, 2)
                await lose_trainer(world, "gpu-0", step=2, lineage=was["lineage"])
                await lose_trainer(world, "gpu-1", step=2, lineage=was["lineage"] + 1)
                await in_rollout(world, step=2)
                highest, members = world.status, dict(world.kubelet.members)
                assert highest["lineage"] == was["lineage"] + 2
                assert highest["epoch"] >= was["epoch"] + 3

                await renewed(world, lease)
                await restore(cluster, snapshot, world)
                async with asyncio.timeout(SEEN_S):
                    assert 1 == await operator.process.wait()
                [aborted] = operator.logged("process aborted")
                assert "restored" in aborted["reason"]
            async with world.operator() as operator:
                await world.until(lambda: world.status.get("lineage", 0) > highest["lineage"])
                assert world.status["epoch"] > highest["epoch"]
                await in_rollout(world, step=2)
                assert members == world.kubelet.members, "no pod was lost"

                failed = world.kubelet.of_seat("gpu-1").server.hello
                world.kubelet.end(failed.pod_uid)
                status = {"status": {"phase": "Failed", "message": "a device is not healthy"}}
                await world.api.call("PATCH", f"{PODS}/{failed.pod}/status", status, PATCH)
                await world.until(lambda: world.status.get("cause") == "PodReplaced")
                world.kubelet.release("rollout")
                await world.until(lambda: world.is_complete)
                assert not operator.logged("pass not finished, trying again")
    aims: dict[int, set[tuple[int, int]]] = {}
    for target in (target for member in members.values() for target in member.seen):
        if isinstance(target, PodTarget):
            aims.setdefault(target.epoch, set()).add((target.step, target.lineage))
    assert {1} == set(map(len, aims.values())), "an epoch has one aim"
    assert [1, 2, 3, 4, 5] == sorted({step for steps in world.group.trained_in.values() for step in steps})
