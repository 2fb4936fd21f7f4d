"""The engine lane runs one engine of the pod: its process, its view, and the calls that change it.

It owns the engine's view. A call's effect enters the view when the engine has confirmed it; a call that failed in any
way leaves the view broken, and then this incarnation can only be killed. Calls that must not be repeated are journaled
before and after. The lane decides nothing: `planner` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import aiohttp

from colocated_rl_agent.drivers.base import CallRefused, DriverError, OutcomeUnknown
from colocated_rl_agent.drivers.sglang import (
    PartPlace,
    ServerInfo,
    SGLang,
    engine_command,
    engine_config,
    new_admin_key,
    undivided_heads,
)
from colocated_rl_agent.files.exports import TensorDigests, export_directory
from colocated_rl_agent.files.journal import EngineRecord, EngineStarted, Intent, Journal
from colocated_rl_agent.files.volume import VolumeDirectory
from colocated_rl_agent.gate.entrance import Backend, Entrance
from colocated_rl_agent.lanes.last_words import last_words
from colocated_rl_agent.lanes.probe import WeightsDoubted, require_agreement
from colocated_rl_agent.lanes.update_check import Checksums, require_changes
from colocated_rl_agent.metrics import AgentMetrics
from colocated_rl_agent.planner.views import WEIGHTS, EngineView, engine_name
from colocated_rl_agent.runner.devices import FREED_S, Devices, MemoryHeld, until_freed
from colocated_rl_agent.runner.runner_link import (
    REAP_S,
    ChildExited,
    ChildStatus,
    RunnerError,
    RunnerLink,
    RunnerRefused,
)
from colocated_rl_agent.settings import AgentSettings
from colocated_rl_api import names
from colocated_rl_api.back_off import doubled_s
from colocated_rl_api.engines import dtype_of, overflowing
from colocated_rl_api.facts import EngineLaunch, TagState
from colocated_rl_api.interfaces import interface_towards
from colocated_rl_api.job import Switch
from colocated_rl_api.logs import log
from colocated_rl_api.member_wire import EngineSpan
from colocated_rl_api.names import PodUid
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.weights import Manifest

LOG = logging.getLogger(__name__)

ABORT_AGAIN_S = 0.5  # an abort of all misses a request that is on its way to the engine (H3)
START_POLL_S = 0.1  # an engine has no way to report that it is up
MAX_BACK_OFF_S = 60.0
LEAST_READ_BYTES_S = 100_000_000  # of weights: no volume that engines are to load from is slower
CONFIG_MODE = 0o640  # the engine reads it through the pod's group


@dataclass(frozen=True)
class _Part:
    """A _Part is what a pod runs of an engine, by default all of it. of: incarnation of another pod's engine."""

    launch: EngineLaunch
    place: PartPlace | None = None
    of: str | None = None
    pods: tuple[PodUid, ...] = ()  # of the engine, in the first of several


class Engine:
    """The Engine holds the view of one of the pod's engines and makes its calls.

    index: of the engine in its pod. entrance: its part of the gate. volume: the engine loads from it. exported: tensors
    of the exports that this agent has read. changed: called when the view has changed. failed: called with (reason,
    message) for the pod's problem.
    """

    def __init__(
        self,
        settings: AgentSettings,
        index: int,
        *,
        entrance: Entrance,
        volume: VolumeDirectory,
        session: aiohttp.ClientSession,
        runner: RunnerLink,
        devices: Devices,
        journal: Journal,
        metrics: AgentMetrics,
        exported: Callable[[], Mapping[WeightVersion, TensorDigests]],
        changed: Callable[[], None],
        failed: Callable[[str, str], None],
    ) -> None:
        self._settings = settings
        self.name = engine_name(index)
        self.entrance = entrance
        self._port = settings.engine_port + index
        self._on = settings.devices_of(index)
        self._config = settings.directories.sockets / f"{self.name}.yaml"
        self._volume = volume
        self._session = session
        self._runner = runner
        self._devices = devices
        self._journal = journal
        self._metrics = metrics
        self._exported = exported
        self._changed = changed
        self._failed = failed
        self._client: SGLang | None = None
        self._dtype = "unknown"
        self._context: int | None = None
        self._held: tuple[WeightVersion, Checksums] | None = None  # what this incarnation last held, by parameter
        self._mapped_bytes: int | None = None  # weights and KV pool on each device, as far as they are released
        self._vocabulary: int | None = None
        self.freed_bytes: Mapping[int, int] = {}  # by the last release, of each device that can be measured
        self.failures = 0  # since it last served: sets the back-off of the next start; a failure policy counts it
        self._exits: dict[str, ChildExited] = {}  # the newest, which can come before the answer to the start
        self._killed_for: str | None = None
        self._gone = asyncio.Event()
        self._unasked: str | None = None  # incarnation started here that has got no request yet
        self.pods: tuple[PodUid, ...] = ()  # of an engine over several, as it was started, in the first of them
        self.view = EngineView()

    # ------------------------------------------------------------------------------------------------- its process
    async def start(self, version: WeightVersion, span: EngineSpan | None = None) -> None:
        """Start the engine, or its part in this pod. span: its pods, if it is over several. Raises VolumeSilent."""
        settings, admin_key = self._settings, new_admin_key()
        part = self._part_in(span)
        if part is None:
            return  # the pods have changed since this was chosen: the planner chooses again
        model, extra = settings.weights_of(version), settings.job.spec.rollout.engine_flags
        exported = {tensor.dtype for tensor in self._exported().get(version, {}).values()}
        gpus = len(self._on) * settings.pods_per_engine
        if impossible := overflowing(dtype_of(extra), exported) or await self._volume.call(
            "read the model's configuration",
            lambda _: undivided_heads(model, gpus=gpus, of=settings.gpus, extra=extra),
        ):
            self._lost(impossible, part_of=part.of)
            return
        await asyncio.to_thread(_write_config, self._config, admin_key)
        command = engine_command(
            model=model,
            version=version,
            port=self._port,
            config=self._config,
            gpus=len(self._on),
            saved_tags=settings.saved_tags,
            extra=extra,
            pool_tokens=part.launch.pool_tokens,
            place=part.place,
        )
        self._gone.clear()
        self._killed_for = self._held = None
        try:
            incarnation = await self._runner.start(
                self.name,
                command.argv,
                command.env,
                secrets=[admin_key],
                devices=self._on if len(self._on) < settings.gpus else (),
            )
        except RunnerRefused as error:
            self._lost(f"it could not be started: {error}", part_of=part.of)
            return
        self._unasked = incarnation
        started = EngineStarted(
            name=self.name,
            incarnation=incarnation,
            version=version,
            admin_key=admin_key,
            keeps=settings.keeps,
            launch=part.launch if part.pods else None,
            pods=part.pods,
            part_of=part.of,
        )
        self._journal.engine_started(started)
        self.pods = started.pods
        self._metrics.incarnations.labels(self.name).inc()
        self.freed_bytes = {}
        self._client = self._client_of(admin_key)
        self._set(replace(started.view(start_by=self._start_by()), doubted=self.view.doubted))
        if (exited := self._exits.get(incarnation)) is not None:
            self.exited(exited)

    def _part_in(self, span: EngineSpan | None) -> _Part | None:
        """Return what this pod runs of an engine; None if it is over several pods that are not what they were."""
        settings = self._settings
        launch = EngineLaunch(port=_new_port(), pool_tokens=self._journal.memory.pool_tokens)
        if settings.pods_per_engine == 1:
            return _Part(launch)
        if span is None or span.address is None or settings.pod_uid not in span.pods:
            return None
        if not settings.has_part:
            part = _Part(launch, pods=span.pods)
        elif span.engine is not None and span.engine.launch is not None:
            part = _Part(span.engine.launch, of=span.engine.incarnation)
        else:
            return None
        try:
            interface = interface_towards(span.address)
        except OSError as error:
            self._lost(f"it has no way to the pods of its engine: {error}", part_of=part.of)
            return None
        rank = span.pods.index(settings.pod_uid)
        place = PartPlace(rank, settings.pods_per_engine, span.address, part.launch.port, interface)
        return replace(part, place=place)

    async def wait_until_up(self) -> None:
        """Wait until the engine answers and suits a switch, is broken, or gone. The caller enforces the deadline."""
        client, incarnation, started = self._client, self.view.incarnation, time.monotonic()
        if client is None or incarnation is None:
            return  # it ended since this was chosen: the planner chooses again
        while not await _is_up(client):
            if self.view.incarnation != incarnation:
                return
            await asyncio.sleep(START_POLL_S)
        try:
            info = await self._look_at(client)
            self._vocabulary = await client.vocabulary()
            version = await client.weight_version()
            if version != self.view.starts_on:
                raise CallRefused(f"it serves {version} and was started on {self.view.starts_on}")
            checksum = await self._checksum(client, version)
        except WeightsDoubted as error:
            self.doubt(version, f"the started engine can't be used: {error}")
            return
        except DriverError as error:
            self.broke(f"the started engine can't be used: {error}")
            return
        if self.view.incarnation == incarnation:
            if info.pool_tokens is not None and self._journal.memory.pool_tokens is None:
                self._journal.pool_measured(info.pool_tokens)
            self._config.unlink(missing_ok=True)
            log(
                LOG,
                "engine started",
                engine=self.name,
                incarnation=incarnation,
                version=str(version),
                took_s=_since(started),
            )
            self._unasked = None
            self._set(self.view.answered(version, checksum))

    async def kill(self, reason: str, *, is_fault: bool, doubts: WeightVersion | None = None) -> None:
        """Kill the engine and wait until its process group is reaped. doubts: weights it was not shown to hold."""
        if doubts is not None:
            self.doubt(doubts, reason)
        elif is_fault:
            self.broke(reason)
        level = logging.INFO if self.view.broken is None else logging.WARNING
        log(LOG, "engine killed", level, engine=self.name, incarnation=self.view.incarnation, reason=reason)
        self._killed_for = reason
        await self._runner.kill(self.name)
        try:
            async with asyncio.timeout(REAP_S):
                await self._gone.wait()
        except TimeoutError:
            self._failed("EngineNotReaped", f"its processes did not end {REAP_S:.0f} s after SIGKILL; killing again")

    def exited(self, event: ChildExited) -> None:
        """Record that the engine's process group is gone, whoever ended it."""
        self._exits = {event.incarnation: event}
        if self.view.incarnation != event.incarnation:
            return
        log(LOG, "engine gone", engine=self.name, incarnation=event.incarnation, reason=f"code {event.code}")
        self._ended(event)

    def _ended(self, event: ChildExited | None) -> None:
        """Record the end of the engine. event: None: it ended with its container."""
        killed_for, self._killed_for = self._killed_for, None
        self._gone.set()
        # a request may fail before the end that it failed of is known
        if killed_for is None or (event is not None and not event.was_killed):
            self._lost("it ended with its container" if event is None else self._end_of(event))
        elif self.view.broken is not None:
            self._lost(killed_for)
        else:
            self._set(self.view.gone())

    async def attach(self, child: ChildStatus | None) -> None:
        """Match the view to the runner's report of the engine, after a restart of either side."""
        record = self._journal.memory.engines.get(self.name)
        if child is None or not child.running:
            self._gone.set()
            missed = child.exit if child is not None else None
            if missed is not None and missed.incarnation == self.view.incarnation:
                self.exited(missed)
            elif not self.view.is_absent:
                self._ended(None)
            elif self._settings.has_part:  # the first pod has to hear of it
                part_of = record.started.part_of if record else None
                self._set(replace(self.view, part_of=part_of))
            elif child is not None and child.incarnation not in self._exits:
                # an earlier agent saw it end: others of the pod serve without it
                self.failures = max(1, self.failures)
            return
        if child.incarnation == self.view.incarnation:
            return
        self._gone.clear()
        if record is None or record.incarnation != child.incarnation:
            unknown = EngineView().started(child.incarnation, WeightVersion(0, 0), start_by=0.0)
            self._set(unknown.broke("it is not known to this agent's journal"))
        elif record.pending is not None:
            tags = record.pending.tags
            self._set(record.view.broke(f"the agent ended during its {record.pending.call}", tags))
        elif self._settings.has_part:
            self._set(record.started.view(start_by=self._start_by()))
        else:
            self.pods = record.started.pods
            self._client = self._client_of(record.started.admin_key)
            self._set(await self._recognize(record, self._client))
        log(LOG, "engine attached", engine=self.name, incarnation=child.incarnation, reason=self.view.broken)
        if (exited := self._exits.get(child.incarnation)) is not None:
            self.exited(exited)

    async def _recognize(self, record: EngineRecord, client: SGLang) -> EngineView:
        """Return the view of a running engine that an earlier agent started."""
        remembered = record.view
        if not await _is_up(client):
            return record.started.view(start_by=self._start_by())
        try:
            paused = not await client.takes_requests()
            version = await client.weight_version()
            await self._look_at(client)
            self._vocabulary = None if paused else await client.vocabulary()
            checksum = await self._checksum(client, version) if remembered.version == version else None
        except WeightsDoubted as error:
            return remembered.was_doubted(version, f"it could not be recognized: {error}")
        except DriverError as error:
            return remembered.broke(f"it could not be recognized: {error}")
        if not remembered.is_whole and not paused:
            return remembered.broke("it takes requests while memory is released")
        if remembered.version is not None and remembered.version != version:
            return remembered.broke(f"it holds {version}, the journal has {remembered.version}")
        # the gate admitted nothing since this agent started, and an engine is drained before it releases memory
        drained = paused and not remembered.is_whole
        return replace(remembered, checksum=checksum, paused=paused, drained=drained, flushed=False)

    async def _look_at(self, client: SGLang) -> ServerInfo:
        """Check that the engine is suitable, and keep its dtype and mapped bytes. Raises DriverError."""
        saved_tags = self._settings.saved_tags
        gpus = len(self._on) * self._settings.pods_per_engine
        info = await client.require_suitable(memory_saver=bool(saved_tags), gpus=gpus)
        self._dtype = info.dtype if info.quantization is None else "quantized"
        self._context = info.context_length
        self._mapped_bytes = info.mapped_bytes(saved_tags)
        return info

    async def _checksum(self, client: SGLang, version: WeightVersion) -> str | None:
        """Return the checksum of its weights; None if the job asks for none. Raises WeightsDoubted if it gives none."""
        if not self._settings.checksums_weights:
            return None
        started = time.monotonic()
        try:
            checksum, by_parameter = await client.checksum()
        except DriverError as error:
            todo = "where none can in spec.switch.engineCallSeconds, make the job with spec.weightSync.verify: Version"
            raise WeightsDoubted(f"it gives no checksum of its weights {version}: {error}; {todo}") from error
        self._held = version, by_parameter
        log(LOG, "weights checksummed", version=str(version), checksum=checksum, took_s=_since(started))
        return checksum

    def _require_changes(self, held: tuple[WeightVersion, Checksums] | None, before: Checksums | None) -> None:
        """Require that an update changed what the exports say, where both are known. Raises UpdateDoubted."""
        if self._held is None:
            return
        exported, (version, found) = self._exported(), self._held
        if held is None or held[0] not in exported or version not in exported:
            log(LOG, "update not judged", version=str(version), reason="this agent has not read both exports")
            return
        old, new = exported[held[0]], exported[version]
        judged = require_changes(old, new, held[1], found, before=before, dtype=self._dtype)
        log(LOG, "update judged", version=str(version), judged=judged, parameters=len(found))

    # ---------------------------------------------------------------------------------------------------- a switch
    def backend(self) -> Backend:
        """Return the backend for a gate that opens now."""
        client, incarnation, version = self._client, self.view.incarnation, self.view.version
        assert client is not None, "a gate opens on an engine"
        assert incarnation is not None, "a gate opens on an engine"
        assert version is not None, "a gate opens on a version"
        self.failures = 0
        return Backend(client.url, incarnation, version, client.abort, self._vocabulary)

    def gate_closed(self) -> None:
        self._set(self.view.gate_closed())

    async def abort_all(self) -> None:
        """Abort all requests, again and again, until nothing is in flight. The caller enforces the deadline."""
        assert self._client is not None
        while True:
            try:
                await self._client.abort_all()
            except DriverError as error:
                self.broke(f"abort failed: {error}")
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_AGAIN_S):
                    await self.entrance.settled()
                return

    async def pause(self) -> None:
        await self._change("pause", SGLang.pause, EngineView.was_paused)

    async def flush(self) -> None:
        await self._change("flush", SGLang.flush, EngineView.was_flushed)

    async def release(self) -> None:
        tags = self.view.tags_in(TagState.MAPPED)

        async def release_and_measure(client: SGLang) -> None:
            before = await self._devices.read()
            await client.release(tags)
            deadline_s = min(FREED_S, self._settings.job.spec.switch.engine_call_seconds)
            freed = await until_freed(
                self._devices, before, of=self._on, mapped_bytes=self._mapped_bytes, deadline_s=deadline_s
            )
            self.freed_bytes = freed
            log(LOG, "memory released", incarnation=self.view.incarnation, freed_bytes=freed or None)

        await self._change("release", release_and_measure, EngineView.was_released, _intent("release", tags=tags))

    async def resume(self, tags: tuple[str, ...]) -> None:
        await self._change(
            "resume",
            lambda client: client.resume(tags),
            lambda view: view.was_resumed(tags),
            _intent("resume", tags=tags),
        )

    async def update(self, version: WeightVersion, *, size_bytes: int) -> None:
        """Load an export of this size into the engine."""
        directory = export_directory(self._settings.directories.weights, version)
        deadline_s = update_deadline_s(self._settings.job.spec.switch, size_bytes)

        checksum: str | None = None

        async def update_and_read_back(client: SGLang) -> None:
            nonlocal checksum
            held, before = self._held, None
            if held is not None and self.view.version is None:  # released meanwhile, it may hold anything
                _, before = await client.checksum()
            await client.update(directory, version, deadline_s=deadline_s)
            if (found := await client.weight_version()) != version:
                raise CallRefused(f"it reports {found} after the update to {version}")
            checksum = await self._checksum(client, version)
            self._require_changes(held, before)

        await self._change(
            "update",
            update_and_read_back,
            lambda view: view.was_updated(version, checksum),
            _intent("update", tags=(WEIGHTS,), version=version),
        )

    async def continue_(self) -> None:
        async def continue_and_look(client: SGLang) -> None:
            await client.continue_()
            if not await client.takes_requests():
                await client.repair()
            if not await client.takes_requests():
                raise CallRefused("it takes no requests after it was continued")
            if self._vocabulary is None:  # an earlier agent started it, or it answered late
                self._vocabulary = await client.vocabulary()

        await self._change("continue", continue_and_look, EngineView.was_continued)

    async def check_probe(self, exported: Manifest) -> None:
        """Compare the engine's log-probabilities with those of the export, if it has any."""
        if (probe := exported.probe) is None:  # by a trainer of the job's own
            log(LOG, "weights not probed", version=str(exported.version), reason="the export has no probe")
            self._set(self.view.agreed())
            return
        is_exact = self._dtype == "float32" and exported.is_float32
        ids = probe.input_ids[: self._context and self._context - 1]  # a beginning of it has the same log-probabilities
        apart: float | None = None

        async def compare(client: SGLang) -> None:
            nonlocal apart
            try:
                found = await client.input_logprobs(ids)
            except DriverError as error:
                raise WeightsDoubted(f"it gives no log-probabilities of the probe: {error}") from error
            trainer = probe.logp[: len(ids) - 1]
            apart = require_agreement(trainer, found, noise_nats=self.view.noise_nats, is_exact=is_exact)
            log(LOG, "probe passed", version=str(exported.version), apart_nats=apart, tokens=len(found))

        await self._change("probe", compare, lambda view: view.agreed(apart))

    async def _change(
        self,
        call: str,
        request: Callable[[SGLang], Awaitable[None]],
        effect: Callable[[EngineView], EngineView],
        intent: Callable[[str], Intent] | None = None,
    ) -> None:
        """Make one call and record its effect. A call not confirmed, for any reason, leaves the engine broken (I6)."""
        client, incarnation, started = self._client, self.view.incarnation, time.monotonic()
        version = self.view.version
        if client is None or incarnation is None:
            return  # it ended since this was chosen: the planner chooses again
        written = intent(incarnation) if intent else None
        if written:
            self._journal.intend(written)
        try:
            await request(client)
        except WeightsDoubted as error:
            checked = (written and written.version) or version
            assert checked is not None, f"{call} is a check of a version"
            self.doubt(checked, f"{call}: {error}", written.tags if written else ())
            return
        except (DriverError, MemoryHeld, RunnerError) as error:
            self.broke(f"{call}: {error}", written.tags if written else ())
            return
        except asyncio.CancelledError:
            self.broke(f"{call} was interrupted", written.tags if written else ())
            raise
        self._metrics.call_seconds.labels(call).observe(time.monotonic() - started)
        if self.view.incarnation == incarnation and self.view.broken is None:
            if written:
                self._journal.confirm(incarnation)
            self._set(effect(self.view))

    # ---------------------------------------------------------------------------------------------------- its view
    def broke(self, reason: str, unknown_tags: Sequence[str] = ()) -> None:
        """Mark this incarnation as broken: the planner has it killed."""
        if not self.view.is_absent and self.view.broken is None:
            self._set(self.view.broke(reason, tuple(unknown_tags)))

    def doubt(self, version: WeightVersion, reason: str, unknown_tags: Sequence[str] = ()) -> None:
        """Record that the engine was not shown to hold the weights it should: it is killed, if it has not ended."""
        if self.view.broken is None:
            self._set(self.view.was_doubted(version, reason, tuple(unknown_tags)))

    def _client_of(self, admin_key: str) -> SGLang:
        return SGLang(
            self._session,
            url=f"http://127.0.0.1:{self._port}",
            admin_key=admin_key,
            call_s=self._settings.job.spec.switch.engine_call_seconds,
        )

    def _start_by(self) -> float:
        return time.monotonic() + self._settings.job.spec.switch.engine_start_seconds

    def _lost(self, reason: str, *, part_of: str | None = None) -> None:
        """Record the loss. part_of: the engine of which the process should have been a part; None: it is known."""
        if self._settings.has_part:
            log(LOG, "part of an engine lost", logging.WARNING, engine=self.name, reason=reason)
            self._failed("EngineLost", reason)
            gone = self.view.gone()
            self._set(gone if part_of is None else replace(gone, part_of=part_of))
            return  # the first pod counts it, once it has ended its own
        self.failures += 1
        wait_s = 0.0 if self.failures == 1 else doubled_s(1.0, self.failures - 2, MAX_BACK_OFF_S)
        self._metrics.replaced.inc()
        told = {"engine": self.name, "reason": reason, "failures": self.failures, "starts_again_in_s": wait_s}
        log(LOG, "engine lost", logging.WARNING, **told)
        again = f" ({self.failures} times since it last served, the next start in {wait_s:.0f} s)" if wait_s else ""
        if self.view.rejected is None:
            self._failed("EngineLost", reason + again)
        else:
            self._failed("WeightsDiffer", self.view.rejected.message)
        self._set(self.view.gone(start_after=time.monotonic() + wait_s))

    def _end_of(self, event: ChildExited) -> str:
        broken = f" ({self.view.broken})" if self.view.broken else ""
        words = last_words(event.tail, was_asked=event.incarnation != self._unasked)
        return f"it ended with code {event.code}{broken}; {words}"

    def _set(self, view: EngineView) -> None:
        self.view = view
        self._changed()


def _new_port() -> int:
    """Return a port for the parts of an engine. Those of two in a row should not meet."""
    return names.ENGINE_RENDEZVOUS_PORT + secrets.randbelow(names.RENDEZVOUS_PORTS)


def _intent(
    call: Literal["release", "resume", "update"], *, tags: tuple[str, ...], version: WeightVersion | None = None
) -> Callable[[str], Intent]:
    """Return a function that makes the intent for an incarnation known only when the call is made."""
    return lambda incarnation: Intent(incarnation=incarnation, call=call, tags=tags, version=version)


def update_deadline_s(switch: Switch, size_bytes: int) -> float:
    """Return the deadline of a weight update: a start reads as many bytes, and has more time than any update needs."""
    needed_s = switch.engine_call_seconds + size_bytes / LEAST_READ_BYTES_S
    return min(needed_s, max(switch.engine_call_seconds, switch.engine_start_seconds))


async def _is_up(client: SGLang) -> bool:
    try:
        return await client.is_up()
    except OutcomeUnknown:
        return False


def _write_config(path: Path, admin_key: str) -> None:
    path.unlink(missing_ok=True)
    path.touch(mode=CONFIG_MODE)
    path.write_text(engine_config(admin_key))


def _since(started: float) -> float:
    return round(time.monotonic() - started, 4)
