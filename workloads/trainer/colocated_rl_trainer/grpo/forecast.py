"""Compute the trainer's budget from a job, its options and the config of its model, at the start or long before.

    python3 -m colocated_rl_trainer.grpo.forecast job.yaml path/to/model --device-memory 80Gi

prints what the trainers of the job will take, beside what the manifest gives them. Of the model config.json is enough,
and neither a GPU nor a cluster is asked. Exit code 0 if a step fits as far as is known, 1 if it never does, 2 if job or
model can't be read.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import yaml  # a dependency of transformers, too
from pydantic import ValidationError

from colocated_rl_api.job import ColocatedRLJob, ColocatedRLJobSpec, TrainerMemory
from colocated_rl_api.parts import size_in_bytes
from colocated_rl_api.rungs import Placement
from colocated_rl_trainer.grpo.budget import BYTES, Budget, choose_recomputing, gib
from colocated_rl_trainer.protocol.settings import ConfigError, TrainerConfig
from colocated_rl_trainer.state.rehearsal import Pass, pass_bytes
from colocated_rl_trainer.state.weights import ParameterCounts, count_parameters, read_config

FITS, NEVER_FITS, NOT_READ = 0, 1, 2


@dataclass(frozen=True)
class Forecast:
    """Predicts what a trainer takes. world_size: ranks of the group. Raises ConfigError if it can't train the model."""

    spec: ColocatedRLJobSpec
    config: TrainerConfig
    model: Path
    world_size: int
    on_cpu: bool

    @property
    def ranks_in_pod(self) -> int:
        return min(self.world_size, max(1, self.spec.gpus.count))

    @property
    def is_shared(self) -> bool:
        """Return whether the ranks divide the model among themselves."""
        return self.world_size > 1 and self.config.training_state == "Sharded"

    @property
    def dtype(self) -> torch.dtype:
        return (
            torch.bfloat16 if self.config.computes_in("cpu" if self.on_cpu else "cuda") == "bfloat16" else torch.float32
        )

    @property
    def pass_tokens(self) -> int:
        """Return the most tokens of one pass: those of one long sample, or as many as the batch has."""
        rollout = self.spec.rollout
        samples = -(-rollout.batch_size * rollout.group_size // self.world_size)
        return max(self._longest, min(self.config.micro_batch_tokens, samples * self._longest))

    def choose(self, *, device_has: int | None, host_has: int | None) -> tuple[bool, Budget]:
        """Return whether activations are computed again, and the budget: as the job wants it, or as there is room."""
        return choose_recomputing(
            self.config.activation_checkpointing, self.budget, device_has=device_has, host_has=host_has
        )

    def budget(self, recomputes: bool) -> Budget:
        """Return the budget of a trainer that computes activations again, or keeps them."""
        spec, config, counts = self.spec, self.config, self._counts
        kept = spec.checkpoint.in_memory
        # fewer pods than the job asks for go on: their larger parts may find no room in memory, which ends nothing
        kept_at_most = size_in_bytes(kept.size_limit) if kept and self.world_size < ranks_of(spec) else None
        shares_memory = not spec.placement.shares_weights  # with the engines: exports are in it
        one_pass = pass_bytes(read_config(self.model), replace(self._largest_pass, recomputes=recomputes))
        exported = counts.parameters * self.dtype.itemsize + 4 * (counts.adapters or 0) + counts.bytes_beside
        return Budget.of(
            counts.parameters,
            on_cpu=self.on_cpu,
            shared_by=self._shared_by,
            largest_part=counts.part,
            ranks_in_pod=self.ranks_in_pod,
            with_moments=config.optimizer == "AdamW",
            updates_on_host=config.updates_on_host,
            keeps_reference=spec.reference is not None and not spec.seals_with_scores,
            parameters_leave=TrainerMemory.PARAMETERS in spec.trainer.offload,
            adapters=counts.adapters,
            frozen_bytes=self.dtype.itemsize,
            one_pass=one_pass or 0,
            export_bytes=exported if shares_memory else 0,
            mirrored=self._most_mirrored,
            mirrors_at_most=kept_at_most,
            reference=self._reference_beside,
        )

    @property
    def exports_have(self) -> int:
        """Return the size of the volume of exports that engines and trainer share in memory."""
        return size_in_bytes(self.spec.weight_sync.size_limit)

    @property
    def mirrors_have(self) -> int | None:
        """Return the size of the volume of the state between checkpoints; None without one."""
        kept = self.spec.checkpoint.in_memory
        return size_in_bytes(kept.size_limit) if kept else None

    @cached_property
    def _counts(self) -> ParameterCounts:
        return count_parameters(self.model, self.config.lora, shared_by=self._shared_by)

    @property
    def _shared_by(self) -> int:
        return self.world_size if self.is_shared else 1

    @property
    def _reference_beside(self) -> int:
        """Return the bytes of the model that a reference holds on each device beside engine and trainer."""
        if self.spec.placement is not Placement.RESIDENT or not self.spec.scores_beside_engines:
            return 0
        is_frozen = self.config.lora or self.is_shared  # as `ref_policy.scorer` loads it
        return self._counts.parameters * (self.dtype.itemsize if is_frozen else BYTES)

    @property
    def _longest(self) -> int:
        return self.spec.rollout.max_prompt_tokens + self.spec.rollout.max_response_tokens

    @property
    def _largest_pass(self) -> Pass:
        return Pass(
            tokens=self.pass_tokens,
            longest=self._longest,
            dtype=self.dtype,
            shared_by=self._shared_by,
            float32_head=self.config.fp32_lm_head,
            with_entropy=self.config.entropy_coefficient > 0,
            lora=self.config.lora,
            on_cpu=self.on_cpu,
        )

    @property
    def _most_mirrored(self) -> int:
        """Return how many files with a rank's state the pod's memory has at most, one step beside the one before."""
        if self.spec.checkpoint.in_memory is None:
            return 0
        if not self.is_shared or self.config.lora:  # each rank has the whole state, and the pod keeps it once
            return 2
        return self.ranks_in_pod * (4 if self.ranks_in_pod < self.world_size else 2)


def ranks_of(spec: ColocatedRLJobSpec) -> int:
    """Return the trainer ranks of the whole job: one for each device, or one in each pod without devices."""
    return spec.replicas * max(1, spec.gpus.count)


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    try:
        spec = ColocatedRLJob.read(yaml.safe_load(options.job.read_text())).spec
        config = TrainerConfig.of(spec.trainer.config)
        forecast = Forecast(spec, config, options.model, ranks_of(spec), on_cpu=spec.gpus.count == 0)
        limit = spec.gpus.resources.limits.get("memory")
        has = {"device_has": options.device_memory, "host_has": size_in_bytes(str(limit)) if limit else None}
        recomputes, budget = forecast.choose(**has)
    except (OSError, yaml.YAMLError, TypeError, ValidationError, ConfigError) as error:
        sys.stderr.write(f"{error}\n")
        return NOT_READ
    sys.stdout.write("".join(f"{line}\n" for line in _lines(forecast, budget, recomputes=recomputes, **has)))
    try:
        budget.refuse_what_never_fits(**has, exports_have=forecast.exports_have, mirrors_have=forecast.mirrors_have)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return NEVER_FITS
    return FITS


def _lines(
    forecast: Forecast, budget: Budget, *, recomputes: bool, device_has: int | None, host_has: int | None
) -> Iterator[str]:
    one_pass = f"; a pass takes {gib(budget.one_pass)} of it{', activations computed again' if recomputes else ''}"
    if budget.device is not None:
        yield _beside("each device, at the peak of a step", budget.device, device_has) + one_pass
    if budget.device is not None and budget.reference:
        yield _beside("each device, for the reference beside engine and trainer", budget.reference, None)
    of_ranks = one_pass + ", in each rank" if budget.device is None else ""
    yield _beside("gpus.resources.limits.memory, without engine and programs", budget.host, host_has) + of_ranks
    if budget.exports:
        yield _beside("of that weightSync.sizeLimit", budget.exports, forecast.exports_have)
    if budget.mirrors:
        yield _beside("of that checkpoint.inMemory.sizeLimit", budget.mirrors, forecast.mirrors_have)


def _beside(what: str, takes: int, has: int | None) -> str:
    return f"{what}: {gib(takes)}" + ("" if has is None else f" of {gib(has)}")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m colocated_rl_trainer.grpo.forecast", description="Compute what the trainers of a job take."
    )
    parser.add_argument("job", type=Path, help="manifest of the job")
    parser.add_argument("model", type=Path, help="directory of its model, of which config.json is enough")
    parser.add_argument("--device-memory", type=_size, help="of each device, 80Gi for instance; compared if given")
    return parser.parse_args(arguments)


def _size(text: str) -> int:
    try:
        return size_in_bytes(text)
    except (ArithmeticError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} is no quantity such as 80Gi") from error


if __name__ == "__main__":
    logging.disable()  # what a rehearsal logs
    sys.exit(main(sys.argv[1:]))
