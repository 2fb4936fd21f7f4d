"""What a step of staleness costs in learning: the demo's task, in pairs of runs that differ in nothing else.

Each seed trains the same prompts twice, by the trainer's own loss, in one process and without a switch
(`examples/arithmetic/loop.py`): with samples of the newest weights, and with samples that are all one step old, the
worst that `maxStaleness: 1` allows. What is said of the pairs is what so many can tell, and no more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

from scipy.stats import t as student

MODEL = Path(__file__).resolve().parents[1] / ".build/models/arithmetic"
HELD_OUT = 512


@dataclass(frozen=True)
class Compared:
    """Stale less newest, over the pairs. low, high: 95 % by the pairs' own spread; None of fewer than two."""

    mean: float
    error: float | None
    low: float | None
    high: float | None


def compared(pairs: Sequence[tuple[float, float]]) -> Compared:
    """pairs: newest and stale, of each seed."""
    differences = [stale - newest for newest, stale in pairs]
    if len(differences) < 2:
        return Compared(mean(differences), None, None, None)
    middle, error = mean(differences), stdev(differences) / sqrt(len(differences))
    reach = float(student.ppf(0.975, len(differences) - 1)) * error
    return Compared(middle, error, middle - reach, middle + reach)


def exact_match(*, seed: int, steps: int, staleness: int) -> float:
    """Of held-out questions, after the last step."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    from examples.arithmetic.loop import Options, learn

    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    options = Options(steps=steps, staleness=staleness, seed=seed, evaluate_every=steps, held_out=HELD_OUT)
    return learn(model, tokenizer, options)[-1].exact_match


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.staleness", description=__doc__)
    parser.add_argument("--seeds", metavar="N", type=int, default=3, help="pairs of runs (%(default)s)")
    parser.add_argument("--steps", metavar="N", type=int, default=20, help="of 256 samples each (%(default)s)")
    asked = parser.parse_args(arguments)
    pairs: list[tuple[float, float]] = []
    print(f"{'seed':>4}  {'newest':>7}  {'one step old':>12}")
    for seed in range(1, asked.seeds + 1):
        newest, stale = (exact_match(seed=seed, steps=asked.steps, staleness=age) for age in (0, 1))
        pairs.append((newest, stale))
        print(f"{seed:4}  {newest:7.3f}  {stale:12.3f}", flush=True)
    print(f"\n{verdict(compared(pairs))}")
    return 0


def verdict(found: Compared) -> str:
    if found.error is None or found.low is None or found.high is None:
        return f"difference {found.mean:+.3f}, of one pair: which tells nothing"
    told = "so many pairs can't tell it from none" if found.low <= 0 <= found.high else "which chance does not explain"
    return (
        f"difference {found.mean:+.3f}, standard error {found.error:.3f} by the spread of the pairs; "
        f"95 %: {found.low:+.3f} to {found.high:+.3f}, {told}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
