"""Etcd of a running cluster is restored from a snapshot: the drill of an administrator, with the real one."""

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
from real_world import World, open_real_world

from colocated_rl_api.member_wire import PodTarget, RolloutTarget
from fakes.group import GpuPod
from real_operator import PODS, Body, cluster_without_nodes

pytestmark = pytest.mark.cluster

SPEC: Body = {"replicas": 2, "steps": 5, "checkpoint": {"everySteps": 1}}
PATCH = "application/merge-patch+json"
ANSWER_S = 120.0


@contextmanager
def stopped(process: int) -> Iterator[None]:
    """What a process has written stays as it is for a while, as after a kill."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def process_of(program: str, folder: Path) -> int:
    """Return a component of the cluster of that folder."""
    [found] = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if (words := _words(path))[1:2] == [program.encode()] and any(bytes(folder) in word for word in words)
    ]
    return found


def _words(path: Path) -> list[bytes]:
    with suppress(OSError):
        return path.read_bytes().split(b"\0")
    return []


def take_snapshot(cluster: Path, to: Path) -> None:
    with stopped(process_of("etcd", cluster)):
        shutil.copytree(cluster / "etcd", to)


async def restore(cluster: Path, snapshot: Path, world: World) -> None:
    """As the documentation of Kubernetes says: other data under etcd, and API servers that forget what they knew."""
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


def hold_after(world: World, step: int) -> None:
    """No batch of a later step is sealed."""

    def is_there(target: PodTarget | RolloutTarget) -> bool:
        return isinstance(target, RolloutTarget) and target.trained_step >= step

    world.kubelet.hold("rollout", under=is_there)


async def lose_trainers(world: World, *, lineage: int) -> None:
    member = world.kubelet.of_seat("gpu-0")
    assert isinstance(member.pod, GpuPod)
    world.group.trainer_dies(member.pod)
    member.poke()
    await world.until(lambda: world.status.get("lineage") == lineage and world.status.get("phase") == "Rollout")


async def test_a_job_goes_on_behind_all_that_its_members_know_after_a_restore_of_etcd(tmp_path: Path) -> None:
    """Two lineages and three epochs later etcd knows of none of them; then a pod fails, under an old version."""
    cluster = tmp_path / "cluster"
    cluster.mkdir()
    with cluster_without_nodes(cluster) as access:
        async with open_real_world(access, tmp_path, SPEC) as world, world.operator() as operator:
            hold_after(world, 1)
            await world.until(lambda: world.status.get("step") == 1 and world.status.get("phase") == "Rollout")
            was = world.status
            take_snapshot(cluster, tmp_path / "snapshot")
            await lose_trainers(world, lineage=was["lineage"] + 1)
            hold_after(world, 2)
            world.kubelet.poke_all()
            await world.until(lambda: world.status.get("step") == 2 and world.status.get("phase") == "Rollout")
            await lose_trainers(world, lineage=was["lineage"] + 2)
            highest = world.status
            assert highest["epoch"] >= was["epoch"] + 3
            targets = {member.pod.uid: member.pod for member in world.kubelet.members.values()}

            await restore(cluster, tmp_path / "snapshot", world)
            await world.until(lambda: world.status.get("lineage", 0) > highest["lineage"])
            assert world.status["epoch"] > highest["epoch"]
            await world.until(lambda: world.status.get("step") == 2 and world.status.get("phase") == "Rollout")
            assert targets.keys() == world.kubelet.members.keys(), "no pod was lost"

            failed = world.kubelet.of_seat("gpu-1").server.hello
            world.kubelet.end(failed.pod_uid)
            status = {"status": {"phase": "Failed", "message": "a device is not healthy"}}
            await world.api.call("PATCH", f"{PODS}/{failed.pod}/status", status, PATCH)
            await world.until(lambda: world.status.get("cause") == "PodReplaced")
            world.kubelet.let_go("rollout")
            await world.until(lambda: world.is_complete)
            assert not operator.said("pass not finished, trying again")
    assert [1, 2, 3, 4, 5] == sorted({step for steps in world.group.trained_in.values() for step in steps})
