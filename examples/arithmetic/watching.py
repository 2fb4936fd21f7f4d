"""Follows a job through what the product itself says: the job's status and the log lines of its pods.

Everything arrives over `kubectl get --watch` and `kubectl logs --follow`. At the end `collect` reads all logs once more
from their beginning, so that no line is missed that came before a follower or after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

from colocated_rl_api import names
from examples.arithmetic.cluster import CommandFailed, LocalCluster

AGAIN_S = 0.5
MAX_LINE_BYTES = 4 * 1024 * 1024
CONTAINERS = {names.ROLE_GPU: names.AGENT_CONTAINER, names.ROLE_ROLLOUT: names.ROLLOUT_CONTAINER}


class JobWatch:
    """One job. `on_line` is called with each new line."""

    def __init__(self, cluster: LocalCluster, *, namespace: str, name: str) -> None:
        self.job: Mapping[str, Any] = {}
        self.lines: list[Mapping[str, Any]] = []
        self.on_line: Callable[[Mapping[str, Any]], None] = lambda _: None
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._ended = asyncio.Event()
        self._seen: set[str] = set()  # lines as they came, each with its pod
        self._followed: dict[str, asyncio.Task[None]] = {}

    @property
    def phase(self) -> str:
        return str(self.job.get("status", {}).get("phase") or "")

    async def until_ended(self, *, deadline_s: float) -> None:
        """Return when the job is complete or failed. Raises TimeoutError, ClusterLost."""
        async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._watch_job(), name="watch/job"),
                group.create_task(self._watch_pods(group), name="watch/pods"),
            ]
            await self._ended.wait()
            for task in (*tasks, *self._followed.values()):
                task.cancel()
        self._cluster.refuse_lost()

    def collect(self) -> None:
        """Read every log that is still there from its beginning."""
        listed = self._cluster.kubectl(*self._pods(), "-o", "json")
        for pod in json.loads(listed)["items"]:
            container = CONTAINERS[pod["metadata"]["labels"][names.ROLE_LABEL]]
            for previous in ("--previous=true", "--previous=false"):
                try:
                    text = self._cluster.kubectl(*self._logs(pod["metadata"]["name"], container), previous)
                except CommandFailed:
                    continue  # no earlier container, or one that never started
                for line in text.splitlines():
                    self._read(pod["metadata"]["name"], line)
        self.lines.sort(key=lambda line: line["ts"])

    async def _watch_job(self) -> None:
        while True:
            watch = ("-n", self._namespace, "get", names.PLURAL, self._name, "--watch", "-o", "json")
            async for job in _documents(self._output(*watch)):
                self.job = job
                if self.phase in ("Complete", "Failed"):
                    self._ended.set()
            if self._cluster.is_lost:
                self._ended.set()
            await asyncio.sleep(AGAIN_S)

    async def _watch_pods(self, group: asyncio.TaskGroup) -> None:
        while True:
            async for pod in _documents(self._output(*self._pods(), "--watch", "-o", "json")):
                name, container = pod["metadata"]["name"], CONTAINERS[pod["metadata"]["labels"][names.ROLE_LABEL]]
                if name not in self._followed and _is_running(pod, container):
                    task = self._follow(name, container)
                    self._followed[name] = group.create_task(task, name=f"watch/{name}")
            await asyncio.sleep(AGAIN_S)

    async def _follow(self, pod: str, container: str) -> None:
        while True:
            async for line in self._output(*self._logs(pod, container), "--follow"):
                self._read(pod, line)
            await asyncio.sleep(AGAIN_S)  # the container is started again, or the pod has gone

    async def _output(self, *words: str) -> AsyncGenerator[str, None]:
        """Lines of a kubectl that goes on, until it ends or nobody listens any more."""
        process = await asyncio.create_subprocess_exec(
            *self._cluster.command("kubectl", *words),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=DEVNULL,
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is for this process alone
        )
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                yield line.decode(errors="replace")
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                process.kill()
            await process.wait()

    def _read(self, pod: str, text: str) -> None:
        key = f"{pod} {text.strip()}"
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

    def _pods(self) -> tuple[str, ...]:
        return ("-n", self._namespace, "get", "pods", "-l", f"{names.JOB_NAME_LABEL}={self._name}")

    def _logs(self, pod: str, container: str) -> tuple[str, ...]:
        return ("-n", self._namespace, "logs", pod, "-c", container)


def _is_running(pod: Mapping[str, Any], container: str) -> bool:
    status = pod.get("status", {})
    statuses = [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]
    return any(one["name"] == container and "waiting" not in one.get("state", {}) for one in statuses)


async def _documents(lines: AsyncIterator[str]) -> AsyncIterator[Any]:
    """Objects as kubectl prints them one after another, each over several lines."""
    text: list[str] = []
    async for line in lines:
        text.append(line)
        if line.rstrip("\n") == "}":
            yield json.loads("".join(text))
            text.clear()
