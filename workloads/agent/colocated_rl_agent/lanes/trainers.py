"""The trainer lane runs the pod's trainer ranks: their processes, their views, and the requests that move them.

Every request goes to all ranks of the pod at once, because training is collective. A rank whose request fails or is not
answered in time is broken, and then all of them are stopped: a rank alone can't rejoin its group. But a checkpoint or
a model for which a volume has no room costs no trainer: the request is repeated until there is room. A rank that died
keeps its lineage and its exit code, and is not started again in that lineage: the operator decides on a new one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from colocated_rl_agent.drivers.base import DriverError, NothingDone, NotRetriable, OutcomeUnknown
from colocated_rl_agent.drivers.trainer import TrainerRank, trainer_environment
from colocated_rl_agent.files.batches import scores_path, shard_path
from colocated_rl_agent.files.exports import export_directory
from colocated_rl_agent.files.journal import Journal
from colocated_rl_agent.lanes.last_words import last_words
from colocated_rl_agent.metrics import AgentMetrics
from colocated_rl_agent.planner.views import RankView, trainer_name
from colocated_rl_agent.runner.devices import MemoryHeld
from colocated_rl_agent.runner.runner_link import (
    KILLED,
    REAP_S,
    ChildExited,
    ChildStatus,
    RunnerLink,
    RunnerRefused,
)
from colocated_rl_agent.settings import AgentSettings
from colocated_rl_api.back_off import doubled_s
from colocated_rl_api.facts import TrainerState
from colocated_rl_api.logs import log
from colocated_rl_api.member_wire import Rendezvous
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.trainer_wire import MISMATCH, Standstill, TrainerStatus
from colocated_rl_api.weights import finished_model

LOG = logging.getLogger(__name__)

START_POLL_S = 0.1  # a trainer has no way to report that it has loaded
NOT_EXECUTABLE = 127  # the exit code that shells use
MOST_METRICS = 32  # logged per step
KEEP_AGAIN_S = 2.0  # after the first refusal of a checkpoint or model, and twice as long after each further one
KEEP_AGAIN_MOST_S = 30.0


class Trainers:
    """The Trainers hold the views of the pod's ranks and make their requests.

    changed: called when a view has changed. failed: called with (reason, message) for the pod's problem. made_good:
    called with the reason that is over. keep_after: end of the back-off after a checkpoint or the model was refused, on
    the clock of `time.monotonic`.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        runner: RunnerLink,
        journal: Journal,
        metrics: AgentMetrics,
        changed: Callable[[], None],
        failed: Callable[[str, str], None],
        made_good: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._runner = runner
        self._journal = journal
        self._metrics = metrics
        self._changed = changed
        self._failed = failed
        self._made_good = made_good
        self._refusals = 0  # in a row, of a checkpoint or the model
        self.keep_after = 0.0
        self._unsaved_since: float | None = None  # when the first step began that no checkpoint holds
        self._exits: dict[str, ChildExited] = {}  # can come before the answer to the start
        self._unasked: set[str] = set()  # incarnations started here that have not loaded a checkpoint yet
        self._stopping = False
        self._one_gone = asyncio.Event()
        spec = settings.job.spec
        self._clients = {
            rank: TrainerRank(
                self._socket(rank),
                progress_s=spec.switch.trainer_progress_seconds,
                must_score=spec.ladder.scores,
                stalls=partial(self._stalled, rank),
            )
            for rank in settings.ranks
        }
        self._views = {rank: RankView(rank) for rank in settings.ranks}

    @property
    def views(self) -> tuple[RankView, ...]:
        return tuple(self._views.values())

    @property
    def exported(self) -> WeightVersion | None:
        """Return the version that every rank of the pod reports as exported, or None."""
        versions = {view.exported for view in self.views}
        return versions.pop() if len(versions) == 1 else None

    @property
    def network_fault(self) -> str:
        """Return what the first rank that reports a slow network says of it; "" if none does."""
        return next((view.network_fault for view in self.views if view.network_fault), "")

    def unsaved(self) -> tuple[int, float] | None:
        """Return the steps that no checkpoint holds, and the seconds since the first began; None: none has loaded."""
        behind = [view.step - (view.saved or 0) for view in self.views if view.is_alive and view.step is not None]
        if not behind:
            return None
        since = self._unsaved_since if max(behind) > 0 else None
        return max(behind), 0.0 if since is None else time.monotonic() - since

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    # ---------------------------------------------------------------------------------------------------- processes
    async def start(self, lineage: int, rendezvous: Rendezvous) -> None:
        settings, spec = self._settings, self._settings.job.spec
        directories = settings.directories
        self._stopping = False
        self._unasked.clear()
        self._refusals, self.keep_after = 0, 0.0
        for local_rank, rank in enumerate(settings.ranks):
            self._socket(rank).unlink(missing_ok=True)
            env = trainer_environment(
                socket=self._socket(rank),
                config=directories.trainer_config,
                job=directories.job_file,
                model=directories.model / spec.model.path,
                checkpoints=directories.checkpoints,
                lineage=lineage,
                rank=rank,
                local_rank=local_rank,
                rendezvous=rendezvous,
                gpus=settings.gpus,
                former=directories.former / spec.restore_from.path if spec.restore_from else None,
                mirrors=directories.mirrors if spec.checkpoint.in_memory else None,
            )
            start_by = time.monotonic() + spec.switch.trainer_start_seconds
            try:
                incarnation = await self._runner.start(trainer_name(rank), spec.trainer.command, env)
            except RunnerRefused as error:
                self._failed("TrainerNotStarted", str(error))
                self._set(RankView(rank).started("", lineage, start_by=start_by).gone(NOT_EXECUTABLE))
                return
            self._unasked.add(incarnation)
            self._journal.trainer_started(rank, incarnation, lineage)
            self._metrics.incarnations.labels(trainer_name(rank)).inc()
            self._set(RankView(rank).started(incarnation, lineage, start_by=start_by))
            if (exited := self._exits.get(incarnation)) is not None:
                self.exited(exited)

    async def wait_until_loaded(self) -> None:
        """Wait until every rank has loaded its checkpoint, or one can't. The caller enforces the deadline."""
        started = time.monotonic()
        while True:
            for view in self.views:
                if view.is_alive and view.step is None:
                    await self._look(view)
            if not all(view.is_alive and view.broken is None for view in self.views):
                return
            if all(view.step is not None for view in self.views):
                break
            await asyncio.sleep(START_POLL_S)
        self._unasked.clear()
        for reason in ("TrainerDied", "TrainerFailed", "TrainerNotStarted", "TrainerNotReaped"):
            self._made_good(reason)
        took_s = time.monotonic() - started
        self._metrics.trainer_load_seconds.observe(took_s)
        log(LOG, "trainers loaded", step=self.views[0].step, took_s=round(took_s, 4))

    async def stop(self, reason: str) -> None:
        """Stop every rank of the pod and wait until all are reaped."""
        level = logging.WARNING if any(view.broken for view in self.views) else logging.INFO
        log(LOG, "trainers stopped", level, reason=reason)
        self._stopping = True
        if any(view.broken for view in self.views):
            self._failed("TrainerFailed", reason)
        for view in self.views:
            if view.is_alive:
                await self._runner.kill(trainer_name(view.rank))
        try:
            async with asyncio.timeout(REAP_S):
                while any(view.is_alive for view in self.views):
                    self._one_gone.clear()
                    await self._one_gone.wait()
        except TimeoutError:
            self._failed("TrainerNotReaped", f"its processes did not end {REAP_S:.0f} s after SIGKILL; killing again")

    def exited(self, event: ChildExited) -> None:
        self._exits[event.incarnation] = event
        view = next((view for view in self.views if view.incarnation == event.incarnation), None)
        if view is None or not view.is_alive:
            return
        del self._exits[event.incarnation]  # another one's may have to wait for the answer to its start
        if not self._stopping or not event.was_killed:  # a broken connection can be seen before the exit
            words = last_words(event.tail, was_asked=event.incarnation not in self._unasked)
            broken = f" ({view.broken})" if view.broken else ""
            self._failed("TrainerDied", f"rank {view.rank} ended with code {event.code}{broken}; {words}")
        log(LOG, "trainer gone", rank=view.rank, lineage=view.lineage, reason=f"code {event.code}")
        self._set(view.gone(event.code))
        self._one_gone.set()

    async def attach(self, children: Mapping[str, ChildStatus]) -> None:
        """Match the views to the runner's report of the ranks, after a restart of either side."""
        started = {record.rank: record for record in self._journal.memory.trainers}
        for rank in self._settings.ranks:
            child, record, view = children.get(trainer_name(rank)), started.get(rank), self._views[rank]
            ended = child.exit if child is not None else None
            if child is not None and child.running:
                if child.incarnation == view.incarnation:
                    continue
                start_by = time.monotonic() + self._settings.job.spec.switch.trainer_start_seconds
                if record is None or record.incarnation != child.incarnation:
                    unknown = RankView(rank, TrainerState.STARTING, child.incarnation, start_by=start_by)
                    self._set(unknown.broke("it is not known to this agent's journal"))
                    continue
                view = RankView(rank).started(child.incarnation, record.lineage, start_by=start_by)
                self._set(view)
                await self._look(view)
                if (exited := self._exits.get(child.incarnation)) is not None:
                    self.exited(exited)
            elif record is not None and record.incarnation != view.incarnation:  # an earlier agent started it
                last = RankView(rank, incarnation=record.incarnation, lineage=record.lineage)
                is_it = ended is not None and ended.incarnation == record.incarnation
                self._set(last.gone(ended.code if ended is not None and is_it else KILLED))
            elif ended is not None and ended.incarnation == view.incarnation:
                self.exited(ended)
            elif view.is_alive:
                self._set(view.gone(KILLED))  # it ended with its container
        self._one_gone.set()

    # ----------------------------------------------------------------------------------------------------- requests
    async def onload(self) -> None:
        await self._ask("onload", lambda rank: self._clients[rank].onload(), lacks=_other_state(TrainerState.ONLOADED))

    async def offload(self, verify: Callable[[], Awaitable[None]]) -> None:
        """Offload all ranks. verify: raises MemoryHeld if the devices still hold too much memory afterwards."""
        await self._ask(
            "offload",
            lambda rank: self._clients[rank].offload(),
            lacks=_other_state(TrainerState.OFFLOADED),
            verify=verify,
        )

    async def score(self, step: int) -> None:
        for view in self.views:
            self._set(view.reported(state=TrainerState.SCORING))
        batches = self._settings.directories.batches
        await self._ask(
            "score",
            lambda rank: self._clients[rank].score(
                step, shard_path(batches, step=step, rank=rank), scores_path(batches, step=step, rank=rank)
            ),
            lacks=lambda status: _other("the newest batch that it scored is", status.scored, step),
        )

    async def train(self, step: int) -> None:
        if self._unsaved_since is None or self.unsaved() == (0, 0.0):  # trainers went back to a checkpoint
            self._unsaved_since = time.monotonic()
        for view in self.views:
            self._set(view.reported(state=TrainerState.TRAINING))
        batches = self._settings.directories.batches
        answers = await self._ask(
            "train",
            lambda rank: self._clients[rank].train(step, shard_path(batches, step=step, rank=rank)),
            lacks=lambda status: _other("it stands at step", status.step, step),
        )
        for rank, status in answers.items():
            figures = dict(list(status.metrics.items())[:MOST_METRICS])
            self._metrics.step_trained(rank, figures)
            log(LOG, "step trained", step=status.step, rank=rank, lineage=status.lineage, metrics=figures)

    async def export(self, version: WeightVersion) -> None:
        directory = export_directory(self._settings.directories.weights, version)
        await self._ask(
            "export",
            lambda rank: self._clients[rank].export(version, directory),
            lacks=lambda status: _other("it has exported", status.exported, version),
        )

    async def save(self, step: int) -> None:
        keep, started = self._settings.job.spec.checkpoint.keep, time.monotonic()
        try:
            await self._ask(
                "save",
                lambda rank: self._clients[rank].save(step, keep=keep),
                lacks=lambda status: (
                    "" if (status.saved or 0) >= step else _other("its newest checkpoint is", status.saved, step)
                ),
                may_wait=True,
            )
        except NothingDone as error:
            self._failed("CheckpointNotWritten", self._put_off(error))
            return
        if any(view.broken is not None for view in self.views):
            return
        self._kept("CheckpointNotWritten")
        self._made_good("StateNotMirrored")
        self._unsaved_since = None
        took_s = time.monotonic() - started
        self._metrics.checkpoint_write_seconds.observe(took_s)
        log(LOG, "checkpoint saved", step=step, took_s=round(took_s, 4))

    async def mirror(self, step: int) -> None:
        """Have the ranks keep the step in memory. Where it can't be kept, the job goes on without."""
        started = time.monotonic()
        answers = await self._ask(
            "mirror",
            lambda rank: self._clients[rank].mirror(step),
            lacks=lambda status: _other("the newest step that it has kept is", status.mirrored, step),
        )
        if faults := [status.mirror_fault for status in answers.values() if status.mirror_fault]:
            self._failed("StateNotMirrored", f"{faults[0]}; without it, a restart goes back to the newest checkpoint")
        elif len(answers) == len(self._views):
            self._made_good("StateNotMirrored")
            took_s = time.monotonic() - started
            self._metrics.mirror_seconds.observe(took_s)
            log(LOG, "state mirrored", step=step, took_s=round(took_s, 4))

    async def finish(self, version: WeightVersion) -> None:
        """Have rank 0 save the job's final model."""
        directories, started = self._settings.directories, time.monotonic()
        export = export_directory(directories.weights, version)
        try:
            status = await self._clients[0].finish(
                version, export, directories.checkpoints / finished_model(version.step)
            )
        except NothingDone as error:
            self._failed("ModelNotWritten", self._put_off(error))
            return
        except DriverError as error:
            self.broke(0, f"finish: {error}")
            return
        self._report(0, status)
        if lacking := _other("it has left", status.finished, version):
            self.broke(0, f"finish: {lacking}")
            return
        self._kept("ModelNotWritten")
        log(LOG, "final model saved", version=str(version), took_s=round(time.monotonic() - started, 4))

    def _stalled(self, rank: int, standstill: Standstill | None) -> None:
        """Report a step that has stood still for far longer than usual, of the rank that is furthest behind."""
        view, moved = self._views[rank], None if standstill is None else standstill.moved
        if view.stalled == moved or not view.is_alive:
            return
        self._set(view.reported(stalled=moved))
        stalled = [each.stalled for each in self.views if each.stalled is not None]
        if not stalled:
            self._made_good("TrainerStalled")
        elif standstill is not None and standstill.moved == min(stalled):
            self._failed(
                "TrainerStalled",
                f"rank {rank} has not got on for {standstill.seconds:.0f} s, and never stood still for more than "
                f"{standstill.usual_s or 0.0:.1f} s in a finished step; it is in {standstill.where}",
            )

    def export_torn(self, version: WeightVersion, reason: str) -> None:
        """Mark all ranks that report this export as broken; ranks with another export go on."""
        for view in self.views:
            if view.exported == version:
                self.broke(view.rank, f"its export can't be used: {reason}")

    def broke(self, rank: int, reason: str) -> None:
        """Mark this rank as broken: the planner has it stopped."""
        view = self._views[rank]
        if view.is_alive and view.broken is None:
            self._set(view.broke(reason))

    async def _ask(
        self,
        what: str,
        request: Callable[[int], Awaitable[TrainerStatus]],
        *,
        lacks: Callable[[TrainerStatus], str],
        verify: Callable[[], Awaitable[None]] | None = None,
        may_wait: bool = False,
    ) -> dict[int, TrainerStatus]:
        """Ask all ranks and return their answers, which become facts together. A rank that did not answer is broken.

        lacks: returns what an answer lacks of the request, or "". Such a rank is broken too: it confirms any request.
        may_wait: a refusal that changed nothing breaks no rank, and NothingDone is raised.
        """
        answers: dict[int, TrainerStatus] = {}
        refusals: list[NothingDone] = []

        async def ask(rank: int) -> None:
            try:
                answers[rank] = await request(rank)
            except DriverError as error:
                if may_wait and isinstance(error, NothingDone):
                    refusals.append(error)
                else:
                    self._refused(rank, f"{what}: {error}", error)

        async with asyncio.TaskGroup() as group:
            for rank in self._views:
                group.create_task(ask(rank), name=f"{what}/{rank}")
        try:
            if verify is not None:
                await verify()
        except MemoryHeld as error:
            for rank in answers:
                self.broke(rank, f"{what}: {error}")
            return {}
        for rank, status in answers.items():
            self._report(rank, status)
            if lacking := lacks(status):
                self.broke(rank, f"{what}: {lacking}")
        if refusals:
            raise refusals[0]
        return {rank: status for rank, status in answers.items() if not lacks(status)}

    def _put_off(self, error: NothingDone) -> str:
        """Set the back-off after a refusal, and return the message for the pod's problem."""
        # in the next try, ranks of other pods wait only this long for those of this pod
        most_s = min(KEEP_AGAIN_MOST_S, self._settings.job.spec.switch.trainer_progress_seconds / 2)
        self.keep_after = time.monotonic() + doubled_s(KEEP_AGAIN_S, self._refusals, most_s)
        self._refusals += 1
        return f"{error}; it is retried, and nothing is lost meanwhile"

    def _kept(self, reason: str) -> None:
        self._refusals, self.keep_after = 0, 0.0
        self._made_good(reason)

    async def _look(self, view: RankView) -> None:
        try:
            self._report(view.rank, await self._clients[view.rank].status())
        except OutcomeUnknown:
            return  # it does not listen yet
        except DriverError as error:
            self._refused(view.rank, str(error), error)

    def _refused(self, rank: int, reason: str, error: DriverError) -> None:
        """Mark a rank as broken by a call; one that would fail again keeps the reason, also once it is gone."""
        if isinstance(error, NotRetriable):
            self._set(self._views[rank].ends_for_good(str(error)))
        self.broke(rank, reason)

    def _report(self, rank: int, status: TrainerStatus) -> None:
        view = self._views[rank]
        if not view.is_alive:
            return
        if (status.rank, status.lineage) != (rank, view.lineage):
            self.broke(
                rank, f"it reports rank {status.rank}, lineage {status.lineage}, and was started as {view.lineage}"
            )
            return
        self._set(
            view.reported(
                state=status.state,
                step=status.step,
                mismatch=status.metrics.get(MISMATCH),
                scored=status.scored,
                dirty=status.dirty,
                exported=status.exported,
                saved=status.saved,
                replay_from=status.replay_from,
                can_mirror=status.can_mirror,
                mirrored=status.mirrored,
                mirror_fault=status.mirror_fault,
                can_finish=status.can_finish,
                finished=status.finished,
                network_fault=status.network_fault,
            )
        )
        if self._unsaved_since is None and (status.step or 0) > (status.saved or 0):
            self._unsaved_since = time.monotonic()  # at the latest: they are an earlier agent's, or were in memory

    def grew(self, rank: int, grown_bytes: int) -> None:
        """Take the host memory that a rank's process has gained since its first switch."""
        if (view := self._views[rank]).is_alive:
            self._set(view.reported(grown_bytes=grown_bytes))

    def _socket(self, rank: int) -> Path:
        return self._settings.directories.sockets / f"{trainer_name(rank)}.sock"

    def _set(self, view: RankView) -> None:
        self._views[view.rank] = view
        self._changed()


def _other(words: str, found: object, wanted: object) -> str:
    return "" if found == wanted else f"it answered as if it were done, and {words} {found}, not {wanted}"


def _other_state(wanted: TrainerState) -> Callable[[TrainerStatus], str]:
    return lambda status: _other("it is", status.state, wanted)
