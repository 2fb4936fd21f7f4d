"""The rollout controller's own process: what a kill -9 leaves, and what its log says."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow.parquet as pq
import pytest
import refusing_kernel
from aiohttp import web
from aiohttp.test_utils import TestServer
from documents.blocks import under
from waiting import DEADLINE_S, until

from colocated_rl_api.rungs import WeightVersion
from fakes.authority import FakeAuthority
from fakes.gate import FakeGate
from fakes.preloaded import preload
from fakes.rollout import JobOnDisk, OperatorEnd, ScriptedConversation, WorkedSums, make_spec
from fakes.silent import silence
from fakes.tasks import task_server


@dataclass
class ControllerProcess:
    """One life of the process."""

    process: Process
    operator: OperatorEnd
    data_port: int
    control_port: int
    log: list[dict[str, Any]] = field(default_factory=list)

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def running(
    job: JobOnDisk, *further: str, trouble: str | None = None, around: Mapping[str, str] | None = None
) -> AsyncIterator[ControllerProcess]:
    """Run the controller's process.

    further: arguments. trouble: what its disk has from SIGUSR1 on (`refusing_kernel`). around: further variables.
    """
    words = ["-m"] if trouble is None else [refusing_kernel.__file__, trouble]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *words, "colocated_rl_rollout", *job.arguments, *further),
        stdout=PIPE,
        env={**os.environ, **job.environment, **(around or {})},
    )
    log: list[dict[str, Any]] = []
    reading = asyncio.create_task(_read(process, log))
    try:
        await until(lambda: reading.done() or _ready(log))
        ports = _ready(log)["ports"]
        async with job.operator(ports["control"]) as operator:
            yield ControllerProcess(process, operator, ports["data"], ports["control"], log)
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


@asynccontextmanager
async def surroundings(
    job: JobOnDisk, folder: Path, respond: WorkedSums | None = None
) -> AsyncIterator[tuple[aiohttp.ClientSession, FakeGate]]:
    """Run what a controller has around it: a task server, one gate that is closed, and a session for batches."""
    with task_server(folder, path=job.tasks):
        gate = FakeGate("job-gpu-0-0", job.tls, respond or WorkedSums(job.directory / "model"))
        async with gate.listening(), aiohttp.ClientSession() as session:
            yield session, gate


async def interrupt_six(life: ControllerProcess, gate: FakeGate) -> None:
    """Six samples have begun at the gate, and a switch cuts them short."""
    await life.operator.send(1, [gate.endpoint])
    await gate.open(WeightVersion(0, 1), pace=4)
    await until(lambda: gate.in_flight == 6)
    await gate.close()
    await life.operator.until(lambda facts: facts.samples.get("interrupted") == 6)


def resident_mib(pid: int) -> int:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].removesuffix("kB")) // 1024


async def test_kill_nine_loses_nothing_that_was_accepted(tmp_path: Path) -> None:
    """Killed with partial responses in the store, again with a sealed batch, and then ended politely."""
    job = JobOnDisk.write(tmp_path, make_spec())
    async with AsyncExitStack() as stack:
        stack.enter_context(task_server(tmp_path, path=job.tasks))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        respond = WorkedSums(job.directory / "model")
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
            assert 128 + signal.SIGTERM == await third.process.wait()

        sealed = [*lines(second.log, "batch sealed"), *lines(third.log, "batch sealed")]
        assert [1, 2] == [line["step"] for line in sealed]
        assert (6, 6, 12) == (sealed[0]["samples"], sealed[0]["resumed_samples"], sealed[0]["segments"])
        assert sum(sealed[0]["staleness"].values()) == sealed[0]["loss_tokens"]
        assert "rollout" == sealed[0]["role"]
        assert lines(second.log, "gate open")
        assert [] == lines(third.log, "gate lost")


async def test_f14_sigterm_waits_for_responses_until_its_deadline_and_no_tokens_are_lost_that_were_there(
    tmp_path: Path,
) -> None:
    """No response ends in time in the first life, and each does in the second."""
    job = JobOnDisk.write(tmp_path, make_spec())
    async with surroundings(job, tmp_path) as (_, gate):
        async with running(job, "--drain-seconds=0.5") as first:
            await interrupt_six(first, gate)
            await gate.open(WeightVersion(0, 1), pace=1)
            await until(lambda: gate.in_flight == 6)
            first.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(DEADLINE_S):
                assert 128 + signal.SIGTERM == await first.process.wait()

        begun = len(gate.requests)
        async with running(job, f"--drain-seconds={10 * DEADLINE_S}") as second:
            facts = await second.operator.until(lambda facts: facts.samples)
            assert {"interrupted": 6} == facts.samples
            await gate.close()
            await second.operator.send(2, [gate.endpoint])
            await gate.open(WeightVersion(1, 1), pace=1)
            await until(lambda: gate.in_flight == 6)
            second.process.send_signal(signal.SIGTERM)
            await until(lambda: lines(second.log, "gate open"))
            await gate.release()
            async with asyncio.timeout(DEADLINE_S):
                assert 128 + signal.SIGTERM == await second.process.wait()
        assert [43] * 6 == [body["sampling_params"]["max_new_tokens"] for body in gate.requests[begun:]]
        (ended,) = lines(second.log, "rollout controller ended")
        assert {"completed", "sealed"} >= set(ended["samples"]), ended
        assert 6 == sum(ended["samples"].values())


async def test_samples_of_a_job_that_is_over_are_read_from_a_copy_of_its_store(tmp_path: Path) -> None:
    """The command of the page makes the file of what a killed controller left: its log of writes is not merged yet."""
    job, copy = JobOnDisk.write(tmp_path, make_spec()), tmp_path / "copy"
    async with surroundings(job, tmp_path) as (_, gate), running(job) as life:
        await life.operator.send(1, [gate.endpoint])
        await gate.open(WeightVersion(0, 1))
        await life.operator.until(lambda facts: facts.sealed)
        await life.kill()
    shutil.copytree(job.directory / "state", copy, ignore=lambda _, found: {"lock"} & {*found})
    [command] = under("docs/samples.md", "When the job is over, or suspended")
    words = {"python": sys.executable, "COPY": str(copy), "MODEL": str(job.directory / "model")}
    program, file = ([words.get(word, word) for word in part.split()] for part in command.split(">"))
    async with asyncio.timeout(DEADLINE_S):
        process = await asyncio.create_subprocess_exec(*program, stdout=PIPE)
        body, _ = await process.communicate()
    assert (0, ["samples.parquet"]) == (process.returncode, file)
    rows = pq.read_table(io.BytesIO(body)).to_pylist()
    sealed = [row for row in rows if row["state"] == "sealed"]
    assert 6 == len(sealed)
    assert all(row["response"].startswith("Answer: ") and {0} == {*row["token_step"]} for row in sealed)


async def test_connections_that_say_nothing_keep_no_member_out_and_take_little_memory(tmp_path: Path) -> None:
    """A thousand of them took 300 MB. A member waits for none of them to be late: these may be silent for long."""
    job = JobOnDisk.write(tmp_path, make_spec())
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        controller = await stack.enter_async_context(running(job))
        before = resident_mib(controller.process.pid)
        for port in (controller.data_port, controller.control_port):
            await stack.enter_async_context(silence(port, 10_000))
        assert 404 == (await job.fetch(session, controller.data_port, "/v1/batches/1?shard=0"))[0]
        async with job.operator(controller.control_port) as operator:
            await operator.until(lambda facts: True)
        grown = resident_mib(controller.process.pid) - before
        print(f"{grown} MiB more than {before}, by 20,000 silent connections")  # noqa: T201 - for docs/proven.md
        assert grown < 32


async def test_a_disk_that_takes_a_second_for_each_fsync_loses_nothing_and_holds_up_no_caller(tmp_path: Path) -> None:
    job = JobOnDisk.write(tmp_path, make_spec())
    async with surroundings(job, tmp_path) as (session, gate):
        async with running(job, around={**preload("slow_libc", tmp_path), "FSYNC_S": "1"}) as first:
            await interrupt_six(first, gate)
            assert 404 == (await job.fetch(session, first.data_port, "/v1/batches/1?shard=0"))[0]
            assert [] == [*lines(first.log, "gate lost"), *lines(first.log, "operator link lost")]
            await first.kill()
        async with running(job) as second:
            facts = await second.operator.until(lambda facts: facts.samples)
            assert {"interrupted": 6} == facts.samples


@pytest.mark.parametrize("resolver", ["hangs", "lies"])
async def test_a_resolver_that_hangs_or_lies_costs_no_sample_and_gives_no_reward(tmp_path: Path, resolver: str) -> None:
    """Samples wait for their reward, and get it once the name leads where it should; a stranger is asked for none."""
    asked = 0

    async def judge(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.json_response({"reward": 1})

    application = web.Application()
    application.add_routes([web.post("/score", judge)])
    stranger = FakeAuthority().server_context(tmp_path / "stranger", server_name="judge.example")
    async with (
        TestServer(application) as honest,
        TestServer(application, scheme="https") as lying,
        AsyncExitStack() as stack,
    ):
        await lying.start_server(ssl=stranger)
        port, scheme = (honest.port, "http") if resolver == "hangs" else (lying.port, "https")
        reward = {"url": f"{scheme}://judge.example:{port}/score", "timeoutSeconds": 1, "attempts": 1}
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine/rows.jsonl").write_text('{"prompt": "2 + 2?", "answer": "4"}\n' * 8)
        rows = {"claimName": "mine", "path": "rows.jsonl", "heldOutPercent": 0, "reward": {"http": reward}}
        spec = make_spec(prompts={"file": rows}).model_copy(update={"evaluation": None})
        job = JobOnDisk.write(tmp_path, spec)
        respond = ScriptedConversation(job.directory / "model", lambda _: "four")
        session, gate = await stack.enter_async_context(surroundings(job, tmp_path, respond))
        trouble = {"RESOLVE_S": "5"} if resolver == "hangs" else {"RESOLVE_TO": "127.0.0.1"}
        async with running(job, around={**preload("slow_libc", tmp_path), **trouble}) as first:
            await first.operator.send(1, [gate.endpoint])
            await gate.open(WeightVersion(0, 1))
            facts = await first.operator.until(lambda facts: facts.problem)
            assert facts.problem is not None
            assert "RewardUnavailable" == facts.problem.reason
            assert 404 == (await job.fetch(session, first.data_port, "/v1/batches/1?shard=0"))[0]
            assert 0 == asked
            first.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(DEADLINE_S):
                assert 128 + signal.SIGTERM == await first.process.wait()
        if resolver == "lies":
            return
        async with running(job, around={**preload("slow_libc", tmp_path), "RESOLVE_TO": "127.0.0.1"}) as second:
            facts = await second.operator.until(lambda facts: facts.samples)
            assert 6 <= sum(facts.samples.values()) - facts.samples.get("rejected", 0), facts
            await second.operator.send(2, [gate.endpoint])
            await gate.open(WeightVersion(0, 1))
            await second.operator.until(lambda facts: facts.sealed)
            assert 6 <= asked


@pytest.mark.parametrize("trouble", ["fsync", "inodes", "quota"])
async def test_a_disk_that_begins_to_fail_loses_nothing_that_was_accepted(tmp_path: Path, trouble: str) -> None:
    """An error of fsync, a quota or inodes used up: it ends, or waits and says why, and the next one goes on."""
    job = JobOnDisk.write(tmp_path, make_spec())
    async with surroundings(job, tmp_path) as (session, gate):
        async with running(job, trouble=trouble) as first:
            await interrupt_six(first, gate)
            first.process.send_signal(signal.SIGUSR1)
            await gate.open(WeightVersion(0, 1))
            if trouble == "inodes":
                facts = await first.operator.until(lambda facts: facts.problem)
                assert facts.problem is not None
                assert "No space left on device" in facts.problem.message
                await first.kill()
            else:
                async with asyncio.timeout(DEADLINE_S):
                    assert 1 == await first.process.wait()
            await gate.close()
        if trouble != "inodes":
            reasons = [line.get("reason", "") for line in first.log]
            [reason] = {reason for reason in reasons if "the store could not be written" in reason}
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
