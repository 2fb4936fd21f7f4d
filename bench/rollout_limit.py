"""Measure the limit of one rollout controller: samples and tokens a second, and its CPU time for a thousand samples.

`make bench-rollout-limit`. The real worker, store, TLS and gate client, over loopback, beside gates of this file that
have one core for themselves: each tells that it is open and answers every request after a while with as many tokens as
it is asked, as engines do. Prompts and rewards cost nothing here, and a batch is trained the moment it is sealed.
CPU time is that of the controller's process alone; the rate is what its core does when there is always more to do.

Then a switch: all gates close at once, and each hands back the tokens of every request that is under way. How long
until the controller has all of them, in columns and in JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import uvloop
from prometheus_client import CollectorRegistry
from pydantic_core import to_json

from bench.gate import content_length
from bench.simulated_job import NoText, PromptsInOrder, Rewards
from colocated_rl_api import garbage, names
from colocated_rl_api.columns import CONTENT_TYPE, pack
from colocated_rl_api.gate_wire import GATE_LINE_S, Closed, GateState
from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.member_wire import Endpoint
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_member.data import DataClient
from colocated_rl_member.tls import MemberTls
from colocated_rl_rollout.engines.engine_client import GateConnector
from colocated_rl_rollout.engines.engines import Engines
from colocated_rl_rollout.episodes import Episodes
from colocated_rl_rollout.gateway.sessions import Sessions
from colocated_rl_rollout.gateway.turns import Turns
from colocated_rl_rollout.metrics import RolloutMetrics
from colocated_rl_rollout.rules.samples import SampleState
from colocated_rl_rollout.store.store import Store
from colocated_rl_rollout.worker import Worker
from colocated_rl_trainer.conformance.ranks import free_port
from fakes.authority import FakeAuthority
from fakes.episodes import unplayed

ENGINES = (10, 100, 1000)
TOKENS, ANSWER_S = (256, 4096), 0.5  # TOKENS: of each answer
SWITCH_ENGINES, SWITCH_REQUESTS, SWITCH_TOKENS = 64, 100, 2500  # requests of each engine, tokens of each request
GROUPS, GROUP_SIZE = 64, 8  # of a batch
IN_FLIGHT = 1024  # samples at least, and two for each engine
WARM_AT_MOST_S, MEASURED_S = 300.0, 15.0
SWITCHED = "switched"
POLL_S, QUIET_S = 0.02, 2.0  # QUIET_S: after the last request, before the switch
JOB_UID, VERSION = names.JobUid("6f0d1c52-8a35-4a7c-9d55-0c8a3f1b2e4d"), WeightVersion(0, 1)


def address_of(engine: int) -> str:
    """Return an address of the engine's own, in the loopback's network."""
    return f"127.0.{1 + engine // 250}.{1 + engine % 250}"


# -------------------------------------------------------------------------------------------------------------- gates
def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n"
JSON = "application/json"
_CLOSED = Closed(epoch=1).model_dump_json(by_alias=True).encode()
CLOSED = b"HTTP/1.1 503 \r\nContent-Length: %d\r\n\r\n" % len(_CLOSED) + _CLOSED


def state(*, is_open: bool) -> bytes:
    return GateState(open=is_open, epoch=1, version=VERSION).model_dump_json(by_alias=True).encode() + b"\n"


def response(tokens: int, *, ended: str, form: str) -> bytes:
    """Return an answer of so many tokens that ended so, in columns or in JSON."""
    ids = [*range(10, 10 + tokens)]
    answer = {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": ended},
            "weight_version": str(VERSION),
            "output_token_logprobs": [[-1.2345678806304932, token, None] for token in ids],
        },
    }
    body = to_json(answer) if form == JSON else pack(answer)
    assert body is not None
    return HEAD % form.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


class CannedGate(asyncio.Protocol):
    """A CannedGate answers each request after a while; or, as at a switch, all of them once there are so many.

    holds: how many; 0: it waits for none.
    """

    moment: ClassVar[Path]  # of the switch: the file that gets it
    waits: ClassVar[list[CannedGate]] = []  # a gate for each request that is to be answered at once with all others
    told: ClassVar[set[CannedGate]] = set()  # those with a caller that follows the state
    is_open, holds = True, 0
    whole = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end]
            length = content_length(head)
            if len(self._received) < end + 4 + length:
                return
            self._received = self._received[end + 4 + length :]
            if head.startswith(b"GET"):
                self.send(HEAD % b"application/x-ndjson" + b"Transfer-Encoding: chunked\r\n\r\n")
                self.told.add(self)
                self._tell()
            elif not self.is_open:
                self.send(CLOSED)
            elif self.holds:
                self.waits.append(self)
                if len(self.waits) == self.holds:
                    asyncio.get_running_loop().call_later(QUIET_S, CannedGate.switch)
            else:
                asyncio.get_running_loop().call_later(ANSWER_S, self.send, self.whole)

    def _tell(self) -> None:
        if not self._transport.is_closing():
            self.send(chunk(state(is_open=CannedGate.is_open)))
            asyncio.get_running_loop().call_later(GATE_LINE_S, self._tell)

    def send(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    @classmethod
    def switch(cls) -> None:
        """Close all gates and hand back what was generated."""
        cls.is_open = False
        cls.moment.write_text(str(time.monotonic()))  # a clock that all processes of a machine share
        for gate in cls.told:
            gate.send(chunk(state(is_open=False)))
        for gate in cls.waits:
            gate.send(cls.whole)
        cls.waits.clear()


async def serve(port: int, engines: int, directory: Path, *, form: str, tokens: int, holds: int) -> None:
    loop, context = asyncio.get_running_loop(), MemberTls.read(directory / "tls").data_context()
    CannedGate.holds, CannedGate.moment = holds, directory / SWITCHED
    CannedGate.whole = response(tokens, ended="abort" if holds else "stop", form=form)
    for engine in range(engines):
        await loop.create_server(CannedGate, address_of(engine), port, ssl=context, backlog=1024)
    print("listening", flush=True)
    await asyncio.Event().wait()


# --------------------------------------------------------------------------------------------------------- controller
@dataclass(frozen=True)
class LimitFigures:
    engines: int
    tokens: int  # of each sample
    rate: float  # samples a second
    cpu_s: float  # for a thousand
    memory_mib: float

    def line(self) -> str:
        rates = f"{self.rate:9.0f}  {self.rate * self.tokens / 1e6:16.2f}"
        return f"{self.engines:7}  {self.tokens:6}  {rates}  {self.cpu_s:20.2f}  {self.memory_mib:10.0f}"


@dataclass(frozen=True)
class MeasuredController:
    """A MeasuredController has the parts of a rollout controller that answers go through."""

    store: Store
    gates: Engines


@asynccontextmanager
async def controller(engines: int, port: int, directory: Path, *, in_flight: int) -> AsyncIterator[MeasuredController]:
    """Run a controller with so many samples under way."""
    rollout = {
        "prompts": {"reasoningGym": {"name": "chain_sum", "size": 1}},
        "maxPromptTokens": 1,
        "maxResponseTokens": 4096,
        "batchSize": GROUPS,
        "groupSize": GROUP_SIZE,
        "maxStaleness": 64,
        "maxConcurrency": -(-in_flight // GROUP_SIZE),
        "offload": [],  # so that nothing is held back for a switch
    }
    fields = {"steps": 1_000_000, "model": {"claim": {"name": "model"}}, "gpus": {"count": 0}, "rollout": rollout}
    spec = ColocatedRLJobSpec.model_validate(fields)
    async with aiohttp.ClientSession(connector=GateConnector(), trust_env=False) as session:
        store, metrics, chat = (
            Store(directory / f"state-{engines}", job_uid=JOB_UID),
            RolloutMetrics(CollectorRegistry()),
            NoText(),
        )
        sessions = Sessions(
            store, metrics, group_size=GROUP_SIZE, max_staleness=64, changed=lambda: None, clock=time.monotonic
        )
        changed, processes = asyncio.Event(), Rewards(spec)
        gates = Engines(
            DataClient(session, MemberTls.read(directory / "tls"), JOB_UID),
            settle_s=30.0,
            changed=lambda: worker.wake(),
            count=lambda tokens: None,
        )
        gates.follow(Endpoint(pod=f"gpu-{engine}", address=address_of(engine), port=port) for engine in range(engines))
        worker = Worker(
            spec,
            store=store,
            engines=gates,
            prompts=PromptsInOrder(),
            chat=chat,
            processes=processes,
            episodes=unplayed(Episodes, spec.rollout.prompts, sessions, processes, directory),
            evaluation=None,
            turns=Turns(chat, metrics, keeps=True, changed=lambda: None, at_most=1, parked_at_most_s=1.0),
            sessions=sessions,
            metrics=metrics,
            changed=changed.set,
        )
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(it) for it in (gates.run(), worker.run(), train(store, worker, changed))]
            yield MeasuredController(store, gates)
            for task in tasks:
                task.cancel()
        store.close()


async def until(is_so: Callable[[], bool]) -> None:
    """Wait by looking again and again: the parts have no event for it, and a look costs nothing."""
    async with asyncio.timeout(WARM_AT_MOST_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


async def measure(engines: int, tokens: int, port: int, directory: Path) -> LimitFigures:
    in_flight = max(IN_FLIGHT, 2 * engines)
    async with controller(engines, port, directory, in_flight=in_flight) as it:
        await until(lambda: done(it.store) >= 2 * in_flight)  # handshakes are no part of what is measured
        began, cpu_s, before = time.monotonic(), time.process_time(), done(it.store)
        await asyncio.sleep(MEASURED_S)
        samples, took_s = done(it.store) - before, time.monotonic() - began
        spent_s = time.process_time() - cpu_s
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return LimitFigures(engines, tokens, samples / took_s, 1000 * spent_s / samples, memory_mib)


async def measure_switch(port: int, directory: Path, form: str) -> str:
    """Return the line of a form. The switch is over when nothing is in flight."""
    requests, moment = SWITCH_ENGINES * SWITCH_REQUESTS, directory / SWITCHED
    moment.unlink(missing_ok=True)
    async with controller(SWITCH_ENGINES, port, directory, in_flight=requests) as it:
        await until(lambda: it.gates.in_flight == requests and len(it.gates.open) == SWITCH_ENGINES)
        while not moment.exists():  # the last look is in the quiet before the switch
            cpu_s = time.process_time()
            await asyncio.sleep(POLL_S)
        await until(lambda: it.gates.in_flight == 0)
        took_s, spent_s = time.monotonic() - float(moment.read_text()), time.process_time() - cpu_s
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    per_token = 1e6 * spent_s / (requests * SWITCH_TOKENS)
    return f"{form:32}  {took_s:9.1f}  {spent_s:5.1f}  {per_token:16.2f}  {memory_mib:10.0f}"


def done(store: Store) -> int:
    ended = (SampleState.COMPLETED, SampleState.SEALED, SampleState.TRAINED)
    return sum(store.counts[state] for state in ended)


async def train(store: Store, worker: Worker, changed: asyncio.Event) -> None:
    while True:
        await changed.wait()
        changed.clear()
        if store.sealed_groups and store.sealed:
            step = store.sealed.step
            store.commit(step)
            store.forget(step)
            worker.wake()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.rollout_limit", description=__doc__)
    parser.add_argument("--engines", type=int, nargs="*", default=ENGINES)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="of each answer")
    parser.add_argument("--serve", type=int, nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=int, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--switch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--form", default=CONTENT_TYPE, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    garbage.look_seldom()  # as a controller's process does
    if given.serve:
        port, engines, tokens, holds = given.serve
        uvloop.run(serve(port, engines, given.directory, form=given.form, tokens=tokens, holds=holds))
    elif given.measure:
        engines, tokens, port = given.measure
        print(uvloop.run(measure(engines, tokens, port, given.directory)).line(), flush=True)
    elif given.switch:
        print(uvloop.run(measure_switch(given.switch, given.directory, given.form)), flush=True)
    else:
        with tempfile.TemporaryDirectory() as place:
            FakeAuthority().member_directory(Path(place) / "tls", job_uid=JOB_UID, token="d" * 32)
            compare([*product(given.tokens, given.engines)], place)
            compare_forms(place)
    return 0


def compare(sizes: Sequence[tuple[int, int]], place: str) -> None:
    """Gates and controller in a process each, on a core each; anew for each size, of tokens and engines."""
    print(f"answers after {ANSWER_S} s, groups of {GROUP_SIZE}, {IN_FLIGHT} samples in flight or more")
    print("engines  tokens  samples/s  million tokens/s  CPU s for a thousand  memory MiB", flush=True)
    for tokens, engines in sizes:
        with serving(place, engines, tokens, CONTENT_TYPE) as port:
            subprocess.run(command(1, place, "--measure", engines, tokens, port), check=True)


def compare_forms(place: str) -> None:
    requests = SWITCH_ENGINES * SWITCH_REQUESTS
    print(f"a switch: {SWITCH_ENGINES} engines hand back {requests} times {SWITCH_TOKENS} tokens at once")
    print(f"{'form':32}  settled s  CPU s  us of CPU a token  memory MiB", flush=True)
    for form in (CONTENT_TYPE, JSON):
        with serving(place, SWITCH_ENGINES, SWITCH_TOKENS, form, holds=requests) as port:
            subprocess.run(command(1, place, "--switch", port, "--form", form), check=True)


@contextmanager
def serving(place: str, engines: int, tokens: int, form: str, *, holds: int = 0) -> Iterator[int]:
    """Run gates on a core of their own. Yields their port."""
    port = free_port()
    serve = command(0, place, "--serve", port, engines, tokens, holds, "--form", form)
    with subprocess.Popen(serve, stdout=subprocess.PIPE) as gates:
        assert gates.stdout is not None
        gates.stdout.readline()
        try:
            yield port
        finally:
            gates.kill()


def command(core: int, place: str, *arguments: object) -> list[str]:
    ours = (sys.executable, "-m", "bench.rollout_limit", "--directory", place)
    return ["taskset", "-c", str(core), *ours, *map(str, arguments)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
