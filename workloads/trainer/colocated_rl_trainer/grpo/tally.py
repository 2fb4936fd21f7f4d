"""Count the metrics of a step on each rank, and add them up over all ranks.

A metric that was not measured is absent, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colocated_rl_api.trainer_wire import MISMATCH
from colocated_rl_trainer.grpo.batch import Shard
from colocated_rl_trainer.grpo.loss import PolicyLoss


@dataclass
class StepTally:
    """Holds one rank's sums of one step."""

    samples: int
    teaching_samples: int
    tokens: int  # to be trained, in the batch
    reward: float
    computed_tokens: int = 0  # once for each pass over them
    loss: float = 0.0  # this rank's part of the loss of each update
    clipped: int = 0
    entropy: float = 0.0
    importance: float = 0.0
    truncated: int = 0  # tokens whose importance ratio was cut off
    masked: int = 0  # tokens whose importance ratio was out of bounds
    kl: float = 0.0  # of policy from reference
    fresh_tokens: int = 0  # made by the weights that the step began with, and computed with them here
    mismatch: float = 0.0  # |trainer - engine| of their log-probabilities, nats
    mismatch_max: float = 0.0
    updates: int = 0  # the same on every rank, like gradient_norm
    gradient_norm: float = 0.0
    skipped: int = 0  # updates whose gradient was not finite; the same on every rank
    pageable_bytes: int = 0  # of the state on the host: what the driver did not pin

    @classmethod
    def of(cls, shard: Shard) -> StepTally:
        return cls(
            samples=shard.samples,
            teaching_samples=int(shard.teaching().sum()),
            tokens=int(shard.loss_tokens.sum()),
            reward=float(shard.reward.sum()),
        )

    def add_tokens(
        self, loss: float, policy: PolicyLoss, entropy: Tensor, importance: Tensor, kept: Tensor, *, cap: float
    ) -> None:
        """Add a step's tokens. kept: bool [tokens], False where the mask of the importance ratio leaves it out."""
        self.computed_tokens += len(entropy)
        self.loss += loss
        self.clipped += int(policy.clipped_tokens)
        self.entropy += float(entropy.detach().sum())
        self.importance += float(importance.sum())
        self.truncated += int((importance >= cap).sum())
        self.masked += int((~kept).sum())

    def add_update(self, gradient_norm: float) -> None:
        self.updates += 1
        self.gradient_norm += gradient_norm

    def add_mismatch(self, shard: Shard, start_logp: Tensor) -> None:
        """Compare log-probabilities with the engine's. Tokens of older weights differ anyway, and are left out.

        start_logp: [T], log-probabilities under the weights that the step began with; NaN where not computed.
        """
        fresh = shard.loss_mask & (shard.token_step == shard.header.step - 1) & ~torch.isnan(start_logp)
        if not bool(fresh.any()):
            return
        apart = (start_logp[fresh] - shard.behaviour_logp[fresh]).abs()
        self.fresh_tokens = len(apart)
        self.mismatch = float(apart.sum())
        self.mismatch_max = float(apart.max())


def metrics(ranks: Sequence[StepTally], *, has_reference: bool = False) -> dict[str, float]:
    """Return the metrics of the whole step from every rank's tally. Means are over tokens unless noted otherwise."""

    def total(name: str) -> float:
        return float(sum(getattr(tally, name) for tally in ranks))

    figures = {name: total(name) for name in ("samples", "teaching_samples", "tokens")}
    figures["updates"], figures["skipped_updates"] = float(ranks[0].updates), float(ranks[0].skipped)
    if samples := total("samples"):
        figures["reward"] = total("reward") / samples
    if updates := ranks[0].updates:
        figures["loss"] = total("loss") / (updates + ranks[0].skipped)
        figures["gradient_norm"] = ranks[0].gradient_norm / updates
    if computed := total("computed_tokens"):
        figures["entropy"] = total("entropy") / computed
        figures["clip_fraction"] = total("clipped") / computed
        figures["importance_mean"] = total("importance") / computed
        figures["importance_truncated"] = total("truncated") / computed
        figures["importance_masked"] = total("masked") / computed
        if has_reference:
            figures["kl"] = total("kl") / computed
    if pageable := total("pageable_bytes"):
        figures["pageable_bytes"] = pageable
    if fresh := total("fresh_tokens"):
        figures[MISMATCH] = total("mismatch") / fresh
        figures["mismatch_max"] = max(tally.mismatch_max for tally in ranks)
    return figures
