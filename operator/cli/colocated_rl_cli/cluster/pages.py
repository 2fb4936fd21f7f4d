"""Read members' pages, which listen on their pods' loopback, through the API server's port-forward.

So the right to `pods/portforward` is the login, and no port is opened on this machine for others to use. A page is one
HTTP request over a WebSocket (`v4.channel.k8s.io`): each frame carries a channel number, 0 for data and 1 for errors,
and the first frame of each channel names the port. An answer is streamed, so a page may be long or endless.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import aiohttp
from yarl import URL

from colocated_rl_api import names
from colocated_rl_api.logs import in_words
from colocated_rl_cli.base.errors import CliError, NotReached, ObjectMissing
from colocated_rl_cli.cluster.api import Api, refusal

DEADLINE_S = 15.0  # for a whole page
QUIET_S = 45.0  # longest silence in a streamed answer; members send something every 15 s
MAX_PAGE_BYTES = 64 * 1024 * 1024
MAX_HEAD_LINE_BYTES = 64 * 1024
AT_ONCE = 16
_DATA, _ERROR = 0, 1


async def post(api: Api, pod: str, path: str, body: str) -> None:
    """Send JSON to a page. Raises NotReached, NotAllowed, ObjectMissing (the member has no such page)."""
    what = f"page {path} of pod {pod}"
    try:
        async with asyncio.timeout(DEADLINE_S), opened(api, pod, path, body=body):
            pass
    except TimeoutError as error:
        raise NotReached(f"{what}: no answer through port-forward within {DEADLINE_S:.0f} s") from error


async def page(api: Api, pod: str, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a page's object. Raises NotReached, NotAllowed, ObjectMissing (the member has no such page)."""
    what = f"page {path} of pod {pod}"
    found = read_json(text := await text_page(api, pod, path, query=query), what)
    if not isinstance(found, dict):
        raise NotReached(f"{what} is no object of JSON: {text[:200]!r}")
    return found


def read_json(text: str | bytes, what: str) -> Any:
    """Parse JSON of a member, which may be of anybody who is in its pod. Raises NotReached."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotReached(f"{what} is no JSON: {text[:200]!r}") from error


async def text_page(
    api: Api, pod: str, path: str, *, query: Mapping[str, str] | None = None, port: int = names.PAGES_PORT
) -> str:
    """Return a page's text. Raises the same errors as `page`."""
    what, body = f"page {path} of pod {pod}", bytearray()
    try:
        async with asyncio.timeout(DEADLINE_S), opened(api, pod, path, query=query, port=port) as answer:
            async for piece in answer.body():
                body += piece
                if len(body) > MAX_PAGE_BYTES:
                    raise NotReached(f"{what}: more than {MAX_PAGE_BYTES} bytes")
    except TimeoutError as error:
        raise NotReached(f"{what}: no answer through port-forward within {DEADLINE_S:.0f} s") from error
    return body.decode(errors="replace")


async def states(api: Api, pods: Iterable[str]) -> dict[str, Any]:
    """Return page `/v1/state` (hello, target, facts) of each pod, or the CliError that prevented reading it."""
    return await of_each(pods, lambda pod: page(api, pod, "/v1/state"))


async def of_each(pods: Iterable[str], read: Callable[[str], Awaitable[Any]]) -> dict[str, Any]:
    """Return what `read` returns for each pod, or the CliError that it raises; a few pods are read at a time."""
    limit = asyncio.Semaphore(AT_ONCE)
    found: dict[str, Any] = {}

    async def note(pod: str) -> None:
        async with limit:
            try:
                found[pod] = await read(pod)
            except CliError as error:
                found[pod] = error  # not idle, not failed: nobody knows

    async with asyncio.TaskGroup() as group:
        for pod in pods:
            group.create_task(note(pod), name=f"page/{pod}")
    return found


@asynccontextmanager
async def opened(
    api: Api,
    pod: str,
    path: str,
    *,
    query: Mapping[str, str] | None = None,
    port: int = names.PAGES_PORT,
    body: str | None = None,
) -> AsyncIterator[PageBody]:
    """Open a page to stream its body. Raises NotReached, NotAllowed, ObjectMissing, also while it is read.

    body: JSON in ASCII to send to the page, which is read otherwise.
    """
    asked = URL(path).with_query(query) if query else URL(path)
    sent = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    method, head = "GET" if body is None else "POST", f"Host: localhost\r\nConnection: close\r\n{sent}"
    request = f"{method} {asked.raw_path_qs} HTTP/1.1\r\n{head}\r\n{body or ''}".encode()
    address, what = f"{api.pods}/{pod}/portforward?ports={port}", f"page {path} of pod {pod}"
    try:
        async with api.session.ws_connect(
            address, protocols=("v4.channel.k8s.io",), max_msg_size=MAX_PAGE_BYTES, autoping=True
        ) as link:
            await link.send_bytes(bytes([_DATA]) + request)
            answer = PageBody(link, what, port)
            await answer.read_head()
            yield answer
    except aiohttp.WSServerHandshakeError as error:
        raise await _why_refused(api, pod, address, error, what) from error
    except aiohttp.ClientError as error:
        raise NotReached(f"{what}: port-forward failed: {in_words(error)}") from error


class PageBody:
    """Reads a member's answer from the port-forward only as far as the caller consumes it.

    headers: keyed by names in lower case.
    """

    def __init__(self, link: aiohttp.ClientWebSocketResponse, what: str, port: int) -> None:
        self._link = link
        self._what = what
        self._port = port
        self._received = bytearray()
        self._channels_seen: set[int] = set()
        self.headers: dict[str, str] = {}

    async def read_head(self) -> None:
        """Read status and headers. Raises NotReached or ObjectMissing for a status other than 200."""
        if not await self._more():  # this kubelet does not report a refused connection
            message = f"port {self._port} of the pod gave no answer: does the member run, and listen there?"
            raise NotReached(f"{self._what}: {message}")
        try:
            status = int((await self._line()).split()[1])
            while line := await self._line():
                name, _, value = line.partition(":")
                self.headers[name.lower()] = value.strip()
        except (ValueError, IndexError) as error:
            raise NotReached(f"{self._what}: port {self._port} of the pod does not speak HTTP") from error
        if status != 200:
            body = bytearray()
            async for piece in self.body():
                body += piece[: MAX_HEAD_LINE_BYTES - len(body)]
            message = body.decode(errors="replace").strip()[:500]
            kind = ObjectMissing if status == 404 else NotReached
            raise kind(
                f"{self._what}: {message}" if status == 404 else f"{self._what}: the member answers {status}: {message}"
            )

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces. Raises NotReached if it is cut off."""
        try:
            if self.headers.get("transfer-encoding", "").lower() == "chunked":
                while size := _size((await self._line()).partition(";")[0], 16):
                    async for piece in self._bytes(size):
                        yield piece
                    await self._line()
            elif "content-length" in self.headers:
                async for piece in self._bytes(_size(self.headers["content-length"], 10)):
                    yield piece
            else:  # the body ends with the connection
                while self._received or await self._more():
                    yield self._take(len(self._received))
        except ValueError as error:
            raise NotReached(f"{self._what}: the member's answer is broken: {error}") from error

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the body's lines without their newlines."""
        partial = b""
        async for piece in self.body():
            *whole, partial = (partial + piece).split(b"\n")
            for line in whole:
                yield line
            if len(partial) > MAX_PAGE_BYTES:
                raise NotReached(f"{self._what}: a line of more than {MAX_PAGE_BYTES} bytes")

    async def _bytes(self, count: int) -> AsyncIterator[bytes]:
        while count:
            if not self._received and not await self._more():
                raise self._cut_off()
            piece = self._take(min(count, len(self._received)))
            count -= len(piece)
            yield piece

    async def _line(self) -> str:
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > MAX_HEAD_LINE_BYTES:
                raise ValueError(f"a line of more than {MAX_HEAD_LINE_BYTES} bytes")
            if not await self._more():
                raise self._cut_off()
        return self._take(end + 1).decode(errors="replace").rstrip("\r\n")

    def _take(self, count: int) -> bytes:
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken

    async def _more(self) -> bool:
        """Wait for more bytes of the answer; return False at the end of the connection."""
        try:
            async with asyncio.timeout(QUIET_S):
                async for message in self._link:
                    if message.type is aiohttp.WSMsgType.BINARY and message.data and self._accept(message.data):
                        return True
        except TimeoutError as error:
            raise NotReached(f"{self._what}: nothing came through port-forward for {QUIET_S:.0f} s") from error
        return False

    def _accept(self, frame: bytes) -> bool:
        """Take in a frame; return whether it held bytes of the answer."""
        channel, content = frame[0], frame[1:]
        if channel not in self._channels_seen:  # the first frame of each channel begins with the port
            self._channels_seen.add(channel)
            content = content[2:]
        if channel == _ERROR and content:
            raise NotReached(f"{self._what}: {content.decode(errors='replace').strip()}: does the member run?")
        if channel == _DATA:
            self._received += content
        return channel == _DATA and bool(content)

    def _cut_off(self) -> NotReached:
        return NotReached(f"{self._what}: the member's answer was cut off")


async def _why_refused(api: Api, pod: str, address: str, error: aiohttp.WSServerHandshakeError, what: str) -> CliError:
    """Return the error with the server's reason, which only the answer to an ordinary request holds.

    A WebSocket's handshake hides it.
    """
    is_of_node = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR  # it forwards nothing, and no request tells why
    try:
        await api.get(f"{api.pods}/{pod}" if is_of_node else address, what=what)
    except CliError as why:
        if is_of_node or error.status in (401, 403, 404):
            return why
    if is_of_node:
        return NotReached(
            f"{what}: the pod's node forwards no port ({error.status}): the pod ends, or the node is away; kubectl get "
            f"pod {pod} -o wide shows which"
        )
    return refusal(error.status, error.message, what)


def _size(text: str, base: int) -> int:
    """Return a number of bytes. Raises ValueError, also for what `int` takes and HTTP does not."""
    if not text.strip().isalnum():
        raise ValueError(f"{text[:20]!r} is no number of bytes")
    return int(text, base)
