"""Jobs on a real API server whose node runs nothing; their pods are those of `bench.members`."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from bench.members import MembersJournal, Who, listen
from builders import make_manifest
from colocated_rl_api import names
from colocated_rl_api.member_wire import Hello, Keys
from colocated_rl_member.tls import MemberTls
from colocated_rl_operator.clients.cluster import ClusterAccess
from real_operator import JOBS, NAMESPACE, PODS, AdminApi, Body

SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"
START_S = 1200.0  # ten thousand pods serve after eight minutes


@dataclass
class Staged:
    """One job, whose pods have one address: their TLS names tell them apart."""

    name: str
    journal: MembersJournal
    address: str
    members: int  # pods
    body: Body = field(default_factory=dict)  # as the API server has it; empty: gone
    by_name: dict[str, Who] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    listening: asyncio.Lock = field(default_factory=asyncio.Lock)
    server: asyncio.Server | None = None

    @property
    def status(self) -> Body:
        status: Body = self.body.get("status", {})
        return status

    @property
    def phase(self) -> str | None:
        phase: str | None = self.status.get("phase")
        return phase

    def serves(self, step: int) -> bool:
        """Its status says so, and all that belongs to the switch is done."""
        return self.phase == "Rollout" and self.status.get("step") == step


class JobsScene:
    """Every job that was added; `changed` after each word of the API server or of a rollout controller."""

    def __init__(self, api: AdminApi) -> None:
        self.api = api
        self.jobs: dict[str, Staged] = {}
        self.changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._at_once = asyncio.Semaphore(32)
        self._net, self._places = random.randrange(10, 250), 0
        self._keys = defaultdict[str, asyncio.Future[dict[str, str]]](asyncio.Future)  # by pod

    async def add(self, name: str, journal: MembersJournal, *, replicas: int, steps: int) -> Staged:
        staged = self.jobs[name] = Staged(name, journal, self._address(), replicas + 1)
        unscheduled = {"spec": {"schedulerName": "bench"}}  # the cluster's own tries each again and again
        spec: Body = {
            "replicas": replicas,
            "steps": steps,
            "checkpoint": {"everySteps": 1000},
            "podTemplates": {"gpu": unscheduled, "rollout": unscheduled},
        }
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
        """The operator has made the keys of a pod: its member can listen."""
        for owner in secret["metadata"].get("ownerReferences", ()):
            if event == "ADDED" and owner["kind"] == "Pod" and not self._keys[owner["name"]].done():
                self._keys[owner["name"]].set_result(secret["data"])

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

    async def _run(self, staged: Staged, pod: Body) -> None:
        """The pod runs: its member answers by its name at the job's address."""
        metadata, labels = pod["metadata"], pod["metadata"]["labels"]
        name = names.pod_server_name(labels[names.JOB_UID_LABEL], metadata["name"])
        if name in staged.started:
            return
        staged.started.add(name)
        is_gpu = labels[names.ROLE_LABEL] == names.ROLE_GPU
        hello = Hello(
            pod=metadata["name"],
            pod_uid=metadata["uid"],
            job_uid=labels[names.JOB_UID_LABEL],
            role=labels[names.ROLE_LABEL],
            replica=int(labels[names.REPLICA_LABEL]) if is_gpu else None,
            incarnation="i1",
        )
        tls = _control_context(await self._keys[metadata["name"]])
        staged.by_name[name] = Who(hello, staged.journal, self.changed.set, tls)
        async with staged.listening:
            staged.server = staged.server or await listen(staged.by_name, staged.address, tls)
        status = {"phase": "Running", "podIP": staged.address, "podIPs": [{"ip": staged.address}]}
        async with self._at_once:
            path = f"{PODS}/{metadata['name']}/status"
            await self.api.call("PATCH", path, {"status": status}, "application/merge-patch+json")

    def _address(self) -> str:
        """Return another one for each job: the control port is the same everywhere."""
        place, self._places = self._places, self._places + 1
        return f"127.{self._net}.{1 + place // 250}.{1 + place % 250}"


def _control_context(secret: Mapping[str, str]) -> ssl.SSLContext:
    """Return the context of a member with the keys in the data of its pod's Secret."""
    texts = {name: base64.b64decode(text).decode() for name, text in secret.items()}
    keys = Keys(
        authorities=texts[names.CA_FILE],
        certificate=texts[names.CERT_FILE],
        key=texts[names.KEY_FILE],
        token=texts[names.DATA_TOKEN_FILE],
    )
    return MemberTls(keys).control_context()


@asynccontextmanager
async def scene_of(access: ClusterAccess) -> AsyncIterator[JobsScene]:
    connector = aiohttp.TCPConnector(ssl=access.ssl_context())
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
        scene = JobsScene(AdminApi(access, session))
        watched = ((PODS, scene.note_pod), (JOBS, scene.note_job), (SECRETS, scene.note_secret))
        watches = [tasks.create_task(scene.api.watch(path, note)) for path, note in watched]
        yield scene
        for watch in watches:
            watch.cancel()
