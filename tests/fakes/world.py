"""A world for an operator: an API server in memory, a kubelet whose pods are simulated members behind real TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kopf import DaemonStoppingReason
from prometheus_client import CollectorRegistry

from builders import make_job, make_manifest
from colocated_rl_api import names
from colocated_rl_api.member_wire import Goal
from colocated_rl_api.rungs import Rung
from colocated_rl_operator.clients.authority import Authority, Keyring
from colocated_rl_operator.clients.events import Events
from colocated_rl_operator.clients.kube import Kube
from colocated_rl_operator.clients.members import Members
from colocated_rl_operator.loop.doors import Doors
from colocated_rl_operator.loop.drive import OperatorContext, drive_job, note_job, note_pod
from colocated_rl_operator.loop.pods import Pods
from colocated_rl_operator.loop.wakeups import Wakeups
from colocated_rl_operator.manifests.resources import PodImages
from colocated_rl_operator.metrics import OperatorMetrics
from fakes.api_server import FakeApiServer
from fakes.group import ModelGroup
from fakes.member import FakeKubelet

JOB_PATH = f"/apis/{names.API_VERSION}/namespaces/default/{names.PLURAL}/sums"
SPEC: dict[str, Any] = {"replicas": 2, "steps": 3, "checkpoint": {"everySteps": 2}, "evaluation": {"everySteps": 2}}
DEADLINE_S = 60.0
TOKEN_KEY = b"k" * 32


@dataclass
class Stopper:
    """A Stopper is what kopf hands to a daemon."""

    reason: DaemonStoppingReason = field(default_factory=lambda: DaemonStoppingReason(0))
    event: asyncio.Event = field(default_factory=asyncio.Event)

    def __bool__(self) -> bool:
        return self.event.is_set()

    async def wait(self) -> None:
        await self.event.wait()

    def was_deleted(self) -> bool:
        return DaemonStoppingReason.RESOURCE_DELETED in self.reason

    def set(self, reason: DaemonStoppingReason) -> None:
        self.reason = reason
        self.event.set()


@dataclass
class WorldOperator:
    context: OperatorContext
    stopper: Stopper
    task: asyncio.Task[None]

    @property
    def metrics(self) -> OperatorMetrics:
        return self.context.doors.metrics


@dataclass
class FakeWorld:
    """An API server, a kubelet, and as many operators as a test starts."""

    api: FakeApiServer
    group: ModelGroup
    kubelet: FakeKubelet
    keyring: Keyring
    tasks: asyncio.TaskGroup
    daemon: asyncio.Task[None] | None = None  # the newest

    @asynccontextmanager
    async def operator(self, **options: Any) -> AsyncIterator[WorldOperator]:
        """One process of it; leaving the context is kill -9."""
        metrics, wakeups, pods, stopper = OperatorMetrics(CollectorRegistry()), Wakeups(), Pods(), Stopper()
        async with (
            Kube(self.api.access, count=metrics.count_request) as kube,
            Members(
                self.keyring.operator_context(), wakeups.wake, lost=metrics.lost.inc, renewals=self.keyring
            ) as members,
        ):
            images = PodImages(agent="agent", rollout="rollout", gpu="gpu", pull_policy="IfNotPresent")
            usual: dict[str, Any] = {"release": "operators/lease", "images": images}
            doors = Doors(
                kube=kube,
                members=members,
                events=Events(kube, instance="test"),
                pods=pods,
                keyring=self.keyring,
                metrics=metrics,
                namespace="operators",
                confirm=_confirmed,
                **usual | options,
            )
            context = OperatorContext(self.api.access, doors, wakeups)
            watching = len(self.api.watchers)
            self.api.watch("pods", lambda event, body: note_pod({"type": event, "object": body}, context))
            self.api.watch(names.PLURAL, lambda event, body: note_job({"type": event, "object": body}, context))
            task = asyncio.create_task(
                drive_job(self.body, stopper, context, was_deleted=stopper.was_deleted), name="daemon"
            )
            task.add_done_callback(lambda task: self.kubelet.moved.set())
            self.daemon = task
            try:
                yield WorldOperator(context, stopper, task)
            finally:
                task.cancel()
                context.close()
                del self.api.watchers[watching:]
                await asyncio.gather(task, return_exceptions=True)

    @property
    def body(self) -> dict[str, Any]:
        return self.api.objects[JOB_PATH]

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.api.objects[JOB_PATH].get("status", {})
        return status

    async def until(self, what: Callable[[], object]) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not what():
                    if self.daemon is not None and self.daemon.done() and not self.daemon.cancelled():
                        self.daemon.result()  # an error of its loop is the test's
                    self.kubelet.moved.clear()
                    await self.kubelet.moved.wait()
        except TimeoutError:
            pytest.fail(f"did not happen in {DEADLINE_S} s; status {self.status}")


async def _confirmed() -> None:
    return None


@asynccontextmanager
async def open_world(directory: Path, spec: dict[str, Any]) -> AsyncIterator[FakeWorld]:
    """A job with this spec, and nobody who looks after it yet."""
    async with asyncio.TaskGroup() as tasks, FakeApiServer() as api:
        group = ModelGroup(make_job(**spec))

        async def set_status(pod: dict[str, Any], status: dict[str, Any]) -> None:
            path = f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}"
            if path in api.objects:
                placed = api.objects[path]["spec"] | {"nodeName": node_for(pod)}
                api.put(path, {**api.objects[path], "spec": placed})
                api.set_status(path, status)

        async def ended(pod: dict[str, Any]) -> None:
            api.remove(f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}")

        async def read_secret(name: str) -> dict[str, str]:
            made, path = asyncio.Event(), f"/api/v1/namespaces/default/secrets/{name}"
            api.watch("secrets", lambda event, body: made.set())
            async with asyncio.timeout(DEADLINE_S):
                while path not in api.objects:  # the pod owns it, and so is there before it
                    made.clear()
                    await made.wait()
            files: dict[str, str] = api.objects[path]["stringData"]
            return files

        kubelet = FakeKubelet(
            group, directory, read_secret=read_secret, set_status=set_status, ended=ended, tasks=tasks
        )
        api.watch("pods", kubelet.note)
        for plural in ("pods", "events", names.PLURAL):
            api.watch(plural, lambda event, body: kubelet.moved.set())
        api.put(JOB_PATH, make_manifest(**spec))
        yield FakeWorld(api, group, kubelet, Keyring(Authority.new(), TOKEN_KEY), tasks)
        kubelet.end_all()


def node_for(pod: dict[str, Any]) -> str:
    """Each seat has a node that it stands on, or the next one that its pod does not avoid."""
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [])
    wanted = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    terms = [*terms, *(each["preference"] for each in wanted)]
    avoided = {name for term in terms for field in term["matchFields"] for name in field["values"]}
    first = int(pod["metadata"]["labels"].get(names.REPLICA_LABEL, 9))
    return next(name for number in range(first, first + 20) if (name := f"node-{number}") not in avoided)


def stay_in_rollout(world: FakeWorld) -> None:
    """No batch is sealed."""
    world.kubelet.hold("rollout", under=lambda target: target.goal is Goal.CLIMB)


def condition(world: FakeWorld, kind: str) -> tuple[str, str]:
    found = next(item for item in world.status["conditions"] if item["type"] == kind)
    return found["status"], found["reason"]


def has_failed(world: FakeWorld) -> bool:
    """Return whether the job has failed and every member has stopped."""
    return any((item["type"], item["status"]) == ("Failed", "True") for item in world.status.get("conditions", []))


def stood(world: FakeWorld, rung: Rung, *, step: int) -> list[bool]:
    """Return, for each pod, whether it has reached `rung` in the climb to `step`."""
    ladder, stood = world.group.ladder, world.group.stood
    return [
        pod.target is not None and pod.target.step == step and ladder.reaches(stood[pod.target.epoch][pod.seat], rung)
        for pod in world.group.pods
    ]


def change(world: FakeWorld, **spec: Any) -> None:
    """A person edits the spec."""
    body = world.api.objects[JOB_PATH]
    world.api.put(JOB_PATH, {**body, "spec": {**body["spec"], **spec}})
