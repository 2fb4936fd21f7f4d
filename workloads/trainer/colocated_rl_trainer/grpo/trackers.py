"""Where a step's figures go besides the log and the agent's `/metrics`: TensorBoard, Weights & Biases.

Rank 0 alone tells them. Their libraries are nobody's dependency: one that is configured and absent ends the trainer at
its start. What fails later costs figures, never a step. A step that is done again after a restart is told again: it
takes the place of the first one in TensorBoard, and is passed over by Weights & Biases, whose steps only rise.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from colocated_rl_api.logs import log
from colocated_rl_trainer.protocol.settings import (
    ConfigError,
    RankSettings,
    TrackerName,
    TrainerConfig,
)

TENSORBOARD_FOLDER = "tensorboard"  # in the checkpoints' volume
_PACKAGES: Mapping[TrackerName, str] = {"TensorBoard": "tensorboard", "WandB": "wandb"}

_LOG = logging.getLogger(__name__)


class Tracker(Protocol):
    def tell(self, step: int, figures: Mapping[str, float]) -> None: ...


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raises ConfigError for one whose library is not there."""
    for name in names:
        if find_spec(_PACKAGES[name]) is None:
            raise ConfigError(
                f"trackers in spec.trainer.config: {name} needs the Python package {_PACKAGES[name]}: install it into "
                f"the image of spec.gpus.image, or leave {name} out"
            )


def make_trackers(settings: RankSettings, config: TrainerConfig, *, step: int) -> Sequence[Tracker]:
    """Those that are configured, going on after `step`; none on a rank other than 0."""
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

    def tell(self, step: int, figures: Mapping[str, float]) -> None:
        try:
            for name, value in figures.items():
                self._writer.add_scalar(f"trainer/{name}", value, step)
            self._writer.flush()
        except OSError as error:
            _passed_over("TensorBoard", step, error)


class WandB:
    """Where to, and with which key, say wandb's own variables: WANDB_API_KEY, WANDB_MODE, WANDB_BASE_URL."""

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
            raise ConfigError(f"trackers in spec.trainer.config: WandB can't begin: {error}") from error

    def tell(self, step: int, figures: Mapping[str, float]) -> None:
        try:
            self._run.log({f"trainer/{name}": value for name, value in figures.items()}, step=step)
        except (OSError, self._failure) as error:
            _passed_over("WandB", step, error)


def _passed_over(name: str, step: int, error: Exception) -> None:
    log(_LOG, "figures not told", logging.WARNING, step=step, reason=f"{name}: {error}")
