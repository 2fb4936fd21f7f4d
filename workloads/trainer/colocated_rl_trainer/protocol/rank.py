"""Decide which requests to one rank are valid when, and that each has its effect once. The module knows no sockets.

It owns what is the same for all trainers: one operation at a time, on the main thread; a repeated request has one
effect; the manifest of an export, and the copy of the last export that is the job's final model; the log line of each
transition; and when the state is unknown.

The state is unknown after every failure but two (`Refused`; no space or no access while files are written): the answer
is a failure and `Rank.run` raises, so that the process ends. After `Diverged` the answer also says that starting again
does not help. Peers that wait for this rank in a collective then fail at
once instead of waiting for their deadline, and the group is started again from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import math
import operator
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn, Protocol, SupportsIndex, assert_never, runtime_checkable

from colocated_rl_api.facts import TrainerState
from colocated_rl_api.logs import failure_of, log
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.trainer_wire import (
    NOT_RETRIABLE,
    ExportRequest,
    FinishRequest,
    MirrorRequest,
    SaveRequest,
    ScoreRequest,
    TrainerError,
    TrainerStatus,
    TrainRequest,
)
from colocated_rl_api.weights import MANIFEST, Probe
from colocated_rl_api.wire import Wire
from colocated_rl_trainer.protocol.finished import save_final_model
from colocated_rl_trainer.protocol.manifest import Exported, NotAnExport, write_manifest
from colocated_rl_trainer.protocol.pace import Pace

ROOM_FOR_EXPORTS = (
    "make spec.weightSync.sizeLimit, or where engines have pods of their own spec.weightSync.volume.size, at least "
    "twice the size of the weights"
)
CLAIM_FULL = "expand the claim of the checkpoints, or remove from it what no job needs"
ROOM_FOR_MIRRORS = "make spec.checkpoint.inMemory.sizeLimit larger"
LAST_ANSWERS_S = 2.0  # for answers that are being written when the process ends

_LOG = logging.getLogger(__name__)


class Refused(Exception):
    """The loop did nothing: its state is what it was, and no peer waits for it in a collective.

    The caller may ask again. The message reaches the job's status, so it must quote no prompt and no response.
    Any other exception of a loop's method ends the process; its type and place are reported, not its message.
    """


class Diverged(Exception):
    """The step would fail again on the same batch: the job's settings must change, and the message names which.

    Raised on every rank. The process ends, and the job fails unless a rule of its failure policy decides otherwise. The
    message reaches the job's status, so it must quote no prompt and no response.
    """


class NoFigure(TypeError):
    """A method of a loop returned a value of the wrong type. The value is not reported: it may be from a batch."""


class Watch(Protocol):
    """Receives the progress of a step from the loop."""

    def progress(self) -> None:
        """Report that something was done, a micro-batch for instance: the step's deadline counts from here."""

    def mark_dirty(self) -> None:
        """Report that the first optimizer call comes next: the step can't be retried in place any more."""


class Loop(Protocol):
    """Names the methods that a person writes. All are called on the main thread, never two at a time.

    With several ranks, `load`, `train`, `export` and `save` are called on every one of them and may be collective.
    `onload` and `offload` come when each pod is ready for them: no peer may be waited for.
    """

    def load(self) -> int:
        """Join the group, read the newest checkpoint or else the model, and return its step, 0 for the model.

        The state is off the device afterwards.
        """

    def onload(self) -> None:
        """Bring the state to the device."""

    def offload(self) -> None:
        """Take the state off the device: the rollout engine lacks whatever stays. Not called in a resident job."""

    def train(self, step: int, shard: Path, watch: Watch) -> Mapping[str, float]:
        """Do step `step` on this rank's shard of its batch (`colocated_rl_api.batch`) and return its metrics.

        Report the first optimizer call to `watch` before it comes, and progress.
        """

    def export(self, directory: Path) -> Exported | Probe | None:
        """Write the weights and what an engine needs beside them, in Hugging Face format.

        `directory` exists and is empty once the rank with `settings.writes_weights` is in this method; another rank of
        its pod must not write before it knows that. What the first returns counts: the manifest is added afterwards,
        with its probe and digests; files without a digest are hashed then.
        """

    def save(self, step: int, keep: int) -> None:
        """Write a checkpoint of `step`, the last finished one, durably; keep the newest `keep`.

        The state is off the device, or on it in a resident job.
        """

    def replay_from(self) -> int:
        """Return the oldest step that `load` may return from now on: the batches after it are kept.

        Called after `load` and after each `save`. A loop that keeps one checkpoint alone returns its step.
        """


@runtime_checkable
class ScoringLoop(Loop, Protocol):
    """Keeps the reference of a job, too: off the device, except while it scores."""

    def score(self, step: int, shard: Path, scores: Path, watch: Watch) -> None:
        """Compute the reference's log-probabilities, which `train` of the same step will use. May be collective.

        scores: file to write them to, whole or not at all. After a restart the loop reads it again, and uses it if it
        was made from the same bytes.
        """


@runtime_checkable
class MirroringLoop(Loop, Protocol):
    """Keeps the state in memory between checkpoints, too, so that a restart goes on from there."""

    def saved(self) -> int:
        """Return the step of the newest checkpoint. Called after `load`, which may return a later step."""

    def mirror(self, step: int) -> None:
        """Keep the state of `step`, the last finished one, in the memory of pods. May be collective.

        It raises OSError or Refused on every rank or on none, and then nothing has changed.
        """


class OnloadRequest(Wire):
    pass


class OffloadRequest(Wire):
    pass


Request = (
    OnloadRequest
    | OffloadRequest
    | ScoreRequest
    | TrainRequest
    | ExportRequest
    | SaveRequest
    | MirrorRequest
    | FinishRequest
)


def holds(status: TrainerStatus, request: Request) -> bool:
    """Return True if the requested effect is there already."""
    match request:
        case OnloadRequest():
            return status.state is TrainerState.ONLOADED
        case OffloadRequest():
            return status.state is TrainerState.OFFLOADED
        case ScoreRequest():
            return status.scored == request.step
        case TrainRequest():
            return status.step == request.step
        case ExportRequest():
            return status.exported == request.version and (Path(request.directory) / MANIFEST).is_file()
        case SaveRequest():
            return status.saved is not None and status.saved >= request.step
        case MirrorRequest():
            return status.mirrored == request.step
        case FinishRequest():
            return status.finished == request.version and (Path(request.directory) / MANIFEST).is_file()
    assert_never(request)


def conflict(status: TrainerStatus, request: Request, *, must_score: bool = False) -> TrainerError | None:
    """Return why `request` is impossible in this state, or None. Its effect must not hold already.

    must_score: the job has a reference.
    """
    match request:
        case OnloadRequest() | OffloadRequest():
            return None
        case ScoreRequest() if not (status.can_score and must_score):
            return trainer_error("NoReference", "the job has none, or this loop has no `score`")
        case ScoreRequest() | TrainRequest() | ExportRequest() if status.state is not TrainerState.ONLOADED:
            return trainer_error("NotOnloaded", f"rank {status.rank} is {status.state}: ask for /v1/onload first")
        case ScoreRequest() | TrainRequest() if status.step is None or request.step != status.step + 1:
            return trainer_error(
                "WrongStep", f"rank {status.rank} stands at {status.step}: step {request.step} is not next"
            )
        case TrainRequest() if must_score and status.scored != request.step:
            return trainer_error(
                "NotScored", f"the reference has not seen step {request.step}: ask for /v1/score first"
            )
        case ExportRequest() | FinishRequest() if request.version != (status.step, status.lineage):
            held = f"{status.step}-{status.lineage}"
            return trainer_error("WrongVersion", f"rank {status.rank} holds {held}, not {request.version}")
        case SaveRequest() if request.step != status.step:
            return trainer_error(
                "WrongStep", f"rank {status.rank} stands at {status.step}: it can't save {request.step}"
            )
        case MirrorRequest() if not status.can_mirror:
            return trainer_error("NoMirrors", "the job has no spec.checkpoint.inMemory, or this loop has no `mirror`")
        case MirrorRequest() if request.step != status.step:
            return trainer_error(
                "WrongStep", f"rank {status.rank} stands at {status.step}: it can't keep {request.step}"
            )
        case FinishRequest() if status.saved is None or status.saved < request.version.step:
            return trainer_error("NotSaved", f"step {request.version.step} is not durable: ask for /v1/save first")
    return None


class NotDone(Exception):
    """The requested effect does not hold. `code` is the HTTP status, as in `colocated_rl_api.trainer_wire`."""

    def __init__(self, code: HTTPStatus, body: TrainerError) -> None:
        super().__init__(body.message)
        self.code = code
        self.body = body


@dataclasses.dataclass(eq=False)
class _Operation:
    request: Request
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    failure: NotDone | None = None


class Rank:
    """Holds the state of one rank, and the one operation that may be under way.

    The server's threads call `ask`, `answering` and `status`, the main thread everything else. network_fault: returns
    what is wrong with the network to other pods, "" if nothing is known to be.
    """

    def __init__(
        self,
        *,
        rank: int,
        lineage: int,
        writes_weights: bool,
        must_score: bool = False,
        has_mirrors: bool = False,
        network_fault: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writes_weights = writes_weights
        self._must_score = must_score
        self._has_mirrors = has_mirrors
        self._network_fault = network_fault
        self._status = TrainerStatus(state=TrainerState.STARTING, rank=rank, lineage=lineage)
        self._operation: _Operation | None = None
        self._pace = Pace(clock)
        self._worker = threading.get_ident()  # the thread that `run` runs in
        self._asking = 0
        self._last_word: TrainerError | None = None  # why this process ends, and would end again
        self._last_word_told = False
        self._changed = threading.Condition()

    @property
    def status(self) -> TrainerStatus:
        return self._status  # replaced as a whole, never changed

    def report(self) -> TrainerStatus:
        """Return the status, and where the rank stands if what it does has stood still for a while.

        Raises NotDone once the process ends for a reason for which it would end again.
        """
        with self._changed:
            if self._last_word is not None:
                self._last_word_told = True
                raise NotDone(HTTPStatus.INTERNAL_SERVER_ERROR, self._last_word)
            return self._status.model_copy(update={"standstill": self._pace.standstill(self._worker)})

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Keep the process from ending between a request and its answer."""
        with self._changed:
            self._asking += 1
        try:
            yield
        finally:
            with self._changed:
                self._asking -= 1
                self._changed.notify_all()

    def ask(self, request: Request) -> TrainerStatus:
        """Bring an effect about, or join an equal request; return when the effect holds. Raises NotDone.

        The caller's deadline is the only one: an operation that has begun can't be cancelled.
        """
        with self._changed:
            operation = self._operation
            if operation is None or operation.request != request:
                is_move = isinstance(
                    request, OnloadRequest | OffloadRequest
                )  # the running operation may be the contrary
                if holds(self._status, request) and not (is_move and operation):
                    return self._status
                if error := self._obstacle(request):
                    raise NotDone(HTTPStatus.CONFLICT, error)
                operation = self._operation = _Operation(request)
                self._changed.notify_all()
        operation.done.wait()
        if operation.failure is not None:
            raise operation.failure
        return self._status

    def _obstacle(self, request: Request) -> TrainerError | None:
        if self._status.state is TrainerState.STARTING:
            return trainer_error("Starting", "no checkpoint is loaded yet: ask again later")
        if self._operation is not None:
            running = type(self._operation.request).__name__.removesuffix("Request").lower()
            return trainer_error("Busy", f"{running} is under way: ask again when it is done")
        return conflict(self._status, request, must_score=self._must_score)

    def run(self, make_loop: Callable[[], Loop]) -> NoReturn:
        """Load, then execute requests until something fails. Raises whatever made the state unknown."""
        began, self._worker = time.monotonic(), threading.get_ident()
        loop = make_loop()
        step = _step("load", loop.load())
        can_score, replay_from = isinstance(loop, ScoringLoop), _step("replay_from", loop.replay_from())
        saved = _step("saved", loop.saved()) if isinstance(loop, MirroringLoop) else step
        self._look_at_network()
        self._set(
            state=TrainerState.OFFLOADED,
            can_score=can_score,
            can_finish=True,
            can_mirror=self._has_mirrors and isinstance(loop, MirroringLoop),
            step=step,
            saved=saved,
            replay_from=replay_from,
        )
        log(_LOG, "trainer loaded", step=step, took_s=_since(began))
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._operation is not None)
                operation = self._operation
                assert operation is not None
                self._pace.begin(type(operation.request).__name__)
            try:
                self._do(loop, operation.request)
            except Exception as error:
                if not isinstance(error, Refused) or self._status.dirty:
                    if isinstance(error, Diverged):
                        body = trainer_error(NOT_RETRIABLE, str(error))
                    else:
                        body = trainer_error("Failed", f"{failure_of(error)}; this rank ends")
                    operation.failure = NotDone(HTTPStatus.INTERNAL_SERVER_ERROR, body)
                    raise
                if isinstance(operation.request, ScoreRequest | TrainRequest):
                    self._set(state=TrainerState.ONLOADED)
                body = trainer_error(type(error).__name__, str(error))
                operation.failure = NotDone(HTTPStatus.SERVICE_UNAVAILABLE, body)
                log(_LOG, "request refused", logging.WARNING, step=self._status.step, reason=str(error))
            finally:
                with self._changed:
                    self._pace.end(is_done=operation.failure is None)
                    self._operation = None
                operation.done.set()

    def progress(self) -> None:
        """See `Watch.progress`."""
        with self._changed:
            self._pace.progress()
            self._set(progress=self._status.progress + 1)

    def mark_dirty(self) -> None:
        """See `Watch.mark_dirty`."""
        if not self._status.dirty:
            self._set(dirty=True)

    def wait_for_answers(self) -> None:
        """Return when no answer is being written, at the latest after LAST_ANSWERS_S."""
        with self._changed:
            self._changed.wait_for(lambda: self._asking == 0, timeout=LAST_ANSWERS_S)

    def wait_until_told(self, reason: str) -> None:
        """Answer `/v1/state` with why this process ends, and would end again; return once that has been asked for.

        At the latest after LAST_ANSWERS_S. An agent asks several times a second while a trainer starts.
        """
        with self._changed:
            self._last_word = trainer_error(NOT_RETRIABLE, reason)
            self._changed.wait_for(lambda: self._last_word_told and self._asking == 0, timeout=LAST_ANSWERS_S)

    def _do(self, loop: Loop, request: Request) -> None:
        began = time.monotonic()
        match request:
            case OnloadRequest():
                loop.onload()
                self._set(state=TrainerState.ONLOADED)
                log(_LOG, "trainer onloaded", step=self._status.step, took_s=_since(began))
            case OffloadRequest():
                loop.offload()
                self._set(state=TrainerState.OFFLOADED)
                log(_LOG, "trainer offloaded", step=self._status.step, took_s=_since(began))
            case ScoreRequest():
                assert isinstance(loop, ScoringLoop)
                self._set(state=TrainerState.SCORING)
                with _refusing("scores", "give the node more ephemeral storage"):
                    loop.score(request.step, Path(request.shard), Path(request.scores), self)
                self._set(state=TrainerState.ONLOADED, scored=request.step)
                log(_LOG, "batch scored", step=request.step, took_s=_since(began))
            case TrainRequest():
                self._set(state=TrainerState.TRAINING)
                metrics = _metrics(loop.train(request.step, Path(request.shard), self))
                self._set(state=TrainerState.ONLOADED, step=request.step, dirty=False, metrics=metrics)
                self._look_at_network()
                log(_LOG, "step trained", step=request.step, took_s=_since(began), metrics=metrics)
            case ExportRequest():
                self._export(loop, request.version, Path(request.directory))
                self._set(exported=request.version)
                log(
                    _LOG,
                    "weights exported",
                    step=request.version.step,
                    version=str(request.version),
                    took_s=_since(began),
                )
            case SaveRequest():
                with _refusing("checkpoint", CLAIM_FULL):
                    loop.save(request.step, request.keep)
                    self._set(saved=request.step)  # first: it holds on every rank, whatever fails next on this one
                    self._set(replay_from=_step("replay_from", loop.replay_from()))
                log(_LOG, "checkpoint saved", step=request.step, took_s=_since(began))
            case MirrorRequest():
                assert isinstance(loop, MirroringLoop)
                self._mirror(loop, request.step)
            case FinishRequest():
                with _refusing("model", CLAIM_FULL):
                    try:
                        save_final_model(Path(request.export), Path(request.directory), progress=self.progress)
                    except NotAnExport as error:
                        raise Refused(f"model not left: {error}") from error
                self._set(finished=request.version)
                log(
                    _LOG,
                    "final model saved",
                    step=request.version.step,
                    version=str(request.version),
                    took_s=_since(began),
                )
            case _:
                assert_never(request)

    def _look_at_network(self) -> None:
        """Report what is wrong with it. A loop may have its first collective in a step, where NCCL chooses."""
        if (fault := self._network_fault()) != self._status.network_fault:
            self._set(network_fault=fault)
            if fault:
                log(_LOG, "slow network found", logging.WARNING, reason=fault)

    def _mirror(self, loop: MirroringLoop, step: int) -> None:
        """Nobody waits for a mirror that can't be made: the step counts as done, on every rank, with the reason."""
        began, fault = time.monotonic(), ""
        try:
            with _refusing("mirror", ROOM_FOR_MIRRORS):
                loop.mirror(step)
            log(_LOG, "state mirrored", step=step, took_s=_since(began))
        except Refused as error:
            fault = str(error)
            log(_LOG, "state not mirrored", logging.WARNING, step=step, reason=fault)
        self._set(mirrored=step, mirror_fault=fault)

    def _export(self, loop: Loop, version: WeightVersion, directory: Path) -> None:
        if self._writes_weights:  # or this rank ends: peers would wait in `loop.export` for one that refused before it
            if directory.exists():  # torn: a whole one would have answered the request
                shutil.rmtree(directory)
            directory.mkdir(parents=True)
        with _refusing("export", ROOM_FOR_EXPORTS):
            written = loop.export(directory)
            if self._writes_weights:
                for file in directory.rglob("*"):  # safetensors makes files for their owner alone
                    file.chmod(file.stat().st_mode | (0o770 if file.is_dir() else 0o660))
                write_manifest(directory, version, written if isinstance(written, Exported) else Exported(written))

    def _set(self, **changes: object) -> None:
        with self._changed:
            self._status = self._status.model_copy(update=changes)


def _step(method: str, returned: SupportsIndex) -> int:
    """Return as an int what `method` returned, an integer of numpy for instance. Raises NoFigure."""
    try:
        return operator.index(returned)
    except TypeError as error:
        raise NoFigure(f"{method} returned a {type(returned).__name__}, and not a step: an integer") from error


def _metrics(returned: object) -> dict[str, float]:
    """Return the finite numbers that `train` returned, by name. Raises NoFigure."""
    if not isinstance(returned, Mapping):
        raise NoFigure(f"train returned a {type(returned).__name__}, and not figures by name")
    metrics = {}
    for name, value in returned.items():
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError) as error:
            raise NoFigure(f"train returned {name}, a {type(value).__name__}, which is no figure") from error
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


@contextlib.contextmanager
def _refusing(what: str, when_full: str) -> Iterator[None]:
    """Turn OSError into Refused: a file that can't be written leaves the trainer's state as it was."""
    try:
        yield
    except OSError as error:
        hint = f": {when_full}" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise Refused(f"{what} not written: {error}{hint}") from error


def trainer_error(error: str, message: str) -> TrainerError:
    return TrainerError(error=error, message=message)


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)
