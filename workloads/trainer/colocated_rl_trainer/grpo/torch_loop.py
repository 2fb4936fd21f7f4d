"""Make a trainer around one model and one torch optimizer. A person writes only the step.

This module owns everything else that `rank.Loop` asks for: the group of ranks, whose gradients it sums; checkpoints
with the optimizer's state; the moves between device and host; exports with a probe. Every rank holds the whole model in
float32.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.optim import Optimizer
from transformers import PreTrainedModel

from colocated_rl_api.job import TrainerMemory
from colocated_rl_api.names import PromptPosition
from colocated_rl_trainer.grpo.batch import Shard, read_together
from colocated_rl_trainer.protocol.manifest import Exported
from colocated_rl_trainer.protocol.rank import Watch
from colocated_rl_trainer.protocol.settings import ConfigError, RankSettings
from colocated_rl_trainer.state.checkpoint import OPTIMIZER, Checkpoints
from colocated_rl_trainer.state.export import write_model
from colocated_rl_trainer.state.group import Collectives, join_group
from colocated_rl_trainer.state.weights import count_parameters, load_model, probe


class TorchLoop:
    """Subclass it, write `make_optimizer` and `learn`, and `serve` that. The other methods are those of `rank.Loop`."""

    model: PreTrainedModel
    optimizer: Optimizer
    group: Collectives

    def __init__(self, settings: RankSettings) -> None:
        self.settings = settings
        self.device = torch.device(settings.device)
        spec = settings.read_job().spec
        self._progress_s = spec.switch.trainer_progress_seconds
        self._checkpoints = Checkpoints.of(settings)
        self._prompt_position: PromptPosition | None = None  # of the newest batch
        self._model_leaves = TrainerMemory.PARAMETERS in spec.trainer.offload
        self._watch: Watch

    # ---------------------------------------------------------------------------------------------- yours to write
    def make_optimizer(self) -> Optimizer:
        """Return an optimizer of `self.model`, which is on the host."""
        raise NotImplementedError(
            f"{type(self).__name__} has no method make_optimizer: let it return one of self.model"
        )

    def learn(self, batch: Shard) -> Mapping[str, float]:
        """Train on this rank's part of a batch and return its metrics.

        Add to the gradient in whatever portions, with each token's part divided by `batch.header.loss_tokens` (of all
        ranks), then call `update`; again for each minibatch. Every rank must call it as often as the others.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method learn: let it train on the batch")

    # ------------------------------------------------------------------------------------------------- yours to call
    def update(self) -> None:
        """Call the optimizer once with the gradient summed over ranks, and set the gradient to zero."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:  # this rank had nothing to add
                    parameter.grad = torch.zeros_like(parameter)
                self.group.sum_in_place(parameter.grad)
        self._watch.mark_dirty()
        self.optimizer.step()
        self.optimizer.zero_grad()

    # ------------------------------------------------------------------------------------------------- the protocol
    def load(self) -> int:
        """Load the newest checkpoint that rank 0 sees: replicas must begin alike.

        Raises ConfigError if it is of another model or optimizer.
        """
        self.group = join_group(self.settings)
        found = self._checkpoints.newest(self.group)
        self.model = load_model(found.directory if found else self.settings.model)
        self.optimizer = self.make_optimizer()
        if found is None:
            return 0
        of_job, of_checkpoint = (
            count_parameters(directory).parameters for directory in (self.settings.model, found.directory)
        )
        if of_job != of_checkpoint:
            raise ConfigError(
                f"checkpoint {found.directory} is of a model of {of_checkpoint:,} parameters, and spec.model has "
                f"{of_job:,}: name the model that it was trained from"
            )
        state = torch.load(found.directory / OPTIMIZER, map_location="cpu", weights_only=True)
        try:
            self.optimizer.load_state_dict(state)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"checkpoint {found.directory} is of another optimizer: {error}") from error
        return found.step

    def onload(self) -> None:
        self._move_to(self.device)

    def offload(self) -> None:
        self.optimizer.zero_grad()
        self._move_to(torch.device("cpu"), with_model=self._model_leaves)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def train(self, step: int, path: Path, watch: Watch) -> Mapping[str, float]:
        self._watch = watch
        batch, _ = read_together(path, self.group, step=step)
        self._prompt_position = batch.header.prompt_position
        forward = self.model.register_forward_hook(lambda *_: watch.progress())
        try:
            return self.learn(batch)
        finally:
            forward.remove()

    def export(self, directory: Path) -> Exported | None:
        if not self.settings.writes_weights:
            return None
        digests = write_model(self.model, directory, origin=self.settings.model, dtype=torch.float32)
        return Exported(probe(self.model, torch.float32), digests)

    def save(self, step: int, keep: int) -> None:
        self.group.once(
            f"saved step {step}",
            lambda: self._checkpoints.write(
                step, keep=keep, fill=self._write_checkpoint, prompt_position=self._prompt_position
            ),
            within_s=self._progress_s,
        )

    def replay_from(self) -> int:
        return self._checkpoints.oldest()

    def _write_checkpoint(self, directory: Path) -> None:
        write_model(self.model, directory, origin=self.settings.model, dtype=torch.float32)
        state = io.BytesIO()  # written at once: torch raises no OSError for a full volume
        torch.save(self.optimizer.state_dict(), state)
        (directory / OPTIMIZER).write_bytes(state.getbuffer())

    def _move_to(self, device: torch.device, *, with_model: bool = True) -> None:
        if with_model:
            self.model.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():  # counts of calls stay on the host
                    state[name] = value.to(device)
