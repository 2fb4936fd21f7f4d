"""Members' pages, which listen on their pods' loopback: reached through the API server's port-forward.

So the right to `pods/portforward` is the login, and no port is opened on this machine for others to use. A page is one
HTTP request over a WebSocket (`v4.channel.k8s.io`): frames carry a channel number, 0 for data and 1 for errors; the
first frame of each names the port.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp
from yarl import URL

from colocated_rl_api import names
from colocated_rl_cli.api import Api, refusal
from colocated_rl_cli.errors import CliError, NotReached, NotThere

DEADLINE_S = 15.0
MAX_PAGE_BYTES = 64 * 1024 * 1024
AT_ONCE = 16
_DATA, _ERROR = 0, 1


class _Text:
    """A socket of which `http.client` reads what has come already."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._text)


async def page(api: Api, pod: str, path: str, query: Mapping[str, str] | None = None) -> Any:
    """A page as JSON. Raises NotReached, NotAllowed, NotThere (the member has no such page)."""
    text = await text_page(api, pod, path, query=query)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise NotReached(f"page {path} of pod {pod} is no JSON: {text[:200]!r}") from error


async def text_page(
    api: Api, pod: str, path: str, *, query: Mapping[str, str] | None = None, port: int = names.PAGES_PORT
) -> str:
    """As `page`, whatever it holds."""
    asked = URL(path).with_query(query) if query else URL(path)
    request = f"GET {asked.raw_path_qs} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    what = f"page {path} of pod {pod}"
    try:
        async with asyncio.timeout(DEADLINE_S):
            answered = await _forwarded(api, pod, port, request, what)
    except TimeoutError as error:
        raise NotReached(f"{what}: no answer through port-forward within {DEADLINE_S:.0f} s") from error
    if not answered:  # a kubelet that says nothing of a refused connection
        raise NotReached(f"{what}: port {port} of the pod gave no answer: does the member run, and listen there?")
    response = http.client.HTTPResponse(_Text(answered))  # type: ignore[arg-type]  # it calls makefile, no more
    try:
        response.begin()
        body = response.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise NotReached(f"{what}: the member's answer was cut off: {error!r}") from error
    if response.status == 404:
        raise NotThere(f"{what}: {body.strip()}")
    if response.status != 200:
        raise NotReached(f"{what}: the member answers {response.status}: {body.strip()[:500]}")
    return body


async def states(api: Api, pods: Iterable[str]) -> dict[str, Any]:
    """`/v1/state` of each pod: hello, target and facts; where it was not read, the CliError that says why."""
    limit = asyncio.Semaphore(AT_ONCE)
    found: dict[str, Any] = {}

    async def read(pod: str) -> None:
        async with limit:
            try:
                found[pod] = await page(api, pod, "/v1/state")
            except CliError as error:
                found[pod] = error  # not idle, not failed: nobody knows

    async with asyncio.TaskGroup() as group:
        for pod in pods:
            group.create_task(read(pod), name=f"state/{pod}")
    return found


async def _forwarded(api: Api, pod: str, port: int, request: bytes, what: str) -> bytes:
    """All bytes that come back until the member closes its connection."""
    address = f"{api.pods}/{pod}/portforward?ports={port}"
    try:
        async with api.session.ws_connect(
            address, protocols=("v4.channel.k8s.io",), max_msg_size=MAX_PAGE_BYTES, autoping=True
        ) as link:
            await link.send_bytes(bytes([_DATA]) + request)
            return await _answer(link, what)
    except aiohttp.WSServerHandshakeError as error:
        raise await _why_refused(api, address, error, what) from error
    except aiohttp.ClientError as error:
        raise NotReached(f"{what}: port-forward failed: {error!r}") from error


async def _answer(link: aiohttp.ClientWebSocketResponse, what: str) -> bytes:
    answered = bytearray()
    named: set[int] = set()
    async for message in link:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        channel, content = message.data[0], message.data[1:]
        if channel not in named:  # the first of each channel says the port
            named.add(channel)
            content = content[2:]
        if channel == _ERROR and content:
            raise NotReached(f"{what}: {content.decode(errors='replace').strip()}: does the member run?")
        if channel == _DATA:
            answered += content
        if len(answered) > MAX_PAGE_BYTES:
            raise NotReached(f"{what}: more than {MAX_PAGE_BYTES} bytes")
        if _is_whole(answered):
            break
    return bytes(answered)


def _is_whole(answered: bytearray) -> bool:
    """Whether a body of the length that its head says is there; without a length the connection's end tells."""
    head, separator, body = bytes(answered).partition(b"\r\n\r\n")
    if not separator:
        return False
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return len(body) >= int(value)
    return False


async def _why_refused(api: Api, address: str, error: aiohttp.WSServerHandshakeError, what: str) -> CliError:
    """The words of a refusal are in the answer to an ordinary request: a WebSocket's handshake hides them."""
    try:
        await api.get(address, what=what)
    except CliError as why:
        if error.status in (401, 403, 404):
            return why
    return refusal(error.status, error.message, what)
