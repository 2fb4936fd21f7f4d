"""The probe checks that engine and trainer hold the same weights by their log-probabilities of one fixed sequence.

A version that is read back proves a label, not the tensors (H52). Tolerances are on the mean absolute difference in
nats. Measured between SGLang and transformers on a CPU with a small random model, 2,100 tokens: float32 2e-7, bfloat16
3e-3. In 16 bits that does not carry over to a trained model, whose logits are large: with equal weights SmolLM2-135M
differs by 0.084 in bfloat16, more than the tolerance. The probe is for float32; in 16 bits it rejects correct engines.
"""

from __future__ import annotations

from collections.abc import Sequence

TOLERANCE_NATS = {"float32": 1e-3}
HALF_PRECISION_TOLERANCE_NATS = 2e-2


class WeightsDoubted(Exception):
    """The engine was not shown to hold the weights it should: a second one is started on them, but no third one."""


class ProbeDisagrees(WeightsDoubted):
    """The engine's log-probabilities differ from those of the exported weights."""


def require_agreement(trainer: Sequence[float], engine: Sequence[float], *, dtype: str) -> float:
    """Return the mean absolute difference in nats. dtype: of the engine's computation. Raises ProbeDisagrees."""
    if len(trainer) != len(engine) or not trainer:
        raise ProbeDisagrees(f"the trainer gave {len(trainer)} log-probabilities, the engine {len(engine)}")
    mean = sum(abs(ours - theirs) for ours, theirs in zip(trainer, engine, strict=True)) / len(trainer)
    tolerance = TOLERANCE_NATS.get(dtype, HALF_PRECISION_TOLERANCE_NATS)
    if not mean <= tolerance:  # NaN disagrees
        todo = (
            "the engine does not hold the weights that were exported"
            if dtype in TOLERANCE_NATS
            else "it holds other weights than were exported, or the model differs by as much in 16 bits, as trained "
            "ones do: make the job with spec.weightSync.verify: Checksum, or run engine and trainer in float32"
        )
        raise ProbeDisagrees(
            f"log-probabilities of {len(trainer)} tokens differ by {mean:.2g} nats on average, {tolerance:g} is allowed"
            f" for {dtype}: {todo}"
        )
    return mean
