"""An authority that somebody else issues, under a running job: what holds whoever issues it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable

from real_world import DEADLINE_S, LEASE, RealWorld

from colocated_rl_operator.clients.authority import SECRET_NAME, Authority
from real_operator import OPERATORS

SECRETS = f"/api/v1/namespaces/{OPERATORS}/secrets"
ISSUED = "colocated-rl-issued"  # as the chart has it
FOLLOWS = {**LEASE, "KEYS_CHECK_S": "0.2", "AUTHORITY_SECRET": ISSUED}

Issue = Callable[[RealWorld], Awaitable[Authority]]
"""Makes the Secret, or makes it again with another key, and returns the authority in it."""


async def files_of(world: RealWorld, name: str) -> dict[str, bytes]:
    """Return the files of a Secret of the operator's namespace; none if it is not there."""
    found = await world.api.call("GET", f"{SECRETS}/{name}")
    return {file: base64.b64decode(data) for file, data in found["data"].items()} if found else {}


async def own(world: RealWorld) -> Authority | None:
    """Return the authority in the operator's own Secret."""
    files = await files_of(world, SECRET_NAME)
    return Authority.read(files) if files else None


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


async def must_follow_a_renewal_under_a_running_job(world: RealWorld, issue: Issue) -> None:
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
