"""This module makes the application of a data port, which requires the data token, and calls other members' ports.

A data port checks the token before anything else: a request without it is answered before its body is read, and a
connection that has not shown it ends soon.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from colocated_rl_api import names
from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.names import JobUid
from colocated_rl_member.connection import error_body
from colocated_rl_member.peers import ByPeer
from colocated_rl_member.tls import MemberTls

MAX_STRANGERS = 1024  # with TLS 60 MB
DATA_IDLE_S = 900.0  # for a data port's connection; callers keep theirs for less, or it could close under a request


NO_TOKEN = error_body(401, "the data token of the job is needed: Authorization: Bearer TOKEN", code="invalid_api_key")


class StandaloneDataPort(Protocol):
    """A StandaloneDataPort serves itself, without an application; it requires the token too."""

    def listening(
        self, host: str, port: int, context: Callable[[], ssl.SSLContext]
    ) -> AbstractAsyncContextManager[int]:
        """Return a context that listens while it is entered, and yields the port; port 0 takes a free one."""


class Strangers:
    """Strangers are connections that have not shown the token yet, or those of a port that asks for none.

    They could fill the port, or the memory of its process: each has a deadline where a token is asked for, and one of
    too many makes room for the next.
    """

    def __init__(self) -> None:
        self._held = ByPeer[web.RequestHandler]()
        self._leave: dict[web.RequestHandler, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._held)

    def connection_opened(self, who: web.RequestHandler, peer: str, *, most: int, within_s: float | None) -> None:
        self._held.add(who, peer)
        if len(self._held) > most:
            self._hang_up_on(self._held.first_to_go())
        if within_s is not None and who in self._held:
            self._leave[who] = asyncio.get_running_loop().call_later(within_s, self._hang_up_on, who)

    def is_none(self, who: web.RequestHandler) -> None:
        self._held.discard(who)
        if (leave := self._leave.pop(who, None)) is not None:
            leave.cancel()

    def _hang_up_on(self, who: web.RequestHandler) -> None:
        self.is_none(who)
        if who.transport is not None:
            who.transport.abort()  # a regular end of TLS would wait for the other side


STRANGERS = web.AppKey("strangers", Strangers)


def data_application(tls: MemberTls, *, max_request_bytes: int) -> web.Application:
    """Return an application for a data port, to which a member adds its routes."""

    @web.middleware
    async def ask_for_token(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not tls.admits(request.headers.get("Authorization")):
            refusal = web.json_response(NO_TOKEN, status=401, headers={"WWW-Authenticate": "Bearer"})
            refusal.force_close()  # a caller without the token keeps no connection
            return refusal
        request.app[STRANGERS].is_none(request.protocol)
        return await handler(request)

    application = web.Application(middlewares=[ask_for_token], client_max_size=max_request_bytes)
    application[STRANGERS] = Strangers()
    return application


class DataClient:
    """A DataClient calls data ports of the job's members by address, and checks certificates against job and pod."""

    def __init__(self, session: aiohttp.ClientSession, tls: MemberTls, job_uid: JobUid) -> None:
        self._session = session
        self._tls, self._job_uid = tls, job_uid

    def request(
        self, method: str, endpoint: Endpoint, path: str, *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Request `path` at `endpoint`, as `aiohttp.ClientSession.request` does. Pass a timeout."""
        host = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
        return self._session.request(
            method,
            f"https://{host}:{endpoint.port}{path}",
            headers={**(headers or {}), "Authorization": self._tls.authorization},
            ssl=self._tls.client_context(),
            server_hostname=names.pod_server_name(self._job_uid, endpoint.pod),
            allow_redirects=False,
            **options,
        )
