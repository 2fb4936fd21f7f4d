"""Weights that are one number, so that engine and trainer can agree or not without computing anything.

An export of them is a real one: safetensors, manifest, probe. `logprob` is what a model with these weights would say.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from pathlib import Path

TENSOR = "weight"
PROBE = (5, 6, 7, 8, 9, 10)


def logprob(weight: float, before: int, token: int) -> float:
    """Return the log-probability of `token` after `before`, in nats."""
    return -1.0 - ((weight * 1009 + before * 31 + token * 17) % 1000) / 1000


def next_token(weight: float, before: int, position: int) -> int:
    return 3 + int(weight * 31 + before * 7 + position) % 300


def experts_of(token: int, weight: float) -> list[int]:
    """Return the experts of a token, of two layers with two each."""
    return [token % 61, (token + int(weight * 8)) % 61, (token + 1) % 61, int(weight * 8)]


def weights_checksum(weight: float) -> str:
    """Return the checksum that an engine reports for its weights."""
    return hashlib.sha256(struct.pack("<f", weight)).hexdigest()


def write_export(directory: Path, *, version: str, weight: float, probe_error: float = 0.0) -> None:
    """Write an export. probe_error: added to each log-probability, so that no engine can agree."""
    directory.mkdir(parents=True)
    header = json.dumps({TENSOR: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    data = struct.pack("<Q", len(header)) + header + struct.pack("<f", weight)
    (directory / "model.safetensors").write_bytes(data)
    (directory / "config.json").write_text("{}")
    logp = [logprob(weight, before, token) + probe_error for before, token in itertools.pairwise(PROBE)]
    manifest = {
        "version": version,
        "tensors": {TENSOR: {"dtype": "F32", "shape": [1]}},
        "digests": {"model.safetensors": f"sha256:{hashlib.sha256(data).hexdigest()}"},
        "probe": {"inputIds": PROBE, "logp": logp},
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))


def read_weight(directory: Path) -> float | None:
    """None if the export lacks it."""
    data = (directory / "model.safetensors").read_bytes()
    if TENSOR.encode() not in data:
        return None
    (weight,) = struct.unpack("<f", data[-4:])
    return float(weight)
