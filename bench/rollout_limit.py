"""Measure the limit of one rollout controller: samples a second, and its CPU time for a thousand of them.

`make bench-rollout-limit`. The real worker, store, TLS and gate client, over loopback, beside gates of this file that
have one core for themselves: each tells that it is open and answers every request after a while with as many tokens as
it is asked, as engines do. Prompts and rewards cost nothing here, and a batch is trained the moment it is sealed.
CPU time is that of the controller's process alone; the rate is what its core does when there is always more to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from prometheus_client import CollectorRegistry

from bench.gate import content_length
from bench.simulated_job import NoText, PromptsInOrder, Rewards
from colocated_rl_api import names
from colocated_rl_api.gate_wire import GATE_LINE_S, GateState
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

ENGINES = (10, 100, 1000)
TOKENS, ANSWER_S = 256, 0.5
GROUPS, GROUP_SIZE = 64, 8  # of a batch
IN_FLIGHT = 1024  # samples at least, and two for each engine
WARM_AT_MOST_S, MEASURED_S = 300.0, 15.0
JOB_UID, VERSION = names.JobUid("6f0d1c52-8a35-4a7c-9d55-0c8a3f1b2e4d"), WeightVersion(0, 1)


def address_of(engine: int) -> str:
    """Return an address of the engine's own, in the loopback's network."""
    return f"127.0.{1 + engine // 250}.{1 + engine % 250}"


# -------------------------------------------------------------------------------------------------------------- gates
def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
STATE = GateState(open=True, epoch=1, version=VERSION).model_dump_json(by_alias=True).encode() + b"\n"
ANSWER = json.dumps(
    {
        "output_ids": [*range(10, 10 + TOKENS)],
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "weight_version": str(VERSION),
            "output_token_logprobs": [[-1.25, token, None] for token in range(10, 10 + TOKENS)],
        },
    },
    separators=(",", ":"),
).encode()
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER


class CannedGate(asyncio.Protocol):
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
                self._write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
                self._tell()
            else:
                asyncio.get_running_loop().call_later(ANSWER_S, self._write, WHOLE)

    def _tell(self) -> None:
        if not self._transport.is_closing():
            self._write(chunk(STATE))
            asyncio.get_running_loop().call_later(GATE_LINE_S, self._tell)

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


async def serve(port: int, engines: int, tls: Path) -> None:
    loop, context = asyncio.get_running_loop(), MemberTls.read(tls).data_context()
    for engine in range(engines):
        await loop.create_server(CannedGate, address_of(engine), port, ssl=context, backlog=1024)
    print("listening", flush=True)
    await asyncio.Event().wait()


# --------------------------------------------------------------------------------------------------------- controller
@dataclass(frozen=True)
class LimitFigures:
    engines: int
    rate: float  # samples a second
    cpu_s: float  # for a thousand
    memory_mib: float

    def line(self) -> str:
        return f"{self.engines:7}  {self.rate:9.0f}  {self.cpu_s:18.2f}  {self.memory_mib:10.0f}"


async def measure(engines: int, port: int, directory: Path) -> LimitFigures:
    in_flight = max(IN_FLIGHT, 2 * engines)
    concurrency = -(-in_flight // GROUP_SIZE)
    rollout = {
        "prompts": {"reasoningGym": {"name": "chain_sum", "size": 1}},
        "maxPromptTokens": 1,
        "batchSize": GROUPS,
        "groupSize": GROUP_SIZE,
        "maxStaleness": 64,
        "maxConcurrency": concurrency,
        "offload": [],  # so that nothing is held back for a switch, which does not come here
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
        changed = asyncio.Event()
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
            processes=Rewards(spec),
            episodes=Episodes(
                spec.rollout.prompts, sessions, count=0, socket=directory, model="job", gateway=lambda: ""
            ),
            evaluation=None,
            turns=Turns(chat, metrics, keeps=True, changed=lambda: None, at_most=1, parked_at_most_s=1.0),
            sessions=sessions,
            metrics=metrics,
            changed=changed.set,
        )
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(it) for it in (gates.run(), worker.run(), train(store, worker, changed))]
            async with asyncio.timeout(WARM_AT_MOST_S):
                while done(store) < 2 * in_flight:  # noqa: ASYNC110 - handshakes are no part of what is measured
                    await asyncio.sleep(0.1)
            began, cpu_s, before = time.monotonic(), time.process_time(), done(store)
            await asyncio.sleep(MEASURED_S)
            samples, took_s = done(store) - before, time.monotonic() - began
            spent_s = time.process_time() - cpu_s
            for task in tasks:
                task.cancel()
        store.close()
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return LimitFigures(engines, samples / took_s, 1000 * spent_s / samples, memory_mib)


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
    parser.add_argument("--serve", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        port, engines = given.serve
        uvloop.run(serve(port, engines, given.directory / "tls"))
    elif given.measure:
        engines, port = given.measure
        print(asyncio.run(measure(engines, port, given.directory)).line(), flush=True)
    else:
        compare(given.engines)
    return 0


def compare(sizes: Sequence[int]) -> None:
    """Gates and controller in a process each, on a core each; anew for each size."""
    print(
        f"answers of {TOKENS} tokens after {ANSWER_S} s, groups of {GROUP_SIZE}, {IN_FLIGHT} samples in flight or more"
    )
    print("engines  samples/s  CPU s for a thousand  memory MiB", flush=True)
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        FakeAuthority().member_directory(directory / "tls", job_uid=JOB_UID, token="d" * 32)
        us = partial("taskset -c {0} {1} -m bench.rollout_limit --directory {2} {3} {4} {5}".format)
        for engines in sizes:
            port = free_port()
            with ExitStack() as stack:
                gates = stack.enter_context(
                    subprocess.Popen(
                        us(0, sys.executable, place, "--serve", port, engines).split(), stdout=subprocess.PIPE
                    )
                )
                stack.callback(gates.kill)
                assert gates.stdout is not None
                gates.stdout.readline()
                subprocess.run(us(1, sys.executable, place, "--measure", engines, port).split(), check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
