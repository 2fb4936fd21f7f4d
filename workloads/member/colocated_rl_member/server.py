"""The server runs a member's ports: the operator's link, pages for people, metrics, and the member's own data port.

It owns the link: it sends hello, sends facts in full at once and on each change, and passes accepted targets on. Facts
are a state, so a slow operator gets the newest ones and skips those in between. A newer connection of the operator
replaces an older one: after a network fault the old one may look alive for seconds.

On the control port it refuses all callers but the operator, messages over MAX_MESSAGE_BYTES and unreadable messages:
that connection is closed, and the operator's next one starts with full facts. A connection on which no whole request
head comes for IDLE_S is closed; on a data port, whose callers come in bursts, for DATA_IDLE_S, once they have shown
the token. Connections of each port are bounded.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Generic, Self

import pydantic
from aiohttp import WSCloseCode, WSMsgType, web
from aiohttp.typedefs import Middleware
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

from colocated_rl_api import descriptors, names
from colocated_rl_api.facts import PodFacts, RolloutFacts
from colocated_rl_api.listening import EVERYWHERE, listen
from colocated_rl_api.logs import in_words, log
from colocated_rl_api.member_wire import (
    HEARTBEAT_S,
    MAX_MESSAGE_BYTES,
    Hello,
    Keys,
    Refusal,
    Renewed,
    read_from_operator,
)
from colocated_rl_api.shared import SharedResult
from colocated_rl_member.accepting import accepting
from colocated_rl_member.connection import MemberConnection
from colocated_rl_member.data import DATA_IDLE_S, MAX_STRANGERS, STRANGERS, StandaloneDataPort, Strangers
from colocated_rl_member.fence import EpochFence, TargetT
from colocated_rl_member.metrics import ProblemGauge
from colocated_rl_member.other_sites import refuse_other_sites
from colocated_rl_member.room import RoomFor
from colocated_rl_member.tls import MemberTls, is_operator

LOG = logging.getLogger(__name__)

SEND_DEADLINE_S = 2 * HEARTBEAT_S
SHUTDOWN_S = 1.0  # for connections that are still open when the member ends
IDLE_S = 60.0
HANDSHAKE_S = 10.0  # also for the caller to show the token
MAX_DATA_CONNECTIONS = 8192  # per data port that is an application, and per pages port: a gateway is on both, with half
# as many turns of clients, and on the loopback with one for each episode that the job plays
MAX_CONNECTIONS = 256  # per other port
OWN_REQUESTS = 3, 8  # this part of the descriptors for sockets is for what such a member asks of others
MAX_HEADER_BYTES = 8190  # per header line
MAX_HEADERS = 64


@dataclass(frozen=True)
class Ports:
    """The Ports are those on which a member listens; 0 takes a free port (tests on one machine)."""

    control: int = names.CONTROL_PORT
    data: int = names.DATA_PORT
    metrics: int = names.METRICS_PORT
    pages: int = names.PAGES_PORT
    host: str = EVERYWHERE  # or an address; the pages port is always on the loopback

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add a flag for each port, with the pod's value as its default."""
        default = cls()
        parser.add_argument("--host", default=default.host, help="address to listen on; all of them when absent")
        for port in ("control", "data", "metrics", "pages"):
            parser.add_argument(f"--{port}-port", dest=port, type=int, default=getattr(default, port))

    @classmethod
    def given(cls, arguments: argparse.Namespace) -> Ports:
        return cls(**{field.name: getattr(arguments, field.name) for field in fields(cls)})


class MemberServer(Generic[TargetT]):
    """A MemberServer serves one member while its context is entered, on the event loop that entered it.

    hello: sent to each operator, with the highest epoch of that moment; its `highest_epoch` is where the fence starts.
    kind: type of the targets that this member takes.
    facts: returns the member's current state; called whenever it is to be sent or shown.
    accept: takes a target that passed the fence; must not block.
    remember_epoch: makes an epoch durable before a target of it is accepted.
    unfit: returns why this member can't take a target of its kind, or "".
    data: application of the data port (`data_application`), or a port that serves itself; None if there is none.
    pages: further routes for people, on the pod's loopback. around_pages: middlewares of all pages.
    idle_s, data_idle_s: time for a caller to send the head of a request. data_connections: bound of connections to a
    data application, and to pages; by default as many as descriptors allow.
    """

    def __init__(
        self,
        *,
        hello: Hello,
        kind: type[TargetT],
        tls: MemberTls,
        facts: Callable[[], PodFacts | RolloutFacts],
        accept: Callable[[TargetT], None],
        remember_epoch: Callable[[int], None],
        unfit: Callable[[TargetT], str] = lambda target: "",
        data: web.Application | StandaloneDataPort | None = None,
        pages: Sequence[web.RouteDef] = (),
        around_pages: Sequence[Middleware] = (),
        ports: Ports | None = None,
        registry: CollectorRegistry = REGISTRY,
        idle_s: float = IDLE_S,
        data_idle_s: float = DATA_IDLE_S,
        data_connections: int | None = None,
    ) -> None:
        self._hello = hello
        self._tls = tls
        self._facts = facts
        self._accept = accept
        self._data = data
        self._pages = web.Application(middlewares=[refuse_other_sites, *around_pages])
        self._pages.add_routes([web.get("/v1/state", self._show_state), *pages])
        self._registry = registry
        self._own = CollectorRegistry()
        self._own.register(ProblemGauge(lambda: facts().problem))
        self._metrics = SharedResult(lambda: generate_latest(self._registry) + generate_latest(self._own))
        self._fence = EpochFence(kind, highest_epoch=hello.highest_epoch, remember_epoch=remember_epoch, unfit=unfit)
        self._changed = asyncio.Event()
        self._link: web.WebSocketResponse | None = None
        self._idle_s, self._data_idle_s = idle_s, data_idle_s
        most = descriptors.limit()
        room = descriptors.for_sockets(most)
        self._data_connections = data_connections or min(MAX_DATA_CONNECTIONS, max(1, room // 4))
        self._data_beginning = room // 16
        self._connections = min(MAX_CONNECTIONS, most // 32)
        self._listening = AsyncExitStack()
        self.ports = ports or Ports()

    @property
    def hello(self) -> Hello:
        return self._hello.model_copy(update={"highest_epoch": self._fence.highest_epoch, "keys": self._tls.held})

    @property
    def target(self) -> TargetT | None:
        """Return the newest target that passed the fence since the process started, or None."""
        return self._fence.target

    def publish(self) -> None:
        """Send changed facts to the operator, together with any changes before they are on the wire."""
        self._changed.set()

    # ------------------------------------------------------------------------------------------------- listening
    async def __aenter__(self) -> Self:
        control = web.Application()
        control.add_routes([web.get("/v1/link", self._serve_link), web.get("/v1/state", self._show_state_to_operator)])
        metrics = web.Application()
        metrics.add_routes([web.get("/metrics", self._show_metrics), web.get("/healthz", self._show_health)])
        asked = self.ports
        async with AsyncExitStack() as stack:
            self.ports = Ports(
                control=await self._listen(stack, control, asked.host, asked.control, self._tls.control_context),
                pages=await self._listen(stack, self._pages, "127.0.0.1", asked.pages),
                metrics=await self._listen(stack, metrics, asked.host, asked.metrics),
                data=await self._listen_for_data(stack, asked.host, asked.data),
                host=asked.host,
            )
            stack.push_async_callback(self._end_link)
            self._listening = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._listening.aclose()

    async def _end_link(self) -> None:
        if self._link is not None:
            await self._link.close(code=WSCloseCode.GOING_AWAY, message=b"member ends")

    async def _listen_for_data(self, stack: AsyncExitStack, host: str, port: int) -> int:
        if self._data is None:
            return 0
        if isinstance(self._data, web.Application):
            return await self._listen(stack, self._data, host, port, self._tls.data_context)
        return await stack.enter_async_context(self._data.listening(host, port, self._tls.data_context))

    async def _listen(
        self,
        stack: AsyncExitStack,
        app: web.Application,
        host: str,
        port: int,
        context: Callable[[], ssl.SSLContext] | None = None,
    ) -> int:
        """Listen until the stack ends, and return the port."""
        runner = web.AppRunner(
            app,
            shutdown_timeout=SHUTDOWN_S,
            handler_cancellation=True,  # a gone caller cancels its handler: a gate then aborts the request
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        assert runner.server is not None, "it was set up"
        http = runner.server
        serves_clients = isinstance(self._data, web.Application) and app in (self._data, self._pages)
        most = self._data_connections if serves_clients else self._connections
        first_s = min(HANDSHAKE_S, self._idle_s)

        asks_for_token, is_for_anybody = STRANGERS in app, app not in (self._data, self._pages) and context is None
        strangers = app[STRANGERS] if asks_for_token else Strangers()
        most_strangers = self._connections if is_for_anybody else min(MAX_STRANGERS, max(1, self._data_beginning))

        def own(peer: str) -> asyncio.BaseProtocol:
            made = MemberConnection(
                http,
                closed=strangers.is_none,
                loop=asyncio.get_running_loop(),
                access_log=None,
                keepalive_timeout=self._data_idle_s if app is self._data else self._idle_s,
                max_headers=MAX_HEADERS,
                max_field_size=MAX_HEADER_BYTES,
                auto_decompress=False,  # a few bytes could become any number
            )
            if asks_for_token or is_for_anybody:
                within_s = first_s if asks_for_token else None
                strangers.connection_opened(made, peer, most=most_strangers, within_s=within_s)
            return made

        return await stack.enter_async_context(  # so that it ends before the runner ends what it still serves
            accepting(
                listen(host, port),
                RoomFor(most, lambda: len(http.connections) - len(strangers), own),
                at_a_time=self._data_beginning if serves_clients else self._connections,
                context=context,
                handshake_s=first_s,
            )
        )

    # ------------------------------------------------------------------------------------------------- the link
    async def _serve_link(self, request: web.Request) -> web.StreamResponse:
        _require_operator(request)
        link = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, heartbeat=2 * HEARTBEAT_S, timeout=SHUTDOWN_S)
        await link.prepare(request)
        replaced, self._link = self._link, link
        if replaced is not None:
            log(LOG, "operator link replaced", reason="a newer connection of the operator came")
            await replaced.close(code=WSCloseCode.POLICY_VIOLATION, message=b"replaced by a newer connection")
        log(LOG, "operator linked")
        try:
            async with asyncio.TaskGroup() as group:
                sender = group.create_task(self._send_facts(link), name="link/facts")
                await self._receive_targets(link)
                sender.cancel()
        except* (ConnectionError, TimeoutError) as errors:
            log(LOG, "operator link lost", reason="; ".join(in_words(error) for error in errors.exceptions))
        except* OSError as errors:  # an epoch that can't be made durable is not accepted: the operator sends it again
            log(LOG, "target not kept", logging.ERROR, reason="; ".join(in_words(error) for error in errors.exceptions))
        finally:
            if self._link is link:
                self._link = None
        log(LOG, "operator link ended", reason=f"close code {link.close_code}")
        return link

    async def _send_facts(self, link: web.WebSocketResponse) -> None:
        await _send(link, self.hello.model_dump_json(by_alias=True))
        sent = ""
        while not link.closed and self._link is link:
            self._changed.clear()
            facts = self._facts().model_dump_json(by_alias=True)
            if facts != sent:
                await _send(link, facts)
                sent = facts
            await self._changed.wait()

    async def _receive_targets(self, link: web.WebSocketResponse) -> None:
        async for message in link:
            if message.type is not WSMsgType.TEXT:
                await link.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"one JSON text frame per message")
                return
            try:
                received = read_from_operator(message.data)
            except pydantic.ValidationError as error:
                log(LOG, "target unreadable", logging.ERROR, reason=_first_line(error))
                await link.close(code=WSCloseCode.INVALID_TEXT, message=b"not a target")
                return
            if isinstance(received, Keys):
                await self._renew(link, received)
                continue
            admitted = self._fence.admit(received)
            if isinstance(admitted, Refusal):
                log(LOG, "target refused", logging.WARNING, epoch=admitted.epoch, reason=admitted.message)
                await _send(link, admitted.model_dump_json(by_alias=True))
                continue
            self._accept(admitted)
            self.publish()

    async def _renew(self, link: web.WebSocketResponse, keys: Keys) -> None:
        try:
            self._tls.take(keys)
        except (OSError, ValueError) as error:  # the operator sends them again
            log(LOG, "keys not taken", logging.ERROR, reason=in_words(error))
            return
        if keys.held is not None:
            log(LOG, "keys renewed", reason=f"the operator sent a certificate until {keys.held.ends.isoformat()}")
            await _send(link, Renewed(keys=keys.held).model_dump_json(by_alias=True))

    # ------------------------------------------------------------------------------------------------- pages
    async def _show_state_to_operator(self, request: web.Request) -> web.Response:
        _require_operator(request)
        return await self._show_state(request)

    async def _show_state(self, request: web.Request) -> web.Response:
        target = self._fence.target
        return web.json_response(
            {
                "hello": self.hello.model_dump(mode="json", by_alias=True),
                "target": target.model_dump(mode="json", by_alias=True) if target else None,
                "facts": self._facts().model_dump(mode="json", by_alias=True),
            }
        )

    async def _show_metrics(self, request: web.Request) -> web.Response:
        text = await self._metrics.get()
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _show_health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")


async def _send(link: web.WebSocketResponse, text: str) -> None:
    async with asyncio.timeout(SEND_DEADLINE_S):
        await link.send_str(text)


def _require_operator(request: web.Request) -> None:
    certificate = request.transport.get_extra_info("peercert") if request.transport else None
    if not is_operator(certificate):
        raise web.HTTPForbidden(text="only the operator's certificate may use this port\n")


def _first_line(error: pydantic.ValidationError) -> str:
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
