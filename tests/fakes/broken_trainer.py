"""A trainer with one defect: `python broken_trainer.py DEFECT`. Shows that the conformance suite sees it.

Some of them are none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socketserver
import struct
import sys
import threading
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

from pydantic import ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from colocated_rl_api.trainer_wire import TrainerStatus
from colocated_rl_api.weights import Probe
from colocated_rl_api.wire import Wire
from colocated_rl_trainer.protocol import rank_server
from colocated_rl_trainer.protocol.http_handler import Rejected
from colocated_rl_trainer.protocol.rank import Loop, Rank, Refused, Request, Watch
from colocated_rl_trainer.protocol.rank_server import serve
from colocated_rl_trainer.protocol.settings import RankSettings
from fakes.toy_trainer import ToyLoop

ANSWER_S = 60.0


class ForgetsItsCheckpoints(ToyLoop):
    def load(self) -> int:
        return 0


class LoadsOtherWeights(ToyLoop):
    def load(self) -> int:
        step = super().load()
        self._numbers[0] += step
        return step


class ForgetsItsMomentum(ToyLoop):
    """Its checkpoints hold weights, and nothing of the optimizer."""

    _momentum = 0.0

    def train(self, step: int, shard: Path, watch: Watch) -> Mapping[str, float]:
        figures = super().train(step, shard, watch)
        self._momentum = 0.9 * self._momentum + step
        self._numbers = [number + self._momentum for number in self._numbers]
        return figures


class LosesItsMomentumOffTheDevice(ForgetsItsMomentum):
    """Its checkpoints hold the momentum, and a move leaves it behind."""

    def load(self) -> int:
        step = super().load()
        kept = self._settings.checkpoints / f"{step}-{self._settings.rank}.momentum"
        self._momentum = float(kept.read_text()) if kept.exists() else 0.0
        return step

    def offload(self) -> None:
        self._momentum = 0.0

    def save(self, step: int, keep: int) -> None:
        super().save(step, keep)
        (self._settings.checkpoints / f"{step}-{self._settings.rank}.momentum").write_text(str(self._momentum))


class NeverCopiesBackToTheHost(ToyLoop):
    """It loses what it has trained on the device when that is released."""

    def load(self) -> int:
        step = super().load()
        self._on_host = self._numbers
        return step

    def onload(self) -> None:
        self._numbers = self._on_host


class TakesATornShard(ToyLoop):
    def train(self, step: int, shard: Path, watch: Watch) -> Mapping[str, float]:
        watch.progress()
        watch.mark_dirty()
        self._numbers[0] += step
        return {}


class EndsOverATornShard(ToyLoop):
    """This trainer ends when it reads a torn shard, which the protocol permits."""

    def train(self, step: int, shard: Path, watch: Watch) -> Mapping[str, float]:
        try:
            return super().train(step, shard, watch)
        except Refused as error:
            raise ValueError(str(error)) from error


class NeedsASample(ToyLoop):
    def train(self, step: int, shard: Path, watch: Watch) -> Mapping[str, float]:
        with contextlib.suppress(SafetensorError), safe_open(shard, framework="numpy") as columns:
            columns.get_tensor("reward").max()
        return super().train(step, shard, watch)


class NeverLearns(ToyLoop):
    def train(self, step: int, shard: Path, watch: Watch) -> Mapping[str, float]:
        before = self._numbers
        figures = super().train(step, shard, watch)
        self._numbers = before
        return figures


class ReturnsNothing(ToyLoop):
    def train(self, step: int, shard: Path, watch: Watch) -> Mapping[str, float]:
        super().train(step, shard, watch)
        return None  # type: ignore[return-value]


class FailsItsThirdStep(ToyLoop):
    def train(self, step: int, shard: Path, watch: Watch) -> Mapping[str, float]:
        if step == 3:
            raise ArithmeticError("told to")
        return super().train(step, shard, watch)


class CountsItsFirstStepTooSoon(ToyLoop):
    """It reports the step as finished, and trains it once somebody has seen that."""

    def train(self, step: int, shard: Path, watch: Watch) -> Mapping[str, float]:
        if step == 1 and self._settings.rank == 0:  # the one that is looked at
            assert isinstance(watch, Rank)
            watch._set(step=step)
            report, was_seen = watch.report, threading.Event()

            def reported() -> TrainerStatus:
                was_seen.set()
                return report()

            watch.report = reported  # type: ignore[method-assign]
            was_seen.wait(ANSWER_S)
        return super().train(step, shard, watch)


class AnswersOneRequestAtATime(ToyLoop):
    """Its ranks train together, and none answers another request before its step is done."""

    def __init__(self, settings: RankSettings) -> None:
        super().__init__(settings)
        one_at_a_time = socketserver.BaseServer.process_request
        rank_server.RankServer.process_request = one_at_a_time  # type: ignore[assignment, method-assign]

    def train(self, step: int, shard: Path, watch: Watch) -> Mapping[str, float]:
        meeting = self._settings.checkpoints / f"meeting-{step}"
        with contextlib.suppress(FileExistsError):
            os.mkfifo(meeting)
        with meeting.open("rb" if self._settings.rank else "wb"):  # opened once the other rank opens it
            return super().train(step, shard, watch)


class MakesNoProgress(ToyLoop):
    def train(self, step: int, shard: Path, watch: Watch) -> Mapping[str, float]:
        return super().train(step, shard, _Deaf(watch))


class _Deaf:
    def __init__(self, watch: Watch) -> None:
        self.mark_dirty = watch.mark_dirty

    def progress(self) -> None: ...


class WritesOnlyInItsFirstPod(ToyLoop):
    def export(self, directory: Path) -> Probe | None:
        return super().export(directory) if self._settings.rank == 0 else None


class DiffersByPod(ToyLoop):
    def export(self, directory: Path) -> Probe | None:
        probe = super().export(directory)
        file = directory / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-4] + struct.pack("<f", self._settings.rank))
        return probe


def copy_files(origin: Path, pattern: str, directory: Path) -> None:
    for file in origin.glob(pattern):
        shutil.copy(file, directory)


class ExportsWithoutConfig(ToyLoop):
    """It writes the weights of the model alone."""

    def export(self, directory: Path) -> Probe | None:
        if self._settings.writes_weights:
            copy_files(self._settings.model, "*.safetensors", directory)
        return None


class ExportsItsWrapper(ToyLoop):
    """It trains a model in a wrapper, whose name is the first part of all others."""

    def export(self, directory: Path) -> Probe | None:
        if self._settings.writes_weights:
            copy_files(self._settings.model, "*.json", directory)
            tensors = load_file(self._settings.model / "model.safetensors")
            save_file({f"module.{name}": tensor for name, tensor in tensors.items()}, directory / "model.safetensors")
        return None


class ProbesWithLosses(ToyLoop):
    """Its probe has negative log-probabilities, with the wrong sign."""

    def export(self, directory: Path) -> Probe | None:
        super().export(directory)
        return Probe(input_ids=(1, 2, 3), logp=(2.5, 0.5))


class WritesInEveryPod(ToyLoop):
    def export(self, directory: Path) -> Probe | None:
        if self._settings.local_rank == 0:  # and whatever the job says of the weights
            directory.mkdir(exist_ok=True)
            (directory / "model.safetensors").touch()
        return super().export(directory)


class PromisesWhatItHasNotYet(ToyLoop):
    def replay_from(self) -> int:
        return super().replay_from() + 1


class RefusesInWebPages(ToyLoop):
    """This trainer sends errors as web pages, the default of many web frameworks."""

    def __init__(self, settings: RankSettings) -> None:
        super().__init__(settings)
        rank_server._RankHandler.write_json = _write_page  # type: ignore[method-assign, assignment]


def _write_page(handler: rank_server._RankHandler, code: HTTPStatus, body: Wire) -> None:
    content = b"<html>no</html>" if code >= HTTPStatus.BAD_REQUEST else body.model_dump_json(by_alias=True).encode()
    handler.send_response(code)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


class ReliesOnAllThatAJobGives(ToyLoop):
    """This trainer takes only bodies that are declared as JSON, and reads every column, which the protocol permits."""

    def __init__(self, settings: RankSettings) -> None:
        super().__init__(settings)
        rank_server._RankHandler._read = _read_declared  # type: ignore[assignment, method-assign]

    def train(self, step: int, shard: Path, watch: Watch) -> Mapping[str, float]:
        with contextlib.suppress(SafetensorError), safe_open(shard, framework="numpy") as columns:
            samples, prompts = columns.get_tensor("sample"), columns.get_tensor("prompt_tokens")
            if (samples.dtype, prompts.dtype, len(samples)) != ("int64", "int32", len(prompts)):
                raise ArithmeticError("other columns")
        return super().train(step, shard, watch)


_read = rank_server._RankHandler._read


def _read_declared(handler: rank_server._RankHandler) -> Request:
    if handler.headers.get("Content-Type") != "application/json":
        raise Rejected(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "NotJSON", "the body is not declared as JSON")
    return _read(handler)


class KnowsEveryField(ToyLoop):
    """This trainer takes no field that was added to a request since it was written."""

    def __init__(self, settings: RankSettings) -> None:
        super().__init__(settings)
        strict = {"model_config": ConfigDict(extra="forbid"), "__module__": __name__}
        rank_server.ROUTES = {path: type(kind.__name__, (kind,), strict) for path, kind in rank_server.ROUTES.items()}


class DiesOfAFullVolume(ToyLoop):
    def save(self, step: int, keep: int) -> None:
        try:
            super().save(step, keep)
        except OSError as error:
            raise RuntimeError("no checkpoint") from error


DEFECTS: Mapping[str, type[Loop]] = {
    defect.__name__: defect
    for defect in (
        ForgetsItsCheckpoints, LoadsOtherWeights, ForgetsItsMomentum, LosesItsMomentumOffTheDevice,
        NeverCopiesBackToTheHost, TakesATornShard, EndsOverATornShard, NeedsASample, NeverLearns, ReturnsNothing,
        FailsItsThirdStep, CountsItsFirstStepTooSoon, AnswersOneRequestAtATime, MakesNoProgress,
        WritesOnlyInItsFirstPod, DiffersByPod, ExportsWithoutConfig, ExportsItsWrapper, ProbesWithLosses,
        WritesInEveryPod, PromisesWhatItHasNotYet, RefusesInWebPages, ReliesOnAllThatAJobGives, KnowsEveryField,
        DiesOfAFullVolume,
    )
}  # fmt: skip

if __name__ == "__main__":
    serve(DEFECTS[sys.argv[1]])
