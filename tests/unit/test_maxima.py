"""Every message and file has a maximum, which `docs/security-model.md` names with the test that it holds."""

from __future__ import annotations

import asyncio
import importlib
import re
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from colocated_rl_agent.files.exports import (
    MAX_HEADER_BYTES,
    MAX_MANIFEST_BYTES,
    ExportTorn,
    read_tensor_file,
    verify_export,
)
from colocated_rl_agent.files.journal import FILE, MAX_JOURNAL_BYTES, Journal, JournalUnreadable
from colocated_rl_agent.gate.upstream import MAX_HEAD_BYTES, Upstream, UpstreamConnection, UpstreamLost
from colocated_rl_agent.runner.runner_link import MAX_LINE_BYTES, RunnerLink
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.weights import MANIFEST
from colocated_rl_cli.base.errors import NotReached
from colocated_rl_cli.base.yaml_text import MAX_BYTES
from colocated_rl_cli.cluster.api import MAX_LINE_BYTES as MAX_LINE_OF_A_LOG
from colocated_rl_cli.cluster.api import Api
from colocated_rl_cli.cluster.pages import MAX_PAGE_BYTES, text_page
from colocated_rl_cli.manifest.manifest import judge
from colocated_rl_operator.clients.cluster import ClusterAccess
from colocated_rl_operator.clients.errors import ApiError
from colocated_rl_operator.clients.kube import MAX_ANSWER_BYTES, Kube
from colocated_rl_rollout.rules.chat import MAX_TEXT_BYTES, Chat, ModelUnusable
from colocated_rl_rollout.tasks.rows import MAX_ROW_BYTES, Rows, RowsUnusable
from colocated_rl_trainer.protocol.manifest import NotAnExport, tensor_entries
from fakes.cluster_api import ClusterApi
from fakes.rollout import write_model
from fuzz.gate import LOOP, FuzzedWire
from setup.layout import CHECKOUT

ROW = re.compile(r"^\| [^|]+ \| ([\d,]+)( [KMG]iB| bytes|) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
UNITS = {"": 1, " bytes": 1, " KiB": 1024, " MiB": 1024**2, " GiB": 1024**3}
ROWS = ROW.findall((CHECKOUT.root / "docs/security-model.md").read_text())
VERSION = WeightVersion(1, 1)


def empty(path: Path, size: int) -> Path:
    """Make a file of this size that takes no room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
    return path


@pytest.mark.parametrize(("number", "unit", "constants", "shown"), ROWS, ids=[row[2][:80] for row in ROWS])
def test_page_says_what_the_code_says_and_names_tests_that_are_there(
    number: str, unit: str, constants: str, shown: str
) -> None:
    for constant in re.findall(r"`([\w.]+)`", constants):
        module, _, name = constant.rpartition(".")
        assert int(number.replace(",", "")) * UNITS[unit] == getattr(importlib.import_module(module), name)
    tests = re.findall(r"`([\w/]+\.py)::(\w+)`", shown)
    assert tests
    for file, name in tests:
        assert f"def {name}(" in (CHECKOUT.root / file).read_text()


def test_page_has_a_row_for_each_part() -> None:
    parts = {re.search(r"colocated_rl_\w+", constants)[0] for _, _, constants, _ in ROWS}  # type: ignore[index]
    assert {
        f"colocated_rl_{part}" for part in ("api", "agent", "cli", "member", "operator", "rollout", "trainer")
    } == parts


def test_engine_whose_head_does_not_end_is_lost() -> None:
    async def ask() -> None:
        connection = UpstreamConnection(Upstream("http://engine:1"))
        connection.connection_made(FuzzedWire())
        line = b"X: " + b"x" * 1000 + b"\r\n"

        def speak(left: int) -> None:
            connection.data_received(line)
            if left > 0:
                LOOP.call_soon(speak, left - len(line))

        LOOP.call_soon(lambda: connection.data_received(b"HTTP/1.1 200 OK\r\n"))
        LOOP.call_soon(speak, MAX_HEAD_BYTES)
        await connection.exchange(b"", lambda status, pieces: True)

    with pytest.raises(UpstreamLost, match=f"a head of more than {MAX_HEAD_BYTES} bytes"):
        LOOP.run_until_complete(ask())


async def test_runner_whose_line_does_not_end_is_lost(tmp_path: Path) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(b"x" * (MAX_LINE_BYTES // 4))
                await writer.drain()
        except ConnectionError:
            writer.close()

    lost: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def heard(event: object) -> None:
        if not lost.done():
            lost.set_result(event)

    path = tmp_path / "runner"
    async with await asyncio.start_unix_server(speak, path), asyncio.timeout(60):
        link = RunnerLink(path, heard)
        running = asyncio.create_task(link.run())
        assert "limit" in str(await lost)
        running.cancel()
        await asyncio.wait([running])


def test_row_that_is_too_long_is_unusable(tmp_path: Path) -> None:
    path = empty(tmp_path / "rows.jsonl", MAX_ROW_BYTES + 1)
    with pytest.raises(RowsUnusable, match=f"row 1 of rows.jsonl is longer than {MAX_ROW_BYTES} bytes"):
        Rows([path], cache=tmp_path, check=lambda row: None)


def test_manifest_that_is_too_long_makes_an_export_torn(tmp_path: Path) -> None:
    empty(tmp_path / "1-1" / MANIFEST, MAX_MANIFEST_BYTES + 1)
    with pytest.raises(ExportTorn, match=f"longer than {MAX_MANIFEST_BYTES} bytes"):
        verify_export(tmp_path, VERSION)


def test_header_that_is_too_long_makes_an_export_torn(tmp_path: Path) -> None:
    """Both readers find it torn; the file has so many bytes, and none of them is read."""
    file = empty(tmp_path / "1-1" / "model.safetensors", 8 + MAX_HEADER_BYTES + 1)
    with file.open("r+b") as stream:
        stream.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
    with pytest.raises(NotAnExport, match=f"its header would have {MAX_HEADER_BYTES + 1} bytes"):
        tensor_entries(file)
    with pytest.raises(ExportTorn, match="is not a safetensors file"):
        read_tensor_file(file)


def test_journal_that_is_too_long_is_unreadable(tmp_path: Path) -> None:
    empty(tmp_path / FILE, MAX_JOURNAL_BYTES + 1)
    with pytest.raises(JournalUnreadable, match="more than"):
        Journal(tmp_path)


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json", "config.json"])
def test_template_that_is_too_long_makes_a_model_unusable(tmp_path: Path, file: str) -> None:
    empty(write_model(tmp_path) / file, MAX_TEXT_BYTES + 1)
    with pytest.raises(ModelUnusable, match=f"{file} can't be read: more than {MAX_TEXT_BYTES} bytes"):
        Chat(tmp_path)


async def test_answer_of_the_api_server_without_an_end_is_read_no_further() -> None:
    async def speak(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b" " * (MAX_ANSWER_BYTES // 8))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", speak)
    async with TestServer(app) as server, Kube(ClusterAccess(str(server.make_url("")).rstrip("/"))) as kube:
        with pytest.raises(ApiError, match=f"the answer is longer than {MAX_ANSWER_BYTES} bytes"):
            await kube.create_pod("default", {"metadata": {"name": "x"}})


def test_manifest_that_no_server_takes_is_refused() -> None:
    [fault] = judge(" " * (MAX_BYTES + 1)).faults
    assert f"larger than {MAX_BYTES} bytes" in fault.message


Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def endless_page(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x" * (MAX_PAGE_BYTES // 16))
        await writer.drain()


async def no_number_of_bytes(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nwhatever")
    await writer.drain()


@pytest.mark.parametrize(
    ("answer", "message"),
    [(endless_page, f"more than {MAX_PAGE_BYTES} bytes"), (no_number_of_bytes, "the member's answer is broken")],
)
async def test_page_of_a_member_without_an_end_is_read_no_further(answer: Answer, message: str) -> None:
    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as member:
        fake = ClusterApi(members={"sums-gpu-0-0": member.sockets[0].getsockname()[1]})
        async with TestServer(fake.application()) as server, aiohttp.ClientSession(server.make_url("/")) as session:
            with pytest.raises(NotReached, match=message):
                await text_page(Api(session, "default"), "sums-gpu-0-0", "/v1/state")


async def test_line_of_a_log_that_does_not_end_is_read_no_further() -> None:
    fake = ClusterApi(logs={("sums-gpu-0-0", "agent"): "x" * (3 * MAX_LINE_OF_A_LOG)})
    async with (
        TestServer(fake.application()) as server,
        aiohttp.ClientSession(server.make_url("/"), read_bufsize=MAX_LINE_OF_A_LOG // 2) as session,
    ):
        with pytest.raises(NotReached, match=f"a line of more than {MAX_LINE_OF_A_LOG} bytes"):
            async for _ in Api(session, "default").follow_log("sums-gpu-0-0", "agent"):
                pass
