"""Rewards that hang and leave everything behind that a process can, where a pod's processes are few."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from few_processes import few_processes
from prometheus_client import CollectorRegistry
from waiting import until

from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.controller import Controller
from colocated_rl_rollout.rewards.rewards import TaskProcesses
from colocated_rl_rollout.rewards.task_connection import ProcessLost, TaskConnection
from colocated_rl_rollout.settings import read_settings
from fakes.gate import FakeGate
from fakes.rollout import JobOnDisk, WorkedSums, make_spec

DEADLINE_S = 120.0
TIMEOUTS = int(os.environ.get("COLOCATED_RL_TIMEOUTS", "1000"))  # of the slow form
MOST_PROCESSES = 160
MOST_ZOMBIES = 5
UNREAPED_S = 2.0  # what is killed together is reaped one by one
AT_A_TIME = 4
BOMB_EVERY = 25
ANSWER = '{"value": 1}'
LEAVES = {
    "grandchildren": "for each in 1 2 3; do sh -c 'sleep 600 & sleep 600 & wait' & done; echo $ANSWER",
    "daemon": "env -i setsid sh -c 'sleep 600 &'; echo $ANSWER",
    "zombies": "for each in 1 2 3; do sh -c 'true & true &'; done; echo $ANSWER",
    "keeper killed": "sleep 600 & echo $ANSWER; kill -KILL $PPID",
    "bomb": f'exec {shlex.quote(sys.executable)} -I -S -c "$BOMB" "$ANSWER"',
}
BOMB = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    try:
        os.fork()
    except OSError:
        print(sys.argv[1], flush=True)
"""
PROGRAM = f"""
ANSWER={shlex.quote(ANSWER)} BOMB={shlex.quote(BOMB)}
read what
case $what in
{"".join(f"'{name}') {left} ;;" for name, left in LEAVES.items())}
esac
while :; do sleep 600; done
"""  # a shell starts ten times as fast as Python
REWARDS = """
import os, signal, subprocess, sys, time

def score(response, row):
    if row["number"] % 5 == 0:
        subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"], start_new_session=True, env={})
        time.sleep(600)
    if row["number"] % 5 == 1:
        while True:
            try:
                os.fork()
            except OSError:
                pass
    return 1.0 if response.endswith(str(row["sum"])) else 0.0
"""


@dataclass
class RewardsContainer:
    """A Container holds the process that the container of rewards runs, and what has become of it."""

    server: asyncio.subprocess.Process
    path: Path
    most_zombies: int = 0
    seen: set[int] = field(default_factory=set)
    _zombies: dict[int, float] = field(default_factory=dict)  # since when each waits

    def look(self) -> set[int]:
        """Return all that descends from the server, and note how much of it has waited for a while to be reaped."""
        states = {}
        for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - it looks ten thousand times
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                state, parent, *_ = file.read().rpartition(b")")[2].split()
                states[int(name)] = state, int(parent)
        found = {self.server.pid}
        while more := {pid for pid, (_, parent) in states.items() if parent in found} - found:
            found |= more
        self.seen |= found
        now = time.monotonic()
        zombies = [pid for pid in found if pid in states and states[pid][0] == b"Z"]
        self._zombies = {pid: self._zombies.get(pid, now) for pid in zombies}
        self.most_zombies = max(self.most_zombies, sum(since < now - UNREAPED_S for since in self._zombies.values()))
        return found - {self.server.pid}

    async def is_empty(self) -> None:
        """Wait until nothing is left, of what was seen either."""
        await until(lambda: not self.look(), DEADLINE_S)
        assert not [pid for pid in self.seen - {self.server.pid} if _descends_from_nobody(pid)]


def _descends_from_nobody(pid: int) -> bool:
    """Return whether a process that was once seen below the server still runs what this file had started."""
    with suppress(OSError):
        return b"sleep\x00600" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@asynccontextmanager
async def container(path: Path, command: list[str]) -> AsyncIterator[RewardsContainer]:
    """The server of tasks as the first process of a container does it, with few processes."""
    main = f"from colocated_rl_rollout.tasks import task_server as it; it.COMMAND = {tuple(command)!r}; it.main()"
    words = ["--socket", str(path), "--claims", str(path.parent), "--cache", str(path.parent / "cache")]
    with few_processes(MOST_PROCESSES) as limited:
        server = await asyncio.create_subprocess_exec(sys.executable, "-c", main, *words, preexec_fn=limited)
        try:
            await until(path.exists, DEADLINE_S)
            yield RewardsContainer(server, path)
        finally:
            server.terminate()
            await server.wait()


@pytest.mark.parametrize("timeouts", [200, pytest.param(TIMEOUTS, marks=pytest.mark.release)], ids=["few", "many"])
async def test_whatever_rewards_leave_behind_ends_with_them_and_the_next_is_given(
    tmp_path: Path, timeouts: int
) -> None:
    """A fork that failed in the server ended it, with the processes of all other rewards."""
    async with container(tmp_path / "tasks.sock", ["/bin/sh", "-c", PROGRAM]) as it:
        left, others = iter(range(timeouts)), sorted(LEAVES.keys() - {"bomb"})

        async def one_after_another() -> None:
            for number in left:
                await time_out(it, "bomb" if number % BOMB_EVERY == 7 else others[number % len(others)])

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_A_TIME):
                group.create_task(one_after_another())
        await it.is_empty()
        assert it.server.returncode is None
        assert it.most_zombies <= MOST_ZOMBIES


async def time_out(it: RewardsContainer, what: str) -> None:
    """Ask for a reward and hang up once everything is left behind; where no process is left for it, ask again."""
    while True:
        try:
            async with asyncio.timeout(DEADLINE_S), TaskConnection.open(it.path) as connection:
                await connection.send(what.encode() + b"\n", deadline_s=DEADLINE_S)
                await connection.receive(deadline_s=DEADLINE_S)
                it.look()
                return
        except ProcessLost:
            it.look()


async def test_a_batch_is_sealed_of_the_rewards_that_end(tmp_path: Path) -> None:
    rows = [{"prompt": f"problem: {number} + 1 =", "number": number, "sum": number + 1} for number in range(200)]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine/storms.py").write_text(REWARDS)
    file = {"claimName": "mine", "path": "sums.jsonl", "reward": {"function": "storms:score"}, "seed": 3}
    job = JobOnDisk.write(tmp_path, make_spec(prompts={"file": file, "rewardDeadlineSeconds": 2}))
    command = [sys.executable, "-m", "colocated_rl_rollout.tasks.task_process"]
    async with AsyncExitStack() as stack:
        it = await stack.enter_async_context(container(job.tasks, command))
        processes = TaskProcesses(job.spec.rollout.prompts, count=2, socket=job.tasks)
        running = asyncio.create_task(processes.run())
        session = await stack.enter_async_context(aiohttp.ClientSession())
        gate = FakeGate("job-gpu-0-0", job.tls, WorkedSums(job.directory / "model"))
        await stack.enter_async_context(gate.listening())
        controller = Controller(read_settings(job.arguments, job.environment), session, processes, CollectorRegistry())
        serving = asyncio.create_task(controller.run())
        await until(lambda: controller.member.ports.control or serving.done())
        async with job.operator(controller.member.ports.control) as operator, asyncio.timeout(DEADLINE_S):
            await operator.send(1, (gate.endpoint,))
            await gate.open(WeightVersion(0, 1))
            facts = await operator.until(lambda facts: facts.sealed and facts.samples.get("failed"))
            it.look()
        controller.drain()
        await serving
        running.cancel()
        await asyncio.wait([running])
        await it.is_empty()
    assert facts.sealed is not None
    assert 6 == facts.sealed.samples
    assert it.most_zombies <= MOST_ZOMBIES
