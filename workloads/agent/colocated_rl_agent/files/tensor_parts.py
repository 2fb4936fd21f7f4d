"""Samples of a tensor's parts, which tell whether the part that one rank of an engine holds has changed.

An engine divides a matrix among its ranks by rows or by columns, or gives each rank all of it; which one is its own
affair. So a rank's part has changed for certain if rows in the middle of its share changed, and columns of its share of
these rows did. The middle, because engines may pad the rows of a vocabulary, which moves the bounds of a share by up to
64 rows (SGLang 0.5.23, `layers/vocab_parallel_embedding.py`). A few rows are enough: they are read, and not the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

import xxhash

SAMPLED_ROWS = 8  # of each rank's share


class PartSample(NamedTuple):
    """Digests of what a rank may hold. columns: None of a vector."""

    rows: str
    columns: str | None

    def changed_to(self, other: PartSample) -> bool:
        """Return whether the part has changed for certain, however the tensor is divided."""
        return self.rows != other.rows and (self.columns is None or self.columns != other.columns)


def sample_parts(
    stream: BinaryIO, start: int, *, shape: Sequence[int], size_bytes: int, ranks: int
) -> tuple[PartSample, ...]:
    """Return a sample for each rank, or none if the tensor can't be divided evenly. It moves the stream.

    start: of the tensor in the stream. Raises OSError.
    """
    if ranks < 2 or len(shape) not in (1, 2) or any(length % ranks for length in shape) or not math.prod(shape):
        return ()
    row_bytes = size_bytes // shape[0]
    share = shape[0] // ranks
    count = min(SAMPLED_ROWS, share)
    rows: list[str] = []
    columns = [xxhash.xxh3_128() for _ in range(ranks)]
    for rank in range(ranks):
        stream.seek(start + (rank * share + (share - count) // 2) * row_bytes)
        sampled = memoryview(stream.read(count * row_bytes))
        rows.append(xxhash.xxh3_128_hexdigest(sampled))
        for place in range(0, len(sampled) if len(shape) == 2 else 0, row_bytes):
            row = sampled[place : place + row_bytes]
            for other, digest in enumerate(columns):
                digest.update(row[other * row_bytes // ranks : (other + 1) * row_bytes // ranks])
    of_columns = [digest.hexdigest() if len(shape) == 2 else None for digest in columns]
    return tuple(PartSample(*both) for both in zip(rows, of_columns, strict=True))
