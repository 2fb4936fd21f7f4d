"""Two nodes in racks, with two simulated devices each, and the operator as its process: where gangs find room.

Pods have images that nobody has: they are placed and never run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from real_world import DEADLINE_S, LEASE

from builders import make_manifest
from colocated_rl_api import names
from colocated_rl_operator.clients.cluster import ClusterAccess
from real_operator import JOBS, PODS, AdminApi, Body, kubeconfig_of, running_operator

NODES = "/api/v1/nodes"
TWO_NODES = ("--nodes=2", "--extended-resource=example.com/gpu=2")  # options of the cluster
NEVER_RUN = dict.fromkeys(("AGENT_IMAGE", "ROLLOUT_IMAGE", "GPU_IMAGE"), "nobody/has:it")
OPERATOR = {**LEASE, **NEVER_RUN, "REQUEST_DISK": "false"}  # which the nodes of this cluster do not count
MERGE = "application/merge-patch+json"
RACK = "example.com/rack"
GPUS = {"count": 2, "resourceName": "example.com/gpu"}
VOLUME = {"volume": {"storageClassName": "immediate"}}  # on no node in particular
ANYWHERE: Body = {"storage": VOLUME, "checkpoint": VOLUME, "model": {"image": {"reference": "nobody/has:it"}}}


@dataclass
class Racks:
    """Two nodes, that may be open to pods and that stand in racks."""

    api: AdminApi

    async def until(self, what: Callable[[], Coroutine[None, None, object]], description: str) -> None:
        last: object = None
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not (last := await what()):  # noqa: ASYNC110 - it is for a server that is asked
                    await asyncio.sleep(0.2)
        except TimeoutError:
            pods = [(pod["metadata"]["name"], pod["spec"].get("nodeName"), pod["status"]) for pod in await self.pods()]
            pytest.fail(f"{description} not within {DEADLINE_S} s: {last}, {pods}")

    async def place(self, *racks: str | None) -> None:
        """Put each node into a rack, open; None: closed."""
        for node, rack in zip(await self.api.all(NODES), racks, strict=True):
            change = {"metadata": {"labels": {RACK: rack}}, "spec": {"unschedulable": rack is None}}
            await self.api.call("PATCH", f"{NODES}/{node['metadata']['name']}", change, MERGE)

    async def submit(self, **spec: Any) -> None:
        job = make_manifest(**{"replicas": 2, "gpus": GPUS, **ANYWHERE, **spec})
        await self.api.call("POST", JOBS, job)
        await self.until(self.has_both, "both pods are there")

    async def pods(self) -> list[Body]:
        """Return the pods with devices."""
        found = await self.api.all(PODS)
        return [pod for pod in found if pod["metadata"]["labels"].get(names.ROLE_LABEL) in names.GPU_ROLES]

    async def has_both(self) -> bool:
        return len(await self.pods()) == 2

    async def nodes(self) -> list[str]:
        """Return the nodes that pods with devices have: a pod without one holds no device."""
        return sorted(pod["spec"]["nodeName"] for pod in await self.pods() if "nodeName" in pod["spec"])

    async def is_refused(self) -> bool:
        """Return whether the scheduler has tried to place each of them, in vain."""
        conditions = [
            {each["type"]: each["status"] for each in pod["status"].get("conditions", ())} for pod in await self.pods()
        ]
        return len(conditions) == 2 and all(each.get("PodScheduled") == "False" for each in conditions)

    async def are_placed(self) -> bool:
        return len(await self.nodes()) == 2

    async def wait_for_room(self) -> None:
        """Two pods with room for one: none gets a node, and so no device, until there is room for both."""
        await self.place("a", None)
        await self.submit()
        await self.until(self.is_refused, "the scheduler has tried")
        assert [] == await self.nodes()
        await self.place("a", "b")
        await self.until(self.are_placed, "both are placed")


@asynccontextmanager
async def racks_of(access: ClusterAccess, directory: Path, settings: Mapping[str, str]) -> AsyncIterator[Racks]:
    """Run an operator beside the racks; afterwards nothing of its job is left. settings: further ones of its."""
    kubeconfig = directory / "kubeconfig"
    kubeconfig.write_text(kubeconfig_of(access))
    connector = aiohttp.TCPConnector(ssl=access.ssl_context())
    async with aiohttp.ClientSession(connector=connector) as session:
        racks = Racks(AdminApi(access, session))
        async with running_operator(kubeconfig, "operator", {**OPERATOR, **settings}):
            try:
                yield racks
            finally:
                await racks.api.call("PATCH", f"{JOBS}/sums", {"metadata": {"finalizers": None}}, MERGE)
                await racks.api.call("DELETE", f"{JOBS}/sums")
                for pod in await racks.api.all(PODS):
                    await racks.api.call("DELETE", f"{PODS}/{pod['metadata']['name']}", {"gracePeriodSeconds": 0})
                await racks.place(None, None)
