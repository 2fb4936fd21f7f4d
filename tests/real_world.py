"""A job on a real API server without nodes: the operator as its process, and a kubelet that tests play.

Pods are real objects that no node runs: `FakeKubelet` plays their kubelet, with members on loopback.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import aiohttp
import pytest

from builders import make_job, make_manifest
from colocated_rl_api.member_wire import Goal
from colocated_rl_operator.clients.cluster import ClusterAccess
from fakes.group import ModelGroup
from fakes.member import FakeKubelet
from real_operator import (
    JOBS,
    NAMESPACE,
    OPERATORS,
    PODS,
    AdminApi,
    Body,
    RealOperator,
    kubeconfig_of,
    running_operator,
)

SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"
DEADLINE_S = 120.0  # operators are started meanwhile, on a machine that does much else
CANDIDATE = "lease awaited"
LEASE_PATH = f"/apis/coordination.k8s.io/v1/namespaces/{OPERATORS}/leases/colocated-rl-operator"
LEASE = {"LEASE_DURATION_S": "90", "LEASE_RENEW_DEADLINE_S": "60", "LEASE_RETRY_S": "0.5"}  # no pause costs it


@dataclass
class RealWorld:
    api: AdminApi
    group: ModelGroup
    kubelet: FakeKubelet
    kubeconfig: Path  # of people
    operators_kubeconfig: Path
    job: Body = field(default_factory=dict)
    phases: list[str | None] = field(default_factory=list)  # of the job, each once in a row
    operators: set[str] = field(default_factory=set)  # who run

    @property
    def status(self) -> Body:
        status: Body = self.job.get("status", {})
        return status

    @property
    def is_complete(self) -> bool:
        return self.status.get("phase") == "Complete"

    def condition(self, kind: str) -> Body:
        found: Body = next((item for item in self.status.get("conditions", []) if item["type"] == kind), {})
        return found

    def note_job(self, event: str, job: Body) -> None:
        if job["metadata"]["name"] != self.group.job.name:
            return
        self.job = {} if event == "DELETED" else job
        if self.phases[-1:] != [phase := self.status.get("phase")]:
            self.phases.append(phase)
        self.kubelet.moved.set()

    def note_pod(self, event: str, pod: Body) -> None:
        self.kubelet.note(event, pod)
        self.kubelet.moved.set()

    async def until(self, what: Callable[[], object], *, deadline_s: float = DEADLINE_S) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while not what():
                    self.kubelet.moved.clear()
                    await self.kubelet.moved.wait()
        except TimeoutError:
            pytest.fail(f"did not happen in {deadline_s} s; status {json.dumps(self.status, indent=1)}")

    @asynccontextmanager
    async def operator(
        self, lease: Mapping[str, str] = LEASE, *, kubeconfig: Path | None = None
    ) -> AsyncIterator[RealOperator]:
        """Run an operator until the context ends, by a kill. The next has its name, as a
        container started again, and so its Lease. kubeconfig: of one that is not like the others.
        """
        name = next(name for number in count(1) if (name := f"operator-{number}") not in self.operators)
        self.operators.add(name)
        try:
            async with running_operator(
                kubeconfig or self.operators_kubeconfig, name, lease, self.kubelet.moved.set
            ) as operator:
                yield operator
        finally:
            self.operators.remove(name)

    async def let_lease_run_out(self) -> None:
        """Its holder is gone, or stopped: it ends a second later, and not when all of its time is over."""
        await self.api.call("PATCH", LEASE_PATH, {"spec": {"leaseDurationSeconds": 1}}, "application/merge-patch+json")

    def stay_in_rollout(self) -> None:
        """No batch is sealed."""
        self.kubelet.hold("rollout", under=lambda target: target.goal is Goal.CLIMB)


@asynccontextmanager
async def open_real_world(
    access: ClusterAccess, directory: Path, spec: Body, *, operators: ClusterAccess | None = None
) -> AsyncIterator[RealWorld]:
    """A job on the cluster, with a kubelet for its pods; afterwards nothing of it is left.

    operators: another way to the API server, for the operators alone.
    """
    connector = aiohttp.TCPConnector(ssl=access.ssl_context())
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
        api = AdminApi(access, session)

        async def set_status(pod: Body, status: Body) -> None:
            path = f"{PODS}/{pod['metadata']['name']}/status"
            status = status | {"podIPs": [{"ip": status["podIP"]}]}
            await api.call("PATCH", path, {"status": status}, "application/merge-patch+json")

        async def read_secret(name: str) -> dict[str, str]:
            async with asyncio.timeout(DEADLINE_S):
                while name not in secrets:  # the pod owns it, and so is there before it
                    secret_made.clear()
                    await secret_made.wait()
            return {key: base64.b64decode(value).decode() for key, value in secrets[name]["data"].items()}

        secrets: dict[str, Body] = {}
        secret_made = asyncio.Event()

        def note_secret(event: str, secret: Body) -> None:
            secrets[secret["metadata"]["name"]] = secret
            secret_made.set()

        async def ended(pod: Body) -> None:
            return None  # the server forgets a pod without a node at once

        group = ModelGroup(make_job(**spec))
        kubelet = FakeKubelet(
            group, directory, read_secret=read_secret, set_status=set_status, ended=ended, tasks=tasks
        )
        kubeconfig = _write_kubeconfig(access, directory / "kubeconfig")
        theirs = _write_kubeconfig(operators, directory / "operators-kubeconfig") if operators else kubeconfig
        world = RealWorld(api, group, kubelet, kubeconfig, theirs)
        watches = [
            tasks.create_task(api.watch(PODS, world.note_pod)),
            tasks.create_task(api.watch(JOBS, world.note_job)),
            tasks.create_task(api.watch(SECRETS, note_secret)),
        ]
        try:
            world.job = await api.call("POST", JOBS, make_manifest(**spec))
            yield world
        finally:
            await _clean(api)
            kubelet.end_all()
            for watch in watches:
                watch.cancel()


def _write_kubeconfig(access: ClusterAccess, path: Path) -> Path:
    path.write_text(kubeconfig_of(access))
    path.chmod(0o600)
    return path


async def _clean(api: AdminApi) -> None:
    for job in await api.all(JOBS):
        await api.call("DELETE", f"{JOBS}/{job['metadata']['name']}")
    for job in await api.all(JOBS):  # once it is being deleted, no late call of an operator adds one again
        path = f"{JOBS}/{job['metadata']['name']}"
        await api.call("PATCH", path, {"metadata": {"finalizers": None}}, "application/merge-patch+json")
    for secret in await api.all(SECRETS):  # of pods, which no collector of garbage looks after here
        await api.call("DELETE", f"{SECRETS}/{secret['metadata']['name']}")
    for pod in await api.all(PODS):
        await api.call("DELETE", f"{PODS}/{pod['metadata']['name']}", {"gracePeriodSeconds": 0})
    await api.call("DELETE", LEASE_PATH)
