"""Serve the protocol of `colocated_rl_api.trainer_wire`, which makes a plain training loop a trainer.

    serve(MyLoop)

starts the server of this rank, makes `MyLoop(settings)` and calls its methods on the main thread, one at a time. Other
threads answer `/v1/state`. `rank.Loop` documents the methods and what they may rely on.
"""

from __future__ import annotations

import logging
import os
import signal
import socketserver
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from colocated_rl_api import descriptors, names
from colocated_rl_api.logs import configure, failure_of, log
from colocated_rl_api.trainer_wire import (
    ExportRequest,
    FinishRequest,
    MirrorRequest,
    SaveRequest,
    ScoreRequest,
    TrainerError,
    TrainerStatus,
    TrainRequest,
)
from colocated_rl_trainer.protocol.http_handler import ConnectionThreads, JSONHandler, Rejected
from colocated_rl_trainer.protocol.network import log_choice, network_fault
from colocated_rl_trainer.protocol.rank import (
    Loop,
    NotDone,
    OffloadRequest,
    OnloadRequest,
    Rank,
    Request,
)
from colocated_rl_trainer.protocol.settings import ConfigError, RankSettings, Unready

MAX_BODY_BYTES = 64 * 1024
IDLE_CONNECTION_S = 60.0  # a connection without a request is closed then

ROUTES: Mapping[str, type[Request]] = {
    "/v1/onload": OnloadRequest,
    "/v1/offload": OffloadRequest,
    "/v1/score": ScoreRequest,
    "/v1/train": TrainRequest,
    "/v1/export": ExportRequest,
    "/v1/save": SaveRequest,
    "/v1/mirror": MirrorRequest,
    "/v1/finish": FinishRequest,
}

_LOG = logging.getLogger(__name__)


def serve(make_loop: Callable[[RankSettings], Loop], environment: Mapping[str, str] = os.environ) -> NoReturn:
    """Run one trainer rank until the process is ended or its state is unknown. Never returns.

    The socket answers before `make_loop` is called: slow imports belong there. SIGTERM ends the process at once,
    whatever it does: exports and checkpoints are whole or torn, never wrong, so nothing needs cleaning up.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.umask(0o007)  # agent and trainer have different users and one group
    configure(role="trainer")
    descriptors.raise_limit()
    try:
        settings = RankSettings.from_environment(environment)
        job = settings.read_job()
    except ConfigError as error:
        _end_before_start(str(error))
    configure(job=job.name, job_uid=job.uid, rank=settings.rank, lineage=settings.lineage)
    if names.ENV_POD_NAME in environment:
        configure(pod=environment[names.ENV_POD_NAME])
    rank = Rank(
        rank=settings.rank,
        lineage=settings.lineage,
        writes_weights=settings.writes_weights,
        must_score=job.spec.ladder.scores,
        has_mirrors=settings.mirrors is not None,
        network_fault=watched_network(settings, os.environ),
    )
    try:
        server = RankServer(settings.socket, rank)
    except OSError as error:
        _end_before_start(f"no socket at {settings.socket}: {error}")
    threading.Thread(target=server.serve_forever, name="rank-server", daemon=True).start()
    log(_LOG, "trainer started", world_size=settings.world_size, device=settings.device)
    try:
        rank.run(lambda: make_loop(settings))
    except ConfigError as error:
        if not isinstance(error, Unready):
            rank.wait_until_told(str(error))
        _end_before_start(str(error))
    except Exception as error:  # noqa: BLE001 - the outermost: whatever a loop raises is logged here and ends the process
        fields = {"step": rank.status.step, "reason": failure_of(error)}
        _LOG.error("trainer failed, its process ends", fields, exc_info=True)
    rank.wait_for_answers()
    _end(1)


def watched_network(settings: RankSettings, environment: MutableMapping[str, str]) -> Callable[[], str]:
    """Return what tells the fault of the network, for the first rank of each pod that NCCL connects with others.

    environment: of this process, in which NCCL is told where to log.
    """
    if settings.local_rank > 0 or not settings.device.startswith("cuda") or not settings.spans_pods:
        return lambda: ""
    log = settings.socket.with_suffix(".nccl")
    log_choice(log, environment)
    return partial(network_fault, log, environment)


class RankServer(ConnectionThreads, socketserver.UnixStreamServer):
    """Serves HTTP/1.1 with JSON on a Unix socket that the group may use."""

    request_queue_size = 16

    def __init__(self, path: Path, rank: Rank) -> None:
        self.rank = rank
        path.unlink(missing_ok=True)  # left by an earlier process of this rank, which the runner has reaped
        super().__init__(str(path), _RankHandler)
        path.chmod(0o660)


class _RankHandler(JSONHandler):
    error_type = TrainerError
    timeout = IDLE_CONNECTION_S
    server: RankServer

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        with self.server.rank.answering():
            if self.path == "/v1/state":
                self._answer(self.server.rank.report)
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        with self.server.rank.answering():
            self._answer(lambda: self.server.rank.ask(self._read()))

    def _answer(self, do: Callable[[], TrainerStatus]) -> None:
        try:
            self.write_json(HTTPStatus.OK, do())
        except NotDone as refusal:
            self.write_json(refusal.code, refusal.body)
        except Rejected as rejected:
            self.reject(rejected)

    def _read(self) -> Request:
        body = self.read_body(limit_bytes=MAX_BODY_BYTES)
        kind = ROUTES.get(self.path)
        if kind is None:
            raise Rejected(HTTPStatus.NOT_FOUND, "NotFound", f"no {self.path} here, only {', '.join(ROUTES)}")
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            raise Rejected(
                HTTPStatus.BAD_REQUEST, "BadRequest", f"body of {self.path}: {_wrong_fields(error)}"
            ) from error


def _wrong_fields(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found)


def _end_before_start(reason: str) -> NoReturn:
    """End with exit code 2."""
    log(_LOG, "trainer start failed", logging.ERROR, reason=reason)
    _end(2)


def _end(code: int) -> NoReturn:
    """Skip the interpreter's own shutdown, in which a process group waits for peers that may be gone."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
