"""A GPU pod as processes of this machine: the real runner and the real agent, a fake engine and a fake trainer.

The test plays the operator (`OperatorEnd`, over the agent's mutual TLS) and the rollout controller (`batches`, requests
to the gate). Directories lie below one root as in a pod.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

import fakes
from colocated_rl_agent.runner import runner
from colocated_rl_agent.settings import Directories
from colocated_rl_api import names
from colocated_rl_api.batch import DIGEST_HEADER
from colocated_rl_api.facts import PodFacts
from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.member_wire import (
    Endpoint,
    Goal,
    Hello,
    JobFile,
    PodTarget,
    Refusal,
    Rendezvous,
    from_member,
)
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_member.data import DataClient, data_application
from colocated_rl_member.server import SHUTDOWN_S
from colocated_rl_member.tls import MemberTls
from fakes import serving
from fakes.authority import FakeAuthority
from fakes.device import FakeDevice

JOB_UID = names.JobUid("5b0f7e0e-6a2a-4a55-9c5b-0d8f0a5f3c11")
TOKEN = "data-token-of-a-test-job"
DEADLINE_S = 60.0
PATIENT_S = 300  # deadline of what happens, however slow the machine: a test that waits for one sets its own
DEADLINES = ("settleSeconds", "engineCallSeconds", "engineStartSeconds", "trainerProgressSeconds")
TRIES = 100
PORTS = range(20_000, 30_000)  # below those that the kernel gives to whoever connects: of these, few are free in a row
TESTS = Path(fakes.__path__[0]).parent
ENGINE = """
import sys
from fakes.engine import main
sys.argv += ["--fake-token-s", "0.02"]  # a response of 4000 tokens is under way for longer than any test waits
main()
"""


def make_job(**changes: Any) -> JobFile:
    """A job on the CPU with the fakes; `changes` are merged into the spec, camelCase."""
    spec: dict[str, Any] = {
        "steps": 4,
        "replicas": 1,
        "model": {"claim": {"name": "model"}},
        "gpus": {"count": 0},
        "rollout": {
            "prompts": {"reasoningGym": {"name": "chain_sum"}},
            "batchSize": 2,
            "groupSize": 2,
        },
        "trainer": {"command": ["python3", "-m", "fakes.trainer"]},
        "checkpoint": {"everySteps": 2},
        "switch": dict.fromkeys(DEADLINES, PATIENT_S),
    }
    for name, value in changes.items():
        spec[name] = {**spec.get(name, {}), **value} if isinstance(value, dict) else value
    return JobFile(
        name="job",
        namespace="default",
        uid=JOB_UID,
        created=datetime.now(UTC),
        spec=ColocatedRLJobSpec.model_validate(spec),
    )


def kept_port(port: int = 0) -> socket.socket:
    """A port, or this one, that nobody else is given until it is closed. Who reuses addresses may listen on it."""
    kept = socket.socket()
    try:
        kept.bind(("127.0.0.1", port))
    except OSError:
        kept.close()
        raise
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # from now on: two that bind so may get the same port
    return kept


def kept_ports(count: int) -> list[socket.socket]:
    """Likewise so many, one after the other."""
    for _ in range(TRIES):
        first = random.choice(PORTS)
        with ExitStack() as stack, suppress(OSError):
            kept = [stack.enter_context(kept_port(port)) for port in range(first, first + count)]
            stack.pop_all()
            return kept
    raise AssertionError(f"no {count} ports in a row after {TRIES} tries")


def number(port: socket.socket) -> int:
    """Return the number of a port."""
    return int(port.getsockname()[1])


@dataclass
class Network:
    """A Network is what the pods of a job share: authority, sessions, the rollout controller's data port."""

    root: Path
    session: aiohttp.ClientSession
    authority: FakeAuthority = field(default_factory=FakeAuthority)
    served: list[str] = field(default_factory=list)  # batches that were asked for
    batch: Callable[[web.Request], bytes] = lambda request: f"batch {request.path_qs}".encode()
    batches: Endpoint = field(init=False)

    @property
    def tls(self) -> MemberTls:
        return MemberTls.read(self.authority.member_directory(self.root / "tls", job_uid=JOB_UID, token=TOKEN))

    async def serve_batch(self, request: web.Request) -> web.Response:
        self.served.append(request.path_qs)
        data = await asyncio.to_thread(self.batch, request)
        return web.Response(body=data, headers={DIGEST_HEADER: hashlib.sha256(data).hexdigest()})


@asynccontextmanager
async def network(root: Path, **of_network: Any) -> AsyncIterator[Network]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        it = Network(root, session, **of_network)
        tls = it.tls
        app = data_application(tls, max_request_bytes=1024)
        app.router.add_get("/v1/batches/{step}", it.serve_batch)
        served = web.AppRunner(app, shutdown_timeout=SHUTDOWN_S)
        await served.setup()
        await web.TCPSite(served, "127.0.0.1", 0, ssl_context=tls.data_context()).start()
        it.batches = Endpoint(pod="job-rollout", address="127.0.0.1", port=served.addresses[0][1])
        yield it
        await serving.end(served)


class PodProcesses:
    """One GPU pod. `facts`: every report that the operator's end received, oldest first."""

    def __init__(
        self,
        net: Network,
        job: JobFile,
        *,
        replica: int = 0,
        device: FakeDevice | None = None,
        environment: Mapping[str, str] | None = None,
        children: Mapping[str, str] | None = None,
        engine: str | None = ENGINE,
    ) -> None:
        """Prepare it. engine: program of the package `sglang` that it gets; None: the one that is installed."""
        self.net, self.job, self.replica, self.device = net, job, replica, device
        self.environment = environment or {}  # of its agent
        self.children, self.engine_program = children or {}, engine  # environment of the runner's children
        self.ladder = job.spec.ladder
        self.ranks = max(1, job.spec.gpus.count)
        self.root = net.root / f"p{replica}"
        self.directories = Directories.below(self.root)
        self._ports = [kept_port() for _ in range(5)]
        self.control, self.data, self.metrics, self.pages, self.engine = map(number, self._ports)
        self.facts: list[PodFacts] = []
        self.refusals: list[Refusal] = []
        self.hello: Hello | None = None
        self.changed = asyncio.Event()
        self.log = self.root / "log"
        self.runner: asyncio.subprocess.Process
        self.agent: asyncio.subprocess.Process
        self._link: aiohttp.ClientWebSocketResponse | None = None
        self._listening: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return f"job-gpu-{self.replica}-0"

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(pod=self.name, address="127.0.0.1", port=self.data)

    # -------------------------------------------------------------------------------------------------- processes
    def lay_out(self) -> None:
        places = self.directories
        for directory in (
            places.state, places.sockets, places.batches, places.weights, places.model, places.checkpoints,
            places.job_file.parent,
        ):  # fmt: skip
            directory.mkdir(parents=True)
        places.job_file.write_text(self.job.model_dump_json(by_alias=True))
        places.trainer_config.write_text(json.dumps(self.job.spec.trainer.config))
        self.net.authority.member_directory(places.tls, job_uid=JOB_UID, token=TOKEN)
        if self.engine_program is not None:
            package = self.root / "site/sglang"
            package.mkdir(parents=True)
            (package / "__init__.py").touch()
            (package / "launch_server.py").write_text(self.engine_program)

    async def start_runner(self) -> None:
        with self.log.open("ab") as output:
            self.runner = await asyncio.create_subprocess_exec(
                sys.executable,
                runner.__file__,
                env={
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                    **self.children,
                    "PYTHONPATH": f"{self.root / 'site'}:{TESTS}:{TESTS.parent}:{os.environ.get('PYTHONPATH', '')}",
                    runner.SOCKET: str(self.directories.sockets / "runner.sock"),
                    "SGLANG_HEALTH_CHECK_TIMEOUT": "1",
                    **(self.device.environment if self.device else {}),
                },
                stdout=output,
            )

    async def start_agent(self) -> None:
        ports = {"control": self.control, "data": self.data, "metrics": self.metrics, "pages": self.pages}
        with self.log.open("ab") as output:
            self.agent = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "colocated_rl_agent", "--root", str(self.root), "--host", "127.0.0.1"),
                *(f"--{name}-port={port}" for name, port in {**ports, "engine": self.engine}.items()),
                env={
                    **os.environ,
                    names.ENV_POD_NAME: self.name,
                    names.ENV_POD_UID: f"uid-{self.replica}",
                    names.ENV_REPLICA: str(self.replica),
                    **self.environment,
                },
                stdout=output,
                stderr=output,
            )

    async def stop(self) -> None:
        await self.unlink()
        for process in (self.agent, self.runner):
            if process.returncode is None:
                process.kill()
            await process.wait()
        for port in self._ports:
            port.close()

    async def restart_agent(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the agent and start another one, to which the operator connects again."""
        await self.unlink()
        self.agent.send_signal(number)
        await self.agent.wait()
        await self.start_agent()
        await self.link()

    def kill(self, pattern: str) -> None:
        """SIGKILL to the child of the runner whose command line has `pattern`."""
        os.kill(self._child(pattern)[0], signal.SIGKILL)

    def command(self, pattern: str) -> str:
        """The command line of that child, its words apart by NUL."""
        return self._child(pattern)[1]

    def _child(self, pattern: str) -> tuple[int, str]:
        for path in (place / "stat" for place in Path("/proc").glob("[0-9]*")):
            try:
                parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
                command = (path.parent / "cmdline").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == self.runner.pid and pattern in command:
                return int(path.parent.name), command
        raise LookupError(f"no child of the runner has {pattern} in its command line")

    # --------------------------------------------------------------------------------------------- the operator's end
    async def link(self) -> None:
        context = self.net.authority.client_context(self.root / "operator")
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    self._link = await self.net.session.ws_connect(
                        f"https://127.0.0.1:{self.control}/v1/link",
                        ssl=context,
                        server_hostname=names.member_server_name(JOB_UID),
                    )
                    break
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.05)
        self._listening = asyncio.create_task(self._listen(self._link))

    async def unlink(self) -> None:
        if self._listening is not None and self._link is not None:
            self._listening.cancel()
            await self._link.close()
            self._listening = None

    async def _listen(self, link: aiohttp.ClientWebSocketResponse) -> None:
        async for message in link:
            match from_member.validate_json(message.data):
                case Hello() as hello:
                    self.hello = hello
                case PodFacts() as facts:
                    self.facts.append(facts)
                case Refusal() as refusal:
                    self.refusals.append(refusal)
                case other:
                    raise AssertionError(f"an agent said {other}")
            self.changed.set()

    async def send(self, target: PodTarget) -> None:
        assert self._link is not None
        await self._link.send_str(target.model_dump_json(by_alias=True))

    @property
    def now(self) -> PodFacts | None:
        return self.facts[-1] if self.facts else None

    async def until(self, is_so: Callable[[PodFacts], bool], what: str) -> PodFacts:
        """The first report from now on, or the newest one, of which it is so."""
        looked_at = max(0, len(self.facts) - 1)
        try:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    for facts in self.facts[looked_at:]:  # several may have come at once, of what did not last
                        if is_so(facts):
                            return facts
                    looked_at = len(self.facts)
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise AssertionError(f"not {what} after {DEADLINE_S} s, but {self.now}\n{self.story()}") from None

    def story(self) -> str:
        return self.log.read_text()[-6000:]

    def standings(self, version: WeightVersion, *, epoch: int) -> list[Rung]:
        """Rungs in the order in which they were reported in an epoch, without repetitions."""
        rungs = [self.ladder.standing(facts, version) for facts in self.facts if facts.epoch == epoch]
        return [rung for rung, before in zip(rungs, [None, *rungs], strict=False) if rung != before]

    # ----------------------------------------------------------------------------------------------------- its insides
    async def generate(self, **request: Any) -> tuple[int, dict[str, Any]]:
        client = DataClient(self.net.session, self.net.tls, JOB_UID)
        async with client.request("POST", self.endpoint, "/generate", json=request) as answer:
            return answer.status, await answer.json()

    async def fault(self, on: str, do: str) -> None:
        """The engine's next call of a route fails in this way."""
        url = f"http://127.0.0.1:{self.engine}/fake/fault"
        async with self.net.session.post(url, json={"on": on, "do": do}) as answer:
            assert answer.status == 200

    def trainer_fault(self, route: str, action: str) -> None:
        unfinished = self.directories.sockets / "fault.part"
        unfinished.write_text(f"{route} {action}")
        unfinished.rename(self.directories.sockets / "fault")

    def trainer_goes_on(self) -> None:
        """Let the trainer go on from where it was held."""
        (self.directories.sockets / "go").touch()

    async def trainer_has_failed(self) -> None:
        """Wait until the trainer that the fault was meant for has taken it."""
        async with asyncio.timeout(DEADLINE_S):
            while (self.directories.sockets / "fault").exists():  # noqa: ASYNC110 - another process removes it
                await asyncio.sleep(0.01)

    async def generating(self, requests: int) -> None:
        """Wait until the engine has made tokens for so many requests."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                async with self.net.session.get(f"http://127.0.0.1:{self.engine}/fake/tokens") as answer:
                    if sum(tokens > 1 for tokens in await answer.json()) >= requests:
                        return
                await asyncio.sleep(0.01)

    async def engine_calls(self) -> list[str]:
        """Routes of this engine's calls since its start, in order."""
        async with self.net.session.get(f"http://127.0.0.1:{self.engine}/fake/calls") as answer:
            return [route.partition("?")[0] for route, _ in await answer.json()]


@asynccontextmanager
async def pod(net: Network, job: JobFile, **of_pod: Any) -> AsyncIterator[PodProcesses]:
    it = PodProcesses(net, job, **of_pod)
    it.lay_out()
    await it.start_agent()
    await it.start_runner()
    try:
        await it.link()
        yield it
    finally:
        await it.stop()


class PodGroup:
    """Plays the operator for some pods: the group may stand one barrier beyond its slowest member.

    deadline_s: of any news on the way; twice as much of the whole way.
    """

    def __init__(self, pods: Sequence[PodProcesses], *, deadline_s: float = DEADLINE_S) -> None:
        self.pods = pods
        self.deadline_s = deadline_s
        self.ladder = pods[0].ladder
        self.epoch = 0

    def target(self, version: WeightVersion, rung: Rung, *, epoch: int | None = None) -> PodTarget:
        return PodTarget(
            epoch=self.epoch if epoch is None else epoch,
            goal=Goal.CLIMB,
            step=version.step,
            lineage=version.lineage,
            rung=rung,
            rendezvous=Rendezvous(address="127.0.0.1", port=29500, world_size=len(self.pods) * self.pods[0].ranks),
            batches=self.pods[0].net.batches,
            checksum=self.agreed(version),
        )

    def agreed(self, version: WeightVersion) -> str | None:
        """Return the checksum of the first engine that holds the version; None before
        all do, or where none is computed.
        """
        engines = [engine for each in self.pods if each.now for engine in each.now.engines if engine.version == version]
        return engines[0].checksum if len(engines) == len(self.pods) else None

    async def climb(self, version: WeightVersion, to: Rung = Rung.SERVING) -> None:
        """A new epoch, and up barrier by barrier until every pod stands at `to`."""
        self.epoch += 1
        await self.go_on(version, to)

    async def go_on(self, version: WeightVersion, to: Rung = Rung.SERVING) -> None:
        sent: Rung | None = None
        async with asyncio.timeout(2 * self.deadline_s):
            while True:
                low = self.slowest(version)
                if self.ladder.reaches(low, to):
                    return
                rung = min(self.ladder.next_barrier(low), to, key=self.ladder.place)
                if rung != sent:
                    for each in self.pods:
                        await each.send(self.target(version, rung))
                    sent = rung
                await self.news(functools.partial(self.moved, version, low))

    async def set_out(self, version: WeightVersion, to: Rung, *, after: Rung) -> None:
        """Every pod stands at `after` and is on its way to `to`, where it may never come."""
        await self.climb(version, after)
        for each in self.pods:
            await each.send(self.target(version, to))

    def moved(self, version: WeightVersion, before: Rung) -> bool:
        return self.slowest(version) != before

    def slowest(self, version: WeightVersion) -> Rung:
        return self.ladder.slowest(self.ladder.standing(each.now, version) for each in self.pods)

    async def news(self, is_so: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self.deadline_s):
                while not is_so():
                    events = [asyncio.create_task(each.changed.wait()) for each in self.pods]
                    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
                    for each, event in zip(self.pods, events, strict=True):
                        event.cancel()
                        each.changed.clear()
        except TimeoutError:
            stories = "\n".join(f"{each.now}\n{each.story()}" for each in self.pods)
            raise AssertionError(f"no progress in {self.deadline_s} s\n{stories}") from None

    async def stop(self) -> None:
        self.epoch += 1
        for each in self.pods:
            await each.send(PodTarget(epoch=self.epoch, goal=Goal.STOP, step=0, lineage=0, rung=Rung.SERVING))
