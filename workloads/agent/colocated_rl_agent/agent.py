"""The agent's loop looks, chooses, acts and reports. `planner.next_actions` decides what to do.

It owns the order of actions in the pod: one at a time in each lane, of which every engine has its own, woken by events
(a target, an exit, an answer, the end of the last request in flight) and by deadlines, never by a poll. The gate to an
engine that is lost closes before anything else happens. When the agent ends, engines and trainers go on; the next agent
finds them through runner and journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from dataclasses import replace
from typing import assert_never

import aiohttp
from prometheus_client import CollectorRegistry

from colocated_rl_agent.faults import Faults
from colocated_rl_agent.files.batches import Shards, ShardUnavailable
from colocated_rl_agent.files.exports import Exports, ExportTorn
from colocated_rl_agent.files.journal import Journal
from colocated_rl_agent.files.volume import SILENT_S, VolumeDirectory, VolumeSilent
from colocated_rl_agent.gate.data_port import DataPort
from colocated_rl_agent.gate.gate import Gate
from colocated_rl_agent.lanes import reference
from colocated_rl_agent.lanes.engine import Engine
from colocated_rl_agent.lanes.trainers import Trainers
from colocated_rl_agent.lanes.volume import VOLUME_AGAIN_S, VolumeLane
from colocated_rl_agent.metrics import AgentMetrics, BelowTarget, GpuSeconds, Unsaved
from colocated_rl_agent.planner import actions as do
from colocated_rl_agent.planner.engines import EngineChoice, choices
from colocated_rl_agent.planner.rung_times import RungTimes
from colocated_rl_agent.planner.spans import as_first, as_part, lost
from colocated_rl_agent.planner.views import EngineView, PodView, pod_facts, trainer_name
from colocated_rl_agent.problems import Problems, slow_network
from colocated_rl_agent.runner.devices import Devices, require_room
from colocated_rl_agent.runner.runner_link import (
    ChildExited,
    RunnerError,
    RunnerEvent,
    RunnerHello,
    RunnerLink,
    RunnerLost,
    RunnerTerminating,
)
from colocated_rl_agent.settings import AgentSettings
from colocated_rl_api.facts import PodFacts
from colocated_rl_api.holders import PodHolder, holder_of
from colocated_rl_api.logs import log
from colocated_rl_api.member_wire import EngineSpan, Goal, Hello, PodTarget
from colocated_rl_api.rungs import Rung, WeightVersion
from colocated_rl_member.data import DataClient
from colocated_rl_member.server import MemberServer
from colocated_rl_member.tls import MemberTls

LOG = logging.getLogger(__name__)

RUNNER_AGAIN_S = 0.5
END_S = 5.0  # for an engine call in progress when the agent ends: interrupting it costs the engine


class Agent:
    """An Agent is one agent process, from `run` to its end."""

    def __init__(
        self,
        settings: AgentSettings,
        session: aiohttp.ClientSession,
        registry: CollectorRegistry,
        *,
        volume_silent_s: float = SILENT_S,
    ) -> None:
        self._settings = settings
        self._journal = Journal(settings.directories.state)
        self._metrics = AgentMetrics(registry)
        self._problems = Problems()
        self._runner = RunnerLink(settings.runner_socket, self._on_runner)
        self._reference = reference.ReferenceLane(
            settings,
            runner=self._runner,
            metrics=self._metrics,
            changed=self._wake_up,
            failed=self._fail,
            made_good=self._problems.made_good,
            ends=lambda: self._terminating or self._stops,
        )
        self._gate = Gate(
            engines=settings.engines,
            changed=self._wake_up,
            count=self._metrics.request_ended,
            score=self._reference.score if settings.has_reference else None,
        )
        self._metrics.show_in_flight(lambda: self._gate.in_flight)
        self._devices = Devices(self._runner, gpus=settings.gpus)
        places = settings.directories
        weights = models = VolumeDirectory(places.weights, silent_s=volume_silent_s)
        if not settings.rules.ladder.trains:
            models = VolumeDirectory(places.model, silent_s=volume_silent_s)
        self._engines = tuple(
            Engine(
                settings,
                index,
                entrance=entrance,
                volume=models,
                session=session,
                runner=self._runner,
                devices=self._devices,
                journal=self._journal,
                metrics=self._metrics,
                exported=lambda: self._exports.tensors,
                changed=self._wake_up,
                failed=self._fail,
            )
            for index, entrance in enumerate(self._gate.entrances)
        )
        self._trainers = Trainers(
            settings,
            runner=self._runner,
            journal=self._journal,
            metrics=self._metrics,
            changed=self._wake_up,
            failed=self._fail,
            made_good=self._problems.made_good,
        )
        tls = MemberTls.read(settings.directories.tls, kept=settings.directories.keys)
        progress_s = settings.job.spec.switch.trainer_progress_seconds
        client = DataClient(session, tls, settings.job.uid)
        self._shards = Shards(client, places.batches, settings.ranks, deadline_s=progress_s)
        self._exports = Exports(weights, ranks=settings.engine_ranks if settings.has_engine else None)
        self._volume = VolumeLane(
            self._exports,
            self._trainers,
            writes=settings.tends_exports,
            changed=self._wake_up,
            failed=self._fail,
            made_good=self._problems.made_good,
        )
        self._faults = Faults(self._runner, self._engines, self._trainers, close_gate=self._close_open_gates)
        self._ladder = settings.rules.ladder
        self.server = MemberServer(
            hello=Hello(
                pod=settings.pod,
                pod_uid=settings.pod_uid,
                job_uid=settings.job.uid,
                role=settings.role,
                replica=settings.replica,
                incarnation=uuid.uuid4().hex[:16],
                highest_epoch=self._journal.memory.epoch,
            ),
            kind=PodTarget,
            tls=tls,
            facts=self._facts,
            accept=self._accept,
            remember_epoch=self._journal.epoch_accepted,
            unfit=self._unfit,
            data=DataPort(self._gate.serve, admits=tls.admits),
            pages=self._faults.routes if settings.takes_faults else (),
            ports=settings.ports,
            registry=registry,
        )
        self._wake = asyncio.Event()
        self._ending = False
        self._tasks: asyncio.TaskGroup
        self._lanes: dict[tuple[do.Lane, int], tuple[do.Action, asyncio.Task[None]]] = {}  # by lane and engine
        self._attaching: asyncio.Task[None] | None = None
        self._runner_known = False
        self._terminating, self._signalled_at = False, 0.0
        self._stopped = False
        self._closed_at = [time.monotonic()] * max(1, settings.engines)
        self._climb = RungTimes(self._ladder, reached=self._reached, waited=self._metrics.barrier_wait_seconds.inc)
        registry.register(BelowTarget(self._below_target))
        registry.register(Unsaved(self._trainers.unsaved))
        self._gpu_seconds = GpuSeconds(settings.gpus, PodHolder.IDLE if settings.is_spare else PodHolder.START)
        registry.register(self._gpu_seconds)
        self._has_served = False

    async def run(self) -> None:
        """Run until `end`. Raises the error of any part: the process ends, and its container starts again."""
        try:
            async with self.server, asyncio.TaskGroup() as self._tasks:
                await self._live()
        finally:
            await self._trainers.close()
            await self._reference.close()
            self._journal.close()

    async def _live(self) -> None:
        log(LOG, "agent started", ports=str(self.server.ports))
        beside = [
            self._tasks.create_task(self._runner.run(), name="runner link"),
            self._tasks.create_task(self._reference.tend(), name="tend reference"),
        ]
        if self._settings.tends_exports:
            beside.append(self._tasks.create_task(self._volume.tend(), name="tend volume"))
        while not self._ending:
            self._wake.clear()
            until = self._advance()
            self.server.publish()
            await self._sleep(until)
        await self._finish_engine_calls()
        await self._hand_back()
        for task in (*beside, self._attaching, *(task for _, task in self._lanes.values())):
            if task is not None:
                task.cancel()

    def end(self) -> None:
        """End the agent: engine and trainers go on, the gate does not."""
        self._ending = True
        self._wake_up()

    # ------------------------------------------------------------------------------------------------ look and choose
    def _views(self) -> list[PodView]:
        """Return the pod as each of its engines sees it, once where there is none."""
        whole, stale, crowded = self._look_at_exports(self.server.target)
        pod = PodView(
            now=time.monotonic(),
            runner_known=self._runner_known,
            terminating=self._terminating,
            gate_open=False,
            in_flight=0,
            closed_at=self._closed_at[0],
            engine=EngineView(),
            ranks=self._trainers.views,
            whole=whole,
            stale_exports=stale,
            crowded=crowded,
            verify_after=self._exports.verify_after,
            shards=self._shards_there(),
            fetch_after=self._shards.fetch_after,
            keep_after=self._trainers.keep_after,
            agreed=self._journal.memory.agreed,
            stopped=self._stopped,
            signalled_at=self._signalled_at,
            has_engine=self._settings.has_engine,
            borrows=self._settings.borrows_exports,
        )
        if not self._engines:
            return [pod]
        views = [
            replace(
                pod,
                gate_open=engine.entrance.is_open,
                in_flight=engine.entrance.in_flight,
                closed_at=closed_at,
                engine=engine.view,
            )
            for engine, closed_at in zip(self._engines, self._closed_at, strict=True)
        ]
        if (pods := self._settings.pods_per_engine) == 1:
            return views
        sees = as_part if self._settings.has_part else as_first
        return [sees(view, self._span, pods=pods) for view in views]

    @property
    def _span(self) -> EngineSpan | None:
        return self.server.target.span if self.server.target else None

    def _look_at_exports(self, target: PodTarget | None) -> tuple[WeightVersion | None, bool, bool | None]:
        """Return the whole export, whether there are others than the target's, and whether a next one finds no room.

        It reads the cached listing: nothing here may wait for the volume.
        """
        settings, exports = self._settings, self._exports
        if not settings.reads_exports:
            return self._trainers.exported, False, False
        whole = exports.whole.version if exports.whole else None
        if not settings.tends_exports:
            return whole, False, False
        is_served = self._gate.is_open or (self._span and self._span.gate and self._span.gate.open)
        may_be_stale = is_served or not settings.has_engine
        stale = may_be_stale and exports.has_others_than(target.version if target else None)
        kept = target.weights if target and settings.shares_weights else whole
        return whole, bool(stale), exports.has_others_than(kept)

    def _facts(self) -> PodFacts:
        target = self.server.target
        return pod_facts(
            self._views(),
            epoch=target.epoch if target else 0,
            devices=self._devices.facts,
            bad_device=self._devices.fault,
            problem=self._problems.newest or slow_network(self._trainers.network_fault),
            took_s=self._climb.took_s,
            waited_s=self._climb.waited_s,
            engine_failures=self._engine_failures,
            reference_ready=self._reference.is_ready,
        )

    @property
    def _engine_failures(self) -> list[int]:
        return [engine.failures for engine in self._engines]

    def _advance(self) -> float | None:
        """Begin the actions that can begin now, and return when to look again if nothing happens before."""
        views, target = self._views(), self.server.target
        now = views[0].now
        if target is not None and self._runner_known:
            facts = pod_facts(views, engine_failures=self._engine_failures)
            rung = self._ladder.standing(facts, target.version)
            is_below = target.goal is Goal.CLIMB and rung is not self._ladder.top
            waits = is_below and self._ladder.reaches(rung, target.rung)
            self._climb.stands(rung, epoch=target.epoch, now=now, waits=waits)
            self._gpu_seconds.hold(self._holder())
        chosen = choices(views, target, self._settings.rules)
        self._problems.chosen(choice.action for choice in chosen)
        untils = [self._begin(choice, now=now) for choice in chosen]
        return min((until for until in untils if until is not None), default=None)

    def _begin(self, choice: EngineChoice, *, now: float) -> float | None:
        """Begin one action, and return when to choose again if nothing happens before."""
        match choice.action:
            case do.Wait(until=until):
                return until
            case do.CloseGate():
                self._close_gate(choice.engine)
                return now
            case do.StartEngine() if now < self._reference.awaited_until:
                return self._reference.awaited_until
            case do.OpenGate() if now < self._faults.gate_closed_until:
                return self._faults.gate_closed_until
            case do.OpenGate():
                self._gate.open(self._engines[choice.engine].backend(), engine=choice.engine)
                if not any(self._engine_failures):
                    self._problems.made_good("EngineLost")
                return now
            case action:
                self._put_in_lane(action, choice.engine)
                return getattr(action, "until", None)

    def _put_in_lane(self, chosen: do.LaneAction, engine: int) -> None:
        running = self._lanes.get((chosen.lane, engine))
        if running is not None:
            action, task = running
            if chosen.overrides and not action.overrides:
                task.cancel()  # its end frees the lane, and then the planner chooses this action again
            return
        task = self._tasks.create_task(self._run_lane(chosen, engine), name=type(chosen).__name__)
        self._lanes[chosen.lane, engine] = chosen, task

    async def _run_lane(self, action: do.LaneAction, engine: int) -> None:
        began, target = time.monotonic(), self.server.target
        try:
            await self._carry_out(action, engine)
        except RunnerError as error:
            self._fail("RunnerUnreachable", str(error))
            await asyncio.sleep(RUNNER_AGAIN_S)
        except VolumeSilent as error:
            self._fail("VolumeSilent", str(error))
            await asyncio.sleep(VOLUME_AGAIN_S)
        finally:
            if isinstance(action, do.Export | do.StopTrainers | do.RemoveExports):  # a stopped rank may have written
                self._volume.may_have_changed()
            log(
                LOG,
                "action ended",
                action=type(action).__name__,
                epoch=target.epoch if target else None,
                step=target.step if target else None,
                took_s=round(time.monotonic() - began, 4),
                in_flight=self._gate.in_flight,
            )
            del self._lanes[action.lane, engine]
            self._wake_up()

    # ------------------------------------------------------------------------------------------------------------ act
    async def _carry_out(self, action: do.LaneAction, engine: int) -> None:
        if isinstance(action, do.EndPod):
            await self._end_pod(action.code)
            return
        if isinstance(action, do.VerifyExport):
            await self._volume.verify(action.version)
            return
        if isinstance(action, do.RemoveExports):
            await self._volume.remove_others_than(action.keep)
            return
        if isinstance(action, do.EngineAction):
            await self._act_on_engine(action, self._engines[engine])
        else:
            await self._act_on_trainers(action)
        if isinstance(action, do.Continue if self._settings.has_engine else do.Export):
            await self._measure_host_memory(engine)
        nobody = (
            not self._settings.has_reference
            and all(each.view.is_absent for each in self._engines)
            and all(rank.is_off_device for rank in self._trainers.views)
        )
        await self._devices.read(nobody=nobody)
        self._problems.made_good("RunnerUnreachable")

    async def _measure_host_memory(self, index: int) -> None:
        """Measure at one moment of each switch, so that values can be compared: an engine when it generates again, and
        trainers when the first one does.
        """
        there = [engine for engine in self._engines if not engine.view.is_absent]
        engine = self._engines[index] if self._engines else None
        incarnations = {engine.name: engine.view.incarnation} if engine else {}
        if engine is None or engine in there[:1]:
            incarnations |= {trainer_name(view.rank): view.incarnation for view in self._trainers.views}
        for child, held in (await self._runner.memory()).items():
            if incarnation := incarnations.get(child):
                self._metrics.child_memory.measured(child, incarnation, held)
        for view in self._trainers.views:
            self._trainers.grew(view.rank, self._metrics.child_memory.grown(trainer_name(view.rank)))

    async def _act_on_engine(self, action: do.EngineAction, engine: Engine) -> None:
        match action:
            case do.StartEngine(version=version):
                await engine.start(version, self._span)
            case do.AwaitEngine():
                await engine.wait_until_up()
            case do.KillEngine(reason=reason, is_fault=is_fault, doubts=doubts):
                await engine.kill(reason, is_fault=is_fault, doubts=doubts)
            case do.AbortAll():
                await engine.abort_all()
            case do.Pause():
                await engine.pause()
            case do.Flush():
                await engine.flush()
            case do.Release():
                await engine.release()
            case do.Resume(tags=tags):
                await engine.resume(tags)
            case do.Update(version=version):
                await self._faults.slow_weights()
                whole = self._exports.whole
                await engine.update(version, size_bytes=whole.size_bytes if whole else 0)
            case do.Continue():
                await engine.continue_()
            case do.CheckProbe(version=version):
                await self._check_probe(engine, version)
            case _:
                assert_never(action)

    async def _act_on_trainers(self, action: do.TrainerAction) -> None:
        trainers = self._trainers
        match action:
            case do.StartTrainers(lineage=lineage):
                await self._start_trainers(lineage)
            case do.AwaitTrainers():
                await trainers.wait_until_loaded()
            case do.StopTrainers(reason=reason):
                await trainers.stop(reason)
            case do.FetchShards(step=step):
                await self._fetch_shards(step)
            case do.Onload():
                await trainers.onload()
            case do.Score(step=step):
                await trainers.score(step)
            case do.Train(step=step):
                await trainers.train(step)
            case do.Export(version=version):
                await trainers.export(version)
            case do.Offload():
                await trainers.offload(self._require_room)
            case do.Save() | do.Mirror() | do.SaveModel():
                await self._keep(action)
            case _:
                assert_never(action)

    async def _keep(self, action: do.Save | do.Mirror | do.SaveModel) -> None:
        match action:
            case do.Save(step=step):
                await self._trainers.save(step)
            case do.Mirror(step=step):
                await self._trainers.mirror(step)
            case do.SaveModel(version=version):
                await self._trainers.finish(version)
            case _:
                assert_never(action)

    def _close_gate(self, engine: int) -> None:
        self._gate.close(engine=engine)
        self._closed_at[engine] = time.monotonic()
        self._engines[engine].gate_closed()

    def _close_open_gates(self) -> None:
        for index, engine in enumerate(self._engines):
            if engine.entrance.is_open:
                self._close_gate(index)
                self._wake_up()

    async def _start_trainers(self, lineage: int) -> None:
        target = self.server.target
        if target is not None and target.lineage == lineage and target.rendezvous is not None:
            await self._trainers.start(lineage, target.rendezvous)

    def _shards_there(self) -> int | None:
        target = self.server.target
        return self._shards.step_of(target.rendezvous.world_size) if target and target.rendezvous else None

    async def _fetch_shards(self, step: int) -> None:
        target = self.server.target
        if target is None or target.batches is None or target.rendezvous is None:
            return
        try:
            await self._shards.fetch(target.batches, step, world_size=target.rendezvous.world_size)
        except ShardUnavailable as error:
            self._fail("BatchUnavailable", str(error))
        else:
            self._problems.made_good("BatchUnavailable")

    async def _check_probe(self, engine: Engine, version: WeightVersion) -> None:
        try:
            manifest = await self._exports.manifest(version)
        except ExportTorn as error:
            engine.doubt(version, f"its weights can't be probed: {error}")
        else:
            await engine.check_probe(manifest)

    async def _require_room(self) -> None:
        """Require room for the engines' memory after trainers report an offload. Raises MemoryHeld, RunnerError."""
        freed = {device: size for engine in self._engines for device, size in engine.freed_bytes.items()}
        require_room(await self._devices.read(), freed)

    async def _end_pod(self, code: int) -> None:
        await self._runner.exit(code)
        log(LOG, "pod ended", reason=f"exit code {code}")
        self._stopped = code == 0

    async def _finish_engine_calls(self) -> None:
        """Let engine calls that can't be repeated end: interrupting one would cost its engine."""
        calls = {
            task for action, task in self._lanes.values() if isinstance(action, do.Release | do.Resume | do.Update)
        }
        if calls:
            await asyncio.wait(calls, timeout=END_S)

    async def _hand_back(self) -> None:
        """Abort requests in flight when the agent ends, so that callers get their tokens and no broken connection."""
        self._close_open_gates()
        busy = [engine for engine in self._engines if engine.entrance.in_flight and not engine.view.is_absent]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await asyncio.gather(*(engine.abort_all() for engine in busy))

    # --------------------------------------------------------------------------------------------------- what happens
    def _unfit(self, target: PodTarget) -> str:
        known = target.rung in self._ladder.rungs
        return "" if known else f"rung {target.rung} is not on the ladder of a {self._ladder.placement} job"

    def _accept(self, target: PodTarget) -> None:
        log(LOG, "target accepted", epoch=target.epoch, step=target.step, rung=target.rung, version=str(target.version))
        self._gate.enter_epoch(target.epoch)
        if target.checksum is not None:
            self._journal.checksum_agreed(target.version, target.checksum)
        for engine in self._engines if target.span and not self._settings.has_part else ():
            if reason := lost(engine.view, target.span, engine.pods):
                engine.broke(reason)
        self._wake_up()

    def _on_runner(self, event: RunnerEvent) -> None:
        match event:
            case RunnerHello():
                self._detach()
                self._attaching = self._tasks.create_task(self._attach(event), name="attach")
            case ChildExited(name=name):
                index = next((index for index, engine in enumerate(self._engines) if engine.name == name), None)
                if name == reference.NAME:
                    self._reference.exited(event)
                elif index is None:
                    self._trainers.exited(event)
                else:
                    self._engine_exited(index, event)
                if event.code != 0:
                    self._tasks.create_task(self._look_at_devices(), name="look at devices")
            case RunnerTerminating(children_end_in_s=wait_s):
                log(LOG, "container terminating", children_end_in_s=wait_s)
                self._terminating, self._signalled_at = True, time.monotonic()
            case RunnerLost(reason=reason):
                level = logging.INFO if self._stopped or self._terminating else logging.WARNING
                log(LOG, "runner lost", level, reason=reason)
                self._detach()
        self._wake_up()

    async def _look_at_devices(self) -> None:
        """Look whether a device is why a process ended."""
        with contextlib.suppress(RunnerError):
            await self._devices.read()
        self._wake_up()

    def _engine_exited(self, index: int, event: ChildExited) -> None:
        engine = self._engines[index]
        if engine.entrance.is_open and event.incarnation == engine.view.incarnation:
            self._close_gate(index)
        engine.exited(event)

    def _detach(self) -> None:
        """Close the gate and treat the children's state as unknown until they are attached again."""
        self._runner_known = False
        self._reference.detach()
        if self._attaching is not None:
            self._attaching.cancel()
        self._close_open_gates()

    async def _attach(self, hello: RunnerHello) -> None:
        children = {child.name: child for child in hello.children}
        log(LOG, "runner attached", runner=hello.runner, children=sorted(children))
        await asyncio.gather(*(engine.attach(children.get(engine.name)) for engine in self._engines))
        await self._trainers.attach(children)
        self._terminating, self._signalled_at = hello.terminating, time.monotonic()
        self._reference.attach(children.get(reference.NAME))
        self._runner_known = True
        self._wake_up()

    # ----------------------------------------------------------------------------------------------------------- report
    def _reached(self, rung: Rung, took_s: float) -> None:
        target = self.server.target
        assert target is not None, "a rung is reached on the way to a target"
        self._metrics.rung_seconds.labels(rung).observe(took_s)
        self._problems.rung_gained()
        log(
            LOG,
            "rung reached",
            epoch=target.epoch,
            step=target.step,
            rung=rung,
            version=str(target.version),
            took_s=took_s,
        )

    def _holder(self) -> PodHolder:
        """Return who has the pod's devices. Whatever comes before the pod first stood at the top is its start."""
        if self._settings.is_spare:
            return PodHolder.IDLE
        rung = self._climb.rung
        self._has_served |= rung is self._ladder.top
        if not self._has_served:
            return PodHolder.START
        holder = holder_of(rung, None, self._ladder, self._settings.role)
        # a mixed job's engine with devices of its own may wait at Offloaded for the others, and generates meanwhile
        return PodHolder.ROLLOUT if holder is PodHolder.SWITCH and self._gate.is_open else holder

    @property
    def _stops(self) -> bool:
        return self.server.target is not None and self.server.target.goal is Goal.STOP

    def _below_target(self) -> tuple[Rung, float] | None:
        """Return the pod's rung and for how many seconds it has stood there, or None if the target is not above it."""
        target, rung, since = self.server.target, self._climb.rung, self._climb.since
        if target is None or target.goal is Goal.STOP or since is None or self._ladder.reaches(rung, target.rung):
            return None
        return rung, time.monotonic() - since

    def _fail(self, reason: str, message: str) -> None:
        self._problems.failed(reason, message)
        self._wake_up()

    def _wake_up(self) -> None:
        self._wake.set()

    async def _sleep(self, until: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(None if until is None else self._loop_time(until)):
                await self._wake.wait()

    @staticmethod
    def _loop_time(monotonic: float) -> float:
        return asyncio.get_running_loop().time() + monotonic - time.monotonic()
