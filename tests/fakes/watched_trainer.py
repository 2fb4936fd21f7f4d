"""The default trainer under watch: it writes each gradient down, and dies by SIGKILL where it is told to.

Ranks are forked from a process that has imported torch already: dozens of them are started in the time of one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from safetensors.torch import save_file

from colocated_rl_api.weights import Digest
from colocated_rl_trainer.grpo.loop import GRPOTrainer
from colocated_rl_trainer.protocol.manifest import Exported
from colocated_rl_trainer.protocol.rank import Watch
from colocated_rl_trainer.protocol.rank_server import serve
from colocated_rl_trainer.protocol.settings import RankSettings, TrainerConfig
from colocated_rl_trainer.state.export import Writers
from colocated_rl_trainer.state.mirror import Mirrors
from colocated_rl_trainer.state.residency import GRADIENTS
from colocated_rl_trainer.state.sharding import whole

PLACES = (
    "load", "loaded", "onload", "onloaded", "score", "scored", "train", "dirty", "trained", "export",
    "exporting", "exported", "offload", "offloaded", "save", "saving", "saved",
)  # fmt: skip
"""In the order of a step: before and after each request, and where a half of it is done."""
OF_MIRRORS = ("writing", "sending", "published", "mirrored")
"""The same of a step that is kept in memory: a rank has done a part of it, of which its peers don't know, or all."""

forking = multiprocessing.get_context("forkserver")
forking.set_forkserver_preload(  # what takes long; nothing of the tests: the server has no path of theirs
    [
        "colocated_rl_trainer.grpo.loop",
        "pytest",
        "torch.distributed.checkpoint.state_dict",
        "transformers.core_model_loading",
        "transformers.models.qwen3.modeling_qwen3",
    ]
)


class WatchedTrainer(GRPOTrainer):
    """Trains as the default trainer, watched.

    die: (rank, place, step), at most once. gradients: a directory, for what stands before each update.
    """

    def __init__(self, settings: RankSettings, *, die: tuple[int, str, int] | None, gradients: Path | None) -> None:
        super().__init__(settings, TrainerConfig.read(settings.config))
        self._rank = settings.rank
        self._die = die
        self._gradients = gradients
        self._at = 0  # step
        self._updates = 0

    def _pass(self, place: str) -> None:
        if self._die == (self._rank, place, self._at):
            os.kill(os.getpid(), signal.SIGKILL)

    def load(self) -> int:
        self._pass("load")
        self._at = super().load()
        self._pass("loaded")
        return self._at

    def onload(self) -> None:
        self._pass("onload")
        super().onload()
        self._pass("onloaded")

    def offload(self) -> None:
        self._pass("offload")
        super().offload()
        self._pass("offloaded")

    def score(self, step: int, path: Path, scores: Path, watch: Watch) -> None:
        self._at = step
        self._pass("score")
        super().score(step, path, scores, watch)
        self._pass("scored")

    def train(self, step: int, path: Path, watch: Watch) -> Mapping[str, float]:
        self._at, self._updates = step, 0
        self._pass("train")
        self._watch = watch
        metrics = super().train(step, path, self)
        self._pass("trained")
        return metrics

    def progress(self) -> None:
        self._watch.progress()

    def mark_dirty(self) -> None:
        self._watch.mark_dirty()
        self._updates += 1
        if self._gradients:
            gradients = {key: whole(part).clone() for key, part in self._state.named(GRADIENTS).items()}
            name = f"step-{self._at}-update-{self._updates}-rank-{self._rank}.safetensors"
            save_file(gradients, self._gradients / name)
        if self._updates == 2:
            self._pass("dirty")  # one update is done, the other isn't

    def export(self, directory: Path) -> Exported | None:
        self._pass("export")
        exported = super().export(directory)
        self._pass("exported")  # without its manifest
        return exported

    def _write_weights(self, directory: Path, writers: Writers) -> Mapping[str, Digest]:
        written = super()._write_weights(directory, writers)
        self._pass("exporting")  # its peers don't know of its files
        return written

    def save(self, step: int, keep: int) -> None:
        self._pass("save")
        super().save(step, keep)
        self._pass("saved")

    def _write_checkpoint(self, directory: Path) -> None:
        super()._write_checkpoint(directory)
        self._pass("saving")

    def mirror(self, step: int) -> None:
        self._at = step
        for method, place in (("_write", "writing"), ("_exchange", "sending"), ("_publish", "published")):
            setattr(self._mirrors, method, self._passing_after(getattr(Mirrors, method), place))
        super().mirror(step)
        self._pass("mirrored")

    def _passing_after(self, method: Callable[..., object], place: str) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            result = method(self._mirrors, *arguments, **named)
            self._pass(place)
            return result

        return call


class ForkedRank:
    """A ForkedRank has what `trainer_process` needs of a process."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, how: int) -> None:
        pid = self._process.pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        return code


def fork(
    environment: Mapping[str, str],
    log: Path,
    *,
    die: tuple[int, str, int] | None = None,
    gradients: Path | None = None,
) -> ForkedRank:
    """Start a rank."""
    process = forking.Process(target=_be, args=(dict(environment), log, die, gradients), daemon=True)
    process.start()
    return ForkedRank(process)


def _be(environment: dict[str, str], log: Path, die: tuple[int, str, int] | None, gradients: Path | None) -> None:
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), sys.stdout.fileno())
        os.dup2(stream.fileno(), sys.stderr.fileno())
    os.environ.update(environment)
    serve(lambda settings: WatchedTrainer(settings, die=die, gradients=gradients), environment)
