"""Files that the agent checks, fetches and installs: exports, shards, the runner."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import xxhash
from aiohttp import web
from safetensors.numpy import save_file

from colocated_rl_agent.__main__ import install_runner
from colocated_rl_agent.files import batches
from colocated_rl_agent.files.batches import (
    Shards,
    ShardUnavailable,
    fetch_shard,
    remove_shards,
    shard_path,
)
from colocated_rl_agent.files.exports import (
    MESSAGE_CHARS,
    ExportTorn,
    TensorDigest,
    exports_in,
    read_tensor_file,
    remove_exports,
    verify_export,
)
from colocated_rl_api import names
from colocated_rl_api.batch import DIGEST_HEADER
from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_member.data import DataClient, data_application
from colocated_rl_member.tls import MemberTls
from colocated_rl_trainer.conformance.ranks import free_port
from colocated_rl_trainer.protocol.manifest import Exported, write_manifest
from fakes import serving
from fakes.authority import FakeAuthority
from fakes.relay import relayed
from fakes.weights import write_export

VERSION = WeightVersion(3, 1)


# ------------------------------------------------------------------------------------------------------------- exports
@pytest.fixture
def export(tmp_path: Path) -> Path:
    write_export(tmp_path / "3-1", version="3-1", weight=1.5)
    return tmp_path / "3-1"


def test_each_file_is_read_once_for_its_digest_and_those_of_its_tensors(tmp_path: Path) -> None:
    """It was read twice, by threads that already had all they needed in hand."""
    directory = tmp_path / "3-1"
    directory.mkdir()
    large = np.arange(3_000_000, dtype=np.float32)
    save_file({"a": large, "b": np.zeros(3, dtype=np.float16)}, directory / "1.safetensors")
    save_file({"c": large}, directory / "2.safetensors")
    write_manifest(directory, VERSION, Exported())
    size = sum(file.stat().st_size for file in directory.iterdir())

    before = bytes_read()
    _, digests = verify_export(tmp_path, VERSION)

    whole, small = (xxhash.xxh3_128(data).hexdigest() for data in (large.tobytes(), bytes(6)))
    expected = {"a": TensorDigest("F32", whole), "b": TensorDigest("F16", small), "c": TensorDigest("F32", whole)}
    assert expected == digests
    assert size <= bytes_read() - before < 1.1 * size


def bytes_read() -> int:
    """Return how many bytes this process has read so far."""
    (read,) = re.findall(r"^rchar: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)
    return int(read)


def write_tensor_file(path: Path, header: object, data: bytes = bytes(4)) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


F32 = {"dtype": "F32", "shape": [1]}


@pytest.mark.parametrize(
    "header",
    [
        {"weight": F32},
        {"weight": F32 | {"data_offsets": [0]}},
        {"weight": 7},
        {"weight": F32 | {"data_offsets": [0, 8]}},
        {"weight": F32 | {"data_offsets": [0, 3]}},
        {"weight": F32 | {"data_offsets": [4, 0]}},
        {"weight": F32 | {"data_offsets": [1, 4]}},
        {"weight": F32 | {"data_offsets": [0, 4]}, "again": F32 | {"data_offsets": [0, 4]}},
    ],
    ids=["no place", "half a place", "no entry", "cut off", "bytes left over", "backwards", "gap", "overlapping"],
)
def test_header_that_does_not_describe_the_bytes_makes_a_torn_export(tmp_path: Path, header: object) -> None:
    """It ended the agent."""
    write_tensor_file(tmp_path / "model.safetensors", header)
    with pytest.raises(ExportTorn, match="is not a safetensors file"):
        read_tensor_file(tmp_path / "model.safetensors")


def edit_manifest(export: Path, change: Callable[[dict[str, object]], object]) -> None:
    path = export / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def write_index(export: Path, weight_map: object) -> None:
    (export / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def sha256(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def xxh3(path: Path) -> str:
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(path.read_bytes())}"


def replace_by_directory(path: Path) -> None:
    """A file that nobody can read, not even root."""
    path.unlink()
    path.mkdir()


def test_whole_export_is_read_with_its_probe(export: Path) -> None:
    manifest, _ = verify_export(export.parent, VERSION)
    assert VERSION == manifest.version
    assert manifest.probe is not None


@pytest.mark.parametrize("digest", [xxh3, sha256])
def test_export_may_be_hashed_with_either_algorithm(export: Path, digest: Callable[[Path], str]) -> None:
    file = export / "model.safetensors"
    edit_manifest(export, lambda it: it.update(digests={file.name: digest(file)}))
    verify_export(export.parent, VERSION)

    flip_last_bit(file)

    with pytest.raises(ExportTorn, match=re.escape(f"has digest {digest(file)}")):
        verify_export(export.parent, VERSION)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda export: (export / "manifest.json").unlink(), "manifest.json can't be read"),
        (lambda export: (export / "manifest.json").write_text("{"), "manifest.json can't be read"),
        (lambda export: edit_manifest(export, lambda it: it.update(version="2-1")), "holds version 2-1"),
        (
            lambda export: edit_manifest(export, lambda it: it.update(digests={"model.safetensors": "md5:00"})),
            "(?s)manifest.json can't be read.*digests.*match pattern",
        ),
        (lambda export: flip_last_bit(export / "model.safetensors"), "digest"),
        (lambda export: (export / "model.safetensors").unlink(), "its manifest names"),
        (lambda export: (export / "more.safetensors").touch(), "its manifest names"),
        (lambda export: replace_by_directory(export / "model.safetensors"), "can't be read.* through the pod's group"),
        (lambda export: edit_manifest(export, lambda it: it.update(tensors={})), "differ in 1 tensors, first weight"),
        (lambda export: write_index(export, {"weight": "model-1-of-2.safetensors"}), r"names \['model-1-of-2.safe"),
        (lambda export: write_index(export, {}), r"index.json names \[\], the export holds \['model.safetensors'\]"),
        (lambda export: write_index(export, None), "index.json can't be read"),
    ],
)
def test_h51_h52_damaged_export_is_refused_with_what_is_wrong(
    export: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(export)
    with pytest.raises(ExportTorn, match=words):
        verify_export(export.parent, VERSION)


@pytest.mark.parametrize("content", ["{token}", '{{"token": "{token}"}}'])
def test_a_manifest_that_leads_to_the_agents_keys_is_not_quoted(export: Path, tmp_path: Path, content: str) -> None:
    """Most of the data token was in the job's status: a trainer writes here, and the agent may read its keys."""
    token = "".join(f"{number:02x}" for number in range(32))
    keys = tmp_path / "keys"
    keys.write_text(content.format(token=token))
    (export / "manifest.json").unlink()
    (export / "manifest.json").symlink_to(keys)
    with pytest.raises(ExportTorn, match=r"manifest\.json can't be read: ") as torn:
        verify_export(export.parent, VERSION)
    assert token[:8] not in str(torn.value)
    assert token[-8:] not in str(torn.value)


@pytest.mark.parametrize("file", ["model.safetensors.index.json", "manifest.json"])
def test_what_is_wrong_with_a_long_file_is_told_in_few_words(export: Path, file: str) -> None:
    """The whole file was in the message, which goes into a log at each try: 64 MiB, four times as long in its repr."""
    (export / file).write_bytes(b'{"words": "' + b"words" * 10_000 + b'\xff"}')
    with pytest.raises(ExportTorn, match="can't be read: ") as torn:
        verify_export(export.parent, VERSION)
    assert "words" not in str(torn.value)
    tensors = {"words" * 1000: 1, **{str(number): 1 for number in range(1000)}}
    (export / "manifest.json").write_text(json.dumps({"version": "1-1", "tensors": tensors, "digests": {}}))
    with pytest.raises(ExportTorn, match="can't be read: ") as torn:
        verify_export(export.parent, VERSION)
    assert len(str(torn.value)) <= MESSAGE_CHARS


def test_export_may_have_an_index_of_its_files(export: Path) -> None:
    write_index(export, {"weight": "model.safetensors"})
    verify_export(export.parent, VERSION)


def test_manifest_can_not_point_outside_of_its_directory(export: Path) -> None:
    outside = export.parent / "outside.safetensors"
    outside.write_bytes((export / "model.safetensors").read_bytes())
    edit_manifest(export, lambda it: it.update(digests={"../outside.safetensors": xxh3(outside)}))
    with pytest.raises(ExportTorn):
        verify_export(export.parent, VERSION)


def write_parts(directory: Path, weight: float) -> None:
    """Write an export of two files."""
    directory.mkdir()
    for number in (1, 2):
        tensor = np.full(4, weight + number, dtype=np.float32)
        save_file({f"layer.{number}": tensor}, directory / f"model-{number:05d}-of-00002.safetensors")
    write_manifest(directory, WeightVersion.parse(directory.name), Exported())


def test_part_of_another_version_makes_an_export_torn(tmp_path: Path) -> None:
    """It has the tensors that the manifest names, and another version's numbers in them."""
    for version in ("2-1", "3-1"):
        write_parts(tmp_path / version, weight=float(version[0]))
    verify_export(tmp_path, VERSION)
    stale = "model-00002-of-00002.safetensors"
    (tmp_path / "3-1" / stale).write_bytes((tmp_path / "2-1" / stale).read_bytes())
    with pytest.raises(ExportTorn, match=f"{stale} has digest"):
        verify_export(tmp_path, VERSION)


def test_part_that_stands_twice_makes_an_export_torn(tmp_path: Path) -> None:
    """Its manifest may say so: nobody knows which of the two an engine would load."""
    write_parts(tmp_path / "3-1", weight=3.0)
    part = tmp_path / "3-1" / "model-00002-of-00002.safetensors"
    twin = part.with_name("model-00003-of-00002.safetensors")
    twin.write_bytes(part.read_bytes())
    with pytest.raises(ExportTorn, match="its manifest names"):
        verify_export(tmp_path, VERSION)
    edit_manifest(tmp_path / "3-1", lambda it: it.update(digests=it["digests"] | {twin.name: xxh3(twin)}))  # type: ignore[operator]
    with pytest.raises(ExportTorn, match=r"tensor layer\.2 stands in two files"):
        verify_export(tmp_path, VERSION)


def test_only_exports_of_other_versions_are_removed(export: Path) -> None:
    root = export.parent
    for name in ("2-1", "2-2", "lost+found"):
        (root / name).mkdir()
    assert {"2-1", "2-2", "3-1"} == {path.name for path in exports_in(root).values()}
    remove_exports(root, VERSION)
    assert {"3-1", "lost+found"} == {path.name for path in root.iterdir()}


def test_exports_that_somebody_else_removes_meanwhile_are_removed(export: Path) -> None:
    """A removal that new trainers interrupted goes on in its thread: the next one reported that older weights stay."""
    root = export.parent
    for name in ("1-1", "2-1"):
        (root / name).mkdir()

    def remove_all_others() -> None:
        for name in ("1-1", "2-1"):
            shutil.rmtree(root / name, ignore_errors=True)

    remove_exports(root, VERSION, remove_all_others)
    assert ["3-1"] == [path.name for path in root.iterdir()]


# -------------------------------------------------------------------------------------------------------------- shards
@dataclass
class BatchServer:
    """The data port of a rollout controller, with one batch."""

    client: DataClient
    endpoint: Endpoint = field(init=False)
    data: bytes = b"shard" * 1000
    digest: str = ""
    status: int = 200
    cut: bool = False
    waits: asyncio.Event | None = None  # in the middle of the next shards
    began: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        digest = self.digest or hashlib.sha256(self.data).hexdigest()
        if self.cut or self.waits is not None:
            response = web.StreamResponse(headers={DIGEST_HEADER: digest, "Content-Length": str(len(self.data))})
            await response.prepare(request)
            await response.write(self.data[:100])
            self.began.set()
            if self.waits is not None:
                await self.waits.wait()
                await response.write(self.data[100:])
                return response
            assert request.transport is not None
            request.transport.abort()
            return response
        return web.Response(status=self.status, body=self.data, headers={DIGEST_HEADER: digest})


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[BatchServer]:
    directory = FakeAuthority().member_directory(tmp_path / "tls", job_uid=names.JobUid("uid"), token="t" * 20)
    tls = MemberTls.read(directory)
    async with aiohttp.ClientSession() as session:
        it = BatchServer(DataClient(session, tls, names.JobUid("uid")))
        app = data_application(tls, max_request_bytes=100)
        app.router.add_get("/v1/batches/4", it.serve)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls.data_context()).start()
        it.endpoint = Endpoint(pod="rollout", address="127.0.0.1", port=runner.addresses[0][1])
        yield it
        await serving.end(runner)


async def fetch(controller: BatchServer, directory: Path, **options: int) -> Path:
    return await fetch_shard(
        controller.client, controller.endpoint, directory, step=4, rank=1, world_size=2, deadline_s=60, **options
    )


async def test_shard_that_is_too_large_is_read_no_further(controller: BatchServer, tmp_path: Path) -> None:
    size = len(controller.data)
    await fetch(controller, tmp_path, most_bytes=size)
    with pytest.raises(ShardUnavailable, match=f"larger than {size - 1} bytes"):
        await fetch(controller, tmp_path, most_bytes=size - 1)


async def test_shard_is_written_whole(controller: BatchServer, tmp_path: Path) -> None:
    path = await fetch(controller, tmp_path)
    assert shard_path(tmp_path, step=4, rank=1) == path
    assert controller.data == path.read_bytes()


async def test_a_shard_is_written_through_no_link(controller: BatchServer, tmp_path: Path) -> None:
    """A trainer with a reference writes here too, and could have the agent overwrite its journal and its keys."""
    journal = tmp_path / "journal"
    journal.write_bytes(b"kept")
    shard_path(tmp_path, step=4, rank=1).with_suffix(".draft").symlink_to(journal)
    path = await fetch(controller, tmp_path)
    assert (b"kept", controller.data) == (journal.read_bytes(), path.read_bytes())
    assert not path.is_symlink()


async def test_shard_that_can_not_be_had_whole_is_not_there_and_the_error_names_it(
    controller: BatchServer, tmp_path: Path
) -> None:
    for name, value, words in (
        ("digest", "0" * 64, "the header declares 0000"),
        ("status", 404, "HTTP 404"),
        ("cut", True, "shard 1 of batch 4 from rollout"),
    ):
        setattr(controller, name, value)
        with pytest.raises(ShardUnavailable, match=words):
            await fetch(controller, tmp_path)
        assert not shard_path(tmp_path, step=4, rank=1).exists()


async def test_what_stands_in_the_way_of_shards_is_waited_for(controller: BatchServer, tmp_path: Path) -> None:
    """The agent ended of it, and so did the next one: a trainer with a reference writes here too."""
    in_the_way = shard_path(tmp_path, step=3, rank=1)
    in_the_way.mkdir()
    shards = Shards(controller.client, tmp_path, range(1, 2), deadline_s=60)
    with pytest.raises(ShardUnavailable, match=str(in_the_way)):
        await shards.fetch(controller.endpoint, 4, world_size=2)
    in_the_way.rmdir()
    await shards.fetch(controller.endpoint, 4, world_size=2)
    assert (4, None) == (shards.step_of(2), shards.step_of(3)), "a group of another size has other shards"


async def test_connection_that_is_left_half_open_costs_one_try(
    controller: BatchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other end is gone in the middle of a shard and without a word, as with its node."""
    monkeypatch.setattr(batches, "SILENCE", aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=0.2))
    controller.waits = asyncio.Event()
    shards, frozen, port = Shards(controller.client, tmp_path, range(1, 2), deadline_s=60), asyncio.Event(), free_port()
    async with relayed(port, controller.endpoint.port, frozen):
        relay = Endpoint(pod="rollout", address="127.0.0.1", port=port)
        fetching = asyncio.create_task(shards.fetch(relay, 4, world_size=2))
        await controller.began.wait()
        frozen.set()
        controller.waits.set()
        with pytest.raises(ShardUnavailable, match=r"shard 1 of batch 4 from rollout at .*Timeout"):
            await fetching
    assert not shard_path(tmp_path, step=4, rank=1).exists()
    await shards.fetch(controller.endpoint, 4, world_size=2)
    assert controller.data == shard_path(tmp_path, step=4, rank=1).read_bytes()


async def test_rollout_controller_that_does_not_listen_is_named(controller: BatchServer, tmp_path: Path) -> None:
    controller.endpoint = Endpoint(pod="rollout", address="127.0.0.1", port=9)
    with pytest.raises(ShardUnavailable, match=r"rollout at 127\.0\.0\.1:9"):
        await fetch(controller, tmp_path)


def test_shards_of_older_steps_are_removed(tmp_path: Path) -> None:
    for step in (2, 3, 4):
        shard_path(tmp_path, step=step, rank=0).touch()
    others = [tmp_path / "batch-\u00b2-0", tmp_path / "batch--3-0"]
    for other in others:
        other.touch()
    remove_shards(tmp_path, below=4)
    assert {shard_path(tmp_path, step=4, rank=0), *others} == {*tmp_path.iterdir()}


# ---------------------------------------------------------------------------------------------------------- the runner
def test_installed_runner_can_be_executed_by_anybody(tmp_path: Path) -> None:
    install_runner(tmp_path / "bin")
    runner = tmp_path / "bin/runner"
    assert 0o755 == runner.stat().st_mode & 0o777
    assert runner.read_text().startswith("#!/usr/bin/env python3\n")
    assert [runner] == list((tmp_path / "bin").iterdir())


def test_runner_is_installed_by_the_command_of_the_init_container(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "colocated_rl_agent", "install-runner", str(tmp_path)], check=True)
    assert (tmp_path / "runner").exists()


@pytest.mark.parametrize("start", [struct.pack("<Q", 2**60) + b"x", struct.pack("<Q", 200_000) + b"[" * 200_000, b"x"])
def test_header_of_a_file_that_is_no_safetensors_is_not_believed(export: Path, start: bytes) -> None:
    path = export / "model.safetensors"
    path.write_bytes(start)
    edit_manifest(export, lambda it: it.update(digests={path.name: xxh3(path)}))
    with pytest.raises(ExportTorn, match="not a safetensors file"):
        verify_export(export.parent, VERSION)
