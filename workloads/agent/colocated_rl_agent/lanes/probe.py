"""The probe checks what an engine computes: its log-probabilities of a fixed sequence, beside those of the trainer.

Checksums show that each parameter changed as the exports did; only outputs show that each is in its place (H52). Two
right implementations differ by the rounding of their arithmetic. How much depends on the model, its dtype, the engine's
kernels and its caches, so no limit in nats is right for all: SGLang 0.5.23 and transformers on a CPU are 2e-7 apart for
a small random model in float32, 3e-3 in bfloat16, and 0.08 for SmolLM2-135M in bfloat16.

Therefore each engine is measured against itself. One that has just started has loaded files that agree with their
manifest: by as much as it then differs from the trainer, it differs by its noise. After an update it may differ by
`TIMES_NOISE` times as much as it did before (`weights.limit_nats`). An engine that differs by more is started again, on
the same files, and measured anew: a model that really got noisier costs one start of an engine, and not the job.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from colocated_rl_api.weights import limit_nats

AT_START_NATS = 0.5  # for an engine without a noise of its own: a model whose outputs hardly vary has no more
AT_START_SHARE = 0.25  # or this share of the standard deviation of the trainer's log-probabilities
AT_START_EXACT_NATS = 1e-2  # where engine and export are in float32, and only the order of sums differs


class WeightsDoubted(Exception):
    """The engine was not shown to hold the weights it should: a second one is started on them, but no third one."""


class ProbeDisagrees(WeightsDoubted):
    """The engine's log-probabilities differ from those of the exported weights."""


def require_agreement(
    trainer: Sequence[float], engine: Sequence[float], *, noise_nats: float | None, is_exact: bool
) -> float:
    """Return the mean absolute difference in nats. Raises ProbeDisagrees.

    noise_nats: what it was when this engine last agreed; None: it has just started. is_exact: both are in float32.
    """
    if len(trainer) != len(engine) or not trainer:
        raise ProbeDisagrees(f"the trainer gave {len(trainer)} log-probabilities, the engine {len(engine)}")
    apart = statistics.fmean(abs(ours - theirs) for ours, theirs in zip(trainer, engine, strict=True))
    if noise_nats is not None:
        limit, of = limit_nats(noise_nats), f"it was {noise_nats:.2g} apart on the weights before"
    elif is_exact:
        limit, of = AT_START_EXACT_NATS, "both compute in float32"
    else:
        limit = max(AT_START_NATS, AT_START_SHARE * statistics.pstdev(trainer))
        of = "it has answered no probe before"
    if not apart <= limit:  # NaN disagrees
        raise ProbeDisagrees(
            f"its log-probabilities of {len(trainer)} tokens are {apart:.2g} nats from the trainer's on average, "
            f"{limit:.2g} are allowed, because {of}: it does not hold the weights that were exported"
        )
    return apart
