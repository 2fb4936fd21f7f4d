"""The ports of a member, over real TLS on loopback."""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import aiohttp
import pytest
from aiohttp import WSMsgType, web
from aiohttp.http_exceptions import HttpProcessingError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from colocated_rl_api import names
from colocated_rl_api.facts import GateFacts, PodFacts, Problem
from colocated_rl_api.member_wire import (
    MAX_MESSAGE_BYTES,
    Endpoint,
    Goal,
    Hello,
    PodTarget,
    Refusal,
    RolloutTarget,
    from_member,
)
from colocated_rl_api.rungs import Rung
from colocated_rl_member.data import DATA_IDLE_S, NO_TOKEN, DataClient, data_application
from colocated_rl_member.server import MAX_HEADERS, MemberServer, Ports
from colocated_rl_member.tls import MemberTls
from colocated_rl_rollout.engines import engine_client
from fakes.authority import FakeAuthority

T = TypeVar("T")
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]

JOB_UID = names.JobUid("2f6c1f5e-0f0e-4a39-8f0f-1f2e3d4c5b6a")
DEADLINE_S = 60.0


def make_hello(highest_epoch: int = 0) -> Hello:
    return Hello(
        pod="job-gpu-0-0",
        pod_uid="uid-0",
        job_uid=JOB_UID,
        role=names.ROLE_GPU,
        incarnation="a",
        highest_epoch=highest_epoch,
    )


def make_target(epoch: int, rung: Rung = Rung.CLOSED) -> PodTarget:
    return PodTarget(epoch=epoch, goal=Goal.CLIMB, step=0, lineage=1, rung=rung)


@dataclass
class MemberWithFacts:
    """A member with facts that a test changes, and everything it was told."""

    facts: PodFacts = field(
        default_factory=lambda: PodFacts(gate=GateFacts(open=False, settled=True), engines=(), trainers=())
    )
    accepted: list[PodTarget] = field(default_factory=list)
    durable_epochs: list[int] = field(default_factory=list)
    disk_is_full: bool = False
    server: MemberServer[PodTarget] = field(init=False)

    def remember_epoch(self, epoch: int) -> None:
        if self.disk_is_full:
            raise OSError(errno.ENOSPC, "no space left")
        self.durable_epochs.append(epoch)

    def accept(self, target: PodTarget) -> None:
        assert self.durable_epochs[-1] == target.epoch, "an epoch is durable before it is acted on"
        self.accepted.append(target)
        self.facts = self.facts.model_copy(update={"epoch": target.epoch})


class MemberScene:
    """One member and the means to reach it."""

    def __init__(
        self, directory: Path, member: MemberWithFacts, session: aiohttp.ClientSession, authority: FakeAuthority
    ) -> None:
        self.authority = authority
        self.directory = directory
        self.member = member
        self.session = session
        self.tls = MemberTls.read(self.authority.member_directory(directory / "tls", job_uid=JOB_UID, token="t" * 32))
        self.operator = self.authority.client_context(directory / "operator")

    def url(self, path: str) -> str:
        return f"https://127.0.0.1:{self.member.server.ports.control}{path}"

    async def link(self) -> aiohttp.ClientWebSocketResponse:
        return await in_time(
            lambda: self.session.ws_connect(
                self.url("/v1/link"), ssl=self.operator, server_hostname=names.member_server_name(JOB_UID)
            )
        )

    async def connect_again_and_again(self) -> NoReturn:
        """Raises what the first connection is refused with."""
        name, once = names.member_server_name(JOB_UID), {"Connection": "close"}
        while True:
            async with self.session.get(
                self.url("/v1/state"), ssl=self.operator, server_hostname=name, headers=once
            ) as answer:
                assert 200 == answer.status


async def in_time(connect: Callable[[], Awaitable[T]]) -> T:
    """A connection, also where a slow machine needs several tries to be quicker than a test's idle_s."""
    while True:
        try:
            return await connect()
        except (OSError, EOFError, aiohttp.ClientConnectionError):
            continue


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """Read until the connection ends. Returns nothing if it is reset: the member ended it before it had read all."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


@asynccontextmanager
async def scene(
    directory: Path,
    *,
    highest_epoch: int = 0,
    idle_s: float = 60.0,
    data_idle_s: float = 60.0,
    data_connections: int = 8,
    authority: FakeAuthority | None = None,
) -> AsyncIterator[MemberScene]:
    member = MemberWithFacts()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
        it = MemberScene(directory, member, session, authority or FakeAuthority())
        data = data_application(it.tls, max_request_bytes=1024)
        data.router.add_post("/echo", _echo)
        member.server = MemberServer(
            hello=make_hello(highest_epoch),
            kind=PodTarget,
            tls=it.tls,
            facts=lambda: member.facts,
            accept=member.accept,
            remember_epoch=member.remember_epoch,
            data=data,
            ports=Ports(control=0, data=0, metrics=0, pages=0, host="127.0.0.1"),
            registry=CollectorRegistry(),
            idle_s=idle_s,
            data_idle_s=data_idle_s,
            data_connections=data_connections,
        )
        async with member.server, asyncio.timeout(2 * DEADLINE_S):
            yield it


async def _echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


async def receive(link: aiohttp.ClientWebSocketResponse) -> Hello | PodFacts | Refusal:
    message = from_member.validate_json(await link.receive_str(timeout=DEADLINE_S))
    assert isinstance(message, Hello | PodFacts | Refusal)
    return message


async def test_hello_comes_first_and_facts_follow_at_once(tmp_path: Path) -> None:
    async with scene(tmp_path, highest_epoch=4) as it:
        link = await it.link()
        assert make_hello(4) == await receive(link)
        assert it.member.facts == await receive(link)


async def test_accepted_target_is_answered_with_facts_of_its_epoch(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        link = await it.link()
        await receive(link), await receive(link)
        await link.send_str(make_target(7).model_dump_json(by_alias=True))
        facts = await receive(link)
        assert isinstance(facts, PodFacts)
        assert 7 == facts.epoch
        assert [make_target(7)] == it.member.accepted


async def test_older_epoch_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path, highest_epoch=9) as it:
        link = await it.link()
        await receive(link), await receive(link)
        await link.send_str(make_target(8).model_dump_json(by_alias=True))
        refusal = await receive(link)
        assert isinstance(refusal, Refusal)
        assert ("StaleEpoch", 8, 9) == (refusal.reason, refusal.epoch, refusal.highest_epoch)
        assert ([], []) == (it.member.accepted, it.member.durable_epochs)


async def test_epoch_is_made_durable_once_and_survives_in_the_next_hello(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        link = await it.link()
        await receive(link), await receive(link)
        for rung in (Rung.CLOSED, Rung.DRAINED):
            await link.send_str(make_target(3, rung).model_dump_json(by_alias=True))
        await receive(link)
        await link.close()
        again = await it.link()
        hello = await receive(again)
        assert isinstance(hello, Hello)
        assert 3 == hello.highest_epoch
        assert [3] == it.member.durable_epochs


async def test_target_whose_epoch_cannot_be_made_durable_is_not_accepted(tmp_path: Path) -> None:
    async with scene(tmp_path, highest_epoch=4) as it:
        it.member.disk_is_full = True
        link = await it.link()
        assert make_hello(4) == await receive(link)
        await receive(link)
        await link.send_str(make_target(epoch=5).model_dump_json(by_alias=True))
        assert (await link.receive(timeout=DEADLINE_S)).type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.ERROR)
        assert [] == it.member.accepted
        it.member.disk_is_full = False
        link = await it.link()
        assert make_hello(4) == await receive(link), "it may be sent again"
        await receive(link)
        await link.send_str(make_target(epoch=5).model_dump_json(by_alias=True))
        assert 5 == getattr(await receive(link), "epoch", None)


async def test_target_for_another_kind_of_member_is_refused(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        link = await it.link()
        await receive(link), await receive(link)
        other = RolloutTarget(epoch=1, goal=Goal.CLIMB, trained_step=0, saved_step=0, engines=())
        await link.send_str(other.model_dump_json(by_alias=True))
        refusal = await receive(link)
        assert isinstance(refusal, Refusal)
        assert "NotForThisMember" == refusal.reason


async def test_changes_between_two_sends_reach_the_operator_as_one(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        link = await it.link()
        await receive(link), await receive(link)
        for epoch in range(1, 50):
            it.member.facts = it.member.facts.model_copy(update={"epoch": epoch})
            it.member.server.publish()
        facts = await receive(link)
        assert isinstance(facts, PodFacts)
        assert 49 == facts.epoch


async def test_newer_connection_of_the_operator_replaces_the_older_one(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        first = await it.link()
        await receive(first), await receive(first)
        second = await it.link()
        await receive(second), await receive(second)
        assert aiohttp.WSMsgType.CLOSE == (await first.receive(timeout=DEADLINE_S)).type
        it.member.facts = it.member.facts.model_copy(update={"epoch": 5})
        it.member.server.publish()
        facts = await receive(second)
        assert isinstance(facts, PodFacts)
        assert 5 == facts.epoch


@pytest.mark.parametrize("path", ["/v1/link", "/v1/state"])
async def test_control_port_refuses_a_verified_certificate_that_is_not_the_operators(tmp_path: Path, path: str) -> None:
    async with scene(tmp_path) as it:
        stranger = it.authority.client_context(tmp_path / "stranger", common_name=JOB_UID)
        async with it.session.get(
            it.url(path), ssl=stranger, server_hostname=names.member_server_name(JOB_UID)
        ) as answer:
            assert 403 == answer.status


async def test_control_port_refuses_a_caller_of_another_authority(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        other = FakeAuthority().client_context(tmp_path / "other")
        other.load_verify_locations(it.directory / "tls" / names.CA_FILE)
        with pytest.raises(aiohttp.ClientError):
            await it.session.get(it.url("/v1/state"), ssl=other, server_hostname=names.member_server_name(JOB_UID))


@pytest.mark.parametrize("frame", ["not json", '{"type":"podTarget"}', '{"type":"other"}'])
async def test_unreadable_target_ends_the_connection(tmp_path: Path, frame: str) -> None:
    async with scene(tmp_path) as it:
        link = await it.link()
        await receive(link), await receive(link)
        await link.send_str(frame)
        assert aiohttp.WSMsgType.CLOSE == (await link.receive(timeout=DEADLINE_S)).type
        assert [] == it.member.accepted


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["Climb", "1-1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [*(field.alias or name for name, field in PodTarget.model_fields.items()), "other"]
frames = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200),
    anything.map(json.dumps),
    st.dictionaries(st.sampled_from(FIELDS), anything, max_size=6).map(
        lambda fields: json.dumps(make_target(1).model_dump(mode="json", by_alias=True) | fields)
    ),
)
requests = st.lists(
    st.sampled_from(
        [b"GET /v1/link HTTP/1.1", b"GET /v1/state HTTP/1.1", b"POST /v1/state HTTP/1.1", b"Host: m", b"", b"{}", b"0",
         b"Upgrade: websocket", b"Connection: upgrade", b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: x",
         b"Content-Length: 3", b"Content-Length: -1", b"Transfer-Encoding: chunked", b"Content-Encoding: gzip"]
    )
    | st.binary(max_size=40),
    max_size=12,
).map(b"\r\n".join)  # fmt: skip


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=st.lists(frames, max_size=8), asked=st.lists(requests, max_size=6))
def test_whatever_comes_over_the_control_port_the_member_goes_on_and_answers_no_500(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sent: list[bytes | str], asked: list[bytes]
) -> None:
    async def send() -> None:
        async with scene(tmp_path, idle_s=0.2) as it:
            for frame in sent:
                link = await it.link()
                await receive(link), await receive(link)
                await (link.send_bytes(frame) if isinstance(frame, bytes) else link.send_str(frame))
                await link.close()
            for request in asked:
                reader, writer = await in_time(
                    lambda: asyncio.open_connection(
                        "127.0.0.1",
                        it.member.server.ports.control,
                        ssl=it.operator,
                        server_hostname=names.member_server_name(JOB_UID),
                    )
                )
                writer.write(request + b"\r\n\r\n")
                assert b" 500 " not in (await all_of(reader)).split(b"\r\n", 1)[0]
                writer.transport.abort()
            link = await it.link()
            hello = await receive(link)
            assert isinstance(hello, Hello)
            await receive(link)
            await link.send_str(make_target(hello.highest_epoch + 1).model_dump_json(by_alias=True))
            assert hello.highest_epoch + 1 == getattr(await receive(link), "epoch", None)

    asyncio.run(send())
    failed = [record.exc_info for record in caplog.records if record.name == "aiohttp.server" and record.exc_info]
    assert [] == [info for info in failed if not isinstance(info[1], HttpProcessingError)], "of a handler"


async def test_a_certificate_that_expires_ends_no_link_and_begins_none(tmp_path: Path) -> None:
    async with scene(tmp_path, authority=FakeAuthority(life=timedelta(seconds=8))) as it:
        link = await it.link()
        await receive(link)
        await receive(link)
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="certificate has expired"):
            await it.connect_again_and_again()
        await link.send_str(make_target(1).model_dump_json(by_alias=True))
        facts = await receive(link)
        assert isinstance(facts, PodFacts)
        assert 1 == facts.epoch


async def test_oversized_target_ends_the_connection(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        link = await it.link()
        await receive(link), await receive(link)
        await link.send_str("x" * (MAX_MESSAGE_BYTES + 1))
        assert aiohttp.WSCloseCode.MESSAGE_TOO_BIG == (await link.receive(timeout=DEADLINE_S)).data
        assert [] == it.member.accepted


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:8080"}, 200),
        ({"Host": "localhost:9999"}, 200),
        ({"Host": "[::1]:8080"}, 200),
        ({"Host": "10.1.2.3"}, 200),
        ({"Host": "job.localhost", "Origin": "http://localhost:8080"}, 200),
        ({"Host": "localhost:8080", "Origin": "http://127.0.0.1:8888"}, 200),
        ({"Host": "10.1.2.3:8080", "Origin": "http://10.1.2.3:8080"}, 200),
        ({"Host": "attacker.example"}, 403),
        ({"Host": "attacker.example:8080"}, 403),
        ({"Host": "127.0.0.1.attacker.example"}, 403),
        ({"Host": "localhost.attacker.example"}, 403),
        ({"Host": "localhost@attacker.example"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "127.0.0.1:8080", "Origin": "https://attacker.example"}, 403),
        ({"Host": "127.0.0.1:8080", "Origin": "http://203.0.113.5"}, 403),
        ({"Host": "localhost:8080", "Origin": "http://[2001:db8::1]"}, 403),
        ({"Host": "127.0.0.1:8080", "Origin": "null"}, 403),
    ],
)
async def test_pages_are_not_for_a_website_in_the_browser_of_who_forwards_the_port(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    """A site whose name led to the loopback read samples through a port-forward."""
    async with scene(tmp_path) as it:
        page = f"http://127.0.0.1:{it.member.server.ports.pages}/v1/state"
        async with it.session.get(page, headers=headers) as answer:
            assert status == answer.status


async def test_a_program_that_names_no_host_gets_pages(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.member.server.ports.pages)
        with closing(writer):
            writer.write(b"GET /v1/state HTTP/1.0\r\n\r\n")
            async with asyncio.timeout(DEADLINE_S):
                assert b" 200 " in await reader.readline()


async def test_state_page_shows_hello_target_and_facts(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        link = await it.link()
        await link.send_str(make_target(2).model_dump_json(by_alias=True))
        while it.member.server.target is None:
            await receive(link)
        async with it.session.get(f"http://127.0.0.1:{it.member.server.ports.pages}/v1/state") as answer:
            state = json.loads(await answer.text())
        assert {"hello", "target", "facts"} == set(state)
        assert (2, 2) == (state["hello"]["highestEpoch"], state["target"]["epoch"])


async def test_metrics_port_answers_metrics_and_health(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        for path in ("/metrics", "/healthz"):
            async with it.session.get(f"http://127.0.0.1:{it.member.server.ports.metrics}{path}") as answer:
                assert 200 == answer.status


async def test_problem_is_shown_as_a_metric_while_the_member_reports_it(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:

        async def shown() -> bool:
            async with it.session.get(f"http://127.0.0.1:{it.member.server.ports.metrics}/metrics") as answer:
                return '\ncolocate_problem{reason="EngineLost"} 1.0\n' in await answer.text()

        assert not await shown()
        it.member.facts = it.member.facts.model_copy(update={"problem": Problem(reason="EngineLost", message="some")})
        assert await shown()
        it.member.facts = it.member.facts.model_copy(update={"problem": None})
        assert not await shown()


def with_a_wrong_token(it: MemberScene) -> MemberTls:
    return MemberTls.read(it.authority.member_directory(it.directory / "wrong", job_uid=JOB_UID, token="w" * 32))


async def test_data_port_serves_a_member_and_refuses_a_wrong_token(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        endpoint = Endpoint(pod="job-gpu-0-0", address="127.0.0.1", port=it.member.server.ports.data)
        for tls, status in ((it.tls, 200), (with_a_wrong_token(it), 401)):
            async with DataClient(it.session, tls, JOB_UID).request("POST", endpoint, "/echo", data=b"x") as answer:
                assert status == answer.status


async def test_authorization_that_is_no_ascii_is_a_wrong_token(tmp_path: Path) -> None:
    """A header that is not UTF-8 was answered with a 500."""
    async with scene(tmp_path) as it:
        port = it.member.server.ports.data
        for shown in (b"Bearer \xff\xfe", "Bearer pässword".encode(), "Bearer \u2028".encode()):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=it.tls.client_context(), server_hostname=names.member_server_name(JOB_UID)
            )
            writer.write(b"POST /echo HTTP/1.1\r\nHost: a\r\nAuthorization: %b\r\n\r\n" % shown)
            async with asyncio.timeout(DEADLINE_S):
                assert b"HTTP/1.1 401 Unauthorized\r\n" == await reader.readline()
            writer.transport.abort()


async def test_data_port_bounds_its_connections_and_says_so(tmp_path: Path) -> None:
    async with scene(tmp_path, data_connections=2) as it, AsyncExitStack() as stack:
        endpoint = Endpoint(pod="job-gpu-0-0", address="127.0.0.1", port=it.member.server.ports.data)

        async def status(of: DataClient) -> int:
            async with of.request("POST", endpoint, "/echo", data=b"x") as answer:
                if answer.status != 200:
                    assert "1" == answer.headers["Retry-After"]
                    assert "rate_limit_error" == (await answer.json())["error"]["type"], (
                        "as a gateway's clients read it"
                    )
                return answer.status

        sessions = [await stack.enter_async_context(aiohttp.ClientSession()) for _ in range(3)]
        callers = [DataClient(session, it.tls, JOB_UID) for session in sessions]
        assert [200, 200, 429] == [await status(one) for one in callers]
        assert [200, 200, 429] == [await status(one) for one in callers], "those that are held go on"
        await sessions[0].close()
        async with asyncio.timeout(DEADLINE_S):
            while await status(callers[2]) != 200:
                pass


async def test_caller_without_the_token_keeps_no_connection(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        endpoint = Endpoint(pod="job-gpu-0-0", address="127.0.0.1", port=it.member.server.ports.data)
        stranger = DataClient(it.session, with_a_wrong_token(it), JOB_UID)
        async with stranger.request("POST", endpoint, "/echo", data=b"x") as answer:
            assert (401, "close") == (answer.status, answer.headers.get("Connection"))
            assert ("Bearer", NO_TOKEN) == (answer.headers["WWW-Authenticate"], await answer.json())


async def test_room_of_a_data_port_is_not_for_those_who_show_no_token(tmp_path: Path) -> None:
    async with scene(tmp_path, idle_s=0.3, data_connections=2) as it:
        port, trusts, name = it.member.server.ports.data, it.tls.client_context(), names.member_server_name(JOB_UID)
        head = f"POST /echo HTTP/1.1\r\nHost: m\r\nAuthorization: {it.tls.authorization}\r\nContent-Length: 1\r\n\r\nx"

        def comes() -> Awaitable[Ends]:
            return asyncio.open_connection("127.0.0.1", port, ssl=trusts, server_hostname=name)

        async def asks(ends: Ends) -> Ends:
            reader, writer = ends
            writer.write(head.encode())
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            assert b"x" == await reader.readexactly(1)
            return ends

        async def comes_and_asks() -> Ends:
            return await asks(await comes())

        kept = await in_time(comes_and_asks)
        for sent in (b"", b"POST /echo HTTP/1.1\r\nHost: m\r\nX-Sl"):
            reader, stranger = await in_time(comes)
            stranger.write(sent)
            assert b"" == await all_of(reader)
            stranger.transport.abort()
        _, writer = await asks(kept)  # who has shown it once has its time
        writer.transport.abort()


async def test_data_port_bounds_a_body(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        endpoint = Endpoint(pod="job-gpu-0-0", address="127.0.0.1", port=it.member.server.ports.data)
        client = DataClient(it.session, it.tls, JOB_UID)
        async with client.request("POST", endpoint, "/echo", data=b"x" * 4096) as answer:
            assert 413 == answer.status


def test_short_data_token_is_an_error_at_start(tmp_path: Path) -> None:
    keys = FakeAuthority().member_directory(tmp_path / "tls", job_uid=JOB_UID, token="t" * 32)
    (keys / names.DATA_TOKEN_FILE).write_text("short\n")
    with pytest.raises(ValueError, match="at least 16"):
        MemberTls.read(keys)


SLOW = [b"", b"GET /healthz HTTP/1.1\r\nHost: m\r\nX-Sl"]


@pytest.mark.parametrize("sent", SLOW)
@pytest.mark.parametrize("encrypted", [False, True])
async def test_connection_without_a_whole_request_is_closed(tmp_path: Path, sent: bytes, encrypted: bool) -> None:
    async with scene(tmp_path, idle_s=0.2) as it:
        ports = it.member.server.ports
        name = names.member_server_name(JOB_UID)
        reader, writer = await in_time(
            lambda: (
                asyncio.open_connection("127.0.0.1", ports.control, ssl=it.operator, server_hostname=name)
                if encrypted
                else asyncio.open_connection("127.0.0.1", ports.metrics)
            )
        )
        writer.write(sent)
        assert b"" == await all_of(reader)
        writer.transport.abort()


@pytest.mark.parametrize("port", ["control", "data"])
@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02"])
async def test_handshake_that_is_not_finished_is_not_waited_for(tmp_path: Path, port: str, sent: bytes) -> None:
    async with scene(tmp_path, idle_s=0.2) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", getattr(it.member.server.ports, port))
        writer.write(sent)
        assert b"" == await all_of(reader)
        writer.close()


async def test_link_stays_open_however_little_is_sent(tmp_path: Path) -> None:
    async with scene(tmp_path, idle_s=0.1) as it:
        link = await it.link()
        await receive(link)
        await receive(link)
        with pytest.raises(TimeoutError):
            await link.receive(timeout=0.3)
        await link.send_str(make_target(epoch=3).model_dump_json(by_alias=True))
        assert 3 == getattr(await receive(link), "epoch", None)
        await link.close()


HEADS = [
    b"GET /healthz HTTP/1.1\r\nHost: m\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(2 * MAX_HEADERS)) + b"\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: m\r\nX: " + b"x" * 10_000 + b"\r\n\r\n",
    b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\nHost: m\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nHost: m\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /healthz HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\x00\r\n\r\n",
]


@pytest.mark.parametrize("head", HEADS)
async def test_head_that_is_too_large_or_no_http_is_a_400_and_no_more(tmp_path: Path, head: bytes) -> None:
    async with scene(tmp_path, idle_s=0.5) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.member.server.ports.metrics)
        writer.write(head)
        answer = await all_of(reader)
        assert answer == b"" or answer.split(b" ", 2)[1] in (b"400", b"405", b"431")
        writer.close()

        async def status() -> int:
            async with it.session.get(f"http://127.0.0.1:{it.member.server.ports.metrics}/healthz") as answer_after:
                return answer_after.status

        assert 200 == await in_time(status)


async def test_end_that_is_cancelled_leaves_no_port_open(tmp_path: Path) -> None:
    """Cancelled in the first clean-up, the others were left out: their ports stayed open for as long as the process."""
    authority = FakeAuthority()
    tls = MemberTls.read(authority.member_directory(tmp_path / "tls", job_uid=JOB_UID, token="t" * 32))
    data, ending = data_application(tls, max_request_bytes=1024), asyncio.Event()

    async def never_end(app: web.Application) -> None:
        ending.set()
        await asyncio.Event().wait()

    data.on_shutdown.append(never_end)
    member = MemberWithFacts()
    server = MemberServer(
        hello=make_hello(),
        kind=PodTarget,
        tls=tls,
        facts=lambda: member.facts,
        accept=member.accept,
        remember_epoch=member.durable_epochs.append,
        data=data,
        ports=Ports(control=0, data=0, metrics=0, pages=0, host="127.0.0.1"),
        registry=CollectorRegistry(),
    )
    await server.__aenter__()
    exiting = asyncio.create_task(server.__aexit__(None, None, None))
    await ending.wait()
    exiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exiting
    for port in (server.ports.control, server.ports.metrics, server.ports.pages):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


def test_connections_to_data_ports_are_kept_for_longer_than_their_callers_keep_them() -> None:
    """One that a port closes while a request is under way is a lost attempt."""
    assert engine_client.IDLE_CONNECTION_S < DATA_IDLE_S


def test_ports_are_the_pods_unless_said_otherwise() -> None:
    parser = argparse.ArgumentParser()
    Ports.add_arguments(parser)
    assert Ports() == Ports.given(parser.parse_args([]))
    assert Ports(data=7, host="::1") == Ports.given(parser.parse_args(["--data-port=7", "--host=::1"]))
