"""`make bench-operator`: what the operator adds to a switch, from 8 members to 1,024.

The real operator on a real API server; members are of `bench.members`: a TLS session and real messages each, and no
time between a target and its facts. The operator has one core, everything else the other. A switch is taken from the
first target of an epoch to the last pod's word that it serves; the epoch's own write comes before it. Of two barriers
it is the time from the last pod's word at one to the last pod's target for the next that is the operator's own.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import itertools
import json
import os
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp
import uvloop

from bench.gate import cpu_seconds
from bench.members import Journal, Who, listen
from builders import make_manifest
from colocated_rl_api import names
from colocated_rl_api.ladder import TIME_SLICED, Rung
from colocated_rl_api.member_wire import Hello
from colocated_rl_member.tls import MemberTls
from colocated_rl_operator.cluster import ClusterAccess
from real_operator import JOBS, NAMESPACE, PODS, Api, Body, cluster_without_nodes, kubeconfig_of, running_operator

SIZES = (8, 64, 256, 1024)
STEPS = 12
START_S, RUN_S = 300.0, 300.0
OPERATOR_CORE, OTHER_CORE = 0, 1
BARRIERS = [rung for rung in TIME_SLICED.rungs if rung in TIME_SLICED.barriers]


@dataclass(frozen=True)
class Figures:
    """Of one job. Seconds, but where said otherwise."""

    members: int
    barrier_s: float
    switch_s: float
    longest_s: float
    cpu_us: float  # of a message, both ways
    memory_kib: int  # of the operator's process, all members connected

    def line(self, smallest: Figures) -> str:
        per_member = self.switch_s / self.members * 1e3
        return (
            f"{self.members:7}  {1e3 * self.barrier_s:20.1f}  {1e3 * self.switch_s:15.1f}  {1e3 * self.longest_s:10.1f}"
            f"  {per_member:13.2f}  {self.cpu_us:14.0f}  {self.memory_kib / 1024:10.0f}"
            f"  {(self.memory_kib - smallest.memory_kib) / max(1, self.members - smallest.members):14.0f}"
        )


HEAD = (
    "members  barrier to target ms  whole switch ms  longest ms  ms per member  CPU us/message  memory MiB"
    "  KiB per member"
)


class Scene:
    """One job and its simulated pods, on a cluster whose node runs nothing."""

    def __init__(self, api: Api, members: int) -> None:
        self.api = api
        self.members = members
        self.journal = Journal()
        self.job: Body = {}
        self.changed = asyncio.Event()
        self.by_address: dict[str, Who] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._at_once = asyncio.Semaphore(32)
        self._ready = asyncio.Event()
        self._net = random.randrange(10, 250)

    @property
    def phase(self) -> str | None:
        phase: str | None = self.job.get("status", {}).get("phase")
        return phase

    def note_job(self, event: str, job: Body) -> None:
        self.job = {} if event == "DELETED" else job
        self.changed.set()

    def note_pod(self, event: str, pod: Body) -> None:
        labels = pod["metadata"].get("labels", {})
        if event != "DELETED" and names.ROLE_LABEL in labels and "podIP" not in pod.get("status", {}):
            task = asyncio.create_task(self._run(pod))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, pod: Body) -> None:
        """The pod runs: its member answers at its address."""
        metadata, labels = pod["metadata"], pod["metadata"]["labels"]
        is_gpu = labels[names.ROLE_LABEL] == names.ROLE_GPU
        replica = int(labels[names.REPLICA_LABEL]) if is_gpu else None
        address = self._address_of(replica)
        if address in self.by_address:
            return
        hello = Hello(
            pod=metadata["name"],
            pod_uid=metadata["uid"],
            job_uid=labels[names.JOB_UID_LABEL],
            role=labels[names.ROLE_LABEL],
            replica=replica,
            incarnation="i1",
        )
        self.by_address[address] = Who(hello, self.journal, self.changed.set)
        await self._ready.wait()
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        async with self._at_once:
            path = f"{PODS}/{metadata['name']}/status"
            await self.api.call("PATCH", path, {"status": status}, "application/merge-patch+json")

    async def listen(self, folder: Path) -> asyncio.Server:
        """Once the operator has made the job's keys."""
        addresses = [self._address_of(replica) for replica in (None, *range(self.members))]
        path = f"/api/v1/namespaces/{NAMESPACE}/secrets"

        async def keys() -> Body | None:
            uid = self.job["metadata"]["uid"]
            found = await self.api.all(path)
            return next(
                (each for each in found if each["metadata"].get("labels", {}).get(names.JOB_UID_LABEL) == uid), None
            )

        secret = await poll(keys, START_S)
        for name, text in secret["data"].items():
            (folder / name).write_bytes(base64.b64decode(text))
        server = await listen(self.by_address, addresses, MemberTls.read(folder).control_context())
        self._ready.set()
        return server

    def _address_of(self, replica: int | None) -> str:
        """Each its own: the control port is the same everywhere."""
        place = 0 if replica is None else replica + 1
        return f"127.{self._net}.{1 + place // 250}.{1 + place % 250}"

    async def until(self, is_so: Callable[[], bool], within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                while not is_so():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            told = json.dumps(self.job.get("status", {}), indent=1)
            raise TimeoutError(f"not within {within_s:.0f} s; {self.journal.connected} connected; {told}") from None


async def poll(ask: Callable[[], Awaitable[Body | None]], within_s: float) -> Body:
    async with asyncio.timeout(within_s):
        while (found := await ask()) is None:  # noqa: ASYNC110 - the API server is asked
            await asyncio.sleep(0.1)
    return found


async def measure(access: ClusterAccess, members: int) -> Figures:
    connector = aiohttp.TCPConnector(ssl=access.ssl_context())
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
        api = Api(access, session)
        scene = Scene(api, members)
        with tempfile.TemporaryDirectory() as folder:
            kubeconfig = Path(folder) / "kubeconfig"
            kubeconfig.write_text(kubeconfig_of(access))
            spec: Body = {"replicas": members, "steps": STEPS, "checkpoint": {"everySteps": 1000}}
            name = f"of-{members}"
            scene.job = await api.call("POST", JOBS, make_manifest(name, **spec))
            watches = [
                tasks.create_task(api.watch(PODS, scene.note_pod)),
                tasks.create_task(api.watch(JOBS, scene.note_job)),
            ]
            with contextlib.redirect_stdout(io.StringIO()):
                async with running_operator(kubeconfig, f"operator-{members}", {}) as operator:
                    os.sched_setaffinity(operator.process.pid, {OPERATOR_CORE})
                    server = await scene.listen(Path(folder))
                    await scene.until(lambda: bool(scene.job.get("status", {}).get("step")), START_S)
                    began, messages = cpu_seconds(operator.process.pid), scene.journal.messages
                    await scene.until(lambda: scene.phase == "Complete", RUN_S)
                    cpu_s, messages = cpu_seconds(operator.process.pid) - began, scene.journal.messages - messages
                    memory_kib = resident_kib(operator.process.pid)
                    await api.call("DELETE", f"{JOBS}/{name}")
                    await scene.until(lambda: not scene.job, START_S)
                    server.close()
            for watch in watches:
                watch.cancel()
    barriers, switches = times(scene.journal)
    return Figures(members, median(barriers), median(switches), max(switches), 1e6 * cpu_s / messages, memory_kib)


def times(journal: Journal) -> tuple[list[float], list[float]]:
    """Seconds: of every barrier, and of every whole switch after the start."""
    barriers, switches = [], []
    for epoch in sorted({epoch for epoch, _ in journal.barriers}):
        of = {rung: journal.barriers[epoch, rung] for rung in BARRIERS if (epoch, rung) in journal.barriers}
        if set(of) != set(BARRIERS):
            continue  # the start, or the end
        switches.append(of[Rung.SERVING].last_fact - of[BARRIERS[0]].first_target)
        barriers += [of[after].last_target - of[rung].last_fact for rung, after in itertools.pairwise(BARRIERS)]
    return barriers, switches


def resident_kib(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.operator", description=__doc__)
    parser.add_argument("--members", type=int, nargs="*", default=SIZES)
    given = parser.parse_args(arguments)
    os.sched_setaffinity(0, {OTHER_CORE % (os.cpu_count() or 1)})
    print(HEAD)
    found: list[Figures] = []
    with tempfile.TemporaryDirectory() as folder, cluster_without_nodes(Path(folder)) as access:
        for members in given.members:
            found.append(uvloop.run(measure(access, members)))
            print(found[-1].line(found[0]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
