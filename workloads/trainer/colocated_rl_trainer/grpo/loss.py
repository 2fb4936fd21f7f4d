"""The loss of GRPO on tokens that older weights may have made. All functions are pure functions of tensors.

Three policies meet in it: the *policy* is what is being trained; the *proximal* policy is what the step began with,
against which the ratio is clipped; the *behaviour* policy sampled the token, one or more steps ago, in another program.
The ratio of policy to proximal is clipped, the ratio of proximal to behaviour corrects for age and is only truncated,
never differentiated: decoupled as in Hilton et al. 2021 (Batch size-invariance for policy optimization). A fourth,
the *reference*, is frozen: the policy may be held near to it by an estimate of its KL divergence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from colocated_rl_trainer.protocol.settings import KL

ADVANTAGE_EPSILON = 1e-4  # added to a group's standard deviation, as the GRPO implementations do
SAME_REWARD = 1e-6  # a spread below this is rounding


class LengthMismatch(ValueError):
    """Tensors that belong to the same tokens differ in length: padding one would train on wrong tokens (H27)."""


@dataclass(frozen=True)
class PolicyLoss:
    """Sums over tokens; the caller divides by counts of all ranks, so that no result depends on the split."""

    total: Tensor  # scalar, carries the gradient
    clipped_tokens: Tensor  # scalar: tokens whose gradient the clip took away


def group_advantage(
    reward: Tensor, group_mean: Tensor, group_std: Tensor, group_count: Tensor, *, in_spreads: bool = True
) -> Tensor:
    """Compute how much better a sample is than its group, in spreads of the group or as it is: [samples] each.

    group_std: of the group as a population. The spread is that of a sample, divided by count - 1, as everywhere else.
    Returns exactly 0 where all rewards of a group are equal: such a sample teaches nothing and need not be computed.
    Sources: GRPO (DeepSeekMath); without the spread Liu et al. 2025 (Dr. GRPO).
    """
    _same_length(reward, group_mean, group_std, group_count)
    advantage = reward - group_mean
    if in_spreads:
        spread = group_std * (group_count / (group_count - 1).clamp(min=1)).sqrt()
        advantage = advantage / (spread + ADVANTAGE_EPSILON)
    return torch.where(group_std > SAME_REWARD, advantage, torch.zeros_like(advantage))


def importance_ratio(proximal_logp: Tensor, behaviour_logp: Tensor, *, cap: float) -> Tensor:
    """Compute the truncated ratio of proximal to behaviour policy, per token.

    proximal_logp, behaviour_logp: [tokens] float32, nats; the second as the engine reported it with the token.
    cap: upper bound, above 1. Returns [tokens], detached.
    Raises LengthMismatch. Source: Espeholt et al. 2018 (IMPALA), truncated importance weights.
    """
    _same_length(proximal_logp, behaviour_logp)
    return (proximal_logp - behaviour_logp).detach().exp().clamp(max=cap)


def policy_loss(
    policy_logp: Tensor,
    proximal_logp: Tensor,
    advantage: Tensor,
    importance: Tensor,
    weight: Tensor | None = None,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Compute PPO's clipped surrogate, with a bound for each side, times the importance ratio; summed over tokens.

    All [tokens]; only `policy_logp` is differentiated. The ratio is clipped to [1 - clip_low, 1 + clip_high].
    weight: of each token in the sum; 1 when absent.
    Raises LengthMismatch. Sources: Schulman et al. 2017 (PPO); Yu et al. 2025 (DAPO) for the two bounds.
    """
    _same_length(policy_logp, proximal_logp, advantage, importance)
    ratio = (policy_logp - proximal_logp.detach()).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    free, clipped = ratio * advantage, clipped_ratio * advantage
    surrogate = torch.minimum(free, clipped) * importance.detach()
    if weight is not None:
        _same_length(surrogate, weight)
        surrogate = surrogate * weight
    return PolicyLoss(total=-surrogate.sum(), clipped_tokens=(clipped < free).sum())


def kl_penalty(policy_logp: Tensor, reference_logp: Tensor, weight: Tensor, *, estimator: KL) -> Tensor:
    """Estimate the KL of policy from reference, summed over tokens with their weights: a scalar with a gradient.

    All [tokens]; the reference is not differentiated. K1, the log-ratio, has no bias, but on tokens of the policy's own
    its gradient is noise around 0; K2, half its square, has the gradient of the divergence there; K3 has no bias and is
    never negative. Raises LengthMismatch. Sources: Schulman 2020 (Approximating KL divergence); K3: GRPO.
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


def token_logp(logits: Tensor, tokens: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute each token's log-probability and the entropy of its distribution (detached), in nats: [tokens] float32.

    logits: [tokens, vocabulary], of the position before each token; divided by the temperature that sampled it.
    """
    _same_length(logits, tokens)
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1), entropy


def _same_length(*tensors: Tensor) -> None:
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1:
        raise LengthMismatch(f"lengths {lengths} should be one: the batch is not what it says")
