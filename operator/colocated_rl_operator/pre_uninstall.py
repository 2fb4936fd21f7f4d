"""Check that the operator may go: `python -m colocated_rl_operator.pre_uninstall`, a hook of the chart.

The exit code is 1 while it has jobs that are neither over nor suspended, with their names and what to do: without an
operator no GPU of theirs changes hands again, and deleting them waits for a finalizer that nobody removes. It is 0 if
the operator may go.
"""

from __future__ import annotations

import asyncio
import os
import sys

from colocated_rl_api import names
from colocated_rl_api.job_status import Phase
from colocated_rl_operator.clients.cluster import find_cluster
from colocated_rl_operator.clients.errors import ApiError, BadSetting, NotAdmitted, NotFound
from colocated_rl_operator.clients.kube import Body, Kube

AT_REST = {Phase.COMPLETE.value, Phase.FAILED.value, Phase.SUSPENDED.value}
NAMED_AT_MOST = 10


async def abandoned(kube: Kube, *, namespaces: tuple[str, ...], release: str) -> list[str]:
    """Return the jobs of `release` that would be left half-way, as NAMESPACE/NAME. Raises ApiError.

    namespaces: those to list; all when empty.
    """
    jobs = [job for namespace in namespaces or (None,) for job in await _jobs_in(kube, namespace)]
    return sorted(f"{job['metadata']['namespace']}/{job['metadata']['name']}" for job in jobs if _is_left(job, release))


async def _jobs_in(kube: Kube, namespace: str | None) -> list[Body]:
    try:
        return await kube.list_jobs(namespace)
    except NotAdmitted:
        if namespace is None:
            raise
        return []  # gone, or its people took the operator's rights away: it does nothing there as it is


def _is_left(job: Body, release: str) -> bool:
    status = job.get("status") or {}
    is_managed = job["spec"].get("managedBy", names.OPERATOR) == names.OPERATOR
    return is_managed and status.get("operator") in (None, release) and status.get("phase") not in AT_REST


def refusal(jobs: list[str]) -> str:
    named = ", ".join(jobs[:NAMED_AT_MOST]) + (f" and {len(jobs) - NAMED_AT_MOST} more" if jobs[NAMED_AT_MOST:] else "")
    return (
        f"nothing was uninstalled: {len(jobs)} job(s) would be left half-way: {named}. Let them end, suspend them "
        "(kubectl crlj suspend) or delete them; or uninstall all the same with helm uninstall --no-hooks"
    )


async def _main() -> int:
    namespaces = tuple(name for name in os.environ.get("WATCH_NAMESPACES", "").split(",") if name)
    release = f"{os.environ.get('OPERATOR_NAMESPACE', '')}/{os.environ.get('LEASE_NAME', '')}"
    try:
        async with Kube(find_cluster(os.environ)) as kube:
            jobs = await abandoned(kube, namespaces=namespaces, release=release)
    except NotFound:
        return 0  # without the CRD there are no jobs
    except (ApiError, BadSetting) as error:
        sys.stderr.write(f"nothing was uninstalled: jobs can't be listed: {error}\n")
        return 1
    if jobs:
        sys.stderr.write(f"{refusal(jobs)}\n")
    return 1 if jobs else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
