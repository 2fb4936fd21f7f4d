"""A trainer with one defect: `python broken_trainer.py DEFECT`. Shows that the conformance suite sees it.

One of them is none.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

from colocated_rl_api.weights import Probe
from colocated_rl_api.wire import Wire
from colocated_rl_trainer.protocol import rank_server
from colocated_rl_trainer.protocol.rank import Loop, Refused, Watch
from colocated_rl_trainer.protocol.rank_server import serve
from colocated_rl_trainer.protocol.settings import RankSettings
from fakes.toy_trainer import ToyLoop


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


class DiesOfAFullVolume(ToyLoop):
    def save(self, step: int, keep: int) -> None:
        try:
            super().save(step, keep)
        except OSError as error:
            raise RuntimeError("no checkpoint") from error


DEFECTS: Mapping[str, type[Loop]] = {
    defect.__name__: defect
    for defect in (
        ForgetsItsCheckpoints, LoadsOtherWeights, ForgetsItsMomentum, TakesATornShard, EndsOverATornShard,
        NeverLearns, ReturnsNothing, FailsItsThirdStep, MakesNoProgress, WritesOnlyInItsFirstPod, DiffersByPod,
        WritesInEveryPod, PromisesWhatItHasNotYet, RefusesInWebPages, DiesOfAFullVolume,
    )
}  # fmt: skip

if __name__ == "__main__":
    serve(DEFECTS[sys.argv[1]])
