"""Wait for a condition of a job: `python -m colocated_rl_operator.helm_test`, which `helm test` runs.

Helm creates the job and removes it. The exit code is 0 once the condition is true, 1 if the job can't reach it any more
or the time is over; either way it prints the job's own message.

| variable | meaning |
|---|---|
| TRIAL_NAMESPACE, TRIAL_JOB | the job |
| TRIAL_CONDITION | type of the condition that has to become true |
| TRIAL_SECONDS | time for it |
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from colocated_rl_operator.clients.cluster import find_cluster
from colocated_rl_operator.clients.errors import (
    ApiError,
    ApiUnreachable,
    BadSetting,
    NotFound,
)
from colocated_rl_operator.clients.kube import Body, Kube
from colocated_rl_operator.planner.reasons import ConditionType

LOOK_AGAIN_S = 1.0


async def verdict(
    kube: Kube, *, namespace: str, name: str, wanted: str, deadline_s: float, look_again_s: float = LOOK_AGAIN_S
) -> tuple[bool, str]:
    """Return whether the condition came true, and the job's message. Raises ApiError if waiting can't help."""
    until, message = time.monotonic() + deadline_s, "no operator has looked at it: does one watch this namespace?"
    while time.monotonic() < until:
        try:
            found = _conditions(await kube.read_job(namespace, name))
        except (ApiUnreachable, NotFound):
            found = {}
        if wanted in found and found[wanted]["status"] == "True":
            return True, f"{wanted}: {found[wanted]['reason']} {found[wanted]['message']}"
        stalled = found.get(ConditionType.STALLED)
        if stalled and stalled["status"] == "True":
            return False, f"{stalled['reason']}: {stalled['message']}"
        if ready := found.get(ConditionType.READY):
            message = f"{ready['reason']}: {ready['message']}"
        await asyncio.sleep(look_again_s)
    return False, f"not {wanted} within {deadline_s:.0f} s; {message}"


def _conditions(job: Body) -> dict[str, Body]:
    return {each["type"]: each for each in (job.get("status") or {}).get("conditions", ())}


async def _main() -> int:
    namespace, name, wanted, seconds = (
        os.environ[f"TRIAL_{each}"] for each in ("NAMESPACE", "JOB", "CONDITION", "SECONDS")
    )
    try:
        async with Kube(find_cluster(os.environ)) as kube:
            came_true, message = await verdict(
                kube, namespace=namespace, name=name, wanted=wanted, deadline_s=float(seconds)
            )
    except (ApiError, BadSetting) as error:
        came_true, message = False, str(error)
    sys.stdout.write(f"job {namespace}/{name}: {message}\n")
    return 0 if came_true else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
