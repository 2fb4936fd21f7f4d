"""Whether engine and trainer mean the same weights: their log-probabilities of one fixed sequence.

A version that is read back proves a label, not the tensors (H52). Tolerances are on the mean absolute difference in
nats. Measured between SGLang and transformers on a CPU, 2,100 tokens: float32 2e-7, bfloat16 3e-3.
"""

from __future__ import annotations

from collections.abc import Sequence

TOLERANCE_NATS = {"float32": 1e-3}
HALF_PRECISION_TOLERANCE_NATS = 2e-2


class ProbeDisagrees(Exception):
    """The engine does not compute what the trainer exported."""


def require_agreement(trainer: Sequence[float], engine: Sequence[float], *, dtype: str) -> float:
    """The mean absolute difference, in nats. dtype: of the engine's computation. Raises ProbeDisagrees."""
    if len(trainer) != len(engine) or not trainer:
        raise ProbeDisagrees(f"the trainer gave {len(trainer)} log-probabilities, the engine {len(engine)}")
    mean = sum(abs(ours - theirs) for ours, theirs in zip(trainer, engine, strict=True)) / len(trainer)
    tolerance = TOLERANCE_NATS.get(dtype, HALF_PRECISION_TOLERANCE_NATS)
    if not mean <= tolerance:  # NaN disagrees
        raise ProbeDisagrees(
            f"log-probabilities of {len(trainer)} tokens differ by {mean:.2g} nats on average, {tolerance:g} is allowed"
            f" for {dtype}: the engine does not hold the weights that were exported"
        )
    return mean
