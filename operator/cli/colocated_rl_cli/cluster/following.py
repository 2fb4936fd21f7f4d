"""Follow a job by its status and the log lines of its pods, as they arrive.

At the end `collect` reads all logs again from their beginning, so that lines from before and after each follower are
not missed. What is unavailable for a while (a pod that starts, an API server that restarts) is requested again, and
`trouble` holds the reason meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from colocated_rl_api import names
from colocated_rl_cli.base.errors import (
    CliError,
    NotAllowed,
    NotReached,
    ObjectMissing,
)
from colocated_rl_cli.cluster.api import Api, Object
from colocated_rl_cli.evidence.evidence import is_over
from colocated_rl_cli.evidence.records import Records, read_line

RETRY_S = 0.5
MAX_LINES = 200_000  # kept; older ones go
PODS_AT_MOST = 64  # whose logs are followed
CONTAINERS = dict.fromkeys(names.GPU_ROLES, names.AGENT_CONTAINER) | {
    names.ROLE_ROLLOUT: names.ROLLOUT_CONTAINER,
    names.ROLE_REFERENCE: names.GPU_CONTAINER,
}


class JobWatch:
    """Follows one job.

    on_line: called with each new line. refuse_lost: called before each retry; raises if retrying is useless.
    """

    def __init__(self, api: Api, name: str, *, refuse_lost: Callable[[], None] = lambda: None) -> None:
        self.job: Mapping[str, Any] = {}
        self.lines: deque[Mapping[str, Any]] = deque(maxlen=MAX_LINES)
        self.trouble: CliError | None = None
        self.unread: list[CliError] = []  # what `collect` could not read although it should be there
        self.on_line: Callable[[Mapping[str, Any]], None] = lambda _: None
        self._api = api
        self._name = name
        self._refuse_lost = refuse_lost
        self._ended = asyncio.Event()
        self._failure: Exception | None = None
        self._seen: set[int] = set()  # hashes of pod and raw line: all of them, which may be many
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._ended_pods: set[str] = set()  # their logs get no further line

    @property
    def phase(self) -> str:
        return str(self.job.get("status", {}).get("phase") or "")

    async def until_ended(self, *, deadline_s: float | None = None) -> None:
        """Return when the job is complete, failed or gone.

        Raises TimeoutError, NotAllowed, and what refuse_lost raises.
        """
        async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._repeat(self._watch_job), name="watch/job"),
                group.create_task(self._repeat(lambda: self._watch_pods(group)), name="watch/pods"),
            ]
            await self._ended.wait()
            for task in (*tasks, *self._followed.values()):
                task.cancel()
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """Stop following: `until_ended` returns."""
        self._ended.set()

    async def collect(self) -> Records:
        """Return the job, every log that is still kept, from its beginning, and the job's events."""
        for pod in await self._api.pods_of(self._name):
            name, container = pod["metadata"]["name"], container_of(pod)
            if container is None:
                continue
            for previous in (True, False):
                try:
                    text = await self._api.log(name, container, previous=previous)
                except (ObjectMissing, NotReached) as error:
                    if has_log(pod, container, previous=previous):
                        self.unread.append(error)
                    continue
                for line in text.splitlines():
                    self._read(name, line)
        events: list[Object] = []
        try:
            if uid := self.job.get("metadata", {}).get("uid"):
                events = await self._api.events_about(uid)
        except CliError as error:
            self.unread.append(error)
        return Records(job=self.job, lines=sorted(self.lines, key=lambda line: float(line["ts"])), events=events)

    async def _repeat(self, task: Callable[[], Any], *, until: Callable[[], bool] = lambda: False) -> None:
        """Repeat a task until that is useless, because the API server ends a watch every few minutes.

        until: asked before each run; a run before which it returns True is the last.
        """
        is_last = False
        while not is_last:
            is_last = until()
            try:
                await task()
            except NotAllowed as error:
                self._failure = error
            except CliError as error:
                self.trouble = error
            try:
                self._refuse_lost()
            except Exception as error:  # noqa: BLE001 - the caller's own exception, which until_ended raises to it
                self._failure = error
            if self._failure is not None:
                self._ended.set()
                return
            await asyncio.sleep(RETRY_S)

    async def _watch_job(self) -> None:
        """Read the job and follow it from there, so that no change is missed between the two.

        It is listed, because a version that an object had long ago may be too old for a watch.
        """
        query, what = {"fieldSelector": f"metadata.name={self._name}"}, f"job {self._api.namespace}/{self._name}"
        found = await self._api.get(self._api.jobs, what=what, query=query)
        for job in found["items"]:
            self._note(job)
        if not found["items"]:
            self._ended.set()
            return
        since = {"resourceVersion": found["metadata"]["resourceVersion"]}
        async for kind, job in self._api.watch(self._api.jobs, query | since, what=what):
            self._note(job)
            if kind == "DELETED":
                self._ended.set()

    def _note(self, job: Mapping[str, Any]) -> None:
        self.job, self.trouble = job, None
        if is_over(job):
            self._ended.set()

    async def _watch_pods(self, group: asyncio.TaskGroup) -> None:
        query, what = {"labelSelector": f"{names.JOB_NAME_LABEL}={self._name}"}, f"pods of job {self._name}"
        async for kind, pod in self._api.watch(self._api.pods, query, what=what):
            name, container = pod["metadata"]["name"], container_of(pod)
            is_over = kind == "DELETED" or pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
            (self._ended_pods.add if is_over else self._ended_pods.discard)(name)
            known = self._followed.get(name)
            is_new = known is None or (known.done() and not is_over)  # another pod may get the name of one that is gone
            following = sum(not task.done() for task in self._followed.values())
            if is_new and following < PODS_AT_MOST and container and has_started(pod, container):
                follow, is_read = partial(self._follow, name, container), partial(self._ended_pods.__contains__, name)
                self._followed[name] = group.create_task(self._repeat(follow, until=is_read), name=f"watch/{name}")

    async def _follow(self, pod: str, container: str) -> None:
        try:
            async for line in self._api.follow_log(pod, container):
                self._read(pod, line)
        except (ObjectMissing, NotReached):
            return  # the container is started again, or the pod has gone

    def _read(self, pod: str, text: str) -> None:
        key = hash((pod, text.strip()))
        if key not in self._seen and (line := read_line(text)) is not None:
            self._seen.add(key)
            self.lines.append(line)
            self.on_line(line)


def container_of(pod: Mapping[str, Any]) -> str | None:
    """Return the container in which the pod's member runs; None without a role label, or with an unknown role."""
    return CONTAINERS.get(pod["metadata"]["labels"].get(names.ROLE_LABEL, ""))


def has_started(pod: Mapping[str, Any], container: str) -> bool:
    """Return whether the container has started, so that it has a log."""
    status = _status_of(pod, container)
    return bool(status) and "waiting" not in status.get("state", {})


def has_log(pod: Mapping[str, Any], container: str, *, previous: bool) -> bool:
    """Return whether a container should have a log. previous: of the container before its newest restart."""
    return bool(_status_of(pod, container).get("restartCount")) if previous else has_started(pod, container)


def _status_of(pod: Mapping[str, Any], container: str) -> Mapping[str, Any]:
    """Return the container's status; empty if the kubelet has not reported it."""
    status = pod.get("status", {})
    statuses = [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]
    return next((one for one in statuses if one["name"] == container), {})
