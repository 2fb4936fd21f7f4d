"""A GPU pod in one event loop: the real agent, with a runner, an engine and a trainer that are objects of the test.

Everything between them goes over the real sockets, so every call can fail in every way, and a whole life of a pod takes
a fraction of a second. What must never happen is noted in `broken` when it does: an engine that dies of what the agent
asked for, trainer and engine on the device together, a token of released memory. `pod.py` is the same with processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from colocated_rl_agent.agent import Agent
from colocated_rl_agent.files.volume import SILENT_S
from colocated_rl_agent.lanes import reference
from colocated_rl_agent.planner.actions import Wait
from colocated_rl_agent.planner.next_actions import next_actions
from colocated_rl_agent.planner.views import engine_name
from colocated_rl_agent.settings import AgentSettings, Directories
from colocated_rl_api import names
from colocated_rl_api.facts import PodFacts, TrainerState
from colocated_rl_api.member_wire import (
    Endpoint,
    Goal,
    JobFile,
    PodTarget,
    Refusal,
    Rendezvous,
)
from colocated_rl_api.reference_wire import MAX_SAMPLE_BYTES, READY_PATH, SCORE_PATH
from colocated_rl_api.rungs import Placement, Rung, WeightVersion
from colocated_rl_api.weights import MANIFEST
from colocated_rl_member.data import DataClient
from colocated_rl_member.server import Ports
from colocated_rl_member.tls import MemberTls
from fakes import serving
from fakes.engine import TAGS, FakeEngine, admin_key_in
from fakes.pod import JOB_UID, TOKEN, Network, kept_ports, make_job, network, number
from fakes.trainer import FakeRank
from fakes.weights import next_token

PATIENT_S = 300.0  # deadline of calls of engine and trainer that are answered, however slow the machine
SOON_S = 0.4  # of those that a test leaves without an answer
DEADLINE_S = 60.0
CALLS = ("engine_call_seconds", "trainer_progress_seconds")
TOKEN_S = 0.001
PROMPT = [5, 6, 7]


ASKED: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "/generate": lambda tokens: {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
    },
    "/v1/completions": lambda tokens: {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True},
    "/v1/chat/completions": lambda tokens: {
        "messages": [{"role": "user", "content": "abc"}],
        "max_tokens": tokens,
        "ignore_eos": True,
    },
}


class StartedChild:
    """A Child is an engine or a trainer that a runner started, as an application on a port or a socket."""

    def __init__(self, name: str, app: web.Application) -> None:
        self.name = name
        self.incarnation = uuid.uuid4().hex[:16]
        self.running = True
        self.code: int | None = None
        self.killed = False
        self._served = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)

    async def listen(self, place: int | Path) -> None:
        await self._served.setup()
        site = (
            web.TCPSite(self._served, "127.0.0.1", place, reuse_address=True)
            if isinstance(place, int)
            else web.UnixSite(self._served, str(place))
        )
        await site.start()

    async def end(self, code: int) -> None:
        """End as a process does that is killed: its connections break at once."""
        if self.running:
            self.running, self.code = False, code
            await serving.end(self._served)

    def hang_up(self) -> None:
        serving.hang_up(self._served)

    def status(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "incarnation": self.incarnation,
            "running": self.running,
            "code": self.code,
            "tail": [],
            "killed": self.killed,
        }


class SmallEngine(FakeEngine):
    """Serves like an engine. dies: called with the reason, instead of the end of the process."""

    def __init__(self, *args: Any, dies: Callable[[str], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._dies = dies

    def die(self, reason: str) -> None:
        self._dies(reason)
        raise asyncio.CancelledError(reason)


class SmallTrainer(FakeRank):
    """One rank. faults: route to hang, error, crash, idle (and say yes), or act_then_hang, once; to full, until there
    is room.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        check: Callable[[], None],
        dies: Callable[[int], None],
        writes_weights: bool,
        writes_probe: bool,
    ) -> None:
        super().__init__(environment)
        self._writes_weights, self._writes_probe = writes_weights, writes_probe
        self._check, self._dies = check, dies
        self.faults: dict[str, str] = {}
        self.has_left = False  # the device, after it was there
        self.load()

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/v1/state", self.serve_state), web.post("/v1/{route}", self.serve)])
        return app

    def export(self, body: dict[str, Any], fault: str) -> None:
        if self._writes_weights:
            super().export(body, fault)
            if not self._writes_probe:
                manifest = Path(body["directory"]) / MANIFEST
                manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"probe": None}))
        self.exported = body["version"]

    async def serve_state(self, request: web.Request) -> web.Response:
        return web.json_response(self.status())

    async def serve(self, request: web.Request) -> web.Response:
        route = request.match_info["route"]
        fault = self.faults.pop(route, "")
        if fault == "crash":
            self._dies(17)
            raise asyncio.CancelledError
        if fault == "error":
            return web.json_response({"error": "ToldToFail", "message": route}, status=500)
        if fault == "full" and route != "mirror":  # which tells it in its answer
            self.faults[route] = fault
            return web.json_response({"error": "Refused", "message": "No space left on device"}, status=503)
        if fault == "hang":
            await asyncio.Event().wait()
        if fault != "idle":
            getattr(self, route)(await request.json(), fault)
            self.has_left |= route == "offload"
        self._check()
        if fault == "act_then_hang":
            await asyncio.Event().wait()
        return web.json_response(self.status())


class SmallRunner:
    """The runner's end of its socket, without processes. devices: what it reads of each. breaks_in: request whose
    answer, and what follows from it, the agent does not hear, once.
    """

    def __init__(self, pod: SmallPod) -> None:
        self._pod = pod
        self.devices: list[dict[str, int]] = []
        self.children: dict[str, StartedChild] = {}
        self._server: asyncio.Server | None = None  # through all restarts: one that closes loses who just connects
        self._is_up = False
        self._writer: asyncio.StreamWriter | None = None
        self._busy = asyncio.Lock()
        self._id = ""
        self.breaks_in: str | None = None
        self.exit_code: int | None = None

    async def start(self) -> None:
        self.children, self._id, self._is_up = {}, uuid.uuid4().hex[:16], True
        if self._server is None:
            path = self._pod.directories.sockets / "runner.sock"
            self._server = await asyncio.start_unix_server(self._serve, path, limit=2**20)

    async def stop(self) -> None:
        """Stop as the container does: nobody hears how its children ended."""
        self._is_up = False
        self.hang_up()
        async with self._busy:  # a child that is being started has to be there to be ended
            for child in self.children.values():
                await child.end(-9)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def hang_up(self) -> None:
        """Break the connection: until it has connected again, the agent hears of nothing."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    async def end_child(self, name: str, code: int, *, killed: bool = False) -> None:
        """End a child. killed: as the agent has asked for."""
        child = self.children.get(name)
        if child is not None and child.running:
            self._pod.forget(name)
            child.killed = killed
            await child.end(code)
            self._tell(event="exited", name=name, incarnation=child.incarnation, code=code, tail=[], killed=killed)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            if self._is_up:
                await self._serve_agent(reader, writer)

    async def _serve_agent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = writer
        children = [child.status() for child in self.children.values()]
        self._tell(event="hello", protocol=1, runner=self._id, terminating=False, children=children)
        while self._writer is writer and (line := await reader.readline()):
            request = json.loads(line)
            try:
                async with self._busy:
                    answer = {"ok": True, **await self._carry_out(request)}
            except KeyError as error:
                answer = {"ok": False, "error": "NoSuchChild", "message": str(error)}
            if request["op"] == self.breaks_in:
                self.breaks_in = None
                self.hang_up()
            self._tell(id=request["id"], **answer)
            if request["op"] == "kill":
                await self.end_child(request["name"], -9, killed=True)

    async def _carry_out(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["op"]:
            case "start":
                child = await self._pod.spawn(request["name"], request["argv"], request["env"])
                self.children[child.name] = child
                return {"incarnation": child.incarnation}
            case "kill":
                self.children[request["name"]]  # raises what becomes a refusal
                return {}
            case "devices":
                return {"devices": self.devices or None}
            case "memory":
                return {"memory": {}}
            case "exit":
                self.exit_code = request["code"]
                for name in list(self.children):
                    await self.end_child(name, -9)
                return {}
            case other:
                raise AssertionError(other)

    def _tell(self, **message: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")


class SmallPod:
    """The pod, and the operator that moves it. called: with each route at the engine, before it takes effect.

    weights: a volume of them that it shares with other pods. silent_s: when the agent gives up a call of it.
    """

    def __init__(
        self,
        root: Path,
        net: Network,
        job: JobFile,
        *,
        role: str = names.ROLE_GPU,
        replica: int = 0,
        weights: Path | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        self.directories = Directories.below(root)
        if weights is not None:
            self.directories = replace(self.directories, weights=weights)
        self.runner = SmallRunner(self)
        self.engines: dict[str, SmallEngine] = {}  # that run, by name
        self.trainer: SmallTrainer | None = None
        self.broken: list[str] = []
        self.on_call: Callable[[str], None] = lambda route: None
        self.epoch = 0
        self.ladder = job.spec.ladder
        self.engine_fails_at_start = 0  # so many times
        self.reference_fails_at_start = 0
        self.reference_loads = asyncio.Event()  # the model of a reference beside the engine is loaded once it is set
        self.reference_loads.set()
        self.references_started = 0
        self.engines_started: list[str] = []  # on which version each
        self.engine_fault: str | None = None  # of every engine, at each call for its checksum
        self.trainer_writes_probe = True
        self.trainer_faults: dict[str, str] = {}  # of every trainer that starts from now on
        self.engine_info: dict[str, Any] = {}  # that every engine gives of itself
        self.logprob_error: float | None = None  # of every engine, which then computes in bfloat16
        self.others_hold: str | None = None  # checksum of most engines of the group; None: that of this one
        self._silent_s = silent_s
        self._net = net
        self._ending: set[asyncio.Task[None]] = set()
        self._running: asyncio.Task[None] | None = None
        self.engine_ports = kept_ports(job.spec.rollout.engine.per_pod)
        self._settings = AgentSettings(
            pod=f"job-{role}-{replica}-0",
            pod_uid=names.PodUid("uid"),
            replica=replica,
            job=job,
            directories=self.directories,
            ports=Ports(control=0, data=0, metrics=0, pages=0, host="127.0.0.1"),
            engine_port=number(self.engine_ports[0]),
            role=role,
        )
        self.agent: Agent

    def make_directories(self) -> None:
        places = self.directories
        for directory in (
            places.state, places.sockets, places.batches, places.model, places.checkpoints, places.job_file.parent,
        ):  # fmt: skip
            directory.mkdir(parents=True)
        if self._settings.tends_exports:
            places.weights.mkdir(parents=True)
        self._net.authority.member_directory(places.tls, job_uid=JOB_UID, token=TOKEN)

    # ------------------------------------------------------------------------------------------------- its processes
    async def start_agent(self) -> None:
        self.registry = CollectorRegistry()
        session, silent_s = self._net.session, self._silent_s
        self.agent = Agent(self._settings, session, self.registry, volume_silent_s=silent_s)
        self._running = asyncio.create_task(self.agent.run())
        await self.news(lambda: self.agent.server.ports.data > 0)

    async def stop_agent(self, *, orderly: bool) -> None:
        assert self._running is not None
        if orderly:
            self.agent.end()
            await self._running
            return
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running

    async def agent_ends(self) -> BaseException | None:
        """Wait until the agent ends by itself, and return why."""
        assert self._running is not None
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait({self._running})
        return self._running.exception()

    async def restart_agent(self, *, orderly: bool) -> None:
        await self.stop_agent(orderly=orderly)
        await self.start_agent()

    async def restart_container(self) -> None:
        await self.runner.stop()
        self.engines, self.trainer = {}, None
        await self.runner.start()

    @property
    def engine(self) -> SmallEngine | None:
        """Return the first engine, if it runs."""
        return self.engines.get(engine_name(0))

    def forget(self, name: str) -> None:
        """This child has ended: it maps nothing any more."""
        if self.engines.pop(name, None) is None and name != reference.NAME:
            self.trainer = None

    async def spawn(self, name: str, argv: list[str], env: Mapping[str, str]) -> StartedChild:
        if name == reference.NAME:
            return await self._spawn_reference(argv)
        if name.startswith("trainer"):
            self.trainer = SmallTrainer(
                env,
                check=self.check,
                dies=lambda code: self._ends(name, code),
                writes_weights=self._settings.tends_exports,
                writes_probe=self.trainer_writes_probe,
            )
            self.trainer.faults |= self.trainer_faults
            child = StartedChild(name, self.trainer.app())
            await child.listen(self.trainer.socket)
        else:
            if self.engine_fails_at_start:
                self.engine_fails_at_start -= 1
                child = StartedChild(name, web.Application())
                self._ends(name, 1, child)
                return child
            given = dict(itertools.pairwise(argv))
            key = admin_key_in(Path(given["--config"]))
            engine = self.engines[name] = SmallEngine(
                Path(given["--model-path"]),
                given["--weight-version"],
                admin_key=key,
                memory_saver=True,
                token_s=TOKEN_S,
                dies=partial(self._engine_dies, name),
            )
            engine.on_call = lambda route: self.on_call(route)
            self.engines_started.append(given["--weight-version"])
            if self.engine_fault is not None:
                engine.faults["/weights_checker"] = self.engine_fault
            engine.info |= self.engine_info
            if self.logprob_error is not None:
                engine.logprob_error, engine.info["dtype"] = self.logprob_error, "bfloat16"
            child = StartedChild(name, engine.app())
            await child.listen(int(given["--port"]))
        self.check()
        return child

    async def _spawn_reference(self, argv: Sequence[str]) -> StartedChild:
        """Start what answers a sample with its own bytes, once it has loaded its model."""

        async def serve_readiness(request: web.Request) -> web.Response:
            return web.Response(status=200 if self.reference_loads.is_set() else 503)

        async def serve_scores(request: web.Request) -> web.Response:
            return web.Response(body=await request.read())

        app = web.Application(client_max_size=MAX_SAMPLE_BYTES)
        app.add_routes([web.get(READY_PATH, serve_readiness), web.post(SCORE_PATH, serve_scores)])
        child = StartedChild(reference.NAME, app)
        self.references_started += 1
        if self.reference_fails_at_start:
            self.reference_fails_at_start -= 1
            self._ends(reference.NAME, 1, child)
        else:
            [socket] = (word.partition("=")[2] for word in argv if word.startswith("--socket="))
            await child.listen(Path(socket))
        return child

    def _engine_dies(self, name: str, reason: str) -> None:
        if "asked to" not in reason:
            self.broken.append(f"the agent killed its engine: {reason}")
        self._ends(name, 1)

    def _ends(self, name: str, code: int, child: StartedChild | None = None) -> None:
        (child or self.runner.children[name]).hang_up()
        task = asyncio.create_task(self.runner.end_child(name, code))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def check(self) -> None:
        """I1: engine memory and a trainer on the device are never there together, unless they are resident.

        Nothing starts in a pod where it does not belong.
        """
        if self.engines and not self._settings.has_engine:
            self.broken.append("an engine in a pod of trainers")
        if self.trainer is not None and not self._settings.ranks:
            self.broken.append("a trainer in the pod of an engine")
        if self.ladder.serves_on:
            if any(engine.released for engine in self.engines.values()) or (self.trainer and self.trainer.has_left):
                self.broken.append("something of a resident pod left the device")
            return
        for name, engine in self.engines.items():
            mapped = engine.released != set(TAGS) - set(self._settings.keeps)
            if mapped and self.trainer is not None and self.trainer.state in ("Onloaded", "Training"):
                self.broken.append(f"trainer {self.trainer.state} beside {name}, which released {engine.released}")

    def _check_tokens(self, answer: dict[str, Any]) -> None:
        """Each token is what the weights that it names would make, and has its log-probability."""
        ids, meta = answer["output_ids"], answer["meta_info"]
        version = WeightVersion.parse(meta["weight_version"])
        weight, before = version.step + version.lineage / 8, PROMPT[-1]
        for position, token in enumerate(ids):
            if token != next_token(weight, before, position):
                self.broken.append(f"token {position} is {token}, which {version} does not make")
                return
            before = token
        if len(ids) != len(meta.get("output_token_logprobs", [])):
            self.broken.append(f"{len(ids)} tokens with {len(meta['output_token_logprobs'])} log-probabilities")

    # -------------------------------------------------------------------------------------------------- its operator
    @property
    def facts(self) -> PodFacts:
        return self.agent._facts()

    def send(self, target: PodTarget) -> Refusal | None:
        admitted = self.agent.server._fence.admit(target)
        if isinstance(admitted, Refusal):
            return admitted
        self.agent._accept(admitted)
        return None

    def target(
        self,
        version: WeightVersion,
        rung: Rung,
        *,
        epoch: int | None = None,
        goal: Goal = Goal.CLIMB,
        weights: WeightVersion | None = None,
    ) -> PodTarget:
        return PodTarget(
            epoch=self.epoch if epoch is None else epoch,
            goal=goal,
            step=version.step,
            lineage=version.lineage,
            rung=rung,
            rendezvous=Rendezvous(address="127.0.0.1", port=29500, world_size=1),
            batches=self._net.batches,
            weights=weights,
            checksum=self._agreed(version, rung),
        )

    def _agreed(self, version: WeightVersion, rung: Rung) -> str | None:
        engines = [engine for engine in self.facts.engines if engine.version == version]
        return (self.others_hold or engines[0].checksum) if rung is Rung.SERVING and engines else None

    async def climb(self, version: WeightVersion, to: Rung = Rung.SERVING) -> WeightVersion:
        """Up barrier by barrier, as the plan would; trainers that died and weights that are rejected get a new lineage.

        What was reached.
        """
        self.epoch += 1
        async with asyncio.timeout(DEADLINE_S):
            while not self.ladder.reaches(low := self.ladder.standing(self.facts, version), to):
                if self.lost_trainer(version) or self.rejects(version):
                    version = WeightVersion(version.step, version.lineage + 1)
                    self.epoch += 1
                    continue
                self.send(self.target(version, min(self.ladder.next_barrier(low), to, key=self.ladder.place)))
                await self.news(partial(self._moved, version, low))
        if to is Rung.SERVING:  # one that has failed is not waited for
            await self.news(self._serves_by_all)
        return version

    def _serves_by_all(self) -> bool:
        pairs = zip(self.facts.engines, self.agent._gate.entrances, strict=True)
        return all(entrance.is_open or not engine.is_ready for engine, entrance in pairs)

    def _moved(self, at: WeightVersion, before: Rung) -> bool:
        return self.ladder.standing(self.facts, at) != before or self.lost_trainer(at) or self.rejects(at)

    def rejects(self, at: WeightVersion) -> bool:
        """No engine starts on them any more: the operator fails the step."""
        return any(engine.rejected and engine.rejected.version == at for engine in self.facts.engines)

    def waits_for_other_weights(self) -> bool:
        """However much time passes."""
        [view] = self.agent._views()
        choices = next_actions(view, self.agent.server.target, self._settings.rules)
        waits = [choice for choice in choices if isinstance(choice, Wait) and choice.reason == "WeightsDiffer"]
        return [None] == [wait.until for wait in waits]

    def lost_trainer(self, at: WeightVersion) -> bool:
        return any(rank.state is TrainerState.ABSENT and rank.lineage == at.lineage for rank in self.facts.trainers)

    async def news(self, is_so: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is checked whenever the agent has facts to report. Raises TimeoutError."""
        late = asyncio.get_running_loop().time() + DEADLINE_S
        while not is_so():
            if asyncio.get_running_loop().time() > late:
                raise TimeoutError(f"it is not so after {DEADLINE_S:.0f} s: {self.facts}")
            changed = self.agent.server._changed
            changed.clear()
            with contextlib.suppress(TimeoutError):  # an agent that was replaced tells nobody
                async with asyncio.timeout(0.1):
                    await changed.wait()

    # ------------------------------------------------------------------------------------------------- its callers
    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(pod="p", address="127.0.0.1", port=self.agent.server.ports.data)

    async def ask(
        self,
        *,
        tokens: int = 4000,
        leaves_after_s: float | None = None,
        stream: bool = False,
        path: str = "/generate",
        **more: Any,
    ) -> str:
        """One request to the gate: how it ended. Looks at the tokens of /generate."""
        client = DataClient(self._net.session, MemberTls.read(self.directories.tls), JOB_UID)
        body = ASKED[path](tokens) | {"stream": stream, **more}
        try:
            async with (
                asyncio.timeout(leaves_after_s or DEADLINE_S),
                client.request("POST", self.endpoint, path, json=body) as answer,
            ):
                text = await answer.read()
                if answer.status in (400, 503):
                    return "refused" if answer.status == 400 else "closed"
                assert answer.status == 200, text
        except TimeoutError:
            return "left" if leaves_after_s else "hung"
        except aiohttp.ClientError:
            return "broken"
        if stream:
            *_, last, done, _ = text.split(b"\n\n")
            assert done == b"data: [DONE]", done
            text = last.removeprefix(b"data: ")
        parsed = json.loads(text)
        if path != "/generate":
            return str(parsed["choices"][0]["finish_reason"])
        self._check_tokens(parsed)
        return str(parsed["meta_info"]["finish_reason"]["type"])


@asynccontextmanager
async def small_pod(
    *,
    gives_up_s: float = PATIENT_S,
    replica: int = 0,
    prepare: Callable[[SmallPod], None] = lambda pod: None,
    **changes: Any,
) -> AsyncIterator[SmallPod]:
    """A pod whose agent has attached to its runner. changes: of the job's spec.

    prepare: called with the pod before anything of it runs. gives_up_s: deadline of each call of engine and trainer. A
    short one is for a test that leaves one unanswered; on a slow machine others may be late too then.
    """
    root, job = Path(tempfile.mkdtemp(prefix="p")), _job(gives_up_s, **changes)
    try:
        async with network(root) as net:
            pod = SmallPod(root, net, job, replica=replica)
            prepare(pod)
            async with _living(pod):
                yield pod
    finally:
        await _remove(root)


class SmallGroup:
    """Pods of trainers, one of an engine, the volume that they share, and the operator that moves them.

    trainers: the pod with rank 0. others: with other ranks. Of a mixed job each of these has an engine too; otherwise
    the others have nothing at the volume's place.
    """

    def __init__(self, trainers: SmallPod, others: Sequence[SmallPod], engine: SmallPod) -> None:
        self.trainers, self.others, self.engine = trainers, others, engine
        self._pods = (trainers, *others, engine)
        self.epoch = 0
        self.served: WeightVersion | None = None  # newest that every engine has

    @property
    def broken(self) -> list[str]:
        return [what for pod in self._pods for what in pod.broken]

    def weights(self, at: WeightVersion) -> WeightVersion | None:
        """Return the weights that the operator names to engines."""
        ranks = [rank for pod in self._pods for rank in pod.facts.trainers]
        return at if ranks and all(rank.exported == at for rank in ranks) else self.served

    def send(self, version: WeightVersion, rung: Rung) -> None:
        for pod in self._pods:
            pod.send(pod.target(version, rung, epoch=self.epoch, weights=self.weights(version)))

    async def climb(self, version: WeightVersion, to: Rung = Rung.SERVING) -> WeightVersion:
        """Move both pods as `SmallPod.climb` moves one."""
        self.epoch += 1
        ladder = self.engine.ladder
        async with asyncio.timeout(DEADLINE_S):
            while True:
                stood = self._stand(version)
                low = ladder.slowest(stood)
                if ladder.reaches(low, Rung.UPDATED):
                    self.served = version
                if any(pod.lost_trainer(version) for pod in self._pods):
                    version = WeightVersion(version.step, version.lineage + 1)
                    self.epoch += 1
                    continue
                self.send(version, min(ladder.next_barrier(low), to, key=ladder.place))
                if ladder.reaches(low, to):
                    return version
                weights = self.weights(version)
                await self.news(partial(self._differs, version, stood, weights))

    async def news(self, is_so: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is checked whenever one of the agents has
        facts to report. Raises TimeoutError.
        """
        late = asyncio.get_running_loop().time() + DEADLINE_S
        while not is_so():
            if asyncio.get_running_loop().time() > late:
                raise TimeoutError(f"it is not so after {DEADLINE_S:.0f} s: {[pod.facts for pod in self._pods]}")
            changed = [pod.agent.server._changed for pod in self._pods]
            for each in changed:
                each.clear()
            waits = [asyncio.create_task(each.wait()) for each in changed]
            await asyncio.wait(waits, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    def _stand(self, at: WeightVersion) -> list[Rung]:
        return [pod.ladder.standing(pod.facts, at) for pod in self._pods]

    def _differs(self, at: WeightVersion, stood: list[Rung], version: WeightVersion | None) -> bool:
        lost = any(pod.lost_trainer(at) for pod in self._pods)
        return lost or self._stand(at) != stood or self.weights(at) != version


@asynccontextmanager
async def small_group(
    *,
    replicas: int = 1,
    volume: type[Path] = Path,
    silent_s: float = SILENT_S,
    prepare: Callable[[SmallPod], None] = lambda pod: None,
    **changes: Any,
) -> AsyncIterator[SmallGroup]:
    """Agents that have attached to their runners. replicas: pods of trainers. changes: of the job's spec.

    volume: how its files are reached. prepare: called with the engine's pod before anything of it runs.
    """
    root = Path(tempfile.mkdtemp(prefix="g"))
    rollout = {"placement": "OwnDevices", "replicas": 1} | changes.pop("rollout", {})
    job = _job(PATIENT_S, rollout=rollout, replicas=replicas, **changes)
    shared = volume(root / "weights" / "exports")
    is_mixed = job.spec.placement is Placement.MIXED
    role, of_others = (names.ROLE_GPU, shared) if is_mixed else (names.ROLE_TRAINER, None)
    try:
        async with AsyncExitStack() as stack:
            net = await stack.enter_async_context(network(root))
            pods = [
                SmallPod(root / "t0", net, job, role=role, weights=shared, silent_s=silent_s),
                *(
                    SmallPod(root / f"t{each}", net, job, role=role, replica=each, weights=of_others)
                    for each in range(1, replicas)
                ),
                SmallPod(root / "e", net, job, role=names.ROLE_ENGINE, weights=shared, silent_s=silent_s),
            ]
            prepare(pods[-1])
            trainers, *others, engine = [await stack.enter_async_context(_living(pod)) for pod in pods]
            yield SmallGroup(trainers, others, engine)
    finally:
        await _remove(root)


async def _remove(root: Path) -> None:
    """Remove the pods' files once their agents' calls to the volume have ended: they go on in their threads."""
    for thread in threading.enumerate():
        if thread.daemon and thread.name.endswith("exports"):
            await asyncio.to_thread(thread.join, DEADLINE_S)
    shutil.rmtree(root)


def _job(gives_up_s: float, **changes: Any) -> JobFile:
    """Return a job with deadlines of less than a second, which no resource can have."""
    job = make_job(**changes)
    switch = job.spec.switch.model_copy(update=dict.fromkeys(CALLS, gives_up_s))
    return job.model_copy(update={"spec": job.spec.model_copy(update={"switch": switch})})


@asynccontextmanager
async def _living(pod: SmallPod) -> AsyncIterator[SmallPod]:
    pod.make_directories()
    await pod.runner.start()
    await pod.start_agent()
    try:
        yield pod
    finally:
        await pod.stop_agent(orderly=False)
        await pod.runner.stop()
        pod.runner.close()
        for port in pod.engine_ports:
            port.close()
