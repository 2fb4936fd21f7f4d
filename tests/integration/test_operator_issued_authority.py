"""An authority that cert-manager issues, under a running job: the operator follows each renewal of its Secret."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from issued_authority import (
    FOLLOWS,
    ISSUED,
    SECRETS,
    must_follow_a_renewal_under_a_running_job,
    own,
    taken,
)
from real_world import RealWorld, open_real_world

from colocated_rl_operator.clients.authority import SECRET_NAME, Authority
from colocated_rl_operator.clients.cluster import ClusterAccess
from fakes.issuer import issued_files
from real_operator import OPERATORS

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
async def world(access: ClusterAccess, operators: ClusterAccess, tmp_path: Path) -> AsyncIterator[RealWorld]:
    """Operators have the account of the chart."""
    async with open_real_world(access, tmp_path, {"replicas": 2, "steps": 3}, operators=operators) as world:
        await forget(world)  # the operators of other tests have made one
        try:
            yield world
        finally:
            await forget(world)


async def forget(world: RealWorld) -> None:
    for name in (ISSUED, SECRET_NAME):
        if await world.api.call("GET", f"{SECRETS}/{name}"):
            await world.api.call("DELETE", f"{SECRETS}/{name}")


async def issue(world: RealWorld) -> Authority:
    """Make the Secret, or make it again, as cert-manager does."""
    files = issued_files()
    data = {name: base64.b64encode(content).decode() for name, content in files.items()}
    metadata = {"name": ISSUED, "namespace": OPERATORS, "annotations": {"cert-manager.io/certificate-name": ISSUED}}
    secret = {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": metadata, "data": data}
    path = f"{SECRETS}/{ISSUED}"
    is_there = await world.api.call("GET", path)
    await world.api.call("PUT" if is_there else "POST", path if is_there else SECRETS, secret)
    return Authority.issued(files)


async def test_a_renewal_is_followed_in_steps_under_a_running_job_and_by_the_next_operator(world: RealWorld) -> None:
    await must_follow_a_renewal_under_a_running_job(world, issue)


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
