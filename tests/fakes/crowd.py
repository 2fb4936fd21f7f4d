"""An engine and so many callers of a gate at once, in a process of their own: each takes two sockets here.

    python -m fakes.crowd callers DIRECTORY FILES COUNT SILENT     JSON: what became of them
    python -m fakes.crowd gate DIRECTORY ENGINE                    a member with a gate; the first starts it

The first starts the second with a soft limit of 1,024 open files and a hard one of FILES. The engine answers nobody
before every request is with it, or refused: all of them are under way at the same time. SILENT connections come first
and say nothing.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import resource
import ssl
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from colocated_rl_agent.gate.data_port import DataPort
from colocated_rl_agent.gate.entrance import Backend
from colocated_rl_agent.gate.gate import Gate
from colocated_rl_api import descriptors, logs, names
from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_member.data import DataClient
from colocated_rl_member.tls import MemberTls
from colocated_rl_rollout.engines.engine_client import (
    BEGIN_AT_ONCE,
    EngineClient,
    GateClosed,
    GateConnector,
    GenerateRequest,
)
from fakes import serving
from fakes.authority import FakeAuthority
from fakes.idle_member import JOB_UID, idle_member
from fakes.silent import silence

SOFT = 1024
VERSION = WeightVersion(1, 1)
PATIENCE_S = 60.0
META = {
    "id": "x", "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": 3, "completion_tokens": 2,
    "weight_version": str(VERSION), "weight_versions": [{"version": str(VERSION), "start": 0, "end": 2}],
    "output_token_logprobs": [[-0.5, 5, None], [-0.5, 2, None]],
}  # fmt: skip
ANSWER = f"data: {json.dumps({'text': 'x', 'output_ids': [5, 2], 'meta_info': META})}\n\ndata: [DONE]\n\n".encode()


async def gate(directory: Path, engine: str) -> None:
    """Serve a gate until standard input ends. It prints its ports first."""
    descriptors.raise_limit()
    tls = MemberTls.read(directory / "tls")

    async def abort(rid: str) -> None:
        pass

    made = Gate()
    made.open(Backend(engine, "a", VERSION, abort))
    async with idle_member(tls, DataPort(made.serve, admits=tls.admits), host="127.0.0.1", gate_open=True) as member:
        print(json.dumps([member.ports.data, member.ports.control]), file=sys.stderr, flush=True)  # noqa: T201
        await asyncio.to_thread(sys.stdin.read)


class Crowd:
    """Counts requests. arrived: at the engine. refused: with 429."""

    def __init__(self, tls: MemberTls, count: int) -> None:
        self.tls, self.count = tls, count
        self.arrived = self.refused = 0
        self.statuses: collections.Counter[str] = collections.Counter()
        self.all_are_there = asyncio.Event()
        self.beginning = asyncio.Semaphore(BEGIN_AT_ONCE)

    def look(self) -> None:
        if self.arrived + self.refused >= self.count:
            self.all_are_there.set()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """The engine's route."""
        await request.read()
        self.arrived += 1
        self.look()
        await self.all_are_there.wait()
        return web.Response(body=ANSWER, content_type="text/event-stream")

    async def call(self, port: int, context: ssl.SSLContext) -> None:
        try:
            status = await asyncio.wait_for(self._status(port, context), PATIENCE_S)
        except (OSError, asyncio.IncompleteReadError) as error:
            status = type(error).__name__
        self.statuses[status] += 1
        self.refused += status != "200"
        self.look()

    async def _status(self, port: int, context: ssl.SSLContext) -> str:
        name = names.member_server_name(JOB_UID)
        async with self.beginning:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
        body = json.dumps({"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8}}).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: gate\r\nAuthorization: {self.tls.authorization}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        status = (await reader.readuntil(b"\r\n")).split()[1].decode()
        if status == "200":
            await reader.read()
        writer.transport.abort()
        return status


async def callers(directory: Path, files: int, count: int, silent: int) -> dict[str, Any]:
    authority = FakeAuthority()
    authority.member_directory(directory / "tls", job_uid=JOB_UID, token="t" * 32)
    tls = MemberTls.read(directory / "tls")
    crowd = Crowd(tls, count)
    async with AsyncExitStack() as stack:
        application = web.Application()
        application.add_routes([web.post("/generate", crowd.generate)])
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        stack.push_async_callback(serving.end, runner)
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fakes.crowd", "gate", str(directory)),
            f"http://127.0.0.1:{runner.addresses[0][1]}",
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            stdout=(directory / "log").open("wb"),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (min(SOFT, files), files)),
        )
        assert process.stdin is not None
        assert process.stderr is not None
        stack.callback(process.stdin.close)
        data, control = json.loads(await process.stderr.readline())
        session = await stack.enter_async_context(aiohttp.ClientSession())
        operator = authority.client_context(directory / "operator")
        link = await stack.enter_async_context(
            session.ws_connect(
                f"https://127.0.0.1:{control}/v1/link", ssl=operator, server_hostname=names.member_server_name(JOB_UID)
            )
        )
        reading = asyncio.create_task(heard(link))
        lost = 0
        async with asyncio.timeout(PATIENCE_S):
            if silent:
                await stack.enter_async_context(
                    silence(data, silent)
                )  # and as the rollout controller calls, which comes again when it was refused
                lost = await samples(crowd, tls, data)
            else:
                context = tls.client_context()
                await asyncio.gather(*(crowd.call(data, context) for _ in range(count)))
        is_linked = not reading.done()
        async with session.get(
            f"https://127.0.0.1:{control}/v1/state", ssl=operator, server_hostname=names.member_server_name(JOB_UID)
        ) as answer:
            is_reached = answer.status == 200  # on a new connection
        reading.cancel()
        process.stdin.close()
        await process.wait()
    return {
        "statuses": crowd.statuses,
        "arrived": crowd.arrived,
        "lost": lost,
        "linked": is_linked and is_reached,
        "log": (directory / "log").read_text(),
    }


async def heard(link: aiohttp.ClientWebSocketResponse) -> None:
    """Read until the link ends."""
    async for _ in link:
        pass


async def samples(crowd: Crowd, tls: MemberTls, port: int) -> int:
    """All of them have their tokens in the end. How often the gate was taken for lost."""
    crowd.all_are_there.set()
    lost = 0
    known = asyncio.Event()
    async with aiohttp.ClientSession(connector=GateConnector()) as session:

        def changed() -> None:
            nonlocal lost
            lost += known.is_set() and client.state is None
            if client.is_open:
                known.set()

        endpoint = Endpoint(pod="job-gpu-0-0", address="127.0.0.1", port=port)
        client = EngineClient(endpoint, DataClient(session, tls, JOB_UID), settle_s=60, changed=changed)
        watching = asyncio.create_task(client.watch())
        await known.wait()

        async def sample() -> None:
            while True:
                try:
                    generated = await client.generate(GenerateRequest([5, 6, 7], 8, 1.0, {2}))
                except GateClosed:
                    crowd.statuses["again"] += 1
                    await asyncio.sleep(0.05)
                else:
                    crowd.statuses["200" if len(generated.tokens) == 2 else "no tokens"] += 1
                    return

        outcomes = await asyncio.gather(*(sample() for _ in range(crowd.count)), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                crowd.statuses[type(outcome).__name__] += 1
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    return lost


def main() -> None:
    match sys.argv[1:]:
        case ["gate", directory, engine]:
            logs.configure(level="DEBUG")
            uvloop.run(gate(Path(directory), engine))
        case ["callers", directory, files, count, silent]:
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            needed = 2 * int(count) + 256
            if hard != resource.RLIM_INFINITY and hard < needed:
                sys.exit(f"{needed} open files are needed, and {hard} are allowed")
            json.dump(asyncio.run(callers(Path(directory), int(files), int(count), int(silent))), sys.stdout)
        case _:
            sys.exit(__doc__)
    sys.stdout.flush()
    os._exit(0)  # what is left of thousands of connections is nobody's


if __name__ == "__main__":
    main()
