"""Jobs on a real API server whose node runs nothing; their pods are those of `bench.members`."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from bench.members import MembersJournal, Who, listen
from builders import make_manifest
from colocated_rl_api import names
from colocated_rl_api.member_wire import Hello
from colocated_rl_member.tls import MemberTls
from colocated_rl_operator.clients.cluster import ClusterAccess
from real_operator import JOBS, NAMESPACE, PODS, AdminApi, Body

SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"
START_S = 900.0


@dataclass
class Staged:
    """One job; addresses: of the rollout controller's pod and of each GPU pod."""

    name: str
    journal: MembersJournal
    addresses: list[str]
    body: Body = field(default_factory=dict)  # as the API server has it; empty: gone
    by_address: dict[str, Who] = field(default_factory=dict)
    listens: asyncio.Event = field(default_factory=asyncio.Event)
    server: asyncio.Server | None = None

    @property
    def status(self) -> Body:
        status: Body = self.body.get("status", {})
        return status

    @property
    def phase(self) -> str | None:
        phase: str | None = self.status.get("phase")
        return phase

    @property
    def members(self) -> int:
        return len(self.addresses)

    def serves(self, step: int) -> bool:
        """Its status says so, and all that belongs to the switch is done."""
        return self.phase == "Rollout" and self.status.get("step") == step


class JobsScene:
    """Every job that was added; `changed` after each word of the API server or of a rollout controller."""

    def __init__(self, api: AdminApi, folder: Path) -> None:
        self.api = api
        self.jobs: dict[str, Staged] = {}
        self.changed = asyncio.Event()
        self._folder = folder
        self._tasks: set[asyncio.Task[None]] = set()
        self._at_once = asyncio.Semaphore(32)
        self._net, self._places = random.randrange(10, 250), 0

    async def add(self, name: str, journal: MembersJournal, *, replicas: int, steps: int) -> Staged:
        staged = self.jobs[name] = Staged(name, journal, [self._address() for _ in range(replicas + 1)])
        spec: Body = {"replicas": replicas, "steps": steps, "checkpoint": {"everySteps": 1000}}
        async with self._at_once:
            staged.body = await self.api.call("POST", JOBS, make_manifest(name, **spec))
        return staged

    async def remove(self) -> None:
        for staged in self.jobs.values():
            await self.api.call("DELETE", f"{JOBS}/{staged.name}")
        await self.until(lambda: not any(staged.body for staged in self.jobs.values()))
        for staged in self.jobs.values():
            if staged.server is not None:
                staged.server.close()
        self.jobs.clear()

    async def until(self, is_so: Callable[[], bool], within_s: float = START_S) -> None:
        try:
            async with asyncio.timeout(within_s):
                while not is_so():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            connected = sum(staged.journal.connected for staged in self.jobs.values())
            status = json.dumps(next(iter(self.jobs.values())).status, indent=1)
            raise TimeoutError(
                f"not within {within_s:.0f} s; {connected} connections; the first job: {status}"
            ) from None

    # ----------------------------------------------------------------------------------------- what the API server says
    def note_job(self, event: str, job: Body) -> None:
        if staged := self.jobs.get(job["metadata"]["name"]):
            staged.body = {} if event == "DELETED" else job
            self.changed.set()

    def note_secret(self, event: str, secret: Body) -> None:
        """The operator has made the job's keys: its members can listen."""
        staged = self._owner(secret)
        if event == "ADDED" and staged is not None and staged.server is None:
            self._do(self._listen(staged, secret), name=f"listen/{staged.name}")

    def note_pod(self, event: str, pod: Body) -> None:
        staged = self._owner(pod)
        if event != "DELETED" and staged is not None and "podIP" not in pod.get("status", {}):
            self._do(self._run(staged, pod), name=f"run/{pod['metadata']['name']}")

    def _owner(self, body: Body) -> Staged | None:
        owners = body["metadata"].get("ownerReferences", ())
        return next((self.jobs[owner["name"]] for owner in owners if owner["name"] in self.jobs), None)

    def _do(self, work: Coroutine[None, None, None], *, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, staged: Staged, secret: Body) -> None:
        folder = self._folder / staged.name
        folder.mkdir(exist_ok=True)
        for name, text in secret["data"].items():
            (folder / name).write_bytes(base64.b64decode(text))
        context = MemberTls.read(folder).control_context()
        staged.server = await listen(staged.by_address, staged.addresses, context)
        staged.listens.set()

    async def _run(self, staged: Staged, pod: Body) -> None:
        """The pod runs: its member answers at its address."""
        metadata, labels = pod["metadata"], pod["metadata"]["labels"]
        is_gpu = labels[names.ROLE_LABEL] == names.ROLE_GPU
        replica = int(labels[names.REPLICA_LABEL]) if is_gpu else None
        address = staged.addresses[0 if replica is None else replica + 1]
        if address in staged.by_address:
            return
        hello = Hello(
            pod=metadata["name"],
            pod_uid=metadata["uid"],
            job_uid=labels[names.JOB_UID_LABEL],
            role=labels[names.ROLE_LABEL],
            replica=replica,
            incarnation="i1",
        )
        staged.by_address[address] = Who(hello, staged.journal, self.changed.set)
        await staged.listens.wait()
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        async with self._at_once:
            path = f"{PODS}/{metadata['name']}/status"
            await self.api.call("PATCH", path, {"status": status}, "application/merge-patch+json")

    def _address(self) -> str:
        """Each its own: the control port is the same everywhere."""
        place, self._places = self._places, self._places + 1
        return f"127.{self._net}.{1 + place // 250}.{1 + place % 250}"


@asynccontextmanager
async def scene_of(access: ClusterAccess) -> AsyncIterator[JobsScene]:
    connector = aiohttp.TCPConnector(ssl=access.ssl_context())
    with tempfile.TemporaryDirectory() as folder:
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
            scene = JobsScene(AdminApi(access, session), Path(folder))
            watched = ((PODS, scene.note_pod), (JOBS, scene.note_job), (SECRETS, scene.note_secret))
            watches = [tasks.create_task(scene.api.watch(path, note)) for path, note in watched]
            yield scene
            for watch in watches:
                watch.cancel()
