"""No request is lost for want of a descriptor: limits are raised, and what they allow is what is let in."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from colocated_rl_agent.gate.data_port import Capacity
from colocated_rl_agent.runner.runner import SOCKET
from colocated_rl_member.accepting import accepting
from colocated_rl_member.room import RoomFor
from fakes.crowd import SOFT
from setup.layout import CHECKOUT

DEADLINE_S = 240.0
_, HARD = resource.getrlimit(resource.RLIMIT_NOFILE)
MANY = 20_000 if HARD == resource.RLIM_INFINITY else min(HARD, 20_000)


@dataclass
class ReportedStatuses:
    statuses: Counter[str]
    arrived: int
    lost: int
    linked: bool
    log: list[dict[str, object]]

    def lines(self, event: str) -> list[dict[str, object]]:
        return [line for line in self.log if line["event"] == event]


async def crowd(directory: Path, *, files: int, count: int, silent: int = 0) -> ReportedStatuses:
    """Return the fate of so many requests at a gate whose process may have so many files open."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fakes.crowd", "callers", str(directory), str(files), str(count), str(silent)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(CHECKOUT.root / "tests"), *sys.path))},
    )
    async with asyncio.timeout(DEADLINE_S):
        out, _ = await process.communicate()
    assert 0 == process.returncode
    counts = json.loads(out)
    lines = [json.loads(line) for line in counts.pop("log").splitlines()]
    return ReportedStatuses(Counter(counts.pop("statuses")), **counts, log=lines)


async def test_2000_requests_at_once_lose_nothing_under_a_soft_limit_of_1024(tmp_path: Path) -> None:
    """It was never raised: of 700 requests 390 ended as if the engine had been lost."""
    fate = await crowd(tmp_path, files=MANY, count=2000)
    assert {"200": 2000} == fate.statuses
    assert fate.linked
    assert [(MANY, SOFT)] == [(line["limit"], line["before"]) for line in fate.lines("open files limited")]
    assert [] == [line for line in fate.log if line["level"] in ("warning", "error")]


async def test_under_a_hard_limit_of_1024_the_surplus_is_told_to_come_later(tmp_path: Path) -> None:
    """Nobody's connection is reset and nobody's request is lost; the log says once that there is no room."""
    fate = await crowd(tmp_path, files=1024, count=2000)
    assert {"200", "429"} == fate.statuses.keys()
    assert fate.arrived == fate.statuses["200"]
    assert Capacity.of(1024).requests >= fate.arrived >= Capacity.of(1024).requests // 2
    assert fate.linked, "the operator's connection stays, and a new one is taken"
    assert 1 <= len([line for line in fate.log if line["level"] in ("warning", "error")]) <= 3
    assert [] == fate.lines("request lost")


async def test_samples_get_their_tokens_past_connections_that_send_nothing(tmp_path: Path) -> None:
    """1,100 of them took every descriptor: honest callers were reset, and a line was logged for each failed accept."""
    fate = await crowd(tmp_path, files=MANY, count=700, silent=20_000)
    assert 700 == fate.statuses["200"]
    assert {"200", "again"} >= fate.statuses.keys(), "refused is not lost: each comes again"
    assert 0 == fate.lost, "nor is the gate"
    assert fate.linked
    assert len([line for line in fate.log if line["level"] in ("warning", "error")]) <= 4


PROGRAMS = {
    "operator": ["-m", "colocated_rl_operator"],
    "agent": ["-m", "colocated_rl_agent"],
    "runner": ["-m", "colocated_rl_agent.runner.runner"],
    "rollout controller": ["-m", "colocated_rl_rollout"],
    "task server": ["-m", "colocated_rl_rollout.tasks.task_server", "--socket", "/proc/nowhere/tasks.sock"],
    "trainer": ["-c", "from colocated_rl_trainer.protocol.rank_server import serve; serve(lambda settings: None)"],
    "reference": ["-m", "colocated_rl_trainer.ref_policy"],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_process_raises_its_limit_at_its_start_and_says_so_once(name: str, tmp_path: Path) -> None:
    """There is no job for them: they end soon, or wait."""
    kubeconfig = tmp_path / "kubeconfig"
    named = {"name": "x", "context": {"cluster": "x", "user": "x"}, "cluster": {"server": "http://x"}, "user": {}}
    kubeconfig.write_text(
        json.dumps({"contexts": [named], "clusters": [named], "users": [named], "current-context": "x"})
    )
    around = {f"{part}_IMAGE": "x" for part in ("AGENT", "ROLLOUT", "GPU")}
    around |= {"KUBECONFIG": str(kubeconfig), "OPERATOR_NAMESPACE": "x", SOCKET: str(tmp_path / "runner.sock")}
    with subprocess.Popen(
        [sys.executable, *PROGRAMS[name]],
        env={**os.environ, **around},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, MANY)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        allowed = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0]
        process.kill()
        rest = process.stdout.read()
    assert (MANY, MANY) == (allowed, first.get("limit", first.get("files")))
    assert "open files limited" not in rest


@pytest.mark.parametrize("turns", range(4))
async def test_a_connection_that_comes_as_a_port_ends_is_closed(turns: int) -> None:
    """A task that was cancelled once its accept was done lost the connection, and nobody closed it."""
    listener = socket.create_server(("127.0.0.1", 0))
    async with accepting(listener, RoomFor(10, lambda: 0, lambda _: asyncio.Protocol()), at_a_time=5) as port:
        for _ in range(3):
            await asyncio.sleep(0)  # it waits for a connection
        with socket.create_connection(("127.0.0.1", port)):
            for _ in range(turns):
                await asyncio.sleep(0)
    gc.collect()  # a socket that nobody closed warns here
