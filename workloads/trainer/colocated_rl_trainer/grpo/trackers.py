"""Write a step's metrics to trackers, besides the log and the agent's `/metrics`: TensorBoard, Weights & Biases.

Rank 0 alone writes to them. The package does not depend on their libraries: a tracker that is configured without its
library ends the trainer at its start. A later failure costs metrics, never a step. A step that is repeated after a
restart is written again: it replaces the first one in TensorBoard, and Weights & Biases ignores it, as its steps only
rise.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from colocated_rl_api.logs import failure_of, log
from colocated_rl_trainer.protocol.settings import (
    ConfigError,
    RankSettings,
    TrackerName,
    TrainerConfig,
    Unready,
)

TENSORBOARD_FOLDER = "tensorboard"  # in the checkpoints' volume
_PACKAGES: Mapping[TrackerName, str] = {"TensorBoard": "tensorboard", "WandB": "wandb"}

_LOG = logging.getLogger(__name__)


class Tracker(Protocol):
    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raise ConfigError for a tracker whose library is not installed."""
    for name in names:
        if find_spec(_PACKAGES[name]) is None:
            raise ConfigError(
                f"trackers in spec.trainer.config: {name} needs the Python package {_PACKAGES[name]}: install it into "
                f"the image of spec.gpus.image, or leave {name} out"
            )


def make_trackers(settings: RankSettings, config: TrainerConfig, *, step: int) -> Sequence[Tracker]:
    """Make the configured trackers, which continue after `step`; none on a rank other than 0."""
    if settings.rank:
        return ()
    made: list[Tracker] = []
    for name in config.trackers:
        match name:
            case "TensorBoard":
                made.append(TensorBoard(settings.checkpoints / TENSORBOARD_FOLDER, step=step))
            case "WandB":
                made.append(WandB(settings, config))
    return made


class TensorBoard:
    def __init__(self, folder: Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # its library may be absent

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            for name, value in metrics.items():
                self._writer.add_scalar(f"trainer/{name}", value, step)
            self._writer.flush()
        except OSError as error:
            _log_failure("TensorBoard", step, error)


class WandB:
    """Writes as wandb's own variables configure it: WANDB_API_KEY, WANDB_MODE, WANDB_BASE_URL."""

    def __init__(self, settings: RankSettings, config: TrainerConfig) -> None:
        import wandb

        self._failure: type[Exception] = wandb.Error
        job = settings.read_job()
        try:
            self._run: Any = wandb.init(
                project=config.wandb_project,
                name=job.name,
                id=str(job.uid),
                resume="allow",
                config=config.model_dump(by_alias=True),
            )
        except wandb.Error as error:
            raise Unready(f"trackers in spec.trainer.config: WandB can't begin: {error}") from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._run.log({f"trainer/{name}": value for name, value in metrics.items()}, step=step)
        except (OSError, self._failure) as error:
            _log_failure("WandB", step, error)


def _log_failure(name: str, step: int, error: Exception) -> None:
    log(_LOG, "tracker write failed", logging.WARNING, step=step, reason=f"{name}: {failure_of(error)}")
