"""Writes shards of a sealed batch as `colocated_rl_api.batch` describes them, with the standard library only."""

from __future__ import annotations

import array
import json
import statistics
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from colocated_rl_api.batch import HEADER_KEY, BatchHeader

Values = Sequence[int] | Sequence[float]

_TYPES = {"int32": ("i", "I32"), "int64": ("q", "I64"), "uint8": ("B", "U8"), "float32": ("f", "F32")}


@dataclass(frozen=True)
class Example:
    prompt: Sequence[int]
    response: Sequence[int]
    logp: Sequence[float]  # behaviour log-probabilities of the response
    reward: float
    group: int
    token_step: int = 0
    written: Sequence[bool] | None = None  # tokens of the response that the policy wrote; all when absent
    reference_logp: Sequence[float] | None = None  # of the response, as logp; every sample has one, or none does

    @property
    def mask(self) -> list[bool]:
        return list(self.written or [True] * len(self.response))


def write_shards(
    folder: Path, samples: Sequence[Example], *, step: int, split: Sequence[int] | int, temperature: float = 1.0
) -> list[Path]:
    """Write one file per rank. split: number of ranks, which get samples in turn, or the rank of each sample."""
    ranks = [number % split for number in range(len(samples))] if isinstance(split, int) else list(split)
    shards = split if isinstance(split, int) else max(split) + 1
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.group, []).append(sample.reward)
    files = []
    for shard in range(shards):
        header = BatchHeader(
            step=step,
            shard=shard,
            shards=shards,
            groups=len(rewards),
            samples=len(samples),
            loss_tokens=sum(sum(sample.mask) for sample in samples),
            temperature=temperature,
            seed=0,
            has_reference=any(sample.reference_logp is not None for sample in samples),
        )
        numbers = [number for number, rank in enumerate(ranks) if rank == shard]
        mine = [samples[number] for number in numbers]
        files.append(folder / f"step-{step}-shard-{shard}-of-{shards}.safetensors")
        scored = {"reference_logp": _by_token(mine, [sample.reference_logp or () for sample in mine])}
        write_shard(files[-1], header, columns(mine, rewards, numbers) | (scored if header.has_reference else {}))
    return files


def columns(
    samples: Sequence[Example], rewards: Mapping[int, Sequence[float]], numbers: Sequence[int] | None = None
) -> dict[str, tuple[str, Values]]:
    """Return type and values of each column that every batch has, by name.

    rewards: of each whole group. numbers: of the samples, from 0 if absent.
    """
    lengths = [len(sample.prompt) + len(sample.response) for sample in samples]
    return {
        "tokens": ("int32", [token for s in samples for token in (*s.prompt, *s.response)]),
        "sample_end": ("int64", [sum(lengths[: number + 1]) for number in range(len(samples))]),
        "loss_mask": ("uint8", [int(bit) for s in samples for bit in (*[False] * len(s.prompt), *s.mask)]),
        "behaviour_logp": _by_token(samples, [sample.logp for sample in samples]),
        "token_step": (
            "int32",
            [
                step
                for s in samples
                for step in (*[-1] * len(s.prompt), *[s.token_step if written else -1 for written in s.mask])
            ],
        ),
        "reward": ("float32", [s.reward for s in samples]),
        "group": ("int64", [s.group for s in samples]),
        "group_mean": ("float32", [statistics.fmean(rewards[s.group]) for s in samples]),
        "group_std": ("float32", [statistics.pstdev(rewards[s.group]) for s in samples]),
        "group_count": ("float32", [float(len(rewards[s.group])) for s in samples]),
        "truncated": ("uint8", [0 for _ in samples]),
        "sample": ("int64", range(len(samples)) if numbers is None else numbers),
        "prompt_tokens": ("int32", [len(s.prompt) for s in samples]),
    }


def _by_token(samples: Sequence[Example], responses: Sequence[Sequence[float]]) -> tuple[str, Values]:
    """Return a column of responses' values, with 0 for tokens of prompts."""
    of_each = zip(samples, responses, strict=True)
    return "float32", [logp for s, response in of_each for logp in (*[0.0] * len(s.prompt), *response)]


def write_shard(file: Path, header: BatchHeader, columns: Mapping[str, tuple[str, Values]]) -> None:
    entries: dict[str, object] = {"__metadata__": {HEADER_KEY: header.model_dump_json(by_alias=True)}}
    body = b""
    for name, (kind, values) in columns.items():
        code, dtype = _TYPES[kind]
        data = array.array(code, values).tobytes()
        entries[name] = {"dtype": dtype, "shape": [len(values)], "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    head = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + body)
