"""Take recorded batches: the files of a sealed batch become a batch of another job, or of another number of ranks.

This module does not know the store. A recording is a directory of files of `colocated_rl_api.batch`, named by
`batches.shard_path`, from step 1 on: the store of a job, or a copy. It is only read. Where this job has as many trainer
ranks as the one that sealed them, files are copied byte by byte; for another number samples are dealt again, and as
every normalizer is in the header or in the columns, no result depends on that.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from colocated_rl_api.batch import HEADER_KEY, BatchHeader
from colocated_rl_api.logs import in_words
from colocated_rl_rollout.store.batches import (
    BatchRecord,
    free_on_volume,
    partition,
    shard_path,
    write_shards,
)

Columns = dict[str, NDArray[Any]]
EXPERTS, REFERENCE, FIGURES = "experts", "reference_logp", "figures"  # only in some batches, which the header tells
BY_TOKEN = frozenset({"tokens", "loss_mask", "behaviour_logp", "token_step", EXPERTS, REFERENCE})
END = "sample_end"


class RecordingUnusable(Exception):
    """The recording has no such batch, or its files do not belong together; the message names which."""


@dataclass(frozen=True)
class Taken:
    """Describes a recorded batch whose files are durable. rewards: one for each sample of each group."""

    record: BatchRecord
    rewards: list[list[float]]


def take_batch(
    recording: Path,
    directory: Path,
    *,
    step: int,
    shards: int,
    needs_scores: bool = False,
    accepts_unversioned: bool = False,
    free_bytes: Callable[[Path], int] = free_on_volume,
) -> Taken:
    """Copy batch `step` into `directory`, for `shards` trainer ranks. needs_scores: the batch must have a reference's.

    accepts_unversioned: weights of tokens to be trained may be unknown.
    Raises RecordingUnusable, OSError.
    """
    headers, columns = _read(recording, step)
    header, whole = headers[0], _joined(columns)
    if needs_scores and not header.has_reference:
        raise RecordingUnusable(
            f"batch {step} in {recording} was sealed without the scores of a reference: let trainers score it "
            "(spec.reference.placement: WithTrainer)"
        )
    if header.has_unversioned and not accepts_unversioned:
        raise RecordingUnusable(
            f"batch {step} in {recording} has tokens without a weight version: make a job with "
            "rollout.unversionedTokens: Accept to train on them"
        )
    if header.shards == shards:
        bodies = [shard_path(recording, step, shard).read_bytes() for shard in range(shards)]
    else:
        bodies = _dealt(whole, header, shards)
    made_by = whole["token_step"][whole["loss_mask"] == 1]
    ages = step - 1 - made_by[made_by >= 0]
    rewards: dict[int, list[float]] = {}
    for group, reward in zip(whole["group"].tolist(), whole["reward"].tolist(), strict=True):
        rewards.setdefault(group, []).append(reward)
    record = BatchRecord(
        step=step,
        groups=len(rewards),
        samples=header.samples,
        loss_tokens=header.loss_tokens,
        reward_mean=float(np.mean(whole["reward"], dtype=np.float64)),
        staleness=dict(sorted(Counter(ages.tolist()).items())),
        unversioned_tokens=len(made_by) - len(ages),
        truncated=int(whole["truncated"].sum()),
        sha256=write_shards(directory, step, bodies, free_bytes=free_bytes),
    )
    return Taken(record, list(rewards.values()))


def deal_anew(directory: Path, record: BatchRecord, *, shards: int) -> BatchRecord:
    """Write a sealed batch for `shards` trainer ranks, beside its files. Raises RecordingUnusable, OSError."""
    headers, columns = _read(directory, record.step)
    bodies = _dealt(_joined(columns), headers[0], shards)
    digests = write_shards(directory, record.step, bodies, beside=True)
    return record.model_copy(update={"sha256": digests})


def as_dealt(directory: Path, record: BatchRecord) -> BatchRecord:
    """Return the record of a batch as its files are dealt: a backup of the store may know of a former dealing.

    Raises RecordingUnusable.
    """
    headers, _ = _read(directory, record.step)
    if len(headers) == len(record.sha256):
        return record
    files = (shard_path(directory, record.step, shard).read_bytes() for shard in range(len(headers)))
    return record.model_copy(update={"sha256": tuple(hashlib.sha256(body).hexdigest() for body in files)})


def _read(recording: Path, step: int) -> tuple[list[BatchHeader], list[Columns]]:
    headers: list[BatchHeader] = []
    columns: list[Columns] = []
    shards = 1
    while len(headers) < shards:
        path = shard_path(recording, step, len(headers))
        try:
            header, found = _read_shard(path)
        except FileNotFoundError:
            raise RecordingUnusable(f"the recording has no batch {step}: {path} is not there") from None
        except OSError as error:
            raise RecordingUnusable(f"{path} can't be read: {in_words(error)}") from error
        shards = header.shards
        headers.append(header)
        columns.append(found)
    alike = {header.model_copy(update={"shard": 0}) for header in headers}
    named = {frozenset(found) for found in columns}
    numbers = [header.shard for header in headers]
    samples = sum(len(found[END]) for found in columns)
    loss_tokens = sum(int(found["loss_mask"].sum()) for found in columns)
    header = headers[0]
    is_whole = (header.step, header.samples, header.loss_tokens) == (step, samples, loss_tokens)
    if len(alike) > 1 or len(named) > 1 or numbers != [*range(shards)] or not is_whole:
        raise RecordingUnusable(f"files of batch {step} in {recording} do not belong together: copy them again")
    return headers, columns


def _read_shard(path: Path) -> tuple[BatchHeader, Columns]:
    try:
        with path.open("rb"), safe_open(path, framework="np") as file:  # which takes what it may not read for missing
            header = BatchHeader.model_validate_json((file.metadata() or {}).get(HEADER_KEY, ""))
            columns: Columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, ValidationError) as error:
        raise RecordingUnusable(f"{path} is no shard of a batch: {error}: copy it again") from error
    declared = {EXPERTS: header.has_experts, REFERENCE: header.has_reference, FIGURES: bool(header.figures)}
    absent = {name for name, is_there in declared.items() if not is_there}
    if missing := {*BY_TOKEN, END, FIGURES, "reward", "group", "truncated"} - absent - columns.keys():
        raise RecordingUnusable(f"{path} has no column {min(missing)}: it is of another version")
    return header, columns


def _joined(parts: Sequence[Columns]) -> Columns:
    """Join all shards into one, in order."""
    lengths = np.concatenate([np.diff(part[END], prepend=0) for part in parts])
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return joined | {END: np.cumsum(lengths, dtype=np.int64)}


def _dealt(whole: Columns, header: BatchHeader, shards: int) -> list[bytes]:
    """Deal the same samples to another number of ranks."""
    lengths = np.diff(whole[END], prepend=0)
    bodies = []
    for shard, places in enumerate(partition(lengths.tolist(), shards)):
        renamed = header.model_copy(update={"shard": shard, "shards": shards})
        bodies.append(save(_part(whole, places), metadata={HEADER_KEY: renamed.model_dump_json(by_alias=True)}))
    return bodies


def _part(whole: Mapping[str, NDArray[Any]], places: Sequence[int]) -> Columns:
    """Return the columns of some samples, in this order; there may be no samples."""
    samples = np.array(places, np.intp)
    ends, lengths = whole[END][samples], np.diff(whole[END], prepend=0)[samples]
    of_each = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    tokens = np.concatenate([np.empty(0, np.intp), *of_each])
    part = {name: column[tokens if name in BY_TOKEN else samples] for name, column in whole.items()}
    return part | {END: np.cumsum(lengths, dtype=np.int64)}
