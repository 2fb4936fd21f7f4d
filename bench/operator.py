"""`make bench-operator`: what the operator adds to a switch, alone and with many jobs.

The real operator on a real API server; members are of `bench.members`: a TLS session and real messages each, and no
time between a target and its facts, where none is said. The operator has one core; API server, etcd and all members
share the others. A switch is taken from the first target of an epoch to the last pod's word that it serves; the
epoch's own write comes before it, and is apart. Of two barriers it is the time from the last pod's word at one to the
last pod's target for the next that is the operator's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import os
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import ClassVar, TypeVar

import aiohttp
import uvloop

from bench.gate import cpu_seconds
from bench.members import MembersJournal
from bench.scene import JobsScene, Staged, scene_of
from colocated_rl_api import names
from colocated_rl_api.ladder import TIME_SLICED
from colocated_rl_api.rungs import Rung
from colocated_rl_operator.clients.cluster import ClusterAccess
from colocated_rl_operator.metrics import PREFIX
from colocated_rl_trainer.conformance.ranks import free_port
from real_operator import RealOperator, cluster_without_nodes, kubeconfig_of, running_operator

T = TypeVar("T")
SIZES = (8, 64, 256, 1024)
STEPS = 12
ENDLESS = 10**6  # batches
GROUPS, GROUP_SIZE, ROUNDS, WORK_S = 8, 8, 5, 0.05
JOBS, JOB_SIZE = 500, 2
OPERATOR_CORE, OTHER_CORE = 0, 1
say = partial(print, file=sys.stdout, flush=True)  # as it is now: what the operator prints goes elsewhere
BARRIERS = [rung for rung in TIME_SLICED.rungs if rung in TIME_SLICED.barriers]
COUNTED = re.compile(rf'^{PREFIX}(\w+?)(?:_total)?(?:{{.*resource="(\w+)".*}})? ([\d.e+-]+)$', re.MULTILINE)


@dataclass
class MeasuredOperator:
    """An operator's process, and what it says of itself."""

    operator: RealOperator
    port: int

    @property
    def cpu_s(self) -> float:
        return cpu_seconds(self.operator.process.pid)

    @property
    def memory_kib(self) -> int:
        lines = Path(f"/proc/{self.operator.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    async def counts(self) -> Counter[str]:
        """Its metrics; requests to the API server by resource."""
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self.port}/metrics") as answer:
            found = Counter[str]()
            for name, kind, value in COUNTED.findall(await answer.text()):
                found[kind or name] += float(value)  # type: ignore[assignment]
            return found


@asynccontextmanager
async def running(access: ClusterAccess, name: str) -> AsyncIterator[MeasuredOperator]:
    with tempfile.TemporaryDirectory() as folder:
        kubeconfig = Path(folder) / "kubeconfig"
        kubeconfig.write_text(kubeconfig_of(access))
        port = free_port()
        with contextlib.redirect_stdout(io.StringIO()):
            async with (
                running_operator(kubeconfig, name, {"METRICS_PORT": str(port)}) as operator,
                asyncio.TaskGroup() as tasks,
            ):
                os.sched_setaffinity(operator.process.pid, {OPERATOR_CORE})
                watched = tasks.create_task(_until_it_ends(operator))
                yield MeasuredOperator(operator, port)
                watched.cancel()


async def _until_it_ends(operator: RealOperator) -> None:
    """Wait for the operator's end. Raises RuntimeError if nobody asked for it, as when it has lost its lease."""
    if code := await operator.process.wait():
        words = "\n".join(str(line) for line in operator.lines[-3:])
        raise RuntimeError(f"the operator ended with code {code}: measure beside less work. It said:\n{words}")


# ------------------------------------------------------------------------------------------------- one job, many sizes
@dataclass(frozen=True)
class JobFigures:
    """The figures of one job, in seconds unless the name has another unit. CPU: for each message, either way."""

    members: int
    barrier_s: float
    switch_s: float
    least_s: float
    epoch_s: float  # from a sealed batch to the first target of its epoch: the epoch is written
    cpu_us: float
    members_cpu_us: float
    passes: float  # of the job's loop, for one switch
    memory_kib: int  # of the operator's process, all members connected

    HEAD: ClassVar = (
        "members  barrier ms  switch ms (least)  per member us  epoch's write ms  CPU us/message (members')  passes  "
        "memory MiB  KiB/member"
    )

    @property
    def per_member_us(self) -> float:
        return 1e6 * self.least_s / self.members

    def line(self, smallest: JobFigures) -> str:
        more = max(1, self.members - smallest.members)
        return (
            f"{self.members:7}  {1e3 * self.barrier_s:10.1f}  {1e3 * self.switch_s:9.1f} ({1e3 * self.least_s:5.0f})"
            f"  {self.per_member_us:13.0f}  {1e3 * self.epoch_s:16.1f}"
            f"  {self.cpu_us:14.0f} ({self.members_cpu_us:8.0f})"
            f"  {self.passes:6.1f}  {self.memory_kib / 1024:10.0f}"
            f"  {(self.memory_kib - smallest.memory_kib) / more:10.0f}"
        )


async def measure(access: ClusterAccess, members: int) -> JobFigures:
    async with scene_of(access) as scene, running(access, f"operator-{members}") as operator:
        job = await scene.add(f"of-{members}", MembersJournal(ENDLESS), replicas=members, steps=STEPS)
        journal = job.journal
        await scene.until(lambda: bool(job.status.get("step")))
        began, own, messages = operator.cpu_s, time.process_time(), journal.messages
        before, first_step = await operator.counts(), job.status["step"]
        await scene.until(lambda: job.phase == "Complete")
        after, messages = await operator.counts(), journal.messages - messages
        cpu_s, own_s, memory_kib = operator.cpu_s - began, time.process_time() - own, operator.memory_kib
        await scene.remove()
    barriers, switches, epochs = times(journal)
    return JobFigures(
        members=members,
        barrier_s=median(barriers),
        switch_s=median(switches),
        least_s=min(switches),
        epoch_s=median(epochs),
        cpu_us=1e6 * cpu_s / messages,
        members_cpu_us=1e6 * own_s / messages,
        passes=(after["pass_seconds_count"] - before["pass_seconds_count"]) / (STEPS - first_step),
        memory_kib=memory_kib,
    )


def times(journal: MembersJournal) -> tuple[list[float], list[float], list[float]]:
    """Seconds: of every barrier, of every whole switch after the start, of every epoch's write."""
    barriers, switches, epochs = [], [], []
    for step, epoch in journal.epochs.items():
        of = {rung: journal.barriers[epoch, rung] for rung in BARRIERS if (epoch, rung) in journal.barriers}
        if set(of) != set(BARRIERS) or step not in journal.sealed_at:
            continue  # the start, or the end
        switches.append(of[Rung.SERVING].last_fact - of[BARRIERS[0]].first_target)
        epochs.append(of[BARRIERS[0]].first_target - journal.sealed_at[step])
        barriers += [of[after].last_target - of[rung].last_fact for rung, after in itertools.pairwise(BARRIERS)]
    return barriers, switches, epochs


# ------------------------------------------------------------------------------------------------------ groups at once
async def compare_groups(access: ClusterAccess) -> None:
    """A switch of one job alone, and of eight that get their batch at the same moment; from batch to serving."""
    async with scene_of(access) as scene, running(access, "operator-groups") as operator:
        jobs = [await scene.add(f"g-{n}", MembersJournal(0), replicas=GROUP_SIZE, steps=ENDLESS) for n in range(GROUPS)]
        await scene.until(lambda: all(job.serves(0) for job in jobs))
        for work_s in (0.0, WORK_S):
            for job in jobs:
                job.journal.work_s = work_s
            alone = [await _switch(scene, jobs[:1]) for _ in range(ROUNDS)]
            together = [await _switch(scene, jobs) for _ in range(ROUNDS)]
            lone_s = min(least for (least,) in alone)
            best = min(together, key=max)
            slowest_s, usual_s = max(best), median(best)
            together_ms = f"together {1e3 * usual_s:.0f} ms, the slowest {1e3 * slowest_s:.0f} ms"
            say(
                f"{GROUPS} groups of {GROUP_SIZE} at once, {1e3 * work_s:.0f} ms on each rung:"
                f" alone {1e3 * lone_s:.0f} ms, {together_ms}: {slowest_s / lone_s:.2f} of a lone one"
                f" (one after another: {GROUPS:.2f})",
            )
        await scene.remove()
        assert operator.operator.process.returncode is None


async def _switch(scene: JobsScene, jobs: list[Staged]) -> list[float]:
    """Seconds of each, from its batch to the last pod that serves."""
    steps = [job.status["step"] + 1 for job in jobs]
    for job in jobs:
        job.journal.seal()
    await scene.until(lambda: all(job.serves(step) for job, step in zip(jobs, steps, strict=True)))
    return [_seconds(job.journal, step) for job, step in zip(jobs, steps, strict=True)]


def _seconds(journal: MembersJournal, step: int) -> float:
    return journal.barriers[journal.epochs[step], Rung.SERVING].last_fact - journal.sealed_at[step]


# ------------------------------------------------------------------------------------------------------------ many jobs
async def measure_jobs(access: ClusterAccess, number: int, size: int) -> None:
    async with scene_of(access) as scene:
        async with running(access, "operator-jobs") as operator:
            empty_kib, began = operator.memory_kib, time.perf_counter()
            adding = (scene.add(f"j-{n}", MembersJournal(0), replicas=size, steps=ENDLESS) for n in range(number))
            jobs = await asyncio.gather(*adding)
            await scene.until(lambda: all(job.serves(0) for job in jobs))
            members, memory_kib = sum(job.members for job in jobs), operator.memory_kib
            theirs_kib, took_s = memory_kib - empty_kib, time.perf_counter() - began
            say(
                f"{number} jobs of {size} GPU pods and a rollout controller each, {members} pods: serving after"
                f" {took_s:.0f} s, CPU {operator.cpu_s:.0f} s; memory {memory_kib / 1024:.0f} MiB,"
                f" {theirs_kib / number:.0f} KiB a job, {theirs_kib / members:.0f} KiB a member",
            )
            idle_s = await _cpu_of(operator, asyncio.sleep(10.0))
            say(f"  all of them serving: {idle_s / 10:.1%} of a core")
            before = await operator.counts()
            busy_s = await _cpu_of(operator, _switch(scene, jobs))
            after = await operator.counts()
            asked = {kind: (after[kind] - before[kind]) / number for kind in (names.PLURAL, "events", "pods")}
            seconds = sorted(_seconds(job.journal, 1) for job in jobs)
            say(
                f"  all get their batch at once: half of them serve after {median(seconds):.1f} s, the last after"
                f" {seconds[-1]:.1f} s; CPU {1e3 * busy_s / number:.0f} ms a switch; requests to the API server"
                f" for each: {', '.join(f'{count:.1f} {kind}' for kind, count in asked.items())}",
            )
            await operator.operator.end()
        epochs = {job.name: job.journal.epochs[1] for job in jobs}
        began = time.perf_counter()
        async with running(access, "operator-jobs-again") as operator:
            took = [at - began for at in await _first_targets(scene, jobs, epochs)]
            say(
                f"  cold start: the first job has targets after {min(took):.1f} s, half after {median(took):.1f} s,"
                f" the last after {max(took):.1f} s; CPU {operator.cpu_s:.0f} s",
            )
            await scene.remove()


async def _cpu_of(operator: MeasuredOperator, work: Awaitable[object]) -> float:
    began = operator.cpu_s
    await work
    return operator.cpu_s - began


async def _first_targets(scene: JobsScene, jobs: Iterable[Staged], epochs: dict[str, int]) -> list[float]:
    """Return when each job's pods got their first target of a newer epoch."""

    def newer(job: Staged) -> list[float]:
        found = job.journal.barriers.items()
        return [barrier.first_target for (epoch, _), barrier in found if epoch > epochs[job.name]]

    await scene.until(lambda: all(newer(job) and job.serves(1) for job in jobs))
    return [min(newer(job)) for job in jobs]


# ------------------------------------------------------------------------------------------------------------- the run
def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.operator", description=__doc__)
    parser.add_argument("--members", type=int, nargs="*", default=SIZES)
    parser.add_argument("--jobs", type=int, default=JOBS, help="0: none")
    parser.add_argument("--job-size", type=int, default=JOB_SIZE, help="GPU pods of each")
    parser.add_argument("--no-groups", action="store_true")
    given = parser.parse_args(arguments)
    cores = os.cpu_count() or 1
    os.sched_setaffinity(0, set(range(OTHER_CORE, cores)) or {0})
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    load = os.getloadavg()[0]
    print(f"{cores} cores: the operator has one, API server, etcd and all members the rest; load before: {load:.1f}")
    found: list[JobFigures] = []
    for members in given.members:
        found.append(_on_a_cluster(partial(measure, members=members)))
        print(*([JobFigures.HEAD] if len(found) == 1 else []), found[-1].line(found[0]), sep="\n", flush=True)
    if len(found) > 1:
        ratio = found[-1].per_member_us / found[-2].per_member_us
        print(f"a member at {found[-1].members} costs {ratio:.2f} of one at {found[-2].members}")
    if not given.no_groups:
        _on_a_cluster(compare_groups)
    if given.jobs:
        _on_a_cluster(partial(measure_jobs, number=given.jobs, size=given.job_size))
    return 0


def _on_a_cluster(work: Callable[[ClusterAccess], Coroutine[None, None, T]]) -> T:
    with tempfile.TemporaryDirectory() as folder, cluster_without_nodes(Path(folder)) as access:
        return uvloop.run(work(access))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
