"""Penalize responses that come near to the token limit. Pure.

A response that the limit cut is rewarded 0 like a wrong one. A penalty that rises before the limit shows the policy
that length was at fault.
"""

from __future__ import annotations

from colocated_rl_api.job import OverlongPenalty


def overlong_penalty(length: int, *, limit: int, rule: OverlongPenalty) -> float:
    """Return what a response of `length` tokens loses of its reward: 0 up to the buffer, `factor` at the limit.

    Source: Yu et al. 2025 (DAPO), soft overlong punishment.
    """
    into_buffer = length - (limit - rule.buffer_tokens)
    return rule.factor * min(1.0, max(0, into_buffer) / rule.buffer_tokens)
