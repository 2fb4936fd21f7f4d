"""Follows a job through what it says itself: its status and the log lines of its pods, as they come.

At the end `collect` reads all logs once more from their beginning, so that no line is missed that came before a
follower or after it. What can't be had for a while (a pod that starts, an API server that restarts) is asked for again;
`trouble` says so meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from colocated_rl_api import names
from colocated_rl_cli.api import Api
from colocated_rl_cli.errors import CliError, NotAllowed, NotReached, NotThere
from colocated_rl_cli.records import Records

AGAIN_S = 0.5
MAX_LINES = 200_000  # kept; older ones go
PODS_AT_MOST = 64  # whose logs are followed
CONTAINERS = dict.fromkeys(names.GPU_ROLES, names.AGENT_CONTAINER) | {
    names.ROLE_ROLLOUT: names.ROLLOUT_CONTAINER,
    names.ROLE_REFERENCE: names.GPU_CONTAINER,
}


class JobWatch:
    """One job. on_line: called with each new line. refuse_lost: raises when there is no use in asking again."""

    def __init__(self, api: Api, name: str, *, refuse_lost: Callable[[], None] = lambda: None) -> None:
        self.job: Mapping[str, Any] = {}
        self.lines: deque[Mapping[str, Any]] = deque(maxlen=MAX_LINES)
        self.trouble: CliError | None = None
        self.on_line: Callable[[Mapping[str, Any]], None] = lambda _: None
        self._api = api
        self._name = name
        self._refuse_lost = refuse_lost
        self._ended = asyncio.Event()
        self._failure: Exception | None = None
        self._seen: set[int] = set()  # hashes of pod and line, as they came: all of them, which may be many
        self._followed: dict[str, asyncio.Task[None]] = {}

    @property
    def phase(self) -> str:
        return str(self.job.get("status", {}).get("phase") or "")

    async def until_ended(self, *, deadline_s: float | None = None) -> None:
        """Return when the job is complete, failed or gone.

        Raises TimeoutError, NotAllowed, and what refuse_lost raises.
        """
        async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._again(self._watch_job), name="watch/job"),
                group.create_task(self._again(lambda: self._watch_pods(group)), name="watch/pods"),
            ]
            await self._ended.wait()
            for task in (*tasks, *self._followed.values()):
                task.cancel()
        if self._failure is not None:
            raise self._failure

    async def collect(self) -> Records:
        """Every log that is still there from its beginning, and the events."""
        for pod in await self._api.pods_of(self._name):
            name, container = pod["metadata"]["name"], container_of(pod)
            for previous in (True, False):
                try:
                    text = await self._api.log(name, container, previous=previous)
                except (NotThere, NotReached):
                    continue  # no earlier container, or one that never started
                for line in text.splitlines():
                    self._read(name, line)
        uid = self.job.get("metadata", {}).get("uid")
        events = await self._api.events_about(uid) if uid else []
        return Records(job=self.job, lines=sorted(self.lines, key=lambda line: float(line["ts"])), events=events)

    async def _again(self, task: Callable[[], Any]) -> None:
        """Do it until there is no use in it. The API server ends a watch every few minutes."""
        while True:
            try:
                await task()
            except NotAllowed as error:
                self._failure = error
            except CliError as error:
                self.trouble = error
            try:
                self._refuse_lost()
            except Exception as error:  # noqa: BLE001 - of whoever asked for it, and raised to him
                self._failure = error
            if self._failure is not None:
                self._ended.set()
                return
            await asyncio.sleep(AGAIN_S)

    async def _watch_job(self) -> None:
        query, what = {"fieldSelector": f"metadata.name={self._name}"}, f"job {self._api.namespace}/{self._name}"
        async for kind, job in self._api.watch(self._api.jobs, query, what=what):
            self.job, self.trouble = job, None
            if kind == "DELETED" or self.phase in ("Complete", "Failed"):
                self._ended.set()

    async def _watch_pods(self, group: asyncio.TaskGroup) -> None:
        query, what = {"labelSelector": f"{names.JOB_NAME_LABEL}={self._name}"}, f"pods of job {self._name}"
        async for _, pod in self._api.watch(self._api.pods, query, what=what):
            name, container = pod["metadata"]["name"], container_of(pod)
            if name not in self._followed and len(self._followed) < PODS_AT_MOST and has_started(pod, container):
                follow = self._again(partial(self._follow, name, container))
                self._followed[name] = group.create_task(follow, name=f"watch/{name}")

    async def _follow(self, pod: str, container: str) -> None:
        try:
            async for line in self._api.follow_log(pod, container):
                self._read(pod, line)
        except (NotThere, NotReached):
            return  # the container is started again, or the pod has gone

    def _read(self, pod: str, text: str) -> None:
        key = hash((pod, text.strip()))
        if key in self._seen or not text.startswith("{"):
            return
        self._seen.add(key)
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            return  # cut off by the end of the container
        if isinstance(line, dict) and isinstance(line.get("ts"), int | float):
            self.lines.append(line)
            self.on_line(line)


def container_of(pod: Mapping[str, Any]) -> str:
    """Where its member runs."""
    return CONTAINERS[pod["metadata"]["labels"][names.ROLE_LABEL]]


def has_started(pod: Mapping[str, Any], container: str) -> bool:
    status = pod.get("status", {})
    statuses = [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]
    return any(one["name"] == container and "waiting" not in one.get("state", {}) for one in statuses)
