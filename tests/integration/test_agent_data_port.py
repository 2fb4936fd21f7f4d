"""The HTTP of a gate, on both event loops: strict with callers, at ease with whatever an engine sends."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocated_rl_agent.gate import upstream
from colocated_rl_agent.gate.call import Call, Malformed
from colocated_rl_agent.gate.data_port import (
    MAX_HEAD_BYTES,
    MAX_WAITING,
    UNREAD_BYTES,
    CallerConnection,
    DataPort,
)
from colocated_rl_agent.gate.deadline import Deadline
from colocated_rl_agent.gate.entrance import Backend
from colocated_rl_agent.gate.gate import Gate
from colocated_rl_agent.gate.limiter import Limiter
from colocated_rl_agent.gate.running import Running
from colocated_rl_agent.gate.upstream import UpstreamConnection
from colocated_rl_api import names
from colocated_rl_api.gate_wire import MAX_REQUEST_BYTES
from colocated_rl_api.logs import JsonLines
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_member.tls import MemberTls
from fakes.authority import FakeAuthority

DEADLINE_S = 60.0
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
NEXT = b"GET /next HTTP/1.1\r\n\r\n"


@dataclass
class Echo:
    """Answers with what it was asked, unless the path says otherwise. asked: paths, in order."""

    asked: list[str] = field(default_factory=list)
    cancelled: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)
    connections: set[CallerConnection] = field(default_factory=set)

    async def handle(self, call: Call) -> None:
        self.asked.append(call.path)
        try:
            match call.path:
                case "/unread":
                    call.refuse(403, "not read")
                case "/later":
                    await self.go.wait()
                    call.answer(200, b"late")
                case "/reads-later":
                    await self.go.wait()
                    call.answer(200, b"%d" % len(await call.read()))
                case "/flood":
                    while True:
                        if not call.is_stalled:
                            call.give(b"x" * 65536, "text/plain")
                        await asyncio.sleep(0)
                case "/bug":
                    raise LookupError("a bug")
                case _:
                    body = await call.read()
                    call.answer(200, f"{call.method} {call.path} {len(body)}\n".encode(), content_type="text/plain")
        except Malformed as error:
            call.refuse(error.status, str(error))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@dataclass
class DataPortCaller:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def sends(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def gets(self, *, status: int) -> bytes:
        """The body of the next answer."""
        async with asyncio.timeout(DEADLINE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            assert status == int(head.split(b" ", 2)[1]), head
            (length,) = [int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: ")]
            return await self.reader.readexactly(length)

    async def gets_all(self, *, leaves: bool = False) -> bytes:
        """Return all bytes until the port ends the connection, with a reset if something was still on its way to it.

        leaves: the caller says that it sends no more once an answer has begun, so the port need not linger for it.
        """
        received = b""
        async with asyncio.timeout(DEADLINE_S):
            with suppress(OSError):
                while piece := await self.reader.read(65536):
                    received += piece
                    if leaves:
                        self.writer.write_eof()
        return received

    async def ends(self) -> None:
        with suppress(ConnectionError):
            await self.gets_all()


@asynccontextmanager
async def calling(port: int) -> AsyncIterator[DataPortCaller]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield DataPortCaller(reader, writer)
    finally:
        writer.transport.abort()


@asynccontextmanager
async def echoing(**options: float) -> AsyncIterator[tuple[Echo, int]]:
    echo = Echo()
    data_port = DataPort(echo.handle, **options)  # type: ignore[arg-type]
    async with data_port.listening("127.0.0.1", 0) as port:
        echo.connections = data_port.connections
        yield echo, port


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():  # noqa: ASYNC110 - many things make it so
            await asyncio.sleep(0.002)


BROKEN = [
    b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    b"POST /a HTTP/1.1\r\nX:\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    b"POST /a HTTP/1.1\r\nContent-Length: 3, 3\r\n\r\nabc",
    b"POST /a HTTP/1.1\r\nContent-Length: +3\r\n\r\nabc",
    b"POST /a HTTP/1.1\r\nContent-Length: -3\r\n\r\nabc",
    b"POST /a HTTP/1.1\r\nContent-Length: 0x3\r\n\r\nabc",
    b"POST /a HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\nabc",
    b"POST /a HTTP/1.1\r\nContent-Length : 3\r\n\r\nabc",
    b"POST /a HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /a HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"POST /a HTTP/1.1\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    b"POST /a HTTP/1.1\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    b"POST /a HTTP/1.1\r\nX: a\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /a HTTP/1.1\r\nX: a\r\n b\r\n\r\n",
    b"GET /a HTTP/1.1\nX: a\n\n",
    b"GET /a HTTP/1.1\r\nX: a\rY: b\r\n\r\n",
    b"GET /a HTTP/1.1\r\nX: \x00\r\n\r\n",
    b"GET /a HTTP/1.1\r\nAuthorization: a\r\nAuthorization: b\r\n\r\n",
    b"GET /a HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"POST /a HTTP/1.1\r\nContent-Length:\r\n\r\n",
    b"POST /a HTTP/1.1\r\nTransfer-Encoding:\r\n\r\n0\r\n\r\n",
    b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"GET /a HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n",
    b"GET /a HTTP/1.0\r\n\r\n",
    b"GET /a\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n\r\n",
    b"GET /a HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"GET /a HTTP/1.1\r\nContent-Encoding: gzip\r\n\r\n",
    b"POST /a HTTP/1.1\r\nExpect: something\r\nContent-Length: 3\r\n\r\nabc",
    CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n",
    CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n",
    CHUNKED + b"3\r\nabcdef\r\n0\r\n\r\n",
    CHUNKED + b"3\nabc\n0\n\n",
    CHUNKED + b"3;a\nb\r\nabc\r\n0\r\n\r\n",
    CHUNKED + b"fffffffffffffffff\r\nabc\r\n0\r\n\r\n",
    CHUNKED + b"3\r\nabc\r\n0\r\nX: trailer\r\n\r\n",
    b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n",
    b"GET /a HTTP/1.1\r\nX: " + b"x" * 9000 + b"\r\n\r\n",
    b"GET /a HTTP/1.1\r\n" + b"X: x\r\n" * 70 + b"\r\n",
    b"GET /a HTTP/1.1\r\nX: " + b"x" * 100_000,
    CHUNKED + b"3;" + b"x" * (3 * MAX_REQUEST_BYTES),
    b"POST /a HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_REQUEST_BYTES + 1),
]


@pytest.mark.parametrize("sent", BROKEN, ids=[str(place) for place in range(len(BROKEN))])
async def test_request_without_one_clear_framing_is_refused_and_nothing_after_it_is_served(sent: bytes) -> None:
    async with echoing() as (echo, port), calling(port) as caller:
        hearing = asyncio.create_task(caller.gets_all(leaves=True))  # a reset takes away what was not read yet
        with suppress(ConnectionError):
            await caller.sends(sent + NEXT)
        answer = await hearing
        assert answer.startswith(b"HTTP/1.1 4"), answer
        assert 1 == answer.count(b"\r\nContent-Length: ")
        assert "/next" not in echo.asked


@pytest.mark.parametrize(
    ("begins", "goes_on", "limit", "status"),
    [
        (b"GET /a HTTP/1.1\r\nX: ", b"x" * 4096, MAX_HEAD_BYTES, b"431"),
        (CHUNKED + b"3;", b"x" * 65536, MAX_HEAD_BYTES + 2 * MAX_REQUEST_BYTES, b"413"),
    ],
    ids=["head", "chunk"],
)
async def test_what_has_no_end_is_refused_at_its_limit_and_not_when_its_time_is_over(
    begins: bytes, goes_on: bytes, limit: int, status: bytes
) -> None:
    """Bytes that arrive in one piece with the beginning are not counted: up to 256 KiB."""
    async with echoing(caller_s=10 * DEADLINE_S) as (_, port), calling(port) as caller:
        hearing = asyncio.create_task(caller.gets_all())
        with suppress(ConnectionError):
            await caller.sends(begins)
            for _sent in range(0, limit + 2**20, len(goes_on)):
                await caller.sends(goes_on)
        caller.writer.write_eof()
        assert (await hearing).startswith(b"HTTP/1.1 " + status)


async def test_requests_that_are_sent_at_once_are_answered_in_order() -> None:
    async with echoing() as (echo, port), calling(port) as caller:
        await caller.sends(b"GET /later HTTP/1.1\r\n\r\nPOST /b HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")
        await caller.sends(CHUNKED + b"5\r\nabcde\r\n0\r\n\r\n" + NEXT)
        await until(lambda: bool(echo.asked))
        assert ["/later"] == echo.asked, "one at a time"
        echo.go.set()
        answers = [await caller.gets(status=200) for _ in range(4)]
        assert [b"late", b"POST /b 3\n", b"POST /a 5\n", b"GET /next 0\n"] == answers


async def test_head_that_comes_with_the_end_of_a_large_body_is_not_taken_for_a_large_head() -> None:
    size = 3 * MAX_HEAD_BYTES
    async with echoing() as (_, port), calling(port) as caller:
        await caller.sends(b"POST /a HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size)
        await caller.sends(b"x" * size + NEXT[:-9])
        assert f"POST /a {size}\n".encode() == await caller.gets(status=200)
        await caller.sends(NEXT[-9:])
        assert b"GET /next 0\n" == await caller.gets(status=200)


async def test_white_space_around_a_value_is_no_part_of_it() -> None:
    async with echoing() as (_, port), calling(port) as caller:
        await caller.sends(CHUNKED.replace(b"chunked", b"  chunked ") + b"3\r\nabc\r\n0\r\n\r\n")
        assert b"POST /a 3\n" == await caller.gets(status=200)


@pytest.mark.parametrize(
    "sent",
    [
        b"POST http://gate:8000/a?x=1 HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        b"POST /a? HTTP/1.1\r\nHost:\r\nX:\r\nY: \xff\r\ncontent-LENGTH: 0003\r\n\r\nabc",
        b"\r\nPOST /a HTTP/1.1\r\nConnection: keep-alive, TE\r\nTE: trailers\r\nContent-Length: 3\r\n\r\nabc",
        b"POST /a HTTP/1.1\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc",
        CHUNKED.replace(b"chunked", b"Chunked\r\nTrailer: X") + b'0003;a="b;c"\r\nabc\r\n000;d\r\n\r\n',
    ],
    ids=range(5),
)
async def test_request_that_is_odd_and_lawful_is_served_and_so_is_the_next(sent: bytes) -> None:
    async with echoing() as (_, port), calling(port) as caller:
        await caller.sends(sent + NEXT)
        assert b"POST /a 3\n" == await caller.gets(status=200)
        assert b"GET /next 0\n" == await caller.gets(status=200)


async def test_connections_are_bounded() -> None:
    async with echoing(max_connections=2) as (echo, port), AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(calling(port)) for _ in range(2)]
        for caller in (first, second):
            await caller.sends(NEXT)
            await caller.gets(status=200)
        third = await stack.enter_async_context(calling(port))
        await third.sends(NEXT)
        assert b"no room" in await third.gets(status=429)
        await first.sends(NEXT)
        await first.gets(status=200)
        second.writer.transport.abort()
        await until(lambda: len(echo.connections) == 1)
        fourth = await stack.enter_async_context(calling(port))
        await fourth.sends(NEXT)
        await fourth.gets(status=200)


async def test_connections_without_a_token_are_bounded_for_themselves() -> None:
    """They could take all of a port's room, and with it more memory than its container has."""
    echo = Echo()
    data_port = DataPort(echo.handle, admits=lambda authorization: authorization == "token", max_strangers=2)
    shown = b"GET /next HTTP/1.1\r\nAuthorization: token\r\n\r\n"
    async with data_port.listening("127.0.0.1", 0) as port, AsyncExitStack() as stack:
        known = []
        for _ in range(3):
            known.append(await stack.enter_async_context(calling(port)))
            await known[-1].sends(shown)
            await known[-1].gets(status=200)
        strangers = [await stack.enter_async_context(calling(port)) for _ in range(3)]
        assert b"" == await strangers[0].gets_all(), "the oldest makes room"
        assert 2 == len(data_port.strangers)
        for caller in (strangers[1], *known):
            await caller.sends(shown)
            await caller.gets(status=200)
        assert 1 == len(data_port.strangers)
        strangers[2].writer.transport.abort()
        await until(lambda: not data_port.strangers)


async def test_requests_behind_one_another_are_bounded() -> None:
    async with echoing() as (echo, port), calling(port) as caller:
        await caller.sends(b"GET /a HTTP/1.1\r\n\r\n" * 1000)
        answers = await caller.gets_all()
        assert MAX_WAITING + 1 >= answers.count(OK) == len(echo.asked)
        assert b"HTTP/1.1 429" in answers


async def test_broken_request_behind_a_good_one_does_not_harm_it() -> None:
    async with echoing() as (echo, port), calling(port) as caller:
        await caller.sends(b"GET /later HTTP/1.1\r\n\r\nno request\r\n\r\n")
        await until(lambda: bool(echo.asked))
        echo.go.set()
        assert b"late" == await caller.gets(status=200)
        assert (await caller.gets_all()).startswith(b"HTTP/1.1 400")


async def test_body_is_asked_for_when_it_is_wanted() -> None:
    async with echoing() as (_, port), calling(port) as caller:
        await caller.sends(b"POST /a HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n")
        assert b"HTTP/1.1 100 Continue\r\n" == await caller.reader.readline()
        assert b"\r\n" == await caller.reader.readline()
        await caller.sends(b"abc" + NEXT)
        assert b"POST /a 3\n" == await caller.gets(status=200)
        assert b"GET /next 0\n" == await caller.gets(status=200)


async def test_body_that_is_not_wanted_is_not_asked_for() -> None:
    async with echoing() as (echo, port), calling(port) as caller:
        await until(lambda: bool(echo.connections))
        (connection,) = echo.connections
        connection.caller_s = 0.2  # of the request that comes now
        await caller.sends(b"POST /unread HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n")
        answer = await caller.gets_all()
        assert answer.startswith(b"HTTP/1.1 403")
        assert b"Connection: close" in answer, "nobody knows whether the body will come"


async def test_body_of_a_refused_request_does_not_hide_the_answer() -> None:
    """A connection that is closed with unread bytes resets the answer, and the caller takes its attempt for lost."""
    size = 4 * 1024 * 1024
    async with echoing() as (_, port), calling(port) as caller:
        await caller.sends(b"POST /unread HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size)
        await caller.gets(status=403)
        await caller.sends(b"x" * size + NEXT)
        assert b"GET /next 0\n" == await caller.gets(status=200)


async def test_large_body_arrives_whole_and_is_not_held_while_nobody_reads_it() -> None:
    size = MAX_REQUEST_BYTES
    async with echoing() as (echo, port), calling(port) as caller:
        await caller.sends(b"POST /reads-later HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size)
        caller.writer.write(b"x" * size)
        await until(lambda: bool(echo.asked))
        (connection,) = echo.connections
        await until(lambda: connection._is_paused)
        assert UNREAD_BYTES < len(connection._calls[0]._body) < size
        echo.go.set()
        assert b"%d" % size == await caller.gets(status=200)


@pytest.mark.parametrize("leaves", [False, True])
async def test_large_body_behind_another_request_does_not_hide_that_its_caller_left(leaves: bool) -> None:
    """Nobody read on until the request in front was answered: it was carried out for nobody, to its end."""
    async with echoing() as (echo, port), calling(port) as caller:
        await caller.sends(b"GET /later HTTP/1.1\r\n\r\nPOST /a HTTP/1.1\r\nContent-Length: 300000\r\n\r\n")
        await caller.sends(b"x" * 300_000)
        await until(lambda: bool(echo.asked))
        if leaves:
            caller.writer.close()
            await until(lambda: echo.cancelled == 1)
        else:
            echo.go.set()
            assert b"late" == await caller.gets(status=200)
            assert b"behind another request" in await caller.gets(status=429)


async def test_token_is_asked_for_before_the_body_is(tmp_path: Path) -> None:
    tls = MemberTls.read(
        FakeAuthority().member_directory(tmp_path / "tls", job_uid=names.JobUid("uid"), token="t" * 32)
    )
    echo = Echo()
    async with DataPort(echo.handle, admits=tls.admits).listening("127.0.0.1", 0) as port:
        head = b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nAuthorization: %b\r\n\r\n"
        for wrong in (b"", b"Bearer x", b"Bearer \xff"):
            async with calling(port) as caller:
                await caller.sends(head % wrong)
                refusal = await caller.reader.readuntil(b"\r\n\r\n")
                assert refusal.startswith(b"HTTP/1.1 401")
                assert {b"Connection: close", b"WWW-Authenticate: Bearer"} <= set(refusal.split(b"\r\n"))
        async with calling(port) as caller:
            await caller.sends(head % tls.authorization.encode() + b"abc")
            assert b"POST /a 3\n" == await caller.gets(status=200)
        assert ["/a"] == echo.asked


@pytest.mark.parametrize(
    "sent", [b"", b"GET /a HT", b"GET /a HTTP/1.1\r\nX: ", b"POST /unread HTTP/1.1\r\nContent-Length: 9\r\n\r\n"]
)
async def test_caller_that_does_not_send_what_it_began_is_left(sent: bytes) -> None:
    async with echoing(caller_s=0.1, idle_s=0.2) as (_, port), calling(port) as caller:
        await caller.sends(sent)
        await caller.ends()


async def test_connection_between_two_requests_has_its_own_time() -> None:
    async with echoing(caller_s=DEADLINE_S, idle_s=0.05) as (_, port), calling(port) as caller:
        await caller.sends(NEXT)
        await caller.gets(status=200)
        await caller.ends()
    async with echoing(caller_s=DEADLINE_S, idle_s=10 * DEADLINE_S) as (echo, port), calling(port) as caller:
        await caller.sends(NEXT)
        await caller.gets(status=200)
        (connection,) = echo.connections
        at = connection._deadline._at
        assert at is not None
        assert at > asyncio.get_running_loop().time() + DEADLINE_S


@pytest.mark.parametrize("encrypted", [False, True])
async def test_caller_that_does_not_read_is_left_and_its_handler_ends(tmp_path: Path, encrypted: bool) -> None:
    tls = MemberTls.read(
        FakeAuthority().member_directory(tmp_path / "tls", job_uid=names.JobUid("uid"), token="t" * 32)
    )
    served, seen = (tls.data_context, tls.client_context()) if encrypted else (None, None)
    name = names.member_server_name(names.JobUid("uid")) if encrypted else None
    echo = Echo()
    data_port = DataPort(echo.handle)
    async with data_port.listening("127.0.0.1", 0, served) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=seen, server_hostname=name, limit=1024)
        await until(lambda: bool(data_port.connections))
        (connection,) = data_port.connections
        connection.caller_s = 0.1  # of the request that comes now
        writer.write(b"GET /flood HTTP/1.1\r\n\r\n")
        assert OK == await reader.readline()
        await until(lambda: echo.cancelled == 1)
        writer.transport.abort()


async def test_caller_that_leaves_ends_its_handler() -> None:
    async with echoing() as (echo, port):
        async with calling(port) as caller:
            await caller.sends(b"GET /later HTTP/1.1\r\n\r\n")
            await until(lambda: bool(echo.asked))
        await until(lambda: echo.cancelled == 1)


async def test_bug_in_a_handler_ends_its_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    async with echoing() as (_, port):
        async with calling(port) as caller:
            await caller.sends(b"GET /bug HTTP/1.1\r\n\r\n")
            await caller.ends()
        async with calling(port) as caller:
            await caller.sends(NEXT)
            await caller.gets(status=200)
    assert "request failed" in caplog.text


async def test_port_that_ends_gives_the_answers_under_way_and_lets_nobody_in() -> None:
    async with AsyncExitStack() as stack:
        async with echoing() as (echo, port):
            caller = await stack.enter_async_context(calling(port))
            await caller.sends(b"GET /later HTTP/1.1\r\n\r\n")
            await until(lambda: bool(echo.asked))
            asyncio.get_running_loop().call_soon(echo.go.set)  # when it has begun to end
        assert b"late" == await caller.gets(status=200)
        await caller.ends()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_head_has_the_head_alone() -> None:
    async with echoing() as (_, port), calling(port) as caller:
        await caller.sends(b"HEAD /a HTTP/1.1\r\n\r\n" + NEXT)
        head = await caller.reader.readuntil(b"\r\n\r\n")
        assert b"Content-Length: 10\r\n" in head
        assert b"GET /next 0\n" == await caller.gets(status=200)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 170), max_size=12))
def test_pieces_in_which_requests_arrive_change_nothing(cuts: list[int]) -> None:
    sent = (
        b"POST /b?x HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
        + CHUNKED
        + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        + NEXT
    )

    async def send() -> list[bytes]:
        async with echoing() as (_, port), calling(port) as caller:
            places = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
            for begin, end in pairwise(places):
                await caller.sends(sent[begin:end])
                await asyncio.sleep(0)
            return [await caller.gets(status=200) for _ in range(3)]

    assert [b"POST /b 3\n", b"POST /a 5\n", b"GET /next 0\n"] == asyncio.run(send())


# -------------------------------------------------------------------------------------------------- the engine's side
def event(ids: int, reason: str) -> bytes:
    body = {"text": "", "output_ids": list(range(ids)), "meta_info": {"id": "r", "finish_reason": None}}
    return b"data: " + json.dumps(body).replace("null", reason).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b'{"type": "length", "length": 3}'
CHUNKS = [(1, "null"), (3, END.decode())]
WHOLE = b"".join(chunk(event(*whole)) for whole in CHUNKS) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


@asynccontextmanager
async def gate_before(
    sent: bytes, gate: Gate | None = None, *, is_cut: bool = False
) -> AsyncIterator[tuple[int, list[str]]]:
    """A gate whose engine answers each request so, and then ends the connection; whom it aborted.

    is_cut: each after as many bytes as the last token of its prompt says.
    """
    gate = gate or Gate()
    aborted: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split()[0])
            asked = json.loads(await reader.readexactly(size))
            writer.write(sent[: asked["input_ids"][-1]] if is_cut else sent)
            await writer.drain()

    async def abort(rid: str) -> None:
        aborted.append(rid)

    engine = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)  # else some wait a second
    async with engine, DataPort(gate.serve).listening("127.0.0.1", 0) as port:
        url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
        gate.open(Backend(url, "a", WeightVersion(0, 1), abort))
        yield port, aborted
        assert (0, 0) == (gate.in_flight, gate._held_bytes)
        gate.close()


ASKED = b'POST /generate HTTP/1.1\r\nContent-Length: 19\r\n\r\n{"input_ids":[1,2]}'


@pytest.mark.parametrize(
    ("sent", "tokens"),
    [
        (b"", 0),
        (b"no http at all\r\n\r\n", 0),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000, 0),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}", 0),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 0),
        (b"HTTP/1.1 200 OK\r\n\r\n" + event(2, "null"), 2),
        (STREAM, 0),
        (STREAM + b"zz\r\n", 0),
        (STREAM + chunk(event(2, "null")) + b"zz\r\n", 2),
        (STREAM + chunk(event(2, "null")), 2),
        (STREAM + chunk(event(2, "null")) + b"ff\r\ndata: {", 2),
    ],
)
async def test_h58_answer_that_breaks_off_is_an_abort_with_what_was_read(sent: bytes, tokens: int) -> None:
    async with gate_before(sent) as (port, aborted), calling(port) as caller:
        await caller.sends(ASKED)
        answer = json.loads(await caller.gets(status=200))
        assert ("abort", tokens) == (answer["meta_info"]["finish_reason"]["type"], len(answer["output_ids"]))
        assert 1 == len(aborted), "in case it goes on"


@pytest.mark.parametrize("end", [chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", b"no chunk\r\n", b""])
async def test_events_that_an_engine_sends_at_once_go_out_at_once(end: bytes) -> None:
    """They reach a gate that has more to do than its core can, and each write is a call of the kernel."""
    together = [event(1, "null"), event(2, "null")]
    sent = STREAM + b"".join(map(chunk, together)) + end
    body = b'{"input_ids":[1,2],"stream":true}'
    head = b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
    async with gate_before(sent) as (port, _), calling(port) as caller:
        await caller.sends(head + body)
        answer = await caller.gets_all()
    assert chunk(b"".join(together)) in answer, "also of an engine that broke off then"


async def test_h17_h58_engine_that_is_lost_at_any_byte_leaves_every_whole_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream, "CONNECT_S", DEADLINE_S)  # so many at once take a slow machine longer
    sent = STREAM + WHOLE
    ends = [sent.index(chunk(event(*whole))) + len(chunk(event(*whole))) - 2 for whole in CHUNKS]  # framing may lack
    async with gate_before(sent, is_cut=True) as (port, aborted):

        async def tokens(cut: int) -> tuple[int, str]:
            streams = cut % 2 == 1
            body = json.dumps({"input_ids": [1, cut], "stream": streams}).encode()
            async with calling(port) as caller:
                await caller.sends(
                    b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
                )
                await caller.sends(body)
                answer = await caller.gets_all()
            if streams:
                assert b"data: [DONE]" in answer
            last = max(re.findall(rb'{"text.*}', answer), key=len)
            last_event = json.loads(last)
            return len(last_event["output_ids"]), last_event["meta_info"]["finish_reason"]["type"]

        found = await asyncio.gather(*(tokens(cut) for cut in range(len(sent) + 1)))
    expected = (
        [(0, "abort")] * ends[0] + [(1, "abort")] * (ends[1] - ends[0]) + [(3, "length")] * (len(sent) + 1 - ends[1])
    )
    assert expected == found
    assert len(sent) == len(aborted), "whose end was not heard is aborted"


async def test_caller_may_leave_at_any_byte_of_its_request() -> None:
    gate = Gate()
    async with gate_before(STREAM + WHOLE, gate) as (port, _):

        async def leave_after(sent: int) -> None:
            async with calling(port) as caller:
                await caller.sends(ASKED[:sent])

        await asyncio.gather(*(leave_after(sent) for sent in range(len(ASKED) + 1)))
        async with calling(port) as caller:
            await caller.sends(ASKED)
            await caller.gets(status=200)
        await until(lambda: gate.in_flight == 0)


@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n"])
async def test_whole_answer_is_taken_however_it_is_framed(before: bytes) -> None:
    async with gate_before(before + STREAM + WHOLE) as (port, aborted), calling(port) as caller:
        await caller.sends(ASKED)
        answer = json.loads(await caller.gets(status=200))
        assert ("length", 3) == (answer["meta_info"]["finish_reason"]["type"], len(answer["output_ids"]))
        assert [] == aborted


async def test_long_error_of_an_engine_is_cut() -> None:
    sent = b"HTTP/1.1 422 No\r\nContent-Length: 1000000\r\n\r\n" + b"e" * 1_000_000
    async with gate_before(sent) as (port, aborted), calling(port) as caller:
        await caller.sends(ASKED)
        assert 60_000 < len(await caller.gets(status=422)) < 70_000
        assert 1 == len(aborted), "the rest of it is not waited for"


async def test_error_of_an_engine_that_has_no_end_is_reported_at_its_limit() -> None:
    """The request was held, and counted, for as long as the engine went on."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 500 No\r\n\r\n")
            while not reader.at_eof():
                writer.write(b"e" * 1000)
                await writer.drain()
                await asyncio.sleep(0)

    gate = Gate()
    engine = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with engine, DataPort(gate.serve).listening("127.0.0.1", 0) as port, calling(port) as caller:
        gate.open(Backend(f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}", "a", WeightVersion(0, 1), forget))
        await caller.sends(ASKED)
        assert 60_000 < len(await caller.gets(status=500)) < 70_000
        await until(lambda: gate.in_flight == 0)
        gate.close()


CANARY = b"CANARY"
QUOTING = [
    b"HTTP/1.1 400 CANARY\r\nX-CANARY: CANARY\r\nContent-Length: 6\r\n\r\nCANARY",
    b'HTTP/1.1 500 No\r\nContent-Length: 20\r\n\r\n{"message":"CANARY"}',
    b"CANARY is no HTTP\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nCANARY\r\n\r\n",
    STREAM + b"CANARY\r\n",
    STREAM + chunk(b"data: CANARY\n\n"),
    STREAM + chunk(b": CANARY\n\n") + chunk(b'data: {"text": "CANARY", "CANARY": 1}\n\n'),
    STREAM + chunk(b'data: {"error": {"message": "CANARY"}}\n\n'),
    STREAM + chunk(event(2, "null").replace(b'"text": ""', b'"text": "CANARY"')),
    STREAM + chunk(event(2, '"CANARY"')),
]


@pytest.mark.parametrize("sent", QUOTING, ids=range(len(QUOTING)))
async def test_no_log_of_a_gate_has_words_of_callers_or_engines(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the engine does, at every level; and so for callers that are no good."""
    caplog.set_level(logging.DEBUG)
    bodies = [b'{"text":"CANARY"}', b'{"text":"CANARY"', b'{"CANARY":1,"input_ids":["CANARY"]}', b"CANARY"]
    bodies.append(b'{"input_ids":[1],"sampling_params":"CANARY"}')
    async with gate_before(sent) as (port, _):
        for body in bodies:
            async with calling(port) as caller:
                head = b"POST /generate HTTP/1.1\r\nX-CANARY: CANARY\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
                await caller.sends(head % len(body) + body)
                assert await caller.gets_all()
        for request in (b"CANARY /CANARY HTTP/1.1\r\n\r\n", b"GET /CANARY HTTP/1.1\r\nCANARY\r\n\r\n"):
            async with calling(port) as caller:
                await caller.sends(request)
                assert await caller.gets_all()
    lines = [JsonLines().format(record) for record in caplog.records if record.name.startswith("colocated_rl")]
    assert lines or sent.startswith((b"HTTP/1.1 400", b"HTTP/1.1 500")), "what was lost is reported"
    assert [] == [line for line in lines if CANARY.decode() in line]


async def forget(rid: str) -> None:
    """Abort nothing, as an engine that is broken."""


@pytest.mark.parametrize("status", [201, 204, 302, 304, 600, 999])
async def test_status_that_is_no_answer_to_a_request_is_not_relayed(status: int) -> None:
    """A 204 with a body broke the caller's framing, and no client knows a 999."""
    sent = b"HTTP/1.1 %d Odd\r\nContent-Length: 3\r\n\r\nabc" % status
    async with gate_before(sent) as (port, _), calling(port) as caller:
        await caller.sends(ASKED)
        await caller.gets(status=502)


async def test_caller_that_reads_late_stops_the_engine_and_gets_all_of_it() -> None:
    pieces = [chunk(event(number, "null")) for number in range(1, 2000)]
    gate = Gate()
    async with gate_before(STREAM + b"".join(pieces) + WHOLE, gate) as (port, aborted), calling(port) as caller:
        body = b'{"input_ids":[1],"stream":true}'
        await caller.sends(b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await until(
            lambda: any(it._connection is not None and it._connection._is_paused for it in gate.entrances[0].running)
        )
        async with asyncio.timeout(DEADLINE_S):
            received = b""
            while not received.endswith(b"\r\n0\r\n\r\n"):
                received += await caller.reader.read(65536)
        assert len(pieces) + 3 == received.count(b"data: ")
        assert [] == aborted


async def test_requests_and_connections_leave_nothing_that_a_collector_would_have_to_find() -> None:
    """An agent's looks seldom. Whole answers, one that broke off, and what is no request."""
    ours, sent = {Call, CallerConnection, Deadline, Running, UpstreamConnection}, STREAM + WHOLE
    gc.collect()
    gc.disable()
    try:
        async with gate_before(sent, is_cut=True) as (port, _):
            for cut in (len(sent), len(sent) // 2):
                async with calling(port) as caller:
                    body = b'{"input_ids":[%d]}' % cut
                    await caller.sends(b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
                    await caller.gets(status=200)
                    await caller.sends(b"no request\r\n\r\n")
                    await caller.gets(status=400)
            await until(lambda: not any(type(it) in ours for it in gc.get_objects()))
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------------------- parts
async def test_deadline_that_is_moved_is_late_once_and_never_early() -> None:
    loop, late = asyncio.get_running_loop(), asyncio.Event()
    it = Deadline(late.set)
    began = loop.time()
    it.set(0.02)
    it.set(DEADLINE_S)
    it.set(0.1)
    async with asyncio.timeout(DEADLINE_S):
        await late.wait()
    assert 0.09 < loop.time() - began
    it.set(0.01)
    it.end()
    assert it._timer is None


def test_turns_go_to_who_waits_longest_and_to_nobody_who_left() -> None:
    turns, called = Limiter(1), list[str]()
    for who in "abcd":
        turns.ask(who, lambda who=who: called.append(who))  # type: ignore[misc]
    assert [False, True, True, True] == [turns.waits(who) for who in "abcd"]
    turns.give_back("b")
    for who in "acdx":
        turns.give_back(who)
    assert ["c", "d"] == called
    assert 0 == turns.taken


def test_past_what_turns_may_hold_together_the_first_goes_on_alone() -> None:
    """Each of 64 chunks of 64 MiB had its turn: eight times the memory that an agent has."""
    turns, called = Limiter(3, 100), list[str]()
    for who in "abcd":
        turns.ask(who, lambda who=who: called.append(who))  # type: ignore[misc]
        turns.hold(who, 10)
    assert [False, False, False, True] == [turns.waits(who) for who in "abcd"]
    turns.hold("b", 100)
    assert [False, True, True, True] == [turns.waits(who) for who in "abcd"]
    turns.hold("a", 1000)
    turns.give_back("a")
    assert ["b", "c", "d"] == called
    assert [False, True, True] == [turns.waits(who) for who in "bcd"]
    turns.give_back("c")
    assert [False, False] == [turns.waits(who) for who in "bd"]
    for who in "bd":
        turns.give_back(who)
    assert (0, 0) == (turns.taken, turns._held)
