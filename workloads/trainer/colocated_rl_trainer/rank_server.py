"""Makes a plain training loop a trainer: the trainer protocol (`colocated_rl_api.trainer_wire`) around six methods.

    serve(MyLoop)

starts the server of this rank, makes `MyLoop(settings)` and calls its methods on the main thread, one at a time, while
`/v1/state` is answered by others. The server owns everything that is the same for all trainers: which request may come
when, that the same request asked twice has one effect, the manifest of an export, the log line of each transition, and
the end of the process when its state is not known any more.

That end is the rule for every failure but two (`Refused`; no space or no access while files are written): the answer
is 500 and the process exits with 1. Peers that wait for this rank in a collective then fail at once instead of
waiting for their deadline, and the group is started again from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import http.server
import logging
import math
import os
import shutil
import signal
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn, Protocol, assert_never

from pydantic import ValidationError

from colocated_rl_api import names
from colocated_rl_api.ladder import WeightVersion
from colocated_rl_api.logs import configure, log
from colocated_rl_api.member_wire import TrainerState, Wire
from colocated_rl_api.trainer_wire import ExportRequest, SaveRequest, TrainerError, TrainerStatus, TrainRequest
from colocated_rl_api.weights import MANIFEST, Probe
from colocated_rl_trainer.manifest import write_manifest
from colocated_rl_trainer.settings import RankSettings, SettingsError

MAX_BODY_BYTES = 64 * 1024
IDLE_CONNECTION_S = 60.0  # an agent's connection that asks nothing is closed
LAST_ANSWERS_S = 2.0  # before the process ends, answers under way may still be written

_LOG = logging.getLogger(__name__)


class Refused(Exception):
    """Raised by a loop that did nothing: its state is what it was, and no peer waits for it in a collective.

    The caller may ask again. Anything else that a method raises ends the process.
    """


class Loop(Protocol):
    """What a person writes. All methods are called on the main thread, never two at a time.

    With several ranks, `load`, `train` and `export` are called on every one of them and may be collective; `onload`,
    `offload` and `save` come when each pod is ready for them and may not wait for peers.
    """

    def load(self) -> int:
        """Join the group and read the newest checkpoint, or the model; return its step (0: the model as it came).

        Leaves the state off the device.
        """

    def onload(self) -> None:
        """Bring the state to the device."""

    def offload(self) -> None:
        """Take the state off the device, until nothing of it can be missed by a rollout engine."""

    def train(self, step: int, shard: Path, mark_dirty: Callable[[], None]) -> Mapping[str, float]:
        """Do step `step` on this rank's shard of its batch (`colocated_rl_api.batch`) and return its metrics.

        Call `mark_dirty` before the first optimizer call: from there on, the step can't be tried again in place.
        """

    def export(self, directory: Path) -> Probe | None:
        """Write the weights and what an engine needs beside them, in Hugging Face format.

        `directory` exists and is empty. Only the rank with `settings.writes_weights` may write; the manifest is added.
        """

    def save(self, step: int, keep: int) -> None:
        """Write a checkpoint of `step`, the last finished one, durably; keep the newest `keep`."""


class OnloadRequest(Wire):
    pass


class OffloadRequest(Wire):
    pass


Request = OnloadRequest | OffloadRequest | TrainRequest | ExportRequest | SaveRequest

ROUTES: Mapping[str, type[Request]] = {
    "/v1/onload": OnloadRequest,
    "/v1/offload": OffloadRequest,
    "/v1/train": TrainRequest,
    "/v1/export": ExportRequest,
    "/v1/save": SaveRequest,
}


def holds(status: TrainerStatus, request: Request) -> bool:
    """Whether the effect that is asked for is there already."""
    match request:
        case OnloadRequest():
            return status.state is TrainerState.ONLOADED
        case OffloadRequest():
            return status.state is TrainerState.OFFLOADED
        case TrainRequest():
            return status.step == request.step
        case ExportRequest():
            return status.exported == request.version and (Path(request.directory) / MANIFEST).is_file()
        case SaveRequest():
            return status.saved is not None and status.saved >= request.step
    assert_never(request)


def conflict(status: TrainerStatus, request: Request) -> TrainerError | None:
    """Why `request` can't be done from here, or None. For a request whose effect does not hold."""
    match request:
        case OnloadRequest() | OffloadRequest():
            return None
        case TrainRequest() | ExportRequest() if status.state is not TrainerState.ONLOADED:
            return _error("NotOnloaded", f"rank {status.rank} is {status.state}: ask for /v1/onload first")
        case TrainRequest() if status.step is None or request.step != status.step + 1:
            return _error("WrongStep", f"rank {status.rank} stands at {status.step}: it can't train {request.step}")
        case ExportRequest() if request.version != (status.step, status.lineage):
            held = f"{status.step}-{status.lineage}"
            return _error("WrongVersion", f"rank {status.rank} holds {held}, not {request.version}")
        case SaveRequest() if request.step != status.step:
            return _error("WrongStep", f"rank {status.rank} stands at {status.step}: it can't save {request.step}")
    return None


class Answer(Exception):
    """A request that is not answered with 200."""

    def __init__(self, code: HTTPStatus, body: TrainerError) -> None:
        super().__init__(body.message)
        self.code = code
        self.body = body


@dataclasses.dataclass(eq=False)
class _Operation:
    request: Request
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    failure: TrainerError | None = None


class Rank:
    """The state of one rank, and the one operation that may be under way.

    `ask` is for the server's threads, everything else for the main thread.
    """

    def __init__(self, *, rank: int, lineage: int, writes_weights: bool) -> None:
        self._writes_weights = writes_weights
        self._status = TrainerStatus(state=TrainerState.STARTING, rank=rank, lineage=lineage)
        self._operation: _Operation | None = None
        self._asking = 0
        self._changed = threading.Condition()

    @property
    def status(self) -> TrainerStatus:
        return self._status  # replaced as a whole, never changed

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Around a request and its answer, so that the process does not end between them."""
        with self._changed:
            self._asking += 1
        try:
            yield
        finally:
            with self._changed:
                self._asking -= 1
                self._changed.notify_all()

    def ask(self, request: Request) -> TrainerStatus:
        """Bring an effect about, or join whoever did so before; returns when it holds. Raises Answer.

        The caller's deadline is the deadline: an operation that is under way can't be called back.
        """
        with self._changed:
            operation = self._operation
            if operation is None or operation.request != request:
                passing = isinstance(request, OnloadRequest | OffloadRequest)  # what is under way may be the contrary
                if holds(self._status, request) and not (passing and operation):
                    return self._status
                if error := self._obstacle(request):
                    raise Answer(HTTPStatus.CONFLICT, error)
                operation = self._operation = _Operation(request)
                self._changed.notify_all()
        operation.done.wait()
        if operation.failure is not None:
            raise Answer(HTTPStatus.INTERNAL_SERVER_ERROR, operation.failure)
        return self._status

    def _obstacle(self, request: Request) -> TrainerError | None:
        if self._status.state is TrainerState.STARTING:
            return _error("Starting", "no checkpoint is loaded yet: ask again later")
        if self._operation is not None:
            under_way = type(self._operation.request).__name__.removesuffix("Request").lower()
            return _error("Busy", f"{under_way} is under way: ask again when it is done")
        return conflict(self._status, request)

    def run(self, make_loop: Callable[[], Loop]) -> NoReturn:
        """Load, then do what is asked, until something fails. Raises whatever made the state unknown."""
        began = time.monotonic()
        loop = make_loop()
        step = loop.load()
        self._set(state=TrainerState.OFFLOADED, step=step, saved=step)
        log(_LOG, "trainer loaded", step=step, took_s=_since(began))
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._operation is not None)
                operation = self._operation
            assert operation is not None
            try:
                self._do(loop, operation.request)
            except Exception as error:
                if not isinstance(error, Refused) or self._status.dirty:
                    operation.failure = _error("Failed", f"{type(error).__name__}: {error}; this rank ends")
                    raise
                if isinstance(operation.request, TrainRequest):
                    self._set(state=TrainerState.ONLOADED)
                operation.failure = _error(type(error).__name__, str(error))
                log(_LOG, "request refused", logging.WARNING, step=self._status.step, reason=str(error))
            finally:
                with self._changed:
                    self._operation = None
                operation.done.set()

    def wait_for_answers(self) -> None:
        """Return when no answer is under way, at the latest after LAST_ANSWERS_S."""
        with self._changed:
            self._changed.wait_for(lambda: self._asking == 0, timeout=LAST_ANSWERS_S)

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
            case TrainRequest():
                self._set(state=TrainerState.TRAINING)
                metrics = loop.train(request.step, Path(request.shard), self._mark_dirty)
                told = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
                self._set(state=TrainerState.ONLOADED, step=request.step, dirty=False, metrics=told)
                log(_LOG, "step trained", step=request.step, took_s=_since(began), metrics=told)
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
                with _refusing("checkpoint", "free space on it or make spec.checkpoint.volume larger"):
                    loop.save(request.step, request.keep)
                self._set(saved=request.step)
                log(_LOG, "checkpoint saved", step=request.step, took_s=_since(began))
            case _:
                assert_never(request)

    def _export(self, loop: Loop, version: WeightVersion, directory: Path) -> None:
        with _refusing("export", "make spec.weightSync.sizeLimit at least twice the size of the weights"):
            if self._writes_weights:
                if directory.exists():  # torn: a whole one would have been the answer
                    shutil.rmtree(directory)
                directory.mkdir(parents=True)
            probe = loop.export(directory)
            if self._writes_weights:
                for file in directory.rglob("*"):  # safetensors makes files for their owner alone
                    file.chmod(file.stat().st_mode | (0o770 if file.is_dir() else 0o660))
                write_manifest(directory, version, probe)

    def _mark_dirty(self) -> None:
        if not self._status.dirty:
            self._set(dirty=True)

    def _set(self, **changes: object) -> None:
        with self._changed:
            self._status = self._status.model_copy(update=changes)


def serve(make_loop: Callable[[RankSettings], Loop], environment: Mapping[str, str] = os.environ) -> NoReturn:
    """Be one trainer rank until the process is ended or its state is unknown. Never returns.

    The socket answers before `make_loop` is called: that is the place for slow imports. SIGTERM ends the process at
    once, whatever it does: exports and checkpoints are whole or torn, never wrong, so there is nothing to tidy.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.umask(0o007)  # agent and trainer have different users and one group
    configure(role="trainer")
    try:
        settings = RankSettings.from_environment(environment)
        job = settings.read_job()
    except SettingsError as error:
        log(_LOG, "trainer can't start", logging.ERROR, reason=str(error))
        _end(2)
    configure(job=job.name, job_uid=job.uid, rank=settings.rank, lineage=settings.lineage)
    if names.ENV_POD_NAME in environment:
        configure(pod=environment[names.ENV_POD_NAME])
    rank = Rank(rank=settings.rank, lineage=settings.lineage, writes_weights=settings.writes_weights)
    server = RankServer(settings.socket, rank)
    threading.Thread(target=server.serve_forever, name="rank-server", daemon=True).start()
    log(_LOG, "trainer started", world_size=settings.world_size, device=settings.device)
    code = 1
    try:
        rank.run(lambda: make_loop(settings))
    except SettingsError as error:
        code = 2
        log(_LOG, "trainer can't start", logging.ERROR, reason=str(error))
    except Exception as error:  # noqa: BLE001 - the last one: whatever a loop raises is told here and ends the process
        told = {"step": rank.status.step, "reason": f"{type(error).__name__}: {error}"}
        _LOG.error("trainer failed, its process ends", told, exc_info=True)
    rank.wait_for_answers()
    _end(code)


class RankServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """HTTP/1.1 with JSON on a Unix socket that the group may use."""

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, path: Path, rank: Rank) -> None:
        self.rank = rank
        path.unlink(missing_ok=True)  # of an earlier process of this rank; the runner has reaped it
        super().__init__(str(path), _Handler)
        path.chmod(0o660)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_CONNECTION_S
    server: RankServer

    def do_GET(self) -> None:
        with self.server.rank.answering():
            if self.path == "/v1/state":
                self._write(HTTPStatus.OK, self.server.rank.status)
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        with self.server.rank.answering():
            try:
                self._write(HTTPStatus.OK, self.server.rank.ask(self._read()))
            except Answer as answer:
                self._write(answer.code, answer.body)

    def _read(self) -> Request:
        size = self.headers.get("Content-Length", "")
        if not size.isdigit() or int(size) > MAX_BODY_BYTES:
            self.close_connection = True  # what follows can't be told from a next request
            raise Answer(HTTPStatus.BAD_REQUEST, _error("BadRequest", f"Content-Length must be 0 to {MAX_BODY_BYTES}"))
        body = self.rfile.read(int(size))
        kind = ROUTES.get(self.path)
        if kind is None:
            raise Answer(HTTPStatus.NOT_FOUND, _error("NotFound", f"no {self.path} here, only {', '.join(ROUTES)}"))
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            raise Answer(HTTPStatus.BAD_REQUEST, _error("BadRequest", f"body of {self.path}: {error}")) from error

    def _write(self, code: HTTPStatus, body: Wire) -> None:
        content = body.model_dump_json(by_alias=True).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses by itself, in the protocol's own words."""
        status = HTTPStatus(code)
        self.close_connection = True
        name = status.phrase.title().replace(" ", "")
        self._write(status, _error(name, message or f"{self.command} {self.path}: {status.description}"))

    def log_message(self, *_: object) -> None:
        """Nothing: transitions are logged where they happen, requests are not."""


@contextlib.contextmanager
def _refusing(what: str, when_full: str) -> Iterator[None]:
    """No space or no access while files are written leaves the trainer's state as it was."""
    try:
        yield
    except OSError as error:
        hint = f": {when_full}" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise Refused(f"{what} not written: {error}{hint}") from error


def _error(error: str, message: str) -> TrainerError:
    return TrainerError(error=error, message=message)


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)


def _end(code: int) -> NoReturn:
    """Without the interpreter's own shutdown, in which a process group waits for peers that may be gone."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
