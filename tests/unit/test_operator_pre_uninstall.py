"""The chart runs this check before it is uninstalled."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from colocated_rl_operator.clients.cluster import ClusterAccess
from colocated_rl_operator.clients.kube import Kube
from colocated_rl_operator.pre_uninstall import abandoned, refusal

OURS = "rl-system/rl"


def job(name: str, *, namespace: str = "team", managed_by: str | None = None, **status: Any) -> dict[str, Any]:
    spec = {"managedBy": managed_by} if managed_by else {}
    return {"metadata": {"namespace": namespace, "name": name}, "spec": spec, **({"status": status} if status else {})}


async def asked(jobs: list[dict[str, Any]], *namespaces: str) -> tuple[list[str], list[str]]:
    """Return what would be left half-way, and the paths that were requested for it."""
    paths: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        paths.append(request.path)
        parts = request.path.split("/")
        within = parts[parts.index("namespaces") + 1] if "namespaces" in parts else None
        if within == "lost":
            return web.json_response({"message": "jobs is forbidden"}, status=403)
        return web.json_response({"items": [each for each in jobs if within in (None, each["metadata"]["namespace"])]})

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    async with TestServer(application) as server, Kube(ClusterAccess(str(server.make_url("")).rstrip("/"))) as kube:
        return await abandoned(kube, namespaces=namespaces, release=OURS), paths


@pytest.mark.parametrize(
    ("given", "is_left"),
    [
        (job("some", phase="Rollout", operator=OURS), True),
        (job("some", phase="Training", operator=OURS), True),
        (job("some"), True),
        (job("some", phase="Suspending", operator=OURS), True),
        (job("some", phase="Suspended", operator=OURS), False),
        (job("some", phase="Complete", operator=OURS), False),
        (job("some", phase="Failed", operator=OURS), False),
        (job("some", phase="Rollout", operator="rl-system/another"), False),
        (job("some", managed_by="example.com/another"), False),
    ],
    ids=lambda value: str(value.get("status", {}).get("phase")) if isinstance(value, dict) else "",
)
async def test_job_is_left_half_way_unless_it_rests_or_is_another_operators(given: Any, is_left: bool) -> None:
    found, _ = await asked([given])
    assert (["team/some"] if is_left else []) == found


async def test_only_namespaces_that_are_watched_are_asked_for() -> None:
    jobs = [job("one", namespace="a"), job("two", namespace="b"), job("three", namespace="c")]
    found, paths = await asked(jobs, "c", "a")
    assert ["a/one", "c/three"] == found
    assert all("/namespaces/" in path for path in paths)
    assert ["a/one", "b/two", "c/three"] == (await asked(jobs))[0]


def test_refusal_names_some_jobs_and_says_what_to_do() -> None:
    message = refusal([f"team/job-{number:02}" for number in range(12)])
    assert "12 job(s)" in message
    assert "team/job-09 and 2 more" in message
    assert "--no-hooks" in message


async def test_a_namespace_that_was_lost_holds_up_nothing() -> None:
    """The RoleBinding went with the namespace, and that its jobs could not be listed refused the uninstallation."""
    found, _ = await asked([job("one", namespace="b")], "lost", "b")
    assert ["b/one"] == found
