"""Weights travel from trainer to engine in files; this module distinguishes a whole export from a torn one.

An export is a directory in Hugging Face format (config.json, tokenizer files, *.safetensors) named by its
`WeightVersion`, plus `MANIFEST`, which is written last: a directory without it is torn and never loaded. Engines
accept missing tensors silently (H52), so the manifest names them all.

Digests reveal torn and damaged files. They are no defence against whoever can write an export: that one
writes its manifest too. So they need not be cryptographic, and must keep up with memory, because GPUs wait for whoever
writes and for whoever compares.

The export of a job's last step is also what the job leaves: a copy stands beside its checkpoints.
"""

from __future__ import annotations

import math
import re
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from colocated_rl_api.wire import Version, Wire

MANIFEST = "manifest.json"


def finished_model(step: int) -> str:
    """Name of the directory in the checkpoints' volume that holds the model of a job that ended with `step`."""
    return f"model-{step:08d}"


class Algorithm(StrEnum):
    """An algorithm computes digests. Readers know all of them."""

    XXH3_128 = "xxh3-128"  # the helper's: as fast as memory
    SHA256 = "sha256"  # for writers that have nothing else


# the algorithm, a colon, and the digest in hexadecimal, most significant byte first
Digest = Annotated[str, Field(pattern="^(xxh3-128:[0-9a-f]{32}|sha256:[0-9a-f]{64})$")]


def algorithm_of(digest: Digest) -> Algorithm:
    return Algorithm(digest.partition(":")[0])


class TensorEntry(Wire):
    dtype: str  # as safetensors spells it: "F32", "BF16"
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Return the tensor's size by its type's name, which begins with a bit count: "F8_E4M3". BOOL takes a byte."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8


class Probe(Wire):
    """Holds a fixed token sequence and the trainer's log-probabilities of it, with which an engine must agree.

    `logp[i]`, nats, is of `input_ids[i + 1]` given `input_ids[:i + 1]`, temperature 1.
    """

    input_ids: tuple[int, ...]
    logp: tuple[float, ...]


LEAST_LIMIT_NATS = 1e-3  # far above what two implementations in float32 differ by, far below what other weights do
TIMES_NOISE = 3.0


def limit_nats(noise_nats: float) -> float:
    """Return by how much an engine's log-probabilities of the probe may differ from the trainer's after an update.

    noise_nats: by how much they differed, on average, when they were last accepted.
    """
    return max(LEAST_LIMIT_NATS, TIMES_NOISE * noise_nats)


class Manifest(Wire):
    version: Version
    tensors: dict[str, TensorEntry]
    digests: dict[str, Digest] = Field(description="of each *.safetensors file, by file name")
    probe: Probe | None = None

    @property
    def size_bytes(self) -> int:
        """Return the size of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    @property
    def is_float32(self) -> bool:
        return {tensor.dtype for tensor in self.tensors.values()} == {"F32"}
