"""A model comes from a hub whole or not at all: the program of container `model` as a process, and a hub of its own."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
from waiting import DEADLINE_S, until

from builders import make_job
from colocated_rl_api import names
from colocated_rl_api.member_wire import JobFile
from colocated_rl_api.model import HubModel
from colocated_rl_rollout.fetch_model import COMPLETE, LOCK, ModelNotFetched, fetch
from fakes.hub import COMMIT, FakeHub
from fakes.serving import listening

NAME = "us/small"
WEIGHTS = "model-00001-of-00001.safetensors"
MODEL = {
    "config.json": b'{"model_type": "qwen3"}',
    "tokenizer.json": b"t" * 5000,
    WEIGHTS: bytes(range(256)) * 4000,
    "modeling_ours.py": b"raise SystemExit",
    "original/consolidated.safetensors": b"the same once more",
    "pytorch_model.bin": b"the same in another format",
}
READ = {"config.json", "tokenizer.json", WEIGHTS}


class FetchingPod:
    """The container's program, with a volume."""

    def __init__(self, directory: Path, endpoint: str, **source: str) -> None:
        hub = {"name": NAME, "revision": COMMIT, "endpoint": endpoint, **source}
        spec = make_job(model={"huggingFace": hub}).spec
        job = JobFile(name="job", namespace="us", uid="-", created=datetime.now(UTC), spec=spec)
        self.models = directory / "models"
        self.place = self.models / NAME / COMMIT
        self._file = directory / "job.json"
        self._file.write_text(job.model_dump_json(by_alias=True))

    async def run(self, environment: Mapping[str, str] | None = None) -> tuple[int, dict[str, object]]:
        """Return its exit code and its log, which has one line: no address of a download, which may be signed."""
        process = await self.begin(environment)
        async with asyncio.timeout(DEADLINE_S):
            output, _ = await process.communicate()
        (line,) = output.splitlines()
        return process.returncode or 0, json.loads(line)

    async def begin(self, environment: Mapping[str, str] | None = None) -> asyncio.subprocess.Process:
        program = (sys.executable, "-P", "-m", "colocated_rl_rollout.fetch_model")
        return await asyncio.create_subprocess_exec(
            *(*program, "--job-file", str(self._file), "--models", str(self.models)),
            env={"PYTHONPATH": ":".join(sys.path), "HOME": str(self.models.parent), **(environment or {})},
            stdout=asyncio.subprocess.PIPE,
        )

    def evil(self) -> list[Path]:
        """Return what lies anywhere in the test's directory though no hub may put it there."""
        return [*self.models.parent.rglob("evil.json")]

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.place.iterdir() if path.is_file()}


async def test_what_engine_and_trainer_read_is_fetched_once_and_nothing_else(tmp_path: Path) -> None:
    hub = FakeHub(NAME, MODEL, failures=1)
    async with listening(hub.application()) as endpoint:
        pod = FetchingPod(tmp_path, endpoint)
        code, line = await pod.run()
        assert (0, "model fetched", COMMIT) == (code, line["event"], line["revision"])
        assert {name: MODEL[name] for name in READ} | {COMPLETE: b""} == pod.files()
        asked = len(hub.revisions)
        assert (0, "model found") == ((again := await pod.run())[0], again[1]["event"])
        assert (asked, READ) == (len(hub.revisions), {*hub.downloads})


async def test_pods_that_begin_together_share_one_volume(tmp_path: Path) -> None:
    hub = FakeHub(NAME, MODEL)
    async with listening(hub.application()) as endpoint:
        pod = FetchingPod(tmp_path, endpoint)
        ends = await asyncio.gather(*(pod.run() for _ in range(6)))
    assert [0] * 6 == [code for code, _ in ends]
    assert sorted(READ) == sorted(hub.downloads), "each file once: none is removed under another pod"
    assert {name: MODEL[name] for name in READ} | {COMPLETE: b""} == pod.files()


def test_who_waits_for_another_pod_gives_up_in_time_and_says_for_what(tmp_path: Path) -> None:
    """Its message was that of a hub that does not answer, with the advice to name a token."""
    source = HubModel(name=NAME, revision=COMMIT)
    lock = tmp_path / source.path / LOCK
    lock.parent.mkdir(parents=True)
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ModelNotFetched, match=r"no other pod may take 0 s for the same model$"):
            fetch(source, models=tmp_path, token=None, patience_s=0.1)


def test_a_directory_that_can_not_be_written_is_named_with_who_has_to(tmp_path: Path) -> None:
    """A directory of the node belongs to whoever made it, and no fsGroup is applied to it."""
    (tmp_path / "us").touch()
    source = HubModel(name=NAME, revision=COMMIT)
    with pytest.raises(ModelNotFetched, match=rf"Error: .*It has to be writable for user {os.getuid()} or one of its"):
        fetch(source, models=tmp_path, token=None, patience_s=0.1)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
async def test_a_file_that_was_damaged_on_its_way_is_never_used_and_fetched_again(tmp_path: Path, name: str) -> None:
    hub = FakeHub(NAME, MODEL)
    hub.instead[name] = bytes(reversed(MODEL[name]))
    async with listening(hub.application()) as endpoint:
        pod = FetchingPod(tmp_path, endpoint)
        code, line = await pod.run()
        assert (1, "model not fetched") == (code, line["event"])
        assert name in str(line["reason"])
        assert not {name, COMPLETE} & {*pod.files()}
        hub.instead.clear()
        assert 0 == (await pod.run())[0]
    assert MODEL[name] == pod.files()[name]


async def test_a_download_that_was_killed_goes_on(tmp_path: Path) -> None:
    hub = FakeHub(NAME, MODEL)
    async with listening(hub.application()) as endpoint:
        pod = FetchingPod(tmp_path, endpoint)
        process = await pod.begin()
        await until(lambda: hub.downloads)
        process.kill()
        await process.wait()
        torn = pod.place / ".cache/huggingface/download/tokenizer.json.metadata"
        torn.parent.mkdir(parents=True, exist_ok=True)
        torn.touch()  # what the library was writing
        code, _ = await pod.run()
    assert 0 == code
    assert {name: MODEL[name] for name in READ} | {COMPLETE: b""} == pod.files()


async def test_a_private_model_needs_its_token_and_no_message_holds_it(tmp_path: Path) -> None:
    hub = FakeHub(NAME, MODEL, token="hf_open_sesame")
    async with listening(hub.application()) as endpoint:
        pod = FetchingPod(tmp_path, endpoint, secretName="mine")
        code, line = await pod.run()
        assert 1 == code
        assert "401" in str(line["reason"])
        assert "a private or gated model needs secretName" in str(line["reason"])
        code, line = await pod.run({names.ENV_HUB_TOKEN: "hf_false"})
        assert (1, False) == (code, "hf_false" in str(line))
        assert 0 == (await pod.run({names.ENV_HUB_TOKEN: "hf_open_sesame"}))[0]


async def test_what_is_no_model_of_the_format_is_refused_by_name(tmp_path: Path) -> None:
    hub = FakeHub(NAME, {"config.json": b"{}", "weights.gguf": b"-"})
    async with listening(hub.application()) as endpoint:
        pod = FetchingPod(tmp_path, endpoint)
        code, line = await pod.run()
    assert 1 == code
    assert "no config.json or no *.safetensors" in str(line["reason"])


@pytest.mark.parametrize("name", ["a/../../evil.json", "TMP/evil.json"])
async def test_no_hub_writes_outside_of_the_models_directory(tmp_path: Path, name: str) -> None:
    """Other jobs' models may lie beside it on the same claim."""
    name = name.replace("TMP", str(tmp_path))
    hub = FakeHub(NAME, MODEL | {name: b"{}"})
    async with listening(hub.application()) as endpoint:
        pod = FetchingPod(tmp_path, endpoint)
        code, line = await pod.run()
    assert (1, "model not fetched") == (code, line["event"])
    assert name not in hub.downloads
    assert [] == pod.evil()


@pytest.mark.parametrize("listed", [b"no JSON", b"[1]", b'[{"type": "file"}]'])
async def test_what_answers_and_is_no_hub_is_named(tmp_path: Path, listed: bytes) -> None:
    hub = FakeHub(NAME, MODEL)
    hub.listing = listed
    async with listening(hub.application()) as endpoint:
        code, line = await FetchingPod(tmp_path, endpoint).run()
    assert (1, "model not fetched") == (code, line["event"])
    assert f"{NAME} at {COMMIT} can't be fetched from {endpoint}" in str(line["reason"])
