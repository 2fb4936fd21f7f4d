"""The rights that the chart grants are the calls that the operator makes.

One too few fails late, one too many is a hole.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from contract.api_server import Document
from contract.test_chart_rendering import CHART, NAMESPACE, rendered

from colocated_rl_api import names
from colocated_rl_operator.clients.cluster import ClusterAccess
from colocated_rl_operator.clients.kube import Kube
from colocated_rl_operator.manifests.gangs import VERSIONS

pytestmark = pytest.mark.cluster

JOBS = "jobs"


class Right(NamedTuple):
    namespace: str
    group: str
    resource: str
    verb: str


KOPF = {
    Right(JOBS, group, resource, verb)
    for group, resource, verbs in (
        (names.GROUP, names.PLURAL, ("list", "watch", "patch")),  # patch: its finalizer
        ("", "pods", ("list", "watch")),
    )
    for verb in verbs
}
GARBAGE_COLLECTION = {Right(JOBS, names.GROUP, f"{names.PLURAL}/finalizers", "update")}  # for blockOwnerDeletion

THING = {"metadata": {"name": "some"}}
APPLIED = (
    *(("v1", "ConfigMap"), ("networking.k8s.io/v1", "NetworkPolicy")),
    ("policy/v1", "PodDisruptionBudget"),
)
GROUPS = [{"apiVersion": version, "kind": "PodGroup", **THING} for version in VERSIONS.values()]
GANGS = {
    "apply": [{"namespace": JOBS, "body": group} for group in GROUPS],
    "delete_group": [{"namespace": JOBS, "group": group} for group in GROUPS],
}
"""Calls of an operator that has gangs to make."""
TAINTS = {"taint_node": [{"name": "some", "taint": {"key": "some"}}]}
"""Calls of an operator that taints nodes."""
USERS = {"read_namespace": [{"name": JOBS}]}
"""Calls of an operator that takes users from the range of a namespace."""
CALLS: dict[str, list[dict[str, Any]]] = {
    "read_job": [{"namespace": JOBS, "name": "some"}],
    "list_jobs": [{"namespace": JOBS}],
    "write_status": [{"namespace": JOBS, "name": "some", "resource_version": "1", "status": {}}],
    "delete_job": [{"namespace": JOBS, "name": "some", "uid": "some"}],
    "drop_finalizer": [{"namespace": JOBS, "name": "some", "uid": "some"}],
    "list_pods": [{"namespace": JOBS, "job_uid": "some"}],
    "list_readers": [{"namespace": JOBS, "job": "some"}],
    "create_pod": [{"namespace": JOBS, "pod": THING}],
    "delete_pod": [{"namespace": JOBS, "name": "some", "uid": "some"}],
    "apply": [{"namespace": JOBS, "body": {"apiVersion": api, "kind": kind, **THING}} for api, kind in APPLIED],
    "delete_group": [],
    "taint_node": [],
    "read_namespace": [],
    "replace_secret": [],
    "create_claim": [{"namespace": JOBS, "claim": THING}],
    "read_revision": [{"namespace": JOBS, "name": "some"}],
    "create_revision": [{"namespace": JOBS, "revision": THING}],
    "delete_revision": [{"namespace": JOBS, "name": "some"}],
    "create_secret": [{"namespace": namespace, "secret": THING} for namespace in (JOBS, NAMESPACE)],
    "read_secret": [{"namespace": NAMESPACE, "name": "some"}],
    "create_event": [{"namespace": JOBS, "event": THING}],
    "repeat_event": [{"namespace": JOBS, "name": "some", "series": {}}],
    "read_lease": [{"namespace": NAMESPACE, "name": "some"}],
    "create_lease": [{"namespace": NAMESPACE, "lease": THING}],
    "replace_lease": [{"namespace": NAMESPACE, "lease": THING}],
}
"""Every call of `Kube`, in each namespace where the operator makes it."""


def right_of(method: str, path: str) -> Right:
    """Return the right that the API server would ask for."""
    parts = path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
    if rest[0] != "namespaces":
        rest = ["namespaces", JOBS, *rest]  # of the whole cluster
    if len(rest) == 2:
        rest = [*rest, *rest]  # a namespace is in itself
    namespace, resource, *named = rest[1:]
    if len(named) == 2:
        resource = f"{resource}/{named[1]}"
    reading = "get" if named else "list"
    verb = {"GET": reading, "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[method]
    return Right(namespace, group, resource, verb)


async def rights_that_calls_need(made: Mapping[str, Sequence[dict[str, Any]]] = CALLS) -> set[Right]:
    """Each call, made once against a server that writes down what was asked."""
    needed: set[Right] = set()

    async def answer(request: web.Request) -> web.Response:
        right = right_of(request.method, request.path)
        needed.add(right)
        if request.content_type == "application/apply-patch+yaml" and "/" not in right.resource:
            needed.add(right._replace(verb="create"))  # applying makes what is not there
        leaving = {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [names.FINALIZER]}
        metadata = {"resourceVersion": "1", "uid": "some", **leaving}
        return web.json_response({"items": [], "metadata": metadata, "spec": {}})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(application) as server, Kube(ClusterAccess(str(server.make_url("")).rstrip("/"))) as kube:
        for name, calls in made.items():
            for arguments in calls:
                await getattr(kube, name)(**arguments)
    return needed


def granted(objects: list[Document], *, bound_to_jobs: str) -> set[Right]:
    """Expanded rules of the operator's roles. bound_to_jobs: kind of the role that holds in namespaces of jobs."""
    rights: set[Right] = set()
    for role in objects:
        if role["kind"] not in ("Role", "ClusterRole") or role["metadata"]["name"].endswith(("-view", "-edit")):
            continue
        is_own = role["metadata"]["name"].endswith("-own")
        assert is_own or role["kind"] == bound_to_jobs
        for rule in role["rules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    rights |= {Right(NAMESPACE if is_own else JOBS, group, resource, verb) for verb in rule["verbs"]}
    return rights


def test_every_call_is_known_here() -> None:
    made = {name for name, _ in inspect.getmembers(Kube, inspect.iscoroutinefunction) if not name.startswith("_")}
    assert made == CALLS.keys()


async def test_nodes_are_read_only_by_an_operator_that_looks_for_their_notices_or_taints_them() -> None:
    """It has rights to nodes in the whole cluster, also where it has those to jobs in some namespaces alone."""
    watching = {Right(JOBS, "", "nodes", verb) for verb in ("list", "watch")}
    tainting = await rights_that_calls_need(TAINTS)
    taint = ("--set", "nodes.taint=true")
    for file, words, expected in (
        ("node-notices-values.yaml", (), watching),
        ("node-notices-values.yaml", taint, watching | tainting),
        ("local-values.yaml", (), set()),
        ("local-values.yaml", taint, tainting),
        ("namespaced-values.yaml", (), set()),
    ):
        roles = [role for role in rendered(CHART / "ci" / file, *words) if "nodes" in str(role.get("rules"))]
        assert expected == granted(roles, bound_to_jobs="ClusterRole")


@pytest.mark.parametrize(("file", "kind"), [("local-values.yaml", "ClusterRole"), ("namespaced-values.yaml", "Role")])
async def test_rights_are_the_calls_that_are_made(file: str, kind: str) -> None:
    needed = await rights_that_calls_need() | KOPF | GARBAGE_COLLECTION
    assert needed == granted(rendered(Path(CHART / "ci" / file)), bound_to_jobs=kind)


async def test_an_issued_authority_may_be_read_and_the_own_one_written() -> None:
    usual, following = (
        granted(rendered(Path(CHART / "ci" / file)), bound_to_jobs="ClusterRole")
        for file in ("local-values.yaml", "cert-manager-values.yaml")
    )
    calls = {"replace_secret": [{"namespace": NAMESPACE, "secret": THING}]}
    assert await rights_that_calls_need(calls) == following - usual


async def test_rights_to_pod_groups_are_those_of_the_gangs_that_the_chart_names() -> None:
    usual, with_gangs = (
        granted(rendered(Path(CHART / "ci" / file)), bound_to_jobs="ClusterRole")
        for file in ("local-values.yaml", "gangs-values.yaml")
    )
    assert await rights_that_calls_need(GANGS) == with_gangs - usual
    assert usual < with_gangs


@pytest.mark.parametrize(("file", "kind"), [("local-values.yaml", "ClusterRole"), ("namespaced-values.yaml", "Role")])
async def test_namespaces_are_read_only_by_an_operator_that_takes_users_from_their_range(file: str, kind: str) -> None:
    usual, taking = (
        granted(rendered(CHART / "ci" / file, *words), bound_to_jobs=kind)
        for words in ((), ("--set", "namespaceUsers=true"))
    )
    assert await rights_that_calls_need(USERS) == taking - usual
    assert usual < taking


def test_no_right_is_a_wildcard_or_reads_secrets_of_jobs() -> None:
    rights = granted(rendered(Path(CHART / "ci/local-values.yaml")), bound_to_jobs="ClusterRole")
    assert not [right for right in rights if "*" in right]
    assert {"create"} == {right.verb for right in rights if right.resource == "secrets" and right.namespace == JOBS}
