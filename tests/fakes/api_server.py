"""An API server in memory, on a real port: names, UIDs, resource versions, preconditions, graceful deletion, watchers.

It admits everything and validates nothing; what the operator's objects look like to a real server is shown elsewhere.
Faults are injected by request: `refuse_next(403)` answers the next change with that code, `hold` keeps changes waiting,
of which `forbidden` is true is never done, and at one of which `panics` is true the server always fails.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from aiohttp.test_utils import TestServer

from colocated_rl_operator.clients.cluster import ClusterAccess

PANIC = "This request caused apiserver to panic. Look in the logs for details."

Body = dict[str, Any]
Watcher = Callable[[str, Body], None]
"""Called with ADDED, MODIFIED or DELETED and the object."""


class FakeApiServer:
    """Serves while its context is entered. `objects` by path, `requests` as "METHOD path" in the order they came."""

    def __init__(self) -> None:
        self.objects: dict[str, Body] = {}
        self.requests: list[str] = []
        self.watchers: list[tuple[str, Watcher]] = []
        self._versions = itertools.count(1)
        self._refusals: list[int] = []
        self.forbidden: Callable[[str, str], bool] = lambda method, path: False  # answered with 403, always
        self.panics: Callable[[str, str], bool] = lambda method, path: False  # answered with 500, and no object
        self.is_over_quota: Callable[[Body], bool] = lambda body: False  # what is made; the server asks this first
        self.refused_trial: Callable[[Body], str | None] = lambda body: None  # words for who asks with a dry run
        self.left_out: Collection[str] = ()  # fields of a pod that it does not have
        self._held: Callable[[str, Any], bool] = lambda path, body: False
        self._released = asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._server = TestServer(app)

    async def __aenter__(self) -> Self:
        await self._server.start_server()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.close()

    @property
    def access(self) -> ClusterAccess:
        return ClusterAccess(str(self._server.make_url("")).rstrip("/"))

    def refuse_next(self, *codes: int) -> None:
        """Answer the next changes with these codes; nothing of them is done."""
        self._refusals.extend(codes)

    def hold(self, what: Callable[[str, Any], bool]) -> None:
        """Changes of which it is so, by path and body, wait until `release`."""
        self._held = what
        self._released.clear()

    def release(self) -> None:
        self._held = lambda path, body: False
        self._released.set()

    def watch(self, plural: str, watcher: Watcher) -> None:
        """Tell the watcher of every object of that kind, present ones first."""
        self.watchers.append((plural, watcher))
        for path, body in list(self.objects.items()):
            if _plural(path) == plural:
                watcher("ADDED", body)

    def all(self, plural: str) -> list[Body]:
        return [body for path, body in self.objects.items() if _plural(path) == plural]

    # ------------------------------------------------------------------------------------------------------- changes
    def put(self, path: str, body: Body) -> Body:
        """Make or change an object, as it is written; gives it what a server gives."""
        old = self.objects.get(path)
        metadata = dict(body["metadata"])
        metadata.setdefault("uid", old["metadata"]["uid"] if old else str(uuid.uuid4()))
        metadata.setdefault("creationTimestamp", old["metadata"]["creationTimestamp"] if old else _now())
        changed_spec = old is not None and old.get("spec") != body.get("spec")
        metadata["generation"] = (old["metadata"]["generation"] if old else 1) + changed_spec
        metadata["resourceVersion"] = str(next(self._versions))
        made = {**json.loads(json.dumps(body)), "metadata": metadata}
        self.objects[path] = made
        self._tell("MODIFIED" if old else "ADDED", path, made)
        return made

    def set_status(self, path: str, status: Body) -> Body:
        return self.put(path, {**self.objects[path], "status": status})

    def remove(self, path: str) -> None:
        if (body := self.objects.pop(path, None)) is not None:
            self._tell("DELETED", path, body)

    def _tell(self, event: str, path: str, body: Body) -> None:
        for plural, watcher in self.watchers:
            if _plural(path) == plural:
                watcher(event, body)

    # ---------------------------------------------------------------------------------------------------------- HTTP
    async def _answer(self, request: web.Request) -> web.Response:
        path, is_trial = request.path, request.query.get("dryRun") == "All"
        self.requests.append(f"{request.method} {path}{'?dryRun=All' if is_trial else ''}")
        if request.method != "GET" and self._refusals:
            return _status(self._refusals.pop(0), "refused by the test")
        if self.forbidden(request.method, path):
            return _status(403, "forbidden by the test")
        if self.panics(request.method, path):
            return web.Response(status=500, text=PANIC)
        body = json.loads(await request.text() or "null")
        if request.method != "GET" and self._held(path, body):
            await self._released.wait()
        match request.method:
            case "GET":
                return self._get(path, request.query.get("labelSelector"))
            case "POST":
                return self._post(path, body, is_trial=is_trial)
            case "PUT":
                return self._replace(path, body, body["metadata"].get("resourceVersion"))
            case "DELETE":
                return self._delete(path, body or {})
            case _:
                return self._patch(path, body, request.content_type)

    def _get(self, path: str, selector: str | None) -> web.Response:
        if path in self.objects:
            return web.json_response(self.objects[path])
        if selector is None:
            return _not_found(path)
        key, value = selector.split("=")
        items = [
            body
            for each, body in self.objects.items()
            if each.rsplit("/", 1)[0] == path and body["metadata"].get("labels", {}).get(key) == value
        ]
        return web.json_response({"items": items, "metadata": {"resourceVersion": "0"}})

    def _post(self, path: str, body: Body, *, is_trial: bool) -> web.Response:
        full = f"{path}/{body['metadata']['name']}"
        if is_trial and (words := self.refused_trial(body)) is not None:
            return _status(422, words)
        if self.is_over_quota(body):
            return _status(403, "exceeded quota")
        if full in self.objects:
            is_ending = "deletionTimestamp" in self.objects[full]["metadata"]
            words = f"{'object is being deleted: ' if is_ending else ''}{full} already exists"
            return _status(409, words, reason="AlreadyExists")
        if path.endswith("/pods"):
            for field in self.left_out:
                body.get("spec", {}).pop(field, None)
        if is_trial:
            return web.json_response(body, status=201)
        return web.json_response(self.put(full, body), status=201)

    def _replace(self, path: str, body: Body, version: str | None) -> web.Response:
        if path not in self.objects:
            return _not_found(path)
        if version is not None and version != self.objects[path]["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified")
        return web.json_response(self.put(path, body))

    def _patch(self, path: str, body: Any, content_type: str) -> web.Response:
        if content_type == "application/apply-patch+yaml":
            old = self.objects.get(path)
            if old is not None and all(old.get(key) == body[key] for key in ("spec", "data") if key in body):
                return web.json_response(old)
            return web.json_response(self.put(path, body))
        path = path.removesuffix("/status")
        if path not in self.objects:
            return _not_found(path)
        old = self.objects[path]
        if content_type == "application/json-patch+json":
            changes = {change["path"]: change["value"] for change in body}
            if changes["/metadata/resourceVersion"] != old["metadata"]["resourceVersion"]:
                return _status(409, "the object has been modified")
            if "/metadata/finalizers" in changes:
                return self._finalize(path, changes["/metadata/finalizers"])
            return web.json_response(self.set_status(path, changes["/status"]))
        if body.get("metadata", {}).get("resourceVersion", version := old["metadata"]["resourceVersion"]) != version:
            return _status(409, "the object has been modified")
        parts = {key: {**old.get(key, {}), **body.get(key, {})} for key in ("metadata", "spec")}
        return web.json_response(self.put(path, {**old, **body, **parts}))

    def _finalize(self, path: str, finalizers: list[str]) -> web.Response:
        old = self.objects[path]
        if not finalizers and "deletionTimestamp" in old["metadata"]:
            self.remove(path)
            return web.json_response(old)
        return web.json_response(self.put(path, {**old, "metadata": {**old["metadata"], "finalizers": finalizers}}))

    def _delete(self, path: str, options: Body) -> web.Response:
        if path not in self.objects:
            return _not_found(path)
        body = self.objects[path]
        if options.get("preconditions", {}).get("uid", body["metadata"]["uid"]) != body["metadata"]["uid"]:
            return _status(409, "the UID is another one")
        grace_s = options.get("gracePeriodSeconds", body.get("spec", {}).get("terminationGracePeriodSeconds", 0))
        if grace_s and body.get("status", {}).get("phase") == "Running":
            ends = (datetime.now(UTC) + timedelta(seconds=grace_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
            metadata = {**body["metadata"], "deletionTimestamp": ends, "deletionGracePeriodSeconds": grace_s}
            return web.json_response(self.put(path, {**body, "metadata": metadata}))
        self.remove(path)
        return web.json_response(body)


def _plural(path: str) -> str:
    return path.rsplit("/", 2)[-2]


def _not_found(path: str) -> web.Response:
    body = {"kind": "Status", "code": 404, "message": f"{path} not found", "details": {"name": path.rsplit("/", 1)[1]}}
    return web.json_response(body, status=404)


def _status(code: int, message: str, *, reason: str = "") -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message, "reason": reason}, status=code)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
