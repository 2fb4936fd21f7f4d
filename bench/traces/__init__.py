"""Fix how many tokens each sample has: by its prompt, its number in the group, and nothing else.

`reasoning`: lengths of answers of a reasoning model in production, with a long tail: the mean is twice the median, one
of a hundred is eight times the mean, the longest fifteen times. Source: Xiang et al. 2025, "ServeGen: Workload
Characterization and Generation of Large Language Model Serving in Production" (arXiv:2505.09999): of
github.com/alibaba/ServeGen at f891d11 (Apache 2.0) data/reason/deepseek-r1, the distributions of all clients, weighted
by their requests, 1.4 million together. reasoning_lengths.txt has their quantiles (n + 0.5) / 1000, in tokens. Samples
of one prompt are drawn independently: in a group the longest is as far from the others as in the whole.

`near_uniform`: the same mean, within a tenth of it.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

LENGTHS = [int(word) for word in (Path(__file__).parent / "reasoning_lengths.txt").read_text(encoding="utf-8").split()]
MEAN = round(sum(LENGTHS) / len(LENGTHS))


def reasoning(prompt: int, number: int) -> int:
    return LENGTHS[_drawn(prompt, number) % len(LENGTHS)]


def near_uniform(prompt: int, number: int) -> int:
    return MEAN - MEAN // 10 + _drawn(prompt, number) % (2 * (MEAN // 10) + 1)


def _drawn(prompt: int, number: int) -> int:
    return int.from_bytes(blake2b(f"{prompt}/{number}".encode(), digest_size=8).digest(), "big")


def brief(prompt: int, number: int) -> int:
    """Return a short length, where only the number of samples matters."""
    return 2 + 2 * (prompt % 2)
