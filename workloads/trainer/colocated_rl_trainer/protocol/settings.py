"""Read the settings of a trainer process: its place in the job from the environment, its options from one JSON file.

Everything is read once, before anything else happens. An error is one line that names the variable or the key, the
value and what to write instead. `RankSettings` is for every trainer, `TrainerConfig` for the default one.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from colocated_rl_api.member_wire import JobFile
from colocated_rl_api.trainer_wire import TrainerEnvironment as Variable


class ConfigError(ValueError):
    """The trainer can't start with its settings. The message names what to change."""


class Unready(ConfigError):
    """Something outside the job is not what its settings need: files on a volume, a service.

    Starting again helps once it is, as after an outage. Any other ConfigError ends the job until its settings change.
    """


@dataclass(frozen=True)
class RankSettings:
    """Holds one rank's place in its job, as the agent put it into the environment (`TrainerEnvironment`)."""

    socket: Path
    config: Path
    job: Path
    model: Path
    checkpoints: Path
    lineage: int
    rank: int
    world_size: int
    local_rank: int
    master_address: str
    master_port: int
    device: str
    former: Path | None = None  # checkpoints of a former job, see spec.restoreFrom
    mirrors: Path | None = None  # memory of the pod that outlives processes, see spec.checkpoint.inMemory

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read all settings. Raises ConfigError if a variable is missing or invalid."""
        settings = cls(
            socket=Path(_text(environment, Variable.SOCKET)),
            config=Path(_text(environment, Variable.CONFIG)),
            job=Path(_text(environment, Variable.JOB)),
            model=Path(_text(environment, Variable.MODEL)),
            checkpoints=Path(_text(environment, Variable.CHECKPOINTS)),
            lineage=_count(environment, Variable.LINEAGE),
            rank=_count(environment, Variable.RANK),
            world_size=_count(environment, Variable.WORLD_SIZE),
            local_rank=_count(environment, Variable.LOCAL_RANK),
            master_address=_text(environment, Variable.MASTER_ADDR),
            master_port=_count(environment, Variable.MASTER_PORT),
            device=_text(environment, Variable.DEVICE),
            former=Path(environment[Variable.FORMER]) if environment.get(Variable.FORMER) else None,
            mirrors=Path(environment[Variable.MIRRORS]) if environment.get(Variable.MIRRORS) else None,
        )
        if settings.rank >= settings.world_size:
            raise ConfigError(f"RANK={settings.rank} must be below WORLD_SIZE={settings.world_size}")
        return settings

    def read_job(self) -> JobFile:
        """Read the job that this rank works for. Raises ConfigError."""
        try:
            return JobFile.read(self.job.read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigError(f"{Variable.JOB}={self.job} is not a readable job file: {error}") from error

    @property
    def first_of_pod(self) -> int:
        """Return the rank of the first one in this pod."""
        return self.rank - self.local_rank

    @property
    def spans_pods(self) -> bool:
        """Return whether the ranks of the job are in several pods."""
        return self.world_size > max(1, self.read_job().spec.gpus.count)

    @cached_property
    def pod_writes_weights(self) -> bool:
        """Return whether exports are written by this pod: all do, or rank 0's alone where pods share a volume."""
        return self.first_of_pod == 0 or not self.read_job().spec.placement.shares_weights

    @property
    def writes_weights(self) -> bool:
        """Return whether this rank writes exports, or completes those that all ranks of its pod write."""
        return self.local_rank == 0 and self.pod_writes_weights


KL = Literal["K1", "K2", "K3"]  # estimators: `loss.kl_penalty`
Advantage = Literal["Spread", "Mean", "LeaveOneOut"]  # `loss.group_advantage`
Loss = Literal["PPO", "GSPO", "CISPO"]  # `loss.policy_loss`
Level = Literal["Token", "Sequence"]  # of a ratio
MaskLevel = Literal["Token", "Sequence", "SequenceMean"]  # `loss.importance_mask`
TrackerName = Literal["TensorBoard", "WandB"]
Beta = Annotated[float, Field(ge=0, lt=1)]


NOT_YET: Mapping[str, str] = {  # by a part of the key
    "critic": "there is no critic, advantages are relative to the group.",
    "value": "there is no critic, advantages are relative to the group.",
    "megatron": "there is no helper for Megatron.",
    "parallel": "ranks share a model's state (trainingState) and each computes samples of its own.",
    "quant": "neither training nor rollout is quantized.",
    "cudaipc": "weights reach the engines as files in memory.",
}


class LoraConfig(BaseModel):
    """Holds `spec.trainer.config.lora`: low-rank adapters are trained, in the terms of peft (`state.lora`)."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, frozen=True, extra="forbid")

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False, description="Adapters count alpha / rank times.")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Of the adapters' inputs, while gradients are computed."
    )
    target_modules: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        default=None,
        min_length=1,
        description="Names of linear layers, or their last parts; every one but the head when absent.",
    )


class TrainerConfig(BaseModel):
    """Holds `spec.trainer.config` of the default trainer."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, frozen=True, extra="forbid")

    learning_rate: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    warmup_steps: int = Field(default=0, ge=0, description="Steps over which the learning rate rises to its value.")
    schedule: Literal["Constant", "Linear", "Cosine"] = Field(
        default="Constant", description="Of the learning rate after that: to finalLearningRate at step decaySteps."
    )
    decay_steps: int | None = Field(default=None, ge=1, description="Last step of the schedule.")
    final_learning_rate: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="From that step on.")
    optimizer: Literal["AdamW", "SGD"] = Field(
        default="AdamW", description="SGD, without momentum, keeps no state of its own."
    )
    updates_on_host: bool = Field(
        default=False, description="AdamW's moments stay in host memory, and CPUs compute the update there."
    )
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="Of AdamW.")
    gradient_clip: float = Field(default=1.0, gt=0, description="Greatest norm of the whole gradient.")
    non_finite_gradient: Literal["Fail", "Skip"] = Field(
        default="Fail",
        description="An update whose gradient is not finite ends the trainer, or is left out, with its count in the "
        "metrics (Skip).",
    )
    max_skipped_updates: int = Field(default=10, ge=1, description="In a row; one more ends the trainer.")
    minibatches: int = Field(default=1, ge=1, description="Optimizer calls in one pass over the batch.")
    data_passes: int = Field(default=1, ge=1, description="Passes over the batch.")
    loss: Loss = Field(
        default="PPO",
        description="The ratio is clipped token by token (PPO), as the geometric mean of a sample's (GSPO), or as a "
        "weight of the log-probability, so that no token loses its gradient (CISPO).",
    )
    clip_low: float = Field(default=0.2, gt=0, le=1, description="The ratio is clipped below 1 - clipLow.")
    clip_high: float = Field(default=0.28, gt=0, description="And above 1 + clipHigh.")
    dual_clip: float | None = Field(
        default=3.0,
        gt=1,
        allow_inf_nan=False,
        description="Greatest ratio that counts where the advantage is negative; no bound when null. Not for CISPO.",
    )
    entropy_coefficient: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Of the entropy bonus: entropy is subtracted from the loss."
    )
    importance_cap: float = Field(default=2.0, gt=1, description="Bound of the ratio to the behaviour policy.")
    importance_level: Level = Field(
        default="Token", description="A token has that ratio of its own, or the product over its sample (Sequence)."
    )
    importance_mask: MaskLevel | None = Field(
        default=None,
        description="Tokens are left out of the policy's loss where that ratio is out of bounds, before importanceCap: "
        "of the token (IcePop), of its sample (MIS), or the geometric mean of its sample (SequenceMean).",
    )
    importance_mask_low: float | None = Field(default=None, gt=0, le=1, description="Lower bound of importanceMask.")
    importance_mask_high: float | None = Field(
        default=None, ge=1, allow_inf_nan=False, description="Upper bound of importanceMask."
    )
    kl_coefficient: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Of KL in the loss; needs spec.reference."
    )
    kl_estimator: KL = Field(default="K3", description="Of KL, by one token; K3 is that of GRPO.")
    kl_bias_correction: bool = Field(
        default=False,
        description="KL of a token is weighted with the ratio of policy to behaviour policy, as tokens of older "
        "weights need (DeepSeek-V3.2).",
    )
    max_token_age: int | None = Field(
        default=None, ge=0, description="Tokens that weights of more steps ago have made are not trained."
    )
    bypass: bool = Field(default=False, description="Clip against the behaviour log-probabilities, recompute none.")
    advantage: Advantage = Field(
        default="Spread",
        description="Reward minus the mean of its group, in spreads of the group (GRPO) or as it is (Dr. GRPO), or "
        "minus the mean of the others in its group (LeaveOneOut, RLOO).",
    )
    average: Literal["Tokens", "Sequences", "Limit"] = Field(
        default="Tokens",
        description="The loss is the mean over tokens (DAPO), over samples of their tokens' means (GRPO), or over "
        "samples of their tokens' sums divided by maxResponseTokens (Dr. GRPO).",
    )
    lora: LoraConfig | None = Field(
        default=None, description="Adapters are trained in place of all weights; exports are merged."
    )
    training_state: Literal["Sharded", "Replicated"] = Field(
        default="Sharded",
        description="Parameters, gradients and optimizer state: divided among the ranks (FSDP2), or each has them all.",
    )
    activation_checkpointing: bool | None = Field(
        default=None,
        description="Compute activations again instead of keeping them: less memory, more work. When absent, where "
        "a step that keeps them would take more than 80 % of the memory.",
    )
    micro_batch_tokens: int = Field(default=16_384, ge=1, description="Tokens of one forward pass, padding included.")
    packing: bool = Field(
        default=False, description="Samples stand one after another in one row: nothing is padded, no position wasted."
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="Of the division into minibatches.")
    threads: int | None = Field(default=None, ge=1, description="Of torch on the CPU; its own choice when absent.")
    trackers: tuple[TrackerName, ...] = Field(
        default=(), description="Told of each step's figures, besides log and metrics: TensorBoard, WandB."
    )
    wandb_project: str = Field(default="colocated-rl", min_length=1, description="Of Weights & Biases.")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="Of the computation and of exports: bfloat16 on GPUs and float32 on CPUs when absent. Parameters "
        "and optimizer state are float32.",
    )

    fp32_lm_head: bool = Field(
        default=False,
        description="Compute logits in float32 from bfloat16 weights, as engines with --enable-fp32-lm-head do.",
    )

    def computes_in(self, device: str) -> Literal["float32", "bfloat16"]:
        """Return the dtype of the computation on `device`, as torch names it.

        An engine converts float32 exports to float16, which overflows in some models.
        """
        return self.dtype or ("float32" if device.startswith("cpu") else "bfloat16")

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of `step`, after warm-up and schedule."""
        if step <= self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        if self.decay_steps is None:
            return self.learning_rate
        done = min(1.0, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        left = 1 - done if self.schedule == "Linear" else (1 + math.cos(math.pi * done)) / 2
        return self.final_learning_rate + left * (self.learning_rate - self.final_learning_rate)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.schedule == "Constant") != (self.decay_steps is None):
            raise _contradiction("decaySteps sets when a Linear or Cosine schedule ends: set both or none")
        if self.schedule == "Constant" and self.final_learning_rate:
            raise _contradiction("finalLearningRate is where a Linear or Cosine schedule ends: set schedule too")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise _contradiction(f"decaySteps must be after warmupSteps, {self.warmup_steps}")
        if self.optimizer == "SGD" and self.updates_on_host:
            raise _contradiction("updatesOnHost is for AdamW's moments, and SGD has none: leave it out")
        if self.optimizer == "SGD" and "betas" in self.model_fields_set:
            raise _contradiction("betas are AdamW's: SGD here has no momentum")
        if self.non_finite_gradient == "Fail" and "max_skipped_updates" in self.model_fields_set:
            raise _contradiction("maxSkippedUpdates is of nonFiniteGradient Skip: set that too")
        self._loss_fits_together()
        if "WandB" not in self.trackers and "wandb_project" in self.model_fields_set:
            raise _contradiction("wandbProject is of Weights & Biases: add WandB to trackers")
        return self

    def _loss_fits_together(self) -> None:
        written = self.model_fields_set
        if self.loss == "GSPO" and self.average != "Sequences":
            raise _contradiction("loss GSPO has one ratio for a sample, which counts once: set average to Sequences")
        if self.loss == "CISPO":
            if "dual_clip" in written and self.dual_clip is not None:
                raise _contradiction(
                    "dualClip bounds the ratio of PPO and GSPO, and CISPO's is clipped already: leave it out"
                )
        elif self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise _contradiction(f"dualClip is {self.dual_clip}, and must be above 1 + clipHigh, or null for no bound")
        bounds = (self.importance_mask_low, self.importance_mask_high)
        if (self.importance_mask is None) != (bounds == (None, None)) or (None in bounds and bounds != (None, None)):
            raise _contradiction("importanceMask needs importanceMaskLow and importanceMaskHigh: set all three or none")
        has_ratio = self.importance_mask or self.importance_level == "Sequence" or "importance_cap" in written
        if self.bypass and has_ratio:
            raise _contradiction(
                "bypass clips against the behaviour policy and has no other ratio to it: leave importanceMask, "
                "importanceLevel and importanceCap out"
            )
        if self.kl_bias_correction and not self.kl_coefficient:
            raise _contradiction("klBiasCorrection corrects the KL in the loss: set klCoefficient too")
        if self.kl_bias_correction and self.importance_level == "Sequence":
            raise _contradiction("klBiasCorrection weights each token's own KL: leave importanceLevel out")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the JSON file. Raises ConfigError."""
        try:
            written = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"trainer config {path} is not readable JSON: {error}") from error
        if not isinstance(written, dict):
            raise ConfigError(f"trainer config {path} must be an object, is {type(written).__name__}")
        return cls.of(written)

    @classmethod
    def of(cls, written: Mapping[str, object]) -> Self:
        """Return what spec.trainer.config has. Raises ConfigError, which names each wrong key."""
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for key in written:
            if key not in known:
                for part, what in NOT_YET.items():
                    if part in key.lower():
                        raise ConfigError(
                            f"{key} in spec.trainer.config: {what} Not supported yet: leave it out, or bring a trainer "
                            "of your own (spec.trainer.command)"
                        )
                near = difflib.get_close_matches(key, known, n=1)
                hint = f", did you mean {near[0]}?" if near else ""
                raise ConfigError(f"unknown key {key} in spec.trainer.config{hint} (known: {', '.join(known)})")
        try:
            return cls.model_validate(written)
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(map(str, item['loc']))}: {item['msg']}, is {item['input']!r}"
                if item["loc"]
                else item["msg"]
                for item in error.errors()
            )
            raise ConfigError(f"spec.trainer.config: {wrong}") from error


def _contradiction(message: str) -> PydanticCustomError:
    return PydanticCustomError("contradiction", "{message}", {"message": message})


def _text(environment: Mapping[str, str], variable: Variable) -> str:
    value = environment.get(variable, "")
    if not value:
        raise ConfigError(f"{variable} is not set: trainers are started by the agent of their pod")
    return value


def _count(environment: Mapping[str, str], variable: Variable) -> int:
    value = _text(environment, variable)
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(f"{variable}={value} must be a whole number, 0 or more")
    return int(value)
