"""A proxy in front of a real API server, which misbehaves as those do: by a seeded deck of faults, or it is away.

What a fault is, and where the cards of each deck are dealt:

| fault | of | what the caller sees |
|---|---|---|
| 401, 429, 500, 502, 503, 504 | any request | that code with a Status; nothing was done. 429 with Retry-After |
| 409 | changes | somebody else was first, though nobody was; nothing was done |
| 410 | lists and the start of watches | the version that was asked for is too old |
| Reset, Lost | any request | the connection ends: before anything was done, or after it was |
| Late | any request, any event | it takes DELAY_S more |
| Dropped, Torn, Ended | events | the watch breaks before an event, in the middle of one, or ends in order |
| Expired, Failed | events | the watch ends with an event of type ERROR: code 410, code 500 |
| Twice, Swapped | events | the same again; an older state of an object after its newer one |

`dealt` counts each fault that took place. A request is spared after MAX_IN_A_ROW faults, whatever the cards say: else a
leader that does all it can could lose its Lease, and a test would show nothing but that. What `stalls` picks, by path
and body, is never answered; `stalled` counts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web
from yarl import URL

from colocated_rl_api import names
from colocated_rl_operator.clients.cluster import ClusterAccess
from colocated_rl_trainer.conformance.ranks import free_port
from fakes import serving
from fakes.authority import FakeAuthority

DELAY_S = 0.3
SWAP_S = 1.0  # an event waits at most so long for the one that it is to come after
QUIET = {"change": 2, "read": 1, "watch": 1, "event": 1}  # cards without a fault for each one with
MAX_IN_A_ROW = 2
HOST = "localhost"
HOP_BY_HOP = ("connection", "content-length", "host", "keep-alive", "transfer-encoding")


class ApiFault(StrEnum):
    UNAUTHORIZED = "401"
    CONFLICT = "409"
    GONE = "410"
    TOO_MANY = "429"
    INTERNAL = "500"
    BAD_GATEWAY = "502"
    UNAVAILABLE = "503"
    TIMEOUT = "504"
    RESET = "Reset"
    LOST = "Lost"
    LATE = "Late"
    DROPPED = "Dropped"
    TORN = "Torn"
    ENDED = "Ended"
    EXPIRED = "Expired"
    FAILED = "Failed"
    TWICE = "Twice"
    SWAPPED = "Swapped"


ANY = (
    *(
        ApiFault.UNAUTHORIZED,
        ApiFault.TOO_MANY,
        ApiFault.INTERNAL,
        ApiFault.BAD_GATEWAY,
        ApiFault.UNAVAILABLE,
        ApiFault.TIMEOUT,
    ),
    *(ApiFault.RESET, ApiFault.LATE),
)
FAULTS: dict[str, tuple[ApiFault, ...]] = {
    "change": (*ANY, ApiFault.CONFLICT, ApiFault.LOST),
    "read": (*ANY, ApiFault.LOST),
    "watch": (*ANY, ApiFault.GONE),
    "event": tuple(fault for fault in ApiFault if not fault.isdigit() and fault not in (ApiFault.RESET, ApiFault.LOST)),
}
REASONS = {
    ApiFault.UNAUTHORIZED: "Unauthorized",
    ApiFault.CONFLICT: "Conflict",
    ApiFault.GONE: "Expired",
    ApiFault.TOO_MANY: "TooManyRequests",
    ApiFault.INTERNAL: "InternalError",
    ApiFault.BAD_GATEWAY: "BadGateway",
    ApiFault.UNAVAILABLE: "ServiceUnavailable",
    ApiFault.TIMEOUT: "Timeout",
}


class Deck:
    """Cards of one kind, each fault once among quiet ones; shuffled again when the last is dealt."""

    def __init__(self, faults: Sequence[ApiFault], quiet: int, order: random.Random) -> None:
        self._all: list[ApiFault | None] = [*faults, *[None] * (quiet * len(faults))]
        self._order = order
        self._left: list[ApiFault | None] = []

    def deal(self) -> ApiFault | None:
        if not self._left:
            self._left = self._order.sample(self._all, len(self._all))
        return self._left.pop()


class UnrulyApi:
    """Serves while its context is entered. `access`: for who shall meet the faults. It behaves until `misbehaves`."""

    def __init__(self, access: ClusterAccess, directory: Path, *, seed: int = 0) -> None:
        self._upstream = access
        self._directory = directory
        order = random.Random(seed)
        self._decks = {kind: Deck(faults, QUIET[kind], order) for kind, faults in FAULTS.items()}
        self._in_a_row: Counter[tuple[str, str]] = Counter()
        self.misbehaves = False
        self.stalls: Callable[[str, bytes], bool] = lambda path, body: False
        self.stalled = 0
        self.dealt: Counter[tuple[str, ApiFault]] = Counter()
        app = web.Application(client_max_size=16 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        self._site: web.TCPSite | None = None
        self._port = free_port()  # it comes back to it

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._upstream.ssl_context(), limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(), auto_decompress=False
        )
        self._tls = FakeAuthority().server_context(self._directory, server_name=HOST)
        await self._runner.setup()
        await self.come_back()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await serving.end(self._runner)
        await self._session.close()

    @property
    def access(self) -> ClusterAccess:
        ca_pem = (self._directory / names.CA_FILE).read_text()
        return replace(self._upstream, server=f"https://{HOST}:{self._port}", ca_pem=ca_pem)

    @property
    def missing(self) -> set[tuple[str, ApiFault]]:
        """Faults that nobody has met yet."""
        return {(kind, fault) for kind, faults in FAULTS.items() for fault in faults} - set(self.dealt)

    async def leave(self) -> None:
        """Refuse every connection, and end those that there are."""
        assert self._site is not None
        await self._site.stop()
        serving.hang_up(self._runner)

    async def come_back(self) -> None:
        self._site = web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=self._tls)
        await self._site.start()

    # ------------------------------------------------------------------------------------------------------ requests
    def _deal(self, kind: str, what: tuple[str, str]) -> ApiFault | None:
        if not self.misbehaves or self._in_a_row[what] >= MAX_IN_A_ROW:
            self._in_a_row[what] = 0
            return None
        fault = self._decks[kind].deal()
        self._in_a_row[what] = 0 if fault in (None, ApiFault.LATE) else self._in_a_row[what] + 1
        return fault

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.stalls(request.path, await request.read()):
            self.stalled += 1
            await asyncio.Event().wait()
        is_watch = "watch" in request.query
        kind = "watch" if is_watch else "read" if request.method == "GET" else "change"
        fault = self._deal(kind, (request.method, request.path))
        if fault is not None and fault is not ApiFault.LOST:
            self.dealt[kind, fault] += 1
        if fault is ApiFault.RESET:
            return _cut(request)
        if fault in REASONS:
            return web.json_response(_status(fault), status=int(fault), headers=_hint(fault))
        if fault is ApiFault.LATE:
            await asyncio.sleep(DELAY_S)
        url = URL(self._upstream.server + request.raw_path, encoded=True)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        async with self._session.request(
            request.method, url, data=await request.read() or None, headers=headers, allow_redirects=False
        ) as answer:
            if is_watch and answer.status == 200:
                return await self._watch(request, answer)
            content = await answer.read()
            if fault is ApiFault.LOST:
                self.dealt[kind, fault] += 1
                return _cut(request)
            return web.Response(status=answer.status, body=content, headers=_kept(answer))

    # -------------------------------------------------------------------------------------------------------- events
    async def _watch(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(headers=_kept(answer))
        await response.prepare(request)
        held: dict[str, bytes] = {}  # by the object's UID, until its next event is out
        try:
            async with contextlib.aclosing(_lines(answer, SWAP_S)) as lines:
                async for line in lines:
                    if line is None:
                        for late in held.values():
                            await response.write(late)
                        held.clear()
                    elif not await self._pass_on(line, response, request, held):
                        break
        except ConnectionResetError:
            pass  # who watched has left
        finally:
            if answer.connection is not None and answer.connection.transport is not None:
                answer.connection.transport.abort()  # a stream that is left in the middle
        return response

    async def _pass_on(
        self, line: bytes, response: web.StreamResponse, request: web.Request, held: dict[str, bytes]
    ) -> bool:
        """Pass a line on, and return whether the watch goes on."""
        uid = json.loads(line)["object"]["metadata"].get("uid")
        fault = self._deal("event", ("EVENT", request.path))
        if fault is ApiFault.SWAPPED and (uid is None or uid in held):
            fault = None
        if fault is not None and fault is not ApiFault.SWAPPED:
            self.dealt["event", fault] += 1
        match fault:
            case ApiFault.DROPPED | ApiFault.TORN:
                if fault is ApiFault.TORN:
                    await response.write(line[: len(line) // 2])
                _cut(request)
                return False
            case ApiFault.ENDED:
                return False
            case ApiFault.EXPIRED | ApiFault.FAILED:
                status = _status(ApiFault.GONE if fault is ApiFault.EXPIRED else ApiFault.INTERNAL)
                await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
                return False
            case ApiFault.SWAPPED:
                held[uid] = line
                return True
            case ApiFault.LATE:
                await asyncio.sleep(DELAY_S)
            case _:
                pass
        await response.write(line * (2 if fault is ApiFault.TWICE else 1))
        if uid in held:
            self.dealt["event", ApiFault.SWAPPED] += 1
            await response.write(held.pop(uid))
        return True


async def _lines(answer: aiohttp.ClientResponse, pause_s: float) -> AsyncGenerator[bytes | None, None]:
    """Lines as they come; None after each time of `pause_s` without one."""
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def read() -> None:
        try:
            async for line in answer.content:
                queue.put_nowait(line)
        finally:
            queue.put_nowait(b"")

    reading = asyncio.create_task(read(), name="watch/upstream")
    try:
        while True:
            try:
                async with asyncio.timeout(pause_s):
                    line = await queue.get()
            except TimeoutError:
                line = None
            if line == b"":
                break
            yield line
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _cut(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _kept(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}


def _hint(fault: ApiFault) -> dict[str, str]:
    return {"Retry-After": "1"} if fault is ApiFault.TOO_MANY else {}


def _status(fault: ApiFault) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": int(fault),
        "reason": REASONS[fault],
        "message": f"{fault} by the test",
    }
