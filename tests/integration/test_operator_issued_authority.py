"""An authority that cert-manager issues, under a running job: the operator follows each renewal of its Secret."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from real_world import DEADLINE_S, LEASE, RealWorld, open_real_world

from colocated_rl_operator.clients.authority import SECRET_NAME, Authority
from colocated_rl_operator.clients.cluster import ClusterAccess
from fakes.issuer import issued_files
from real_operator import OPERATORS

pytestmark = pytest.mark.cluster

SECRETS = f"/api/v1/namespaces/{OPERATORS}/secrets"
FOLLOWS = {**LEASE, "KEYS_CHECK_S": "0.2", "AUTHORITY_SECRET": "issued"}


@pytest.fixture
async def world(access: ClusterAccess, tmp_path: Path) -> AsyncIterator[RealWorld]:
    async with open_real_world(access, tmp_path, {"replicas": 2, "steps": 3}) as world:
        await forget(world)  # the operators of other tests have made one
        try:
            yield world
        finally:
            await forget(world)


async def forget(world: RealWorld) -> None:
    for name in ("issued", SECRET_NAME):
        if await world.api.call("GET", f"{SECRETS}/{name}"):
            await world.api.call("DELETE", f"{SECRETS}/{name}")


async def issue(world: RealWorld) -> Authority:
    """Make the Secret, or make it again, as cert-manager does."""
    files = issued_files()
    data = {name: base64.b64encode(content).decode() for name, content in files.items()}
    metadata = {"name": "issued", "namespace": OPERATORS, "annotations": {"cert-manager.io/certificate-name": "issued"}}
    secret = {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": metadata, "data": data}
    path = f"{SECRETS}/issued"
    is_there = await world.api.call("GET", path)
    await world.api.call("PUT" if is_there else "POST", path if is_there else SECRETS, secret)
    return Authority.issued(files)


async def own(world: RealWorld) -> Authority | None:
    """Return the authority in the operator's own Secret."""
    found = await world.api.call("GET", f"{SECRETS}/{SECRET_NAME}")
    return Authority.read({name: base64.b64decode(data) for name, data in found["data"].items()}) if found else None


async def taken(world: RealWorld, issued: Authority) -> list[Authority]:
    """Return the authorities that the operator had on its way to the issued one alone."""
    seen = list[Authority]()
    async with asyncio.timeout(DEADLINE_S):
        while not seen or (seen[-1].certificate, seen[-1].others) != (issued.certificate, ()):
            present = await own(world)
            if present is not None and (not seen or seen[-1].files() != present.files()):
                seen.append(present)
            await asyncio.sleep(0.02)
    return seen


def issuers(world: RealWorld) -> set[str]:
    """Return whose certificates the members have."""
    keys = [member.server.hello.keys for member in world.kubelet.members.values()]
    return {each.issuer for each in keys if each is not None}


async def test_a_renewal_is_followed_in_steps_under_a_running_job_and_by_the_next_operator(world: RealWorld) -> None:
    """No connection ends, no pod is made again, and the former authority is trusted by nobody in the end."""
    world.stay_in_rollout()
    first = await issue(world)
    async with world.operator(FOLLOWS) as operator:
        await world.until(lambda: world.status.get("phase") == "Rollout")
        assert [first.files()] == [each.files() for each in await taken(world, first)]
        before, members = issuers(world), dict(world.kubelet.members)
        second = await issue(world)
        former, both, swapped, last = await taken(world, second)
        assert [former.files(), last.files()] == [first.files(), second.files()]
        assert (first.certificate, (second.certificate,)) == (both.certificate, both.others)
        assert (second.certificate, (first.certificate,)) == (swapped.certificate, swapped.others)
        async with asyncio.timeout(DEADLINE_S):
            while len(issuers(world)) > 1 or issuers(world) == before:  # noqa: ASYNC110 - nobody is told of new keys
                await asyncio.sleep(0.05)
        assert members == world.kubelet.members
        assert [] == operator.logged("member lost")
    third = await issue(world)
    async with world.operator(FOLLOWS):
        assert third.files() == (await taken(world, third))[-1].files()
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
    assert (0, 1) == (world.status["restarts"], world.status["lineage"])


async def test_jobs_of_an_operator_that_made_its_own_authority_get_to_the_issued_one(world: RealWorld) -> None:
    world.stay_in_rollout()
    async with world.operator():
        await world.until(lambda: world.status.get("phase") == "Rollout")
    made = await own(world)
    assert made is not None
    async with world.operator(FOLLOWS) as operator:
        await world.until(lambda: operator.logged("issued authority not followed, trying again"))
        [line, *_] = operator.logged("issued authority not followed, trying again")
        assert "describe certificate" in line["reason"]
        issued = await issue(world)
        seen = await taken(world, issued)
        assert made.files() == seen[0].files()
        world.kubelet.release("rollout")
        await world.until(lambda: world.is_complete)
    assert (0, 1) == (world.status["restarts"], world.status["lineage"])
