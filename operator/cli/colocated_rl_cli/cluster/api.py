"""Read and change objects, and read logs, at the API server as the user who is logged in to kubectl.

No other module knows the server's paths. Every call has a deadline, except the streams `follow_log` and `watch`, which
last until they end. An error names the missing right, or who does not answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp.http_exceptions import LineTooLong

from colocated_rl_api import names
from colocated_rl_api.back_off import retry_after_s
from colocated_rl_api.bounded_json import ALONE, LISTED, WATCHED, read_objects
from colocated_rl_api.logs import in_words
from colocated_rl_cli.base.errors import (
    CliError,
    NotAllowed,
    NotReached,
    ObjectMissing,
)
from colocated_rl_cli.cluster.kubectl import Login, proxied
from colocated_rl_cli.evidence.causes import event_time

CALL_DEADLINE_S = 30.0
BUSY_TRIES, BUSY_AT_MOST_S = 10, 10  # of a server that says when to ask again
MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_LOG_BYTES = 64 * 1024 * 1024
COLLECTIONS = (names.PLURAL, "pods", "events", "persistentvolumeclaims")  # last in the path of a list

Object = dict[str, Any]


class Api:
    """Calls the API server in one namespace of one cluster."""

    def __init__(self, session: aiohttp.ClientSession, namespace: str) -> None:
        self.session = session
        self.namespace = namespace

    @classmethod
    @asynccontextmanager
    async def reach(cls, login: Login, namespace: str | None) -> AsyncIterator[Api]:
        """Connect through `kubectl proxy` while the block runs. Raises NotReached."""
        chosen = namespace or await login.namespace()
        async with proxied(login) as socket:
            connector = aiohttp.UnixConnector(str(socket), limit=0)
            async with aiohttp.ClientSession(
                "http://localhost", connector=connector, read_bufsize=MAX_LINE_BYTES // 2, trust_env=False
            ) as session:
                yield cls(session, chosen)

    def within(self, namespace: str) -> Api:
        """Return the same connection for another namespace."""
        return Api(self.session, namespace)

    # ----------------------------------------------------------------------------------------------------------- paths
    @property
    def jobs(self) -> str:
        return f"/apis/{names.API_VERSION}/namespaces/{self.namespace}/{names.PLURAL}"

    @property
    def pods(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    # --------------------------------------------------------------------------------------------------------- objects
    async def job(self, name: str) -> Object:
        """Return the job. Raises ObjectMissing."""
        found: Object = await self.get(f"{self.jobs}/{name}", what=f"job {self.namespace}/{name}")
        return found

    async def all_jobs(self, *, everywhere: bool = False) -> list[Object]:
        """Return the jobs of the namespace, or of all namespaces, in their order."""
        path, where = self.jobs, f"namespace {self.namespace}"
        if everywhere:
            path, where = f"/apis/{names.API_VERSION}/{names.PLURAL}", "all namespaces"
        found: list[Object] = (await self.get(path, what=f"jobs of {where}"))["items"]
        return found

    async def job_names(self) -> list[str]:
        return [str(job["metadata"]["name"]) for job in await self.all_jobs()]

    async def change_job(self, name: str, patch: Mapping[str, Any]) -> Object:
        """Apply a JSON merge patch to the job, and return the changed job."""
        what = f"job {self.namespace}/{name}"
        changed: Object = await self._json("PATCH", f"{self.jobs}/{name}", what=what, body=patch)
        return changed

    async def pods_of(self, job: str) -> list[Object]:
        """Return the job's pods, earlier attempts included, sorted by name."""
        selector = {"labelSelector": f"{names.JOB_NAME_LABEL}={job}"}
        found = await self.get(self.pods, what=f"pods of job {self.namespace}/{job}", query=selector)
        return sorted(found["items"], key=lambda pod: str(pod["metadata"]["name"]))

    async def create_pod(self, pod: Object) -> Object:
        """Make a pod. Raises CliError."""
        made: Object = await self._json("POST", self.pods, what=f"pod {pod['metadata']['name']}", body=pod)
        return made

    async def delete_pod(self, name: str) -> None:
        """Delete a pod. Raises CliError."""
        await self._json("DELETE", f"{self.pods}/{name}", what=f"pod {name}")

    async def operators(self) -> list[Object]:
        """Return the operator's pods in this namespace."""
        selector = {"labelSelector": f"app.kubernetes.io/name={names.MANAGED_BY}"}
        found = await self.get(self.pods, what=f"operator in namespace {self.namespace}", query=selector)
        return list(found["items"])

    async def events_about(self, uid: str) -> list[Object]:
        """Return the events about an object, oldest first. The API server usually drops them after an hour."""
        found = await self.get(
            f"/api/v1/namespaces/{self.namespace}/events",
            what=f"events of namespace {self.namespace}",
            query={"fieldSelector": f"involvedObject.uid={uid}"},
        )
        return sorted(found["items"], key=event_time)

    async def log(self, pod: str, container: str, *, previous: bool = False, newest: int | None = None) -> str:
        """Return a container's log as far as it is kept, or its newest lines.

        Raises CliError: ObjectMissing without the pod, NotReached if the container has not run or the node is away.
        """
        query = {"container": container, "previous": str(previous).lower(), "limitBytes": str(MAX_LOG_BYTES)}
        if newest is not None:
            query["tailLines"] = str(newest)
        path, what = f"{self.pods}/{pod}/log", f"log of container {container} of pod {pod}"
        async with self._request("GET", path, what=what, query=query) as answer:
            return (await answer.read()).decode(errors="replace")

    async def get(self, path: str, *, what: str, query: Mapping[str, str] | None = None) -> Any:
        return await self._json("GET", path, what=what, query=query)

    # --------------------------------------------------------------------------------------------------------- streams
    async def watch(self, path: str, query: Mapping[str, str], *, what: str) -> AsyncIterator[tuple[str, Object]]:
        """Yield each existing object as ADDED, then each change, until the server ends the watch. Raises CliError."""
        async with self._request("GET", path, what=what, query={**query, "watch": "1"}, deadline_s=None) as answer:
            async for line in _lines(answer, what):
                try:
                    event = read_objects(line, level=WATCHED)
                except ValueError:
                    return  # cut off by the end of the connection
                if event["type"] == "ERROR":
                    return  # too old: the caller asks again from the beginning
                yield event["type"], event["object"]

    async def follow_log(self, pod: str, container: str) -> AsyncIterator[str]:
        """Yield the lines of a log from its beginning until the container ends. Raises CliError."""
        query, what = {"container": container, "follow": "true"}, f"log of container {container} of pod {pod}"
        async with self._request("GET", f"{self.pods}/{pod}/log", what=what, query=query, deadline_s=None) as answer:
            async for line in _lines(answer, what):
                yield line

    # ----------------------------------------------------------------------------------------------------------- calls
    async def _json(
        self, method: str, path: str, *, what: str, query: Mapping[str, str] | None = None, body: object = None
    ) -> Any:
        async with self._request(method, path, what=what, query=query, body=body) as answer:
            level = LISTED if method == "GET" and path.rpartition("/")[2] in COLLECTIONS else ALONE
            try:
                return await answer.json(loads=partial(read_objects, level=level))
            except ValueError as error:
                raise NotReached(f"{what}: the API server's answer is no JSON: {error}") from error

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        *,
        what: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        deadline_s: float | None = CALL_DEADLINE_S,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        kind = "merge-patch+json" if method == "PATCH" else "json"
        headers = {"Content-Type": f"application/{kind}"} if body is not None else {}
        try:
            for tries in range(BUSY_TRIES, 0, -1):
                async with self.session.request(
                    method,
                    path,
                    params=query,
                    data=None if body is None else json.dumps(body),
                    headers=headers,
                    timeout=aiohttp.ClientTimeout(total=deadline_s, sock_connect=CALL_DEADLINE_S),
                ) as answer:
                    later_s = retry_after_s(answer.headers.get("Retry-After"))
                    if answer.status != HTTPStatus.TOO_MANY_REQUESTS or tries == 1 or later_s is None:
                        if answer.status >= 400:
                            raise refusal(answer.status, await answer.text(), what)
                        yield answer
                        return
                await asyncio.sleep(min(later_s, BUSY_AT_MOST_S))  # nothing was done, and kubectl waits too
        except TimeoutError as error:
            raise NotReached(f"{what}: no answer from the API server within {deadline_s} s") from error
        except aiohttp.ClientError as error:
            raise NotReached(f"{what}: the connection to the API server ended: {in_words(error)}") from error


def refusal(status: int, text: str, what: str) -> CliError:
    """Return the error for an answer that is no success, with the server's message and what to do next."""
    try:
        message, is_servers = str(json.loads(text).get("message") or text), True
    except (json.JSONDecodeError, AttributeError):  # kubectl's own text
        message, is_servers = text.strip(), False
    message = message[:2000]
    match status:
        case _ if status >= 500 and not is_servers:
            return NotReached(f"{what}: kubectl reaches no API server: {message}; see that `kubectl get crlj` works")
        case 401:
            return NotAllowed(
                f"{what}: the API server does not know who asks ({message}): log in again, as for kubectl"
            )
        case 403:
            return NotAllowed(f"{what}: {message}; docs/cli.md lists the rights that each command needs")
        case 404 if "the server could not find the requested resource" in message or "page not found" in message:
            return ObjectMissing(f"{what}: the cluster has no {names.KIND}: is the chart installed?")
        case 404:
            others = "; kubectl get crlj -A lists the jobs there are" if what.startswith("job ") else ""
            return ObjectMissing(f"{what}: {message}{others}")
        case 502 | 503 | 504:
            return NotReached(f"{what}: the API server is not reached: {message}")
        case _:
            return NotReached(f"{what}: the API server answers {status}: {message}")


async def _lines(answer: aiohttp.ClientResponse, what: str) -> AsyncIterator[str]:
    while True:
        try:
            line = await answer.content.readline()
        except LineTooLong as error:
            raise NotReached(f"{what}: a line of more than {MAX_LINE_BYTES} bytes") from error
        if not line:
            return
        yield line.decode(errors="replace")
