"""An API server as `kubectl proxy` shows it, with one job: objects, logs, watches and port-forward to members' pages.

`kubectl` writes a program that serves it in kubectl's place, so that the command line runs whole.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from colocated_rl_api import names

Body = dict[str, Any]
JOBS = f"/apis/{names.API_VERSION}/namespaces/default/{names.PLURAL}"
PODS = "/api/v1/namespaces/default/pods"
DATA, ERROR = b"\x00", b"\x01"
UNREACHED = 599  # not a status: kubectl itself answers, with 500 and no object


@dataclass(frozen=True)
class OpenPortForward:
    """A port-forward that is open."""

    request: web.Request

    def cut(self) -> None:
        if self.request.transport is not None:
            self.request.transport.abort()


@dataclass
class ClusterApi:
    """A ClusterApi serves the objects that it holds; tests change them before and while it serves."""

    jobs: dict[str, Body] = field(default_factory=dict)
    pods: list[Body] = field(default_factory=list)
    events: list[Body] = field(default_factory=list)
    logs: dict[tuple[str, str], str] = field(default_factory=dict)  # by pod and container
    pages: dict[tuple[str, str], str] = field(default_factory=dict)  # by pod and path, as the member answers
    members: dict[str, int] = field(default_factory=dict)  # by pod: the port of a real one, instead of pages
    links: list[OpenPortForward] = field(default_factory=list)  # to real ones
    refused: dict[str, int] = field(default_factory=dict)  # by the end of a path: answered with this status
    busy: int = 0  # so many requests are answered with 429 first
    asked: list[str] = field(default_factory=list)
    forwarded: list[bytes] = field(default_factory=list)
    records: dict[str, Body] = field(default_factory=dict)  # of starts, by name
    begins: Body = field(default_factory=lambda: {"phase": "Running"})  # status of a pod that is made
    is_ending: bool = False  # ends its watches at the next change
    versions: dict[str, list[Body]] = field(default_factory=dict)  # the jobs of each list; one taken away is too old
    before_watch: Callable[[], None] = lambda: None  # of jobs
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._write_down])
        application.add_routes(
            [
                web.get(JOBS, self._list_jobs),
                web.get(f"/apis/{names.API_VERSION}/{names.PLURAL}", self._list_jobs),
                web.get(JOBS + "/{name}", self._show_job),
                web.patch(JOBS + "/{name}", self._change_job),
                web.get(PODS, self._list_pods),
                web.post(PODS, self._make_pod),
                web.get(PODS + "/{pod}", self._show_pod),
                web.delete(PODS + "/{pod}", self._delete_pod),
                web.get("/apis/apps/v1/namespaces/default/controllerrevisions/{name}", self._show_record),
                web.get("/api/v1/namespaces/default/events", self._list_events),
                web.get("/api/v1/namespaces/default/persistentvolumeclaims", self._nothing),
                web.get("/version", self._version),
                web.get(PODS + "/{pod}/log", self._log),
                web.get(PODS + "/{pod}/portforward", self._forward),
            ]
        )
        return application

    @web.middleware
    async def _write_down(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path}")
        if self.busy:
            self.busy -= 1
            return web.json_response({"message": "too busy"}, status=429, headers={"Retry-After": "0"})
        status = next((code for end, code in self.refused.items() if request.path.endswith(end)), None)
        if status == UNREACHED:
            return web.Response(text="dial tcp 127.0.0.1:8080: connect: connection refused", status=500)
        if status is not None:
            return web.json_response({"kind": "Status", "message": f"{request.path} is refused"}, status=status)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _nothing(self, _: web.Request) -> web.Response:
        return web.json_response({"items": []})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"gitVersion": "v1.36.0"})

    async def _list_jobs(self, request: web.Request) -> web.StreamResponse:
        name = request.query.get("fieldSelector", "").removeprefix("metadata.name=")

        def jobs() -> list[Body]:
            return [job for job in self.jobs.values() if name in ("", _name(job))]

        if "watch" in request.query:
            self.before_watch()
            before = self.versions.get(request.query.get("resourceVersion", ""))
            if before is None and "resourceVersion" in request.query:
                return web.json_response({"type": "ERROR", "object": {"kind": "Status", "code": 410}})
            gone = [{"type": "DELETED", "object": job} for job in before or () if _name(job) not in self.jobs]
            return await self._watch(request, jobs, gone)
        version = str(len(self.asked))
        self.versions[version] = jobs()
        return web.json_response({"metadata": {"resourceVersion": version}, "items": jobs()})

    async def _list_pods(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await self._watch(request, lambda: self.pods)
        """Answer with the pods of a job that is asked for; those without its label are taken for any job's."""
        label, _, wanted = request.query.get("labelSelector", "").partition("=")
        labels = [pod["metadata"].get("labels", {}) for pod in self.pods]
        found = [pod for pod, its in zip(self.pods, labels, strict=True) if its.get(label, wanted) == wanted]
        return web.json_response({"items": found})

    async def _make_pod(self, request: web.Request) -> web.Response:
        pod = await request.json()
        assert "application/json" == request.content_type
        self.pods.append(pod | {"status": self.begins})
        return web.json_response(pod, status=201)

    async def _show_pod(self, request: web.Request) -> web.Response:
        return web.json_response(next(pod for pod in self.pods if _name(pod) == request.match_info["pod"]))

    async def _delete_pod(self, request: web.Request) -> web.Response:
        self.pods = [pod for pod in self.pods if _name(pod) != request.match_info["pod"]]
        return web.json_response({"kind": "Status"})

    async def _show_record(self, request: web.Request) -> web.Response:
        return web.json_response(self.records[request.match_info["name"]])

    async def _list_events(self, request: web.Request) -> web.Response:
        uid = request.query["fieldSelector"].removeprefix("involvedObject.uid=")
        return web.json_response({"items": [one for one in self.events if one["involvedObject"].get("uid") == uid]})

    async def _show_job(self, request: web.Request) -> web.Response:
        job = self.jobs.get(request.match_info["name"])
        if job is None:
            return web.json_response({"message": f'"{request.match_info["name"]}" not found'}, status=404)
        return web.json_response(job)

    async def _change_job(self, request: web.Request) -> web.Response:
        job = self.jobs[request.match_info["name"]]
        job["spec"] |= (await request.json())["spec"]
        return web.json_response(job)

    async def _watch(self, request: web.Request, objects: Any, first: Sequence[Body] = ()) -> web.StreamResponse:
        """Send the first events, then all objects, and all of them again at each change."""
        answer = web.StreamResponse()
        await answer.prepare(request)
        for event in first:
            await answer.write(json.dumps(event).encode() + b"\n")
        while True:
            self.changed.clear()
            for one in objects():
                await answer.write(json.dumps({"type": "ADDED", "object": one}).encode() + b"\n")
            await self.changed.wait()
            if self.is_ending:
                await answer.write(b'{"type": "MODIF')  # cut off
                return answer

    async def _log(self, request: web.Request) -> web.StreamResponse:
        key = (request.match_info["pod"], request.query["container"])
        if key not in self.logs or request.query.get("previous") == "true":
            return web.json_response({"message": "no such container"}, status=400)
        return web.Response(text=self.logs[key])

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        pod, port = request.match_info["pod"], int(request.query["ports"])
        link = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await link.prepare(request)
        for channel in (DATA, ERROR):
            await link.send_bytes(channel + port.to_bytes(2, "little"))
        if pod in self.members:
            self.links.append(OpenPortForward(request))
            return await self._join(link, self.members[pod])
        message = await link.receive_bytes()
        self.forwarded.append(message)
        target = message[1:].split(b" ")[1].decode()
        page = self.pages.get((pod, target.split("?")[0]))
        if page is None:
            await link.send_bytes(ERROR + f"connection refused on port {port}".encode())
        else:
            head, _, body = page.partition("\n\n")
            length = f"{head}\nContent-Length: {len(body.encode())}\n\n".replace("\n", "\r\n")
            sent = length.encode() + body.encode()
            for part in (sent[:20], sent[20:]):  # in two frames, cut anywhere
                await link.send_bytes(DATA + part)
        await link.close()
        return link

    async def _join(self, link: web.WebSocketResponse, port: int) -> web.StreamResponse:
        """Connect to a member on this machine, until either end closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def answer() -> None:
            while piece := await reader.read(1 << 16):
                await link.send_bytes(DATA + piece)
            await link.close()

        answering = asyncio.create_task(answer())
        try:
            async for message in link:
                self.forwarded.append(message.data)
                writer.write(message.data[1:])
        finally:
            answering.cancel()
            writer.transport.abort()
        return link


def page(body: object, status: str = "200 OK") -> str:
    """Return the answer of a member."""
    return f"HTTP/1.1 {status}\nContent-Type: application/json\n\n{json.dumps(body)}"


def _name(job: Body) -> str:
    return str(job["metadata"]["name"])
