"""Call the API server, which no other module does. It is plain HTTP: the calls are few, and all are listed here.

| call | group and resource | verb | namespace |
|---|---|---|---|
| read_job | rl.colocate.dev colocatedrljobs | get | of the job |
| list_jobs | rl.colocate.dev colocatedrljobs | list | those that are watched |
| write_status | rl.colocate.dev colocatedrljobs/status | patch | of the job |
| delete_job | rl.colocate.dev colocatedrljobs | delete | of the job |
| drop_finalizer | rl.colocate.dev colocatedrljobs | patch | of the job |
| list_pods, list_readers | pods | list | of the job |
| create_pod, delete_pod | pods | create, delete | of the job |
| create_claim | persistentvolumeclaims | create | of the job |
| apply | configmaps; networking.k8s.io networkpolicies | create, patch | of the job |
| apply, delete_group | podgroups of the chart's scheduling.gangs | create, patch, delete | of the job |
| read_namespace | namespaces | get | of the job, where users come from its range |
| read_revision, create_revision, delete_revision | apps controllerrevisions | get, create, delete | of the job |
| create_secret | secrets | create | of the job, and its own |
| read_secret | secrets | get | its own only |
| replace_secret | secrets | update | its own, where somebody else issues the authority |
| create_event, repeat_event | events.k8s.io events | create, patch | of the job |
| read_lease, create_lease, replace_lease | coordination.k8s.io leases | get, create, update | its own only |

kopf adds: colocatedrljobs list, watch, patch (its finalizer) and pods list, watch in the watched namespaces. Owner
references that block deletion need update on colocatedrljobs/finalizers. Applying needs create as well as patch: the
server asks for both when the object is new.

Answers are translated into `errors`; no caller sees HTTP. Every call has a deadline and a bounded answer. A call that
hangs does so in a webhook as a rule, for one kind of object in some namespaces. So few calls of one kind and namespace
are under way at once, and they hold up none of another kind or namespace. All calls but those of the lease share one
`CallLimiter`, and wait as long as the server asks with `Retry-After`: without its lease an operator ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

import aiohttp

from colocated_rl_api import names
from colocated_rl_api.back_off import retry_after_s
from colocated_rl_api.bounded_json import ALONE, LISTED, read_objects
from colocated_rl_api.logs import in_words
from colocated_rl_api.names import JobUid, PodUid
from colocated_rl_operator.clients.cluster import ClusterAccess
from colocated_rl_operator.clients.errors import (
    ApiError,
    ApiUnreachable,
    Conflict,
    NotAdmitted,
    NotFound,
)
from colocated_rl_operator.clients.limiter import CallLimiter
from colocated_rl_operator.clients.pod_text import is_list, read_pods

TURN_DEADLINE_S = 120.0  # until a call's turn comes: what gives up before has waited for nothing, and waits again
REQUEST_DEADLINE_S = 20.0  # from then on
MAKING_DEADLINE_S = 65.0  # of calls that reach webhooks, each for up to 30: the server itself gives up after 60
APPLY = "application/apply-patch+yaml"
AT_ONCE = 32  # of one kind and namespace
MAX_ANSWER_BYTES = 64 * 1024 * 1024  # a list of the pods of the largest job

Body = dict[str, Any]
"""An object as the API server speaks it."""

_PLURALS = {
    ("v1", "ConfigMap"): "configmaps",
    ("networking.k8s.io/v1", "NetworkPolicy"): "networkpolicies",
    ("policy/v1", "PodDisruptionBudget"): "poddisruptionbudgets",
}
_GROUPS = "podgroups"  # of several API groups


class Kube:
    """A client calls one API server while its context is entered.

    count: called with the verb, resource and status code of each answer (metrics); code 0 if there was none.
    """

    def __init__(self, access: ClusterAccess, *, count: Callable[[str, str, int], None] | None = None) -> None:
        self._access = access
        self._count = count or (lambda verb, resource, code: None)
        self._limiter = CallLimiter()
        self._session: aiohttp.ClientSession | None = None
        self._turns = WeakValueDictionary[tuple[str, str], asyncio.Semaphore]()  # those that a call holds or awaits

    async def __aenter__(self) -> Self:
        secure = self._access.server.startswith("https:")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._access.ssl_context() if secure else False, limit=0),
            timeout=aiohttp.ClientTimeout(),
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    # ------------------------------------------------------------------------------------------------------ the job
    async def read_job(self, namespace: str, name: str) -> Body:
        return await self._call("get", names.PLURAL, _job_path(namespace, name))

    async def list_jobs(self, namespace: str | None) -> list[Body]:
        """Return all jobs of a namespace; None: of all namespaces."""
        answer = await self._call("get", names.PLURAL, _jobs_path(namespace))
        items: list[Body] = answer["items"]
        return items

    async def write_status(self, namespace: str, name: str, *, resource_version: str, status: Body) -> Body:
        """Replace the whole status, if the object is still at `resource_version`; raises Conflict otherwise."""
        patch = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": resource_version},
            {"op": "add", "path": "/status", "value": status},
        ]
        path, query = _job_path(namespace, name) + "/status", {"fieldManager": names.FIELD_MANAGER}
        return await self._call("patch", names.PLURAL, path, patch, "application/json-patch+json", query)

    async def delete_job(self, namespace: str, name: str, *, uid: JobUid) -> None:
        """Delete the job with that UID, if it still exists."""
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        with contextlib.suppress(NotFound, Conflict):
            await self._call("delete", names.PLURAL, _job_path(namespace, name), options)

    async def drop_finalizer(self, namespace: str, name: str, *, uid: JobUid) -> None:
        """Remove our finalizer from the job with that UID, if it is being deleted and still has it."""
        with contextlib.suppress(NotFound):
            job = await self.read_job(namespace, name)
            metadata, finalizers = job["metadata"], job["metadata"].get("finalizers", [])
            if metadata["uid"] != uid or "deletionTimestamp" not in metadata or names.FINALIZER not in finalizers:
                return
            patch = [
                {"op": "replace", "path": "/metadata/resourceVersion", "value": metadata["resourceVersion"]},
                {
                    "op": "add",
                    "path": "/metadata/finalizers",
                    "value": [item for item in finalizers if item != names.FINALIZER],
                },
            ]
            path = _job_path(namespace, name)
            await self._call("patch", names.PLURAL, path, patch, "application/json-patch+json")

    # --------------------------------------------------------------------------------------------------------- pods
    async def list_pods(self, namespace: str, job_uid: JobUid) -> list[Body]:
        """Return the `brief` of each pod that is labelled as one of the job, whoever made it."""
        return await self._labelled_pods(namespace, f"{names.JOB_UID_LABEL}={job_uid}")

    async def list_readers(self, namespace: str, job: str) -> list[Body]:
        """Return the pods that are labelled as readers of a job of that name, whoever made them."""
        return await self._labelled_pods(namespace, f"{names.READER_LABEL}={job}")

    async def _labelled_pods(self, namespace: str, selector: str) -> list[Body]:
        path, query = _core_path(namespace, "pods"), {"labelSelector": selector}
        items: list[Body] = (await self._call("get", "pods", path, query=query))["items"]
        return items

    async def create_pod(self, namespace: str, pod: Body, *, dry_run: bool = False) -> Body:
        """Create a pod. dry_run: the server and its admission judge the pod, and nothing is made."""
        query = {"fieldManager": names.FIELD_MANAGER, **({"dryRun": "All"} if dry_run else {})}
        return await self._call("post", "pods", _core_path(namespace, "pods"), pod, query=query)

    async def delete_pod(self, namespace: str, name: str, *, uid: PodUid, grace_s: int | None = None) -> None:
        """Delete the pod with that UID, no other of its name. Grace 0 forgets a pod whose node does not answer."""
        options: Body = {"preconditions": {"uid": uid}}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        with contextlib.suppress(NotFound, Conflict):  # gone already, or another pod has the name
            await self._call("delete", "pods", f"{_core_path(namespace, 'pods')}/{name}", options)

    # -------------------------------------------------------------------------------------------------------- nodes
    async def taint_node(self, name: str, taint: Body) -> bool:
        """Add a taint to a node; False if it has one of that key. Raises Conflict if it is changed meanwhile."""
        path = f"/api/v1/nodes/{name}"
        node = await self._call("get", "nodes", path)
        taints = node["spec"].get("taints", [])
        if taint["key"] in [each["key"] for each in taints]:
            return False
        version = {"resourceVersion": node["metadata"]["resourceVersion"]}
        patch = {"metadata": version, "spec": {"taints": [*taints, taint]}}
        query = {"fieldManager": names.FIELD_MANAGER}
        await self._call("patch", "nodes", path, patch, "application/merge-patch+json", query)
        return True

    # ------------------------------------------------------------------------------------------------ other objects
    async def apply(self, namespace: str, body: Body) -> Body:
        """Apply server-side: fields that we own become as in `body`, others stay. The same body changes nothing."""
        version, kind = body["apiVersion"], body["kind"]
        plural = _GROUPS if kind == "PodGroup" else _PLURALS[version, kind]
        root = "/api/v1" if version == "v1" else f"/apis/{version}"
        return await self._call(
            "patch",
            plural,
            f"{root}/namespaces/{namespace}/{plural}/{body['metadata']['name']}",
            body,
            APPLY,
            query={"fieldManager": names.FIELD_MANAGER, "force": "true"},
        )

    async def delete_group(self, namespace: str, group: Body) -> None:
        """Delete a PodGroup, if it still exists."""
        path = f"/apis/{group['apiVersion']}/namespaces/{namespace}/{_GROUPS}/{group['metadata']['name']}"
        with contextlib.suppress(NotFound):
            await self._call("delete", _GROUPS, path)

    async def create_claim(self, namespace: str, claim: Body, *, dry_run: bool = False) -> Body:
        """Create a claim. Raises Conflict if it exists. dry_run: make nothing, to check without a right to read."""
        plural, query = "persistentvolumeclaims", {"dryRun": "All"} if dry_run else None
        return await self._call("post", plural, _core_path(namespace, plural), claim, query=query)

    async def read_namespace(self, name: str) -> Body:
        return await self._call("get", "namespaces", f"/api/v1/namespaces/{name}")

    async def read_revision(self, namespace: str, name: str) -> Body:
        return await self._call("get", "controllerrevisions", f"{_revisions_path(namespace)}/{name}")

    async def create_revision(self, namespace: str, revision: Body) -> Body:
        return await self._call("post", "controllerrevisions", _revisions_path(namespace), revision)

    async def delete_revision(self, namespace: str, name: str) -> None:
        """Delete the revision, if it still exists."""
        with contextlib.suppress(NotFound):
            await self._call("delete", "controllerrevisions", f"{_revisions_path(namespace)}/{name}")

    async def create_secret(self, namespace: str, secret: Body) -> Body:
        return await self._call("post", "secrets", _core_path(namespace, "secrets"), secret)

    async def read_secret(self, namespace: str, name: str) -> Body:
        return await self._call("get", "secrets", f"{_core_path(namespace, 'secrets')}/{name}")

    async def replace_secret(self, namespace: str, secret: Body) -> Body:
        """Replace the Secret. Raises Conflict if its resourceVersion is not that of `secret`."""
        path = f"{_core_path(namespace, 'secrets')}/{secret['metadata']['name']}"
        return await self._call("put", "secrets", path, secret)

    async def create_event(self, namespace: str, event: Body) -> Body:
        return await self._call("post", "events", f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", event)

    async def repeat_event(self, namespace: str, name: str, series: Body) -> Body:
        return await self._call(
            "patch",
            "events",
            f"/apis/events.k8s.io/v1/namespaces/{namespace}/events/{name}",
            {"series": series},
            "application/merge-patch+json",
        )

    # -------------------------------------------------------------------------------------------------------- lease
    async def read_lease(self, namespace: str, name: str) -> Body:
        return await self._call("get", "leases", f"{_lease_path(namespace)}/{name}")

    async def create_lease(self, namespace: str, lease: Body) -> Body:
        return await self._call("post", "leases", _lease_path(namespace), lease)

    async def replace_lease(self, namespace: str, lease: Body) -> Body:
        """Replace the lease. Raises Conflict if its resourceVersion is not that of `lease`."""
        return await self._call("put", "leases", f"{_lease_path(namespace)}/{lease['metadata']['name']}", lease)

    # -------------------------------------------------------------------------------------------------------- HTTP
    async def _call(
        self,
        verb: str,
        resource: str,
        path: str,
        body: object = None,
        content_type: str = "application/json",
        query: dict[str, str] | None = None,
    ) -> Body:
        assert self._session is not None, "enter the context first"
        what = f"{verb} {path}"
        data = None if body is None else json.dumps(body)
        deadline_s = MAKING_DEADLINE_S if verb == "post" or content_type == APPLY else REQUEST_DEADLINE_S
        code, content = 0, bytearray()
        try:
            headers = {**self._access.headers(), "Accept": "application/json", "Content-Type": content_type}
            async with (
                self._turn(path, resource),
                asyncio.timeout(deadline_s),
                self._session.request(
                    verb, self._access.server + path, params=query, data=data, headers=headers, allow_redirects=False
                ) as answer,
            ):
                code = answer.status
                self._limiter.hold(_retry_after_s(answer))
                async for piece in answer.content.iter_any():
                    content += piece
                    if len(content) > MAX_ANSWER_BYTES:
                        raise ApiError(f"{what}: the answer is longer than {MAX_ANSWER_BYTES} bytes", code)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiUnreachable(f"{what}: no answer from the API server: {in_words(error)}") from error
        finally:
            self._count(verb, resource, code)
        if code >= 300:
            raise _translate(verb, path, code, content)
        try:
            answer_body: Body = _read(verb, path, content)
        except (ValueError, RecursionError) as error:
            raise ApiUnreachable(f"{what}: {code}, and no JSON: something in between answered") from error
        return answer_body

    @asynccontextmanager
    async def _turn(self, path: str, resource: str) -> AsyncIterator[None]:
        """Hold a turn among calls of this kind and namespace, once the process has its turn. Raises ApiUnreachable."""
        namespace = path.partition("/namespaces/")[2].partition("/")[0]  # "": all namespaces
        async with AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(TURN_DEADLINE_S):
                    turns = self._turns.setdefault((namespace, resource), asyncio.Semaphore(AT_ONCE))
                    await turn.enter_async_context(turns)
                    if resource != "leases":
                        await self._limiter.wait()
            except TimeoutError as error:
                message = f"{path} was not called: for {TURN_DEADLINE_S:.0f} s too many calls were before it"
                raise ApiUnreachable(message) from error
            yield


def _read(verb: str, path: str, content: bytearray) -> Body:
    found: Body
    if verb == "get" and is_list(path):
        found = read_pods(content.decode(), level=LISTED)
    elif f"/{names.PLURAL}" in path:
        found = read_objects(content.decode(), level=LISTED if path.endswith(names.PLURAL) else ALONE)
    else:
        found = json.loads(content)
    return found


def version_of(item: Body) -> int:
    """Return an object's resourceVersion: Kubernetes defines it as a number, and the newer state has the higher."""
    return int(item["metadata"]["resourceVersion"])


def _retry_after_s(answer: aiohttp.ClientResponse) -> float:
    """Return the seconds for which the server wants no call: with 429 and 503, where it is too busy. 0: none."""
    return (retry_after_s(answer.headers.get("Retry-After")) or 0.0) if answer.status in (429, 503) else 0.0


def _translate(verb: str, path: str, code: int, content: bytearray) -> ApiError:
    try:
        status = json.loads(content)
        words, is_named = str(status["message"]), "name" in (status.get("details") or {})
        exists = status.get("reason") == "AlreadyExists"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        words, is_named, exists = content[:200].decode("utf-8", "replace"), False, False
    message = f"{verb} {path}: {code} {words}"
    match code:
        case 404:
            return NotFound(message, code, is_kind_known=is_named)
        case 409 if verb != "post" or exists:  # else two requests counted a quota at once: nothing was made
            return Conflict(message, code)
        case 400 | 403 | 413 | 422:
            return NotAdmitted(message, code)
        case _:
            return ApiUnreachable(message, code)


def _job_path(namespace: str, name: str) -> str:
    return f"/apis/{names.API_VERSION}/namespaces/{namespace}/{names.PLURAL}/{name}"


def _jobs_path(namespace: str | None) -> str:
    within = f"/namespaces/{namespace}" if namespace else ""
    return f"/apis/{names.API_VERSION}{within}/{names.PLURAL}"


def _core_path(namespace: str, plural: str) -> str:
    return f"/api/v1/namespaces/{namespace}/{plural}"


def _revisions_path(namespace: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/controllerrevisions"


def _lease_path(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
