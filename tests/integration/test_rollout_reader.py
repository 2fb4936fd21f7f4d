"""The reader's own process, over the volume that a killed rollout controller left."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow.parquet as pq
import pytest
from integration.test_rollout_process import running, surroundings
from waiting import DEADLINE_S, until
from yarl import URL

from colocated_rl_api import names
from colocated_rl_api.member_wire import Climbed
from colocated_rl_api.rungs import WeightVersion
from fakes.interface import rollout_interface
from fakes.rollout import JobOnDisk, make_spec

OTHER_UID = "uid-other"
PAGES = ("/v1/samples?text=1", "/v1/samples?text=1&state=trained&limit=2", "/v1/batches", "/v1/evaluations")


async def start(job: JobOnDisk, volume: Path) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "colocated_rl_rollout.pages.reader", "--store", str(volume), "--pages-port", "0"),
        *("--job-file", str(job.directory / "job.json"), "--models", str(job.directory / "model")),
        stdout=PIPE,
        env={**os.environ, **job.environment, "TMPDIR": str(job.directory)},
    )


async def says(reader: Process) -> dict[str, Any]:
    """The next line of its log."""
    assert reader.stdout is not None
    line: dict[str, Any] = json.loads(await reader.stdout.readline())
    return line


@asynccontextmanager
async def reading(job: JobOnDisk, volume: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A reader that answers; it ends as the kubelet ends it, and leaves no copy."""
    reader = await start(job, volume)
    try:
        async with asyncio.timeout(DEADLINE_S):
            ready = await says(reader)
            assert "reader ready" == ready["event"], ready
            async with aiohttp.ClientSession(ready["address"]) as client:
                yield client
            reader.send_signal(signal.SIGTERM)
            assert 0 == await reader.wait()
        assert not [*job.directory.glob("tmp*")]
    finally:
        if reader.returncode is None:
            reader.kill()
        await reader.wait()


async def refusal(job: JobOnDisk, volume: Path) -> str:
    reader = await start(job, volume)
    async with asyncio.timeout(DEADLINE_S):
        line = await says(reader)
        assert ("reader failed", 1) == (line["event"], await reader.wait())
    return str(line["reason"])


async def body(client: aiohttp.ClientSession, path: str) -> bytes:
    async with client.get(path) as answer:
        content = await answer.read()
        assert 200 == answer.status, content
        shown = URL(path).path
        if answer.content_type == "application/json" and shown != "/openapi.json":
            rollout_interface().check("GET", shown, answer.status, answer.content_type, content)
        return content


async def asked(client: aiohttp.ClientSession) -> dict[str, Any]:
    shown = {path: json.loads(await body(client, path)) for path in PAGES}
    progress = json.loads(await body(client, "/v1/progress"))
    known = ("sealed", "samples", "trainedStep", "rewardMean", "stalenessMean", "epoch")
    return shown | {"facts": {name: progress["facts"].get(name) for name in known}, "sealed": progress["sealed"]}


def content(volume: Path) -> dict[str, str]:
    files = (each for each in volume.rglob("*") if each.is_file())
    return {str(each): hashlib.sha256(each.read_bytes()).hexdigest() for each in files}


@pytest.fixture
async def left(tmp_path: Path) -> tuple[JobOnDisk, Path, dict[str, Any]]:
    """A job that was killed with a trained batch and samples under way; its volume, and what its pages said last."""
    job, volume = JobOnDisk.write(tmp_path, make_spec()), tmp_path / "state"
    async with surroundings(job, tmp_path) as (_, gate), running(job) as life:
        await life.operator.send(1, [gate.endpoint])
        await gate.open(WeightVersion(0, 1))
        await life.operator.until(lambda facts: facts.sealed)
        await gate.close()
        climbed = Climbed(epoch=2, step=1, took_s={"Trained": 1.5})
        await life.operator.send(2, [gate.endpoint], trained_step=1, climbed=climbed)
        await gate.open(WeightVersion(1, 1), pace=4)
        await until(lambda: gate.in_flight == 6)
        await gate.close()
        await life.operator.until(lambda facts: facts.samples.get("interrupted") == 6)
        (ready,) = (line for line in life.log if line["event"] == "rollout controller ready")
        async with aiohttp.ClientSession(f"http://127.0.0.1:{ready['ports']['pages']}") as client:
            last = await asked(client)
            ((kept,),) = last["/v1/batches"].values()
            assert climbed == Climbed.model_validate(kept["climb"])
            assert "is held: its job still runs" in await refusal(job, volume)
        await life.kill()
    return job, volume, last


async def test_it_shows_what_the_controller_showed_last_and_changes_nothing(
    left: tuple[JobOnDisk, Path, dict[str, Any]],
) -> None:
    job, volume, last = left
    before = content(volume)
    async with reading(job, volume) as client:
        assert last == await asked(client)
        state = json.loads(await body(client, "/v1/state"))
        assert (job.environment[names.ENV_POD_NAME], None) == (state["hello"]["pod"], state["target"])
        assert b"<html" in await body(client, "/")
        document = json.loads(await body(client, "/openapi.json"))
        assert [] == [path for path in document["paths"] if "sessions" in path or path == "/v1/batches/{step}"]
    assert before == content(volume)


async def test_a_follower_gets_all_that_ended_and_then_the_end(left: tuple[JobOnDisk, Path, dict[str, Any]]) -> None:
    job, volume, last = left
    ended = sum(last["facts"]["samples"].values()) - 6
    async with reading(job, volume) as client:
        lines = (await body(client, "/v1/samples?follow=true&after=0")).splitlines()
        assert [*range(1, ended + 1)] == [json.loads(line)["ended"] for line in lines]


async def test_a_file_has_tokens_of_batches_and_of_samples_under_way(
    left: tuple[JobOnDisk, Path, dict[str, Any]],
) -> None:
    job, volume, last = left
    async with reading(job, volume) as client:
        rows = pq.read_table(io.BytesIO(await body(client, "/v1/samples?format=parquet&text=true"))).to_pylist()
    assert last["facts"]["samples"] == Counter(row["state"] for row in rows)
    assert all(row["response"].startswith("Answer: ") for row in rows if row["state"] == "trained")
    assert all(row["response_length"] for row in rows)


async def test_it_names_a_volume_without_a_store_one_of_another_job_and_a_damaged_one(
    left: tuple[JobOnDisk, Path, dict[str, Any]], tmp_path: Path
) -> None:
    job, volume, _ = left
    assert "has no store.sqlite3: the job never began" in await refusal(job, tmp_path / "empty")
    file = job.directory / "job.json"
    own = file.read_text()
    file.write_text(json.dumps(json.loads(own) | {"uid": OTHER_UID}))
    assert f"belongs to job {json.loads(own)['uid']}, not to {OTHER_UID}" in await refusal(job, volume)
    file.write_text(own)
    (volume / "store.sqlite3-wal").unlink()
    (volume / "store.sqlite3").write_bytes(b"x" * 10_000)
    assert "is damaged" in await refusal(job, volume)
