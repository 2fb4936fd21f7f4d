"""`samples --follow` as a person starts it, over kubectl and a port-forward, of a store that is really served."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from unit.test_rollout_followers import FollowersScene, serving
from unit.test_rollout_store import JOB, completed_group, seal
from waiting import DEADLINE_S

from builders import make_manifest
from colocated_rl_api import names
from colocated_rl_cli.base.errors import Exit
from colocated_rl_rollout.store.store import Store
from fakes.cluster_api import ClusterApi, page
from fakes.kubectl import Played, play_kubectl

POD = "sums-rollout-0"


@pytest.fixture
def api() -> ClusterApi:
    manifest = make_manifest("sums", replicas=1)
    job = {**manifest, "metadata": {**manifest["metadata"], "uid": "uid-1"}, "status": {"phase": "Rollout"}}
    labels = {names.ROLE_LABEL: names.ROLE_ROLLOUT, names.ATTEMPT_LABEL: "0"}
    pod = {"metadata": {"name": POD, "labels": labels}, "status": {"phase": "Running"}}
    return ClusterApi(jobs={"sums": job}, pods=[pod])


@pytest.fixture
def kubectl(api: ClusterApi, tmp_path: Path) -> Iterator[Played]:
    with play_kubectl(api, tmp_path) as played:
        yield played


@pytest.fixture
async def scene(api: ClusterApi, tmp_path: Path) -> AsyncIterator[FollowersScene]:
    async with serving(Store(tmp_path / "store", job_uid=JOB), text=lambda ids: f"{len(ids)} tokens") as scene:
        api.members[POD] = scene.port
        yield scene


@asynccontextmanager
async def started(kubectl: Played, *words: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "colocated_rl_cli", "samples", "sums", *words),
        env=kubectl.environment, stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def line(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().rstrip("\n")


async def row(process: Process) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(await line(process))
    return read


async def ended(process: Process) -> tuple[int, str]:
    """Exit code, and what it complained of."""
    assert process.stderr is not None
    complaints = (await process.stderr.read()).decode()
    return await process.wait(), complaints


async def test_samples_are_reported_as_they_end_until_the_job_is_over(
    scene: FollowersScene, api: ClusterApi, kubectl: Played
) -> None:
    completed_group(scene.store)
    async with started(kubectl, "--follow", "--limit", "1") as process:
        assert ["ID", "GROUP_ID", "STATE", "REWARD"] == (await line(process)).split()[:4]
        assert ["2", "1", "completed", "1", "stop"] == (await line(process)).split()[:5]
        completed_group(scene.store)
        assert ["3", "4"] == [(await line(process)).split()[0] for _ in range(2)]
        completed_group(scene.store)
        api.jobs["sums"]["status"]["phase"] = "Complete"
        scene.followers.end()
        assert ["5", "6"] == [(await line(process)).split()[0] for _ in range(2)]
        assert (Exit.FINE, "") == await ended(process)
    assert not kubectl.is_running()


async def test_a_port_forward_that_breaks_is_made_again_and_no_sample_is_reported_twice_or_never(
    scene: FollowersScene, api: ClusterApi, kubectl: Played
) -> None:
    async with started(kubectl, "--follow", "-o", "json") as process:
        for group in range(4):
            if group:
                kubectl.cut_links()
            completed_group(scene.store)
            assert [2 * group + 1, 2 * group + 2] == [(await row(process))["ended"] for _ in range(2)]
        del api.jobs["sums"]
        scene.followers.end()
        code, complaints = await ended(process)
    assert Exit.FINE == code
    assert 3 == complaints.count("it is asked again\n") == complaints.count("\n")


async def test_a_port_forward_that_breaks_as_the_job_goes_is_reported_and_not_made_again(
    scene: FollowersScene, api: ClusterApi, kubectl: Played
) -> None:
    async with started(kubectl, "--follow", "-o", "json") as process:
        completed_group(scene.store)
        assert [1, 2] == [(await row(process))["ended"] for _ in range(2)]
        del api.jobs["sums"]
        kubectl.cut_links()
        code, complaints = await ended(process)
    assert (Exit.FINE, 1) == (code, complaints.count("\n"))
    assert "cut off" in complaints
    assert "asked again" not in complaints


async def test_samples_that_a_checkpoint_took_meanwhile_are_missed_aloud(
    scene: FollowersScene, api: ClusterApi, kubectl: Played
) -> None:
    async with started(kubectl, "--follow", "-o", "json") as process:
        completed_group(scene.store)
        assert [1, 2] == [(await row(process))["ended"] for _ in range(2)]
        port = api.members.pop(POD)
        kubectl.cut_links()
        seal(scene.store, list(scene.store.groups.values()))
        scene.store.commit(1)
        seal(scene.store, [completed_group(scene.store)])
        scene.store.commit(2)
        scene.store.forget(2)
        completed_group(scene.store)
        api.members[POD] = port
        assert [5, 6] == [(await row(process))["ended"] for _ in range(2)]
        del api.jobs["sums"]
        scene.followers.end()
        _, complaints = await ended(process)
    assert "2 that ended before are in a checkpoint, and only counted" in complaints


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
async def test_it_ends_when_it_is_told_to(scene: FollowersScene, kubectl: Played, ending: signal.Signals) -> None:
    completed_group(scene.store)
    async with started(kubectl, "--follow", "--text") as process:
        assert "1: completed, reward 1" == await line(process)
        process.send_signal(ending)
        assert (Exit.INTERRUPTED, "") == await ended(process)
    assert not kubectl.is_running()


async def test_whoever_reads_it_may_have_enough(scene: FollowersScene, kubectl: Played) -> None:
    completed_group(scene.store)
    async with started(kubectl, "--follow", "-o", "yaml") as process:
        assert "- id: 1" == await line(process)
        assert process.stdout is not None
        process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined] # as `| head -1` does
        while process.returncode is None:
            completed_group(scene.store)
            await scene.store.flushed()
            await asyncio.wait([asyncio.create_task(process.wait())], timeout=0.1)
        assert (Exit.FINE, "") == await ended(process)


async def test_samples_are_a_file_for_pandas(scene: FollowersScene, kubectl: Played, tmp_path: Path) -> None:
    group = completed_group(scene.store)
    seal(scene.store, [group])
    completed_group(scene.store)
    file = tmp_path / "samples.parquet"
    async with started(kubectl, "--parquet", str(file)) as process:
        code, complaints = await ended(process)
    assert (Exit.FINE, f"{file}: written, 0.0 MiB\n") == (code, complaints)
    found = pq.read_table(file).to_pylist()
    assert ["sealed", "sealed", "completed", "completed"] == [row["state"] for row in found]
    assert [[3, 4]] * 4 == [row["response_ids"] for row in found]
    async with started(kubectl, "--parquet", str(tmp_path / "no" / "folder"), "--state", "failed") as process:
        code, complaints = await ended(process)
    assert (Exit.USAGE, True) == (code, "can't be written: " in complaints)


async def test_a_file_that_is_cut_off_is_none(scene: FollowersScene, kubectl: Played, tmp_path: Path) -> None:
    file = tmp_path / "samples.parquet"
    async with started(kubectl, "--parquet", str(file), "--text") as process:  # there is no model
        code, complaints = await ended(process)
    assert Exit.NO_ANSWER == code
    assert "no file of samples could be written: " in complaints
    assert "tokenizer_config.json can't be read" in complaints
    (scene.store.batch_directory / "1-0.safetensors").parent.mkdir(exist_ok=True)
    seal(scene.store, [completed_group(scene.store)])
    for shard in scene.store.batch_directory.iterdir():
        shard.write_bytes(b"damaged")
    async with started(kubectl, "--parquet", str(file)) as process:
        code, complaints = await ended(process)
    assert (Exit.NO_ANSWER, True) == (code, "cut off" in complaints)
    assert not file.exists()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (page({"samples": []}), f"pod {POD} is of an earlier release, whose samples can't be followed"),
        (
            "HTTP/1.1 429 Too Many Requests\n\n16 clients follow the samples already",
            "the member answers 429: 16 clients",
        ),
    ],
)
async def test_what_can_not_begin_is_code_3(api: ClusterApi, kubectl: Played, answer: str, message: str) -> None:
    api.pages[POD, "/v1/samples"] = answer
    async with started(kubectl, "--follow") as process:
        code, complaints = await ended(process)
    assert Exit.NO_ANSWER == code
    assert message in complaints


LINES = "HTTP/1.1 200 OK\nContent-Type: application/x-ndjson\n"
BEGUN = LINES + "X-Begins-After: 0\n\n"
SAMPLE = {"id": 1, "state": "completed", "reward": 0.5, "ended": 1}


@pytest.mark.parametrize(
    ("answer", "words", "message"),
    [
        ("HTTP/1.1 200 OK\n\n" + "[" * 5000, [], "is no JSON"),
        (page([]), [], "is no object of JSON"),
        (page({"samples": {}}), [], "shows samples of another form"),
        (page({"samples": [SAMPLE | {"reward": 10**400}]}), ["--text"], "another form, see 0.reward"),
        (LINES + f"X-Begins-After: {'9' * 5000}\n\n", ["--follow"], "does not say where its samples begin"),
    ],
)
async def test_a_pod_that_shows_something_else_is_no_answer(
    api: ClusterApi, kubectl: Played, answer: str, words: list[str], message: str
) -> None:
    """Reward code is beside the pages, and may serve others at their port. Each of these was a traceback."""
    api.pages[POD, "/v1/samples"] = answer
    async with started(kubectl, *words) as process:
        code, complaints = await ended(process)
    assert Exit.NO_ANSWER == code
    assert message in complaints
    assert "Traceback" not in complaints


@pytest.mark.parametrize("broken", ["[" * 5000, json.dumps(SAMPLE | {"ended": "x"})])
async def test_a_stream_that_brings_something_else_is_asked_again(
    api: ClusterApi, kubectl: Played, broken: str
) -> None:
    api.pages[POD, "/v1/samples"] = f"{BEGUN}{json.dumps(SAMPLE)}\n{broken}\n"
    async with started(kubectl, "--follow", "-o", "json") as process:
        assert SAMPLE == await row(process)
        assert process.stderr is not None
        assert b"; it is asked again\n" in await process.stderr.readline()
        del api.jobs["sums"]
        code, complaints = await ended(process)
    assert "Traceback" not in complaints
    assert Exit.FINE == code
