"""`make bench-gate`: what a gate costs beside nothing at all, beside a relay that only copies bytes, which is the least
that a process of this language costs in its place, and, where it is installed, beside `sglang-router`.

Upstream and load are of this file and have one core, whoever is measured has the other. Each is told the same: plain
requests that are answered with 4 KB after 50 ms, and streams of 32 events in 320 ms. Callers begin together, as after a
switch, and then all go on together too; streams are measured once more with beginnings spread over the time of one. CPU
time is that of the measured process alone, so it can be compared on a busy machine too; times and rates only with what
was measured right before. Everybody takes three turns of a third each, so that all see the same machine, and begins
with its connections open.

Then the same with the real engine on the CPU and the demo's model, as far as the set-up has made both: streams of 64
tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

import uvloop
from prometheus_client import CollectorRegistry

from colocated_rl_agent.gate.data_port import DataPort
from colocated_rl_agent.gate.entrance import Backend
from colocated_rl_agent.gate.gate import Gate
from colocated_rl_agent.metrics import AgentMetrics
from colocated_rl_api import garbage
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_trainer.conformance.ranks import free_port
from engines import engine_process
from setup.layout import CHECKOUT

PLAIN_S, PLAIN_BYTES = 0.05, 4096
EVENTS, EVENT_S = 32, 0.01
STREAM_S = EVENTS * EVENT_S
CONCURRENCY = (64, 256, 1024)
ENGINE_CONCURRENCY, ENGINE_REQUESTS, ENGINE_TOKENS, TURNS = 16, 64, 64, 3
ENGINE_FLAGS = ("--max-total-tokens", "16384", "--max-running-requests", str(ENGINE_CONCURRENCY))
TICKS = os.sysconf("SC_CLK_TCK")
MEASURED_CORE, OTHER_CORE = 0, 1
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


# -------------------------------------------------------------------------------------------------------- the upstream
def chunk(tokens: int, *, done: bool, filler: int = 0) -> bytes:
    event = {
        "text": "x" * filler,
        "output_ids": list(range(tokens)),
        "meta_info": {
            "id": "r",
            "weight_version": "0-1",
            "completion_tokens": tokens,
            "finish_reason": {"type": "length"} if done else None,
        },
    }
    return json.dumps(event, separators=(",", ":")).encode()


WHOLE = chunk(16, done=True, filler=PLAIN_BYTES)
PIECES = [chunk(n + 1, done=n + 1 == EVENTS) for n in range(EVENTS)]


def event(data: bytes) -> bytes:
    text = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(text), text)


class PromptedUpstream(asyncio.Protocol):
    """Answers `/generate` by what its prompt says, and whatever a router asks with an empty object."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head = self.received[:end]
            length = content_length(head)
            if len(self.received) < end + 4 + length:
                return
            body, self.received = self.received[end + 4 : end + 4 + length], self.received[end + 4 + length :]
            self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        loop = asyncio.get_running_loop()
        if not head.startswith(b"POST /generate"):
            self.transport.write(JSON % (2, b"{}"))
        elif b'"pieces"' in body:
            self.transport.write(STREAM)
            loop.call_later(EVENT_S, self.piece, 0)
        elif b'"stream":true' in body:  # as a gate asks
            loop.call_later(PLAIN_S, self.write, STREAM + event(WHOLE) + event(b"[DONE]") + b"0\r\n\r\n")
        else:
            loop.call_later(PLAIN_S, self.write, JSON % (len(WHOLE), WHOLE))

    def piece(self, number: int) -> None:
        self.write(event(PIECES[number]))
        if number + 1 < EVENTS:
            asyncio.get_running_loop().call_later(EVENT_S, self.piece, number + 1)
        else:
            self.write(event(b"[DONE]") + b"0\r\n\r\n")

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)


def content_length(head: bytes) -> int:
    at = head.lower().find(b"content-length:")
    return int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


async def serve_upstream(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(PromptedUpstream, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


# ------------------------------------------------------------------------------------------------------------ the gate
async def serve_gate(port: int, upstream: int) -> None:
    """Serve a gate as an agent does."""
    garbage.look_seldom()
    gate = Gate(count=AgentMetrics(CollectorRegistry()).request_ended)
    async with DataPort(gate.serve).listening("127.0.0.1", port):
        gate.open(Backend(f"http://127.0.0.1:{upstream}", "i", WeightVersion(0, 1), nobody_aborts))
        await asyncio.Event().wait()


async def nobody_aborts(rid: str) -> None:
    """Every request of the load ends by itself."""


# ----------------------------------------------------------------------------------------------------------- the relay
class Copier(asyncio.Protocol):
    """Copy one direction of a relayed connection."""

    def __init__(self, to: asyncio.WriteTransport | None = None) -> None:
        self.to = to
        self.early = b""  # what came before there was anywhere to send it

    def data_received(self, data: bytes) -> None:
        if self.to is None:
            self.early += data
        else:
            self.to.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.to is not None:
            self.to.close()


async def serve_relay(port: int, upstream: int) -> None:
    loop = asyncio.get_running_loop()
    joining = set[asyncio.Task[None]]()

    async def join(client: Copier, transport: asyncio.WriteTransport) -> None:
        there, _ = await loop.create_connection(partial(Copier, transport), "127.0.0.1", upstream)
        client.to = there
        there.write(client.early)

    class Relayed(Copier):
        def connection_made(self, transport: Any) -> None:
            joining.add(task := loop.create_task(join(self, transport)))
            task.add_done_callback(joining.discard)

    server = await loop.create_server(Relayed, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


# ------------------------------------------------------------------------------------------------------------ the load
@dataclass
class RequestTimes:
    """Seconds, of every request."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.whole) / self.took_s

    def __add__(self, other: RequestTimes) -> RequestTimes:
        return RequestTimes(self.first + other.first, self.whole + other.whole, self.took_s + other.took_s)


class StreamCaller(asyncio.Protocol):
    """Send one request after the other on one connection."""

    def __init__(
        self,
        request: bytes,
        left: Iterator[int],
        times: RequestTimes,
        ended: asyncio.Future[None],
    ) -> None:
        self.request, self.left, self.times, self.ended = request, left, times, ended
        self.received = bytearray()
        self.began = 0.0
        self.first = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self) -> None:
        if next(self.left, None) is None:
            self.transport.close()
            if not self.ended.done():
                self.ended.set_result(None)
            return
        self.received.clear()
        self.began, self.first = time.perf_counter(), 0.0
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self.first and (b"data: " in data or b"Content-Length" in data):
            self.first = time.perf_counter()
        if self.is_whole():
            if not self.received.startswith(b"HTTP/1.1 200"):
                self.ended.set_exception(RuntimeError(bytes(self.received[:300]).decode()))
                return
            now = time.perf_counter()
            self.times.first.append((self.first or now) - self.began)
            self.times.whole.append(now - self.began)
            self.send()

    def is_whole(self) -> bool:
        if self.received.endswith(b"0\r\n\r\n"):
            return True
        end = self.received.find(b"\r\n\r\n")
        if end < 0 or b"chunked" in self.received[:end].lower():
            return False
        return len(self.received) >= end + 4 + content_length(bytes(self.received[:end]))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(f"a connection broke: {error!r}"))


def asked(*, streams: bool) -> dict[str, Any]:
    """Return the body of a request to the upstream of this file."""
    return {"text": "pieces" if streams else "whole", "sampling_params": {}} | ({"stream": True} if streams else {})


async def load(
    port: int, body: dict[str, Any], *, concurrency: int, requests: int, spread_s: float = 0.0
) -> RequestTimes:
    """Load a port by concurrent callers, whose connections are open before the first one begins.

    spread_s: from the first caller's beginning to the last one's.
    """
    data = json.dumps(body, separators=(",", ":")).encode()
    request = (
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (len(data), data)
    )
    times, left, loop = RequestTimes(), iter(range(requests)), asyncio.get_running_loop()
    ends: list[asyncio.Future[None]] = [loop.create_future() for _ in range(concurrency)]
    callers = [
        (await loop.create_connection(partial(StreamCaller, request, left, times, end), "127.0.0.1", port))[1]
        for end in ends
    ]
    began = time.perf_counter()
    for number, caller in enumerate(callers):
        loop.call_later(number / concurrency * spread_s, caller.send)
    await asyncio.gather(*ends)
    times.took_s = time.perf_counter() - began
    return times


# --------------------------------------------------------------------------------------------------------- who is who
@contextmanager
def process(*command: str, core: int, port: int) -> Iterator[int]:
    """A process that listens on the port, on one core; its pid."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as it:
        try:
            os.sched_setaffinity(it.pid, {core})
            deadline = time.monotonic() + 30
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    if time.monotonic() > deadline or it.poll() is not None:
                        raise
                    time.sleep(0.05)
            yield it.pid
        finally:
            it.kill()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


Command = tuple[str, ...]
US = (sys.executable, "-m", "bench.gate", "--serve")


SERVED: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "upstream": serve_upstream,
    "gate": serve_gate,
    "relay": serve_relay,
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gate", description=__doc__)
    parser.add_argument("--router", default="", help="a Python with sglang-router")
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--serve", choices=[*SERVED], help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=int, nargs="*", default=[], help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        uvloop.run(SERVED[given.serve](*given.ports))  # as an agent runs
        return 0
    print(f"{'':22}  {'':7}  requests/s  of direct  CPU s/1000  p50 ms  p99 ms  first p50 ms")
    beside_simulated_engine(given.router, given.requests)
    if CHECKOUT.environment("gpu").exists() and CHECKOUT.model.exists():
        beside_real_engine(given.router)
    else:
        print("no real engine: `make setup` installs it and makes its model")
    return 0


def proxies(router: str, upstream: int) -> dict[str, tuple[int, Command]]:
    """Return, by name, port and command of each process in front of the upstream; none for `direct`."""
    found: dict[str, tuple[int, Command]] = {"direct": (upstream, ())}
    for ours in ("relay", "gate"):
        port = free_port()
        found[ours] = (port, (*US, ours, "--ports", str(port), str(upstream)))
    if router:
        other = free_port()
        there = ("--host", "127.0.0.1", "--port", str(other), "--worker-urls", f"http://127.0.0.1:{upstream}")
        found["router"] = (other, (router, "-m", "sglang_router.launch_router", *there))
    return found


def beside_simulated_engine(router: str, requests: int) -> None:
    upstream = free_port()
    os.sched_setaffinity(0, {OTHER_CORE % (os.cpu_count() or 1)})
    with process(*US, "upstream", "--ports", str(upstream), core=OTHER_CORE, port=upstream):
        for streams, spread_s in ((False, 0.0), (True, 0.0), (True, STREAM_S)):
            for concurrency in CONCURRENCY:
                what = f"{'streams' if streams else 'plain'}, {concurrency} {'spread' if spread_s else 'at once'}"
                who = proxies(router, upstream)
                in_turns(what, who, asked(streams=streams), concurrency, requests, spread_s=spread_s)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))


def beside_real_engine(router: str) -> None:
    limits = {"max_new_tokens": ENGINE_TOKENS, "ignore_eos": True, "temperature": 1.0}
    body = {"input_ids": list(range(5, 21)), "stream": True, "return_logprob": True, "sampling_params": limits}
    with tempfile.TemporaryDirectory() as root:
        engine = engine_process(CHECKOUT.model, version=WeightVersion(0, 1), root=Path(root), flags=ENGINE_FLAGS)
        with engine as it:
            it.wait_until_up()
            what, who = f"real engine, {ENGINE_CONCURRENCY} at once", proxies(router, urlsplit(it.url).port or 0)
            in_turns(what, who, body, ENGINE_CONCURRENCY, TURNS * ENGINE_REQUESTS)


def in_turns(
    what: str,
    who: dict[str, tuple[int, Command]],
    body: dict[str, Any],
    concurrency: int,
    requests: int,
    *,
    spread_s: float = 0.0,
) -> None:
    """Measure and show everybody, direct first."""
    found = {name: (RequestTimes(), 0.0) for name in who}
    for _ in range(TURNS):
        for name, (port, command) in who.items():
            load_it = partial(load, port, body, concurrency=concurrency, spread_s=spread_s)
            times, cpu_s = measure(port, command, load_it, requests // TURNS, concurrency)
            before, before_s = found[name]
            found[name] = before + times, before_s + cpu_s / TURNS
    direct, _ = found["direct"]
    for name, (times, cpu_s) in found.items():
        show(what, name, times, cpu_s if who[name][1] else None, times.rate / direct.rate)


def measure(
    port: int,
    command: Command,
    load_it: Callable[..., Coroutine[Any, Any, RequestTimes]],
    requests: int,
    concurrency: int,
) -> tuple[RequestTimes, float]:
    """Times, and CPU seconds of 1,000 requests; those of nobody are 0."""
    if not command:
        uvloop.run(load_it(requests=concurrency))
        return uvloop.run(load_it(requests=requests)), 0.0
    with process(*command, core=MEASURED_CORE, port=port) as pid:
        uvloop.run(load_it(requests=concurrency))  # its connections to the upstream are kept
        before = cpu_seconds(pid)
        times = uvloop.run(load_it(requests=requests))
        return times, (cpu_seconds(pid) - before) / requests * 1000


def show(what: str, name: str, times: RequestTimes, cpu_s: float | None, of_direct: float) -> None:
    print(
        f"{what:22}  {name:7}  {times.rate:10.1f}  {of_direct:9.3f}  {'' if cpu_s is None else f'{cpu_s:.2f}':>10}"
        f"  {1000 * median(times.whole):6.1f}  {1000 * quantiles(times.whole, n=100)[98]:6.1f}"
        f"  {1000 * median(times.first):12.1f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
