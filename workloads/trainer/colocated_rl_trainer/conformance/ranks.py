"""Run trainer ranks as real processes, and call them over their sockets as an agent does."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any, Protocol, Self, TypeVar

from colocated_rl_api.facts import TrainerState
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_api.trainer_wire import TrainerEnvironment, TrainerError, TrainerStatus

START_S = 300.0  # importing torch and transformers takes 10 s of a core, a minute where many processes share it
ANSWER_S = 60.0

Answer = TypeVar("Answer")


class UnexpectedStatus(Exception):
    """The answer is not 200."""

    def __init__(self, code: int, error: str, message: str) -> None:
        super().__init__(f"{code} {error}: {message}")
        self.code = code
        self.error = error
        self.message = message


class RankLost(Exception):
    """A rank ended, or did not reach the awaited state in time. The message has its output."""


class Launch(Protocol):
    """Describes a process that was started: the part of `subprocess.Popen` that is needed here."""

    def poll(self) -> int | None: ...
    @property
    def returncode(self) -> int | None: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


Launcher = Callable[[dict[str, str], Path], Launch]


class RankProcess(subprocess.Popen[bytes]):
    """Signals a process together with its children, as in a pod."""

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.killpg(self.pid, sig)


class TrainerProcess:
    """Runs and calls one rank of a trainer."""

    def __init__(self, launch: Launcher, environment: dict[str, str], log: Path) -> None:
        self.socket = Path(environment[TrainerEnvironment.SOCKET])
        self.log = log
        self.process = launch(environment, log)

    def ask(self, path: str, body: Mapping[str, object] | None = None) -> TrainerStatus:
        """Send GET without a body or POST with one.

        Raises UnexpectedStatus for an error, OSError without an answer, ValueError for an answer that can't be read.
        """
        code, content = self.ask_raw(
            "GET" if body is None else "POST", path, json.dumps(body) if body is not None else None
        )
        if code != 200:
            refusal = TrainerError.model_validate(content)
            raise UnexpectedStatus(code, refusal.error, refusal.message)
        return TrainerStatus.model_validate(content)

    def ask_raw(self, method: str, path: str, body: str | None = None) -> tuple[int, Any]:
        """Return status and JSON body of an answer. Raises OSError, and ValueError if it is not JSON."""
        connection = http.client.HTTPConnection("localhost", timeout=ANSWER_S)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(ANSWER_S)
        with contextlib.closing(connection):
            connection.sock.connect(str(self.socket))
            connection.request(method, path, body, {"Content-Type": "application/json"} if body is not None else {})
            try:
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read())
            except http.client.HTTPException as error:
                raise ConnectionResetError(f"{path} was answered in part: the rank has ended") from error

    @property
    def status(self) -> TrainerStatus:
        return self.ask("/v1/state")

    def train(self, step: int, shard: Path) -> TrainerStatus:
        return self.ask("/v1/train", {"step": step, "shard": str(shard)})

    def score(self, step: int, shard: Path) -> TrainerStatus:
        return self.ask("/v1/score", {"step": step, "shard": str(shard), "scores": str(scores_beside(shard))})

    def export(self, version: WeightVersion, directory: Path) -> TrainerStatus:
        return self.ask("/v1/export", {"version": str(version), "directory": str(directory)})

    def finish(self, version: WeightVersion, export: Path, directory: Path) -> TrainerStatus:
        return self.ask("/v1/finish", {"version": str(version), "export": str(export), "directory": str(directory)})

    def save(self, step: int, keep: int = 2) -> TrainerStatus:
        return self.ask("/v1/save", {"step": step, "keep": keep})

    def mirror(self, step: int) -> TrainerStatus:
        return self.ask("/v1/mirror", {"step": step})

    def wait_until(self, holds: Callable[[TrainerStatus], bool], within_s: float = START_S) -> TrainerStatus:
        """Poll the state until `holds`. Raises RankLost if the process ends or the time is over."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RankLost(f"trainer ended with {self.process.returncode}:\n{self.log.read_text()}")
            with contextlib.suppress(FileNotFoundError, ConnectionError):
                try:
                    status = self.status
                except UnexpectedStatus as refused:
                    raise RankLost(
                        f"trainer ends, by its own account for {refused}:\n{self.log.read_text()}"
                    ) from refused
                if holds(status):
                    return status
            time.sleep(0.02)
        raise RankLost(f"trainer did not get there within {within_s} s:\n{self.log.read_text()}")

    def wait_loaded(self) -> TrainerStatus:
        return self.wait_until(lambda status: status.state is not TrainerState.STARTING)

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (line for line in self.log.read_text().splitlines() if line.startswith("{"))
        return [line for line in map(json.loads, lines) if line["event"] == name]

    def end(self, how: signal.Signals = signal.SIGKILL, *, within_s: float = ANSWER_S) -> int:
        """Send a signal and return the exit code. Raises TimeoutError."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"rank at {self.socket} still runs {within_s:.0f} s after {how.name}") from error


@dataclass(frozen=True)
class TrainerKind:
    """Describes a trainer to start: its command, model and config, in a job with a reference or without.

    is_apart: the job's engines have pods of their own, and all pods share a volume of weights.
    """

    name: str
    command: Sequence[str]
    model: Path
    config: Mapping[str, object]
    has_reference: bool = False
    is_apart: bool = False


class TrainerGroup:
    """Runs all ranks of one lineage until the `with` block ends; `checkpoints` outlives it.

    former: checkpoints of another job that this one goes on from. in_one_pod: the ranks share one; otherwise each has
    its own. mirrors: pods keep the state in memory between checkpoints.
    """

    def __init__(
        self,
        kind: TrainerKind,
        folder: Path,
        *,
        size: int,
        lineage: int = 1,
        keep: int = 2,
        device: str = "cpu",
        launch: Launcher | None = None,
        former: Path | None = None,
        in_one_pod: bool = False,
        mirrors: bool = False,
    ) -> None:
        self.kind = kind
        self._in_one_pod = in_one_pod
        self.former = former
        self._mirrors = mirrors
        self._launch = launch or self._run_command
        self.folder = folder
        self.size = size
        self.lineage = lineage
        self.device = device
        self.checkpoints = folder / "checkpoints"
        self.checkpoints.mkdir(exist_ok=True)
        (folder / "trainer.json").write_text(json.dumps(kind.config))
        restores = former is not None
        job = job_file(
            keep=keep, has_reference=kind.has_reference, is_apart=kind.is_apart, restores=restores, mirrors=mirrors
        )
        (folder / "job.json").write_text(json.dumps(job))
        self._sockets = tempfile.TemporaryDirectory(
            prefix="ranks-"
        )  # short: the path of a socket has at most 107 bytes
        port = free_port()
        self.ranks = [self._start(rank, port) for rank in range(size)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _start(self, rank: int, port: int) -> TrainerProcess:
        (self.folder / f"pod-{rank}").mkdir(exist_ok=True)
        variables = {
            TrainerEnvironment.SOCKET: Path(self._sockets.name) / f"{rank}.sock",
            TrainerEnvironment.CONFIG: self.folder / "trainer.json",
            TrainerEnvironment.JOB: self.folder / "job.json",
            TrainerEnvironment.MODEL: self.kind.model,
            TrainerEnvironment.CHECKPOINTS: self.checkpoints,
            **({TrainerEnvironment.FORMER: self.former} if self.former else {}),
            **({TrainerEnvironment.MIRRORS: self._mirrors_of(rank)} if self._mirrors else {}),
            TrainerEnvironment.LINEAGE: self.lineage,
            TrainerEnvironment.RANK: rank,
            TrainerEnvironment.WORLD_SIZE: self.size,
            TrainerEnvironment.LOCAL_RANK: rank if self._in_one_pod else 0,
            TrainerEnvironment.MASTER_ADDR: "127.0.0.1",
            TrainerEnvironment.MASTER_PORT: port,
            TrainerEnvironment.DEVICE: self.device,
        }
        environment = (
            os.environ | {"OMP_NUM_THREADS": "1"} | {str(name): str(value) for name, value in variables.items()}
        )
        return TrainerProcess(self._launch, environment, self.folder / f"rank-{rank}-lineage-{self.lineage}.log")

    def _run_command(self, environment: dict[str, str], log: Path) -> Launch:
        with log.open("ab") as stream:
            return RankProcess(
                self.kind.command, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_loaded(self) -> list[TrainerStatus]:
        return [rank.wait_loaded() for rank in self.ranks]

    def all(self, ask: Callable[[int, TrainerProcess], Answer]) -> list[Answer]:
        """Call every rank at once, as the agents of a group do. Raises the first failure when all have answered."""
        with ThreadPoolExecutor(self.size) as pool:
            asked = [pool.submit(ask, number, rank) for number, rank in enumerate(self.ranks)]
        return [answer.result() for answer in asked]

    def onload(self) -> list[TrainerStatus]:
        return self.all(lambda _, rank: rank.ask("/v1/onload", {}))

    def offload(self) -> list[TrainerStatus]:
        return self.all(lambda _, rank: rank.ask("/v1/offload", {}))

    def score(self, step: int, shards: Sequence[Path]) -> list[TrainerStatus]:
        return self.all(lambda number, rank: rank.score(step, shards[number]))

    def train(self, step: int, shards: Sequence[Path]) -> list[TrainerStatus]:
        """Train as agents do: score the batch first if there is a reference."""
        if self.kind.has_reference and any(rank.status.step != step for rank in self.ranks):
            self.score(step, shards)
        return self.all(lambda number, rank: rank.train(step, shards[number]))

    def export(self, step: int) -> list[Path]:
        """Export on all ranks and return the directory of each one's pod."""
        version = WeightVersion(step, self.lineage)
        folders = [self.export_directory(number, step) for number in range(self.size)]
        self.all(lambda number, rank: rank.export(version, folders[number]))
        return folders

    def export_directory(self, rank: int, step: int) -> Path:
        return self._pod_of(rank) / str(WeightVersion(step, self.lineage))

    def _mirrors_of(self, rank: int) -> Path:
        directory = self._pod_of(rank) / "mirrors"
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _pod_of(self, rank: int) -> Path:
        return self.folder / f"pod-{0 if self._in_one_pod else rank}"

    def save(self, step: int, keep: int = 2) -> list[TrainerStatus]:
        return self.all(lambda _, rank: rank.save(step, keep))

    def mirror(self, step: int) -> list[TrainerStatus]:
        return self.all(lambda _, rank: rank.mirror(step))

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()
        self._sockets.cleanup()


def scores_beside(shard: Path) -> Path:
    return shard.with_suffix(".scores")


def free_port() -> int:
    """Return a port for a server that listens later: the kernel gives none of this range to a connection meanwhile."""
    while True:
        port = SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def job_file(
    *,
    keep: int = 2,
    has_reference: bool = False,
    is_apart: bool = False,
    restores: bool = False,
    mirrors: bool = False,
) -> dict[str, object]:
    rollout = {"prompts": {"reasoningGym": {"name": "chain_sum"}}, "batchSize": 4, "groupSize": 4}
    return {
        "name": "sums",
        "namespace": "default",
        "uid": "00000000-0000-0000-0000-000000000000",
        "created": "2026-01-01T00:00:00Z",
        "spec": {
            "steps": 10,
            "model": {"claim": {"name": "model"}},
            "rollout": {**rollout, "placement": "OwnDevices", "replicas": 1} if is_apart else rollout,
            "switch": {"trainerStartSeconds": 100, "trainerProgressSeconds": 60},
            "checkpoint": {"keep": keep, **({"inMemory": {"sizeLimit": "1Gi"}} if mirrors else {})},
            **({"reference": {}} if has_reference else {}),
            **({"restoreFrom": {"claimName": "former"}} if restores else {}),
        },
    }
