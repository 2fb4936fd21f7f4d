"""Compute the loss of GRPO on tokens that older weights may have made. All functions are pure functions of tensors.

Three policies meet in it: the *policy* is what is being trained; the *proximal* policy is what the step began with,
against which the ratio is clipped; the *behaviour* policy sampled the token, one or more steps ago, in another program.
The ratio of policy to proximal is clipped, the ratio of proximal to behaviour corrects for age and is only truncated,
never differentiated: decoupled as in Hilton et al. 2021 (Batch size-invariance for policy optimization). A fourth,
the *reference*, is frozen: the policy may be held near to it by an estimate of its KL divergence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colocated_rl_trainer.protocol.settings import KL, Advantage, Level, Loss, MaskLevel

ADVANTAGE_EPSILON = 1e-4  # added to a group's standard deviation, as the GRPO implementations do
SAME_REWARD = 1e-6  # a spread below this is rounding
RATIO_LOG_BOUND = 20.0  # nats either way; beyond it the clipped loss of a token is finite, but its gradient is 0 * inf


class LengthMismatch(ValueError):
    """Tensors that belong to the same tokens differ in length: padding one would train on wrong tokens (H27)."""


@dataclass(frozen=True)
class PolicyLoss:
    """Holds sums over tokens; the caller divides by counts of all ranks, so that no result depends on the split."""

    total: Tensor  # scalar, carries the gradient
    clipped_tokens: Tensor  # scalar: tokens whose gradient the clip took away


def group_advantage(
    reward: Tensor, group_mean: Tensor, group_std: Tensor, group_count: Tensor, *, kind: Advantage = "Spread"
) -> Tensor:
    """Compute how much better a sample is than its group: [samples] each.

    kind: in spreads of the group (`Spread`), as it is (`Mean`), or than the mean of the others alone (`LeaveOneOut`).
    group_std: of the group as a population. The spread is that of a sample, divided by count - 1, as everywhere else.
    Returns exactly 0 where all rewards of a group are equal: such a sample teaches nothing and need not be computed.
    Sources: GRPO (DeepSeekMath); Liu et al. 2025 (Dr. GRPO); Ahmadian et al. 2024 (RLOO).
    """
    _same_length(reward, group_mean, group_std, group_count)
    advantage = reward - group_mean
    of_sample = group_count / (group_count - 1).clamp(min=1)
    match kind:
        case "Spread":
            advantage = advantage / (group_std * of_sample.sqrt() + ADVANTAGE_EPSILON)
        case "LeaveOneOut":
            advantage = advantage * of_sample
        case "Mean":
            pass
    return torch.where(group_std > SAME_REWARD, advantage, torch.zeros_like(advantage))


def importance_ratio(
    proximal_logp: Tensor,
    behaviour_logp: Tensor,
    sample: Tensor | None = None,
    *,
    cap: float,
    level: Level = "Token",
) -> Tensor:
    """Compute the truncated ratio of proximal to behaviour policy, per token.

    proximal_logp, behaviour_logp: [tokens] float32, nats; the second as the engine reported it with the token.
    sample: int64 [tokens], which sample each token is of, all tokens of a sample among them; only for level `Sequence`,
    where a token gets the ratio of its whole sample, the product of those of its tokens.
    cap: upper bound, above 1. Returns [tokens], detached.
    Raises LengthMismatch. Source: Espeholt et al. 2018 (IMPALA), truncated importance weights.
    """
    _same_length(proximal_logp, behaviour_logp)
    apart = (proximal_logp - behaviour_logp).detach()
    if level == "Sequence":
        apart = _of_sample(apart, sample, mean=False)
    return apart.exp().clamp(max=cap)


def importance_mask(
    proximal_logp: Tensor,
    behaviour_logp: Tensor,
    sample: Tensor | None = None,
    *,
    level: MaskLevel,
    low: float,
    high: float,
) -> Tensor:
    """Return which tokens have a ratio of proximal to behaviour policy within [low, high]: bool [tokens].

    The ratio is that of the token, of its whole sample (the product of the tokens' ratios), or the geometric mean of
    these over the sample, which does not depend on its length. Arguments as of `importance_ratio`.
    Raises LengthMismatch. Sources: Ling Team 2025 (IcePop) by token; Liu et al. 2025 (When speed kills stability:
    masked importance sampling) by sample; the geometric mean: rejection sampling in verl.
    """
    _same_length(proximal_logp, behaviour_logp)
    apart = (proximal_logp - behaviour_logp).detach()
    if level != "Token":
        apart = _of_sample(apart, sample, mean=level == "SequenceMean")
    ratio = apart.exp()
    return (ratio >= low) & (ratio <= high)


def policy_loss(
    policy_logp: Tensor,
    proximal_logp: Tensor,
    advantage: Tensor,
    importance: Tensor,
    weight: Tensor | None = None,
    sample: Tensor | None = None,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    loss: Loss = "PPO",
) -> PolicyLoss:
    """Compute the clipped surrogate, with a bound for each side, times the importance ratio; summed over tokens.

    All [tokens]; only `policy_logp` is differentiated. The ratio is clipped to [1 - clip_low, 1 + clip_high].
    PPO has a ratio for each token. GSPO's is the geometric mean over the sample. CISPO clips the ratio as a weight of
    the log-probability, without a gradient of its own: no token is lost to the clip, and `clipped_tokens` counts those
    whose weight it changed.
    weight: of each token in the sum; 1 when absent. sample: as of `importance_ratio`; only for GSPO.
    dual_clip: greatest ratio that counts where the advantage is negative, above 1 + clip_high. Not of CISPO.
    Raises LengthMismatch. Sources: Schulman et al. 2017 (PPO); Yu et al. 2025 (DAPO) for the two bounds; Ye et al. 2020
    (Mastering complex control in MOBA games) for the dual clip; Zheng et al. 2025 (GSPO); MiniMax 2025 (CISPO).
    """
    _same_length(policy_logp, proximal_logp, advantage, importance)
    apart = policy_logp - proximal_logp.detach()
    if loss == "GSPO":
        apart = _of_sample(apart, sample, mean=True)
    ratio = apart.clamp(-RATIO_LOG_BOUND, RATIO_LOG_BOUND).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    if loss == "CISPO":
        is_clipped = clipped_ratio != ratio
        surrogate = clipped_ratio.detach() * advantage * policy_logp
    else:
        free, clipped = ratio * advantage, clipped_ratio * advantage
        is_clipped = clipped < free
        surrogate = torch.minimum(free, clipped)
        if dual_clip is not None:
            least = dual_clip * advantage.clamp(max=0)  # no bound where both are above 0
            is_clipped = is_clipped | (surrogate < least)
            surrogate = torch.maximum(surrogate, least)
    surrogate = surrogate * importance.detach()
    if weight is not None:
        _same_length(surrogate, weight)
        surrogate = surrogate * weight
    return PolicyLoss(total=-surrogate.sum(), clipped_tokens=is_clipped.sum())


def kl_penalty(policy_logp: Tensor, reference_logp: Tensor, weight: Tensor, *, estimator: KL) -> Tensor:
    """Estimate the KL of policy from reference, summed over tokens with their weights: a scalar with a gradient.

    weight: may have a gradient too, that of the ratio of policy to proximal policy (`kl_ratio`): then the estimate is
    unbiased for tokens that another policy sampled, and so is its gradient.

    All [tokens]; the reference is not differentiated. K1, the log-ratio, has no bias, but on tokens of the policy's own
    its gradient is noise around 0; K2, half its square, has the gradient of the divergence there; K3 has no bias and is
    never negative. Raises LengthMismatch. Sources: Schulman 2020 (Approximating KL divergence); K3: GRPO; the ratio
    as a weight: DeepSeek-AI 2025 (DeepSeek-V3.2).
    """
    _same_length(policy_logp, reference_logp, weight)
    apart = policy_logp - reference_logp.detach()
    match estimator:
        case "K1":
            estimate = apart
        case "K2":
            estimate = apart.square() / 2
        case "K3":
            estimate = (-apart).expm1() + apart
    return (estimate * weight).sum()


def kl_ratio(policy_logp: Tensor, proximal_logp: Tensor, importance: Tensor) -> Tensor:
    """Compute the ratio of policy to behaviour policy that corrects an estimate of KL: [tokens], with a gradient.

    importance: ratio of proximal to behaviour policy, bounded. Raises LengthMismatch.
    """
    _same_length(policy_logp, proximal_logp, importance)
    apart = (policy_logp - proximal_logp.detach()).clamp(-RATIO_LOG_BOUND, RATIO_LOG_BOUND)
    return apart.exp() * importance.detach()


def token_logp(logits: Tensor, tokens: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute each token's log-probability and the entropy of its distribution, in nats: [tokens] float32.

    logits: [tokens, vocabulary], of the position before each token; divided by the temperature that sampled it.
    """
    _same_length(logits, tokens)
    logp = torch.log_softmax(logits.float() / temperature, dim=1)
    entropy: Tensor = _Entropy.apply(logp)  # type: ignore[no-untyped-call]
    return logp.gather(1, tokens.long().unsqueeze(1)).squeeze(1), entropy


class _Entropy(torch.autograd.Function):
    """[tokens, vocabulary] log-probabilities -> [tokens]. Keeps no tensor that `log_softmax` does not keep anyway."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor) -> Tensor:
        ctx.save_for_backward(logp)
        return -(logp.exp() * logp).sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (logp,) = ctx.saved_tensors
        slope: Tensor = -gradients[0].unsqueeze(1) * logp.exp() * (logp + 1)
        return slope


def _of_sample(values: Tensor, sample: Tensor | None, *, mean: bool) -> Tensor:
    """Return the sum or mean over each token's sample: [tokens]. Differentiable."""
    if sample is None:
        raise TypeError("values of whole samples need the sample of each token")
    _same_length(values, sample)
    _, place, count = torch.unique(sample.to(values.device), return_inverse=True, return_counts=True)
    sums = torch.zeros(len(count), dtype=values.dtype, device=values.device).index_add(0, place, values)
    return (sums / count if mean else sums)[place]


def _same_length(*tensors: Tensor) -> None:
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1:
        raise LengthMismatch(f"lengths {lengths} should be one: the batch does not match its header")
