"""The rollout controller's own process: what a kill -9 leaves, and what its log says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import refusing_kernel

from colocated_rl_api.rungs import WeightVersion
from fakes.gate import FakeGate
from fakes.rollout import Answers, JobOnDisk, OperatorEnd, make_spec, until
from fakes.tasks import task_server

START_DEADLINE_S = 60.0


@dataclass
class Running:
    """One life of the process."""

    process: Process
    operator: OperatorEnd
    data_port: int
    log: list[dict[str, Any]] = field(default_factory=list)

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def running(job: JobOnDisk, *, trouble: str | None = None) -> AsyncIterator[Running]:
    """trouble: what its disk has from SIGUSR1 on (`refusing_kernel`)."""
    words = ["-m"] if trouble is None else [refusing_kernel.__file__, trouble]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *words, "colocated_rl_rollout", *job.arguments),
        stdout=PIPE,
        env={**os.environ, **job.environment},
    )
    log: list[dict[str, Any]] = []
    reading = asyncio.create_task(_read(process, log))
    try:
        await until(lambda: reading.done() or _ready(log), START_DEADLINE_S)
        ports = _ready(log)["ports"]
        async with job.operator(ports["control"]) as operator:
            yield Running(process, operator, ports["data"], log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


async def _read(process: Process, log: list[dict[str, Any]]) -> None:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        log.append(json.loads(line))


def _ready(log: list[dict[str, Any]]) -> dict[str, Any]:
    return next((line for line in log if line["event"] == "rollout controller ready"), {})


def lines(log: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in log if line["event"] == event]


async def test_kill_nine_loses_nothing_that_was_accepted(tmp_path: Path) -> None:
    """Killed with partial responses in the store, again with a sealed batch, and then ended politely."""
    job = JobOnDisk.write(tmp_path, make_spec())
    async with AsyncExitStack() as stack:
        stack.enter_context(task_server(tmp_path, path=job.tasks))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        respond = Answers(job.directory / "model")
        gates = [FakeGate(f"job-gpu-{replica}-0", job.tls, respond) for replica in range(2)]
        for gate in gates:
            await stack.enter_async_context(gate.listening())
        endpoints = [gate.endpoint for gate in gates]

        async def serve(version: WeightVersion, pace: int | None = None) -> None:
            for gate in gates:
                await gate.open(version, pace=pace)

        async with running(job) as first:
            await first.operator.send(3, endpoints)
            await serve(WeightVersion(0, 1), pace=4)
            await until(lambda: sum(gate.in_flight for gate in gates) == 6)
            for gate in gates:
                await gate.close()
            await first.operator.until(lambda facts: facts.samples.get("interrupted") == 6)
            await serve(WeightVersion(0, 1), pace=1)
            await until(lambda: sum(gate.in_flight for gate in gates) == 6)
            await first.kill()
            for gate in gates:
                await gate.close()

        async with running(job) as second:
            facts = await second.operator.until(lambda facts: facts.samples)
            assert ({"interrupted": 6}, 3) == (facts.samples, facts.epoch)
            await second.operator.send(4, endpoints)
            await serve(WeightVersion(1, 1))
            await second.operator.until(lambda facts: facts.sealed)
            before = await job.fetch(session, second.data_port, "/v1/batches/1?shard=0")
            await second.kill()

        limits = [request["sampling_params"]["max_new_tokens"] for gate in gates for request in gate.requests]
        assert 12 == limits.count(43), "in both lives, each of six went on after the five tokens that were accepted"

        async with running(job) as third:
            facts = await third.operator.until(lambda facts: facts.sealed)
            assert before == await job.fetch(session, third.data_port, "/v1/batches/1?shard=0")
            assert 6 == facts.samples["sealed"]
            await third.operator.send(5, endpoints, trained_step=1)
            await third.operator.until(lambda facts: facts.sealed and facts.sealed.step == 2)
            third.process.send_signal(signal.SIGTERM)
            assert 0 == await third.process.wait()

        sealed = [*lines(second.log, "batch sealed"), *lines(third.log, "batch sealed")]
        assert [1, 2] == [line["step"] for line in sealed]
        assert (6, 6, 12) == (sealed[0]["samples"], sealed[0]["resumed_samples"], sealed[0]["segments"])
        assert sum(sealed[0]["staleness"].values()) == sealed[0]["loss_tokens"]
        assert "rollout" == sealed[0]["role"]
        assert lines(second.log, "gate open")
        assert [] == lines(third.log, "gate lost")


@pytest.mark.parametrize("trouble", ["fsync", "inodes", "quota"])
async def test_a_disk_that_begins_to_fail_loses_nothing_that_was_accepted(tmp_path: Path, trouble: str) -> None:
    """An error of fsync, a quota or inodes used up: it ends, or waits and says why, and the next one goes on."""
    job = JobOnDisk.write(tmp_path, make_spec())
    async with AsyncExitStack() as stack:
        stack.enter_context(task_server(tmp_path, path=job.tasks))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        gate = FakeGate("job-gpu-0-0", job.tls, Answers(job.directory / "model"))
        await stack.enter_async_context(gate.listening())

        async with running(job, trouble=trouble) as first:
            await first.operator.send(1, [gate.endpoint])
            await gate.open(WeightVersion(0, 1), pace=4)
            await until(lambda: gate.in_flight == 6)
            await gate.close()
            await first.operator.until(lambda facts: facts.samples.get("interrupted") == 6)
            first.process.send_signal(signal.SIGUSR1)
            await gate.open(WeightVersion(0, 1))
            if trouble == "inodes":
                facts = await first.operator.until(lambda facts: facts.problem)
                assert facts.problem is not None
                assert "No space left on device" in facts.problem.message
                await first.kill()
            else:
                async with asyncio.timeout(START_DEADLINE_S):
                    assert 1 == await first.process.wait()
            await gate.close()
        if trouble != "inodes":
            said = [line.get("reason", "") for line in first.log]
            [reason] = {reason for reason in said if "the store could not be written" in reason}
            assert ("quota" in reason) is (trouble == "quota")

        async with running(job) as second:
            await second.operator.send(2, [gate.endpoint])
            await gate.open(WeightVersion(0, 1))
            await second.operator.until(lambda facts: facts.sealed)
            status, _, _ = await job.fetch(session, second.data_port, "/v1/batches/1?shard=0")
            assert 200 == status
        [sealed] = lines(second.log, "batch sealed")[:1]
        assert (6, 6) == (sealed["samples"], sealed["resumed_samples"])


async def test_a_start_that_cannot_work_says_why_in_one_line(tmp_path: Path) -> None:
    job = JobOnDisk.write(tmp_path, make_spec())
    (job.directory / "model" / "tokenizer.json").unlink()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "colocated_rl_rollout", *job.arguments),
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, **job.environment},
    )
    output, errors = await process.communicate()
    limit, line = output.splitlines()
    assert "open files limited" == json.loads(limit)["event"]
    assert (1, b"") == (process.returncode, errors)
    assert "tokenizer.json" in json.loads(line)["reason"]
