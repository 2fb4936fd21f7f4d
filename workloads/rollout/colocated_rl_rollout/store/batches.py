"""Seal batches: groups become the files of `colocated_rl_api.batch`, and this module knows where the files are.

Sealing divides a batch among the trainer ranks: whole samples, balanced by tokens. Its files are written and synced
before the store seals the batch, so a sealed batch always has its files; the next attempt overwrites a file of a batch
that never was sealed. The bytes depend on the samples alone.

When another number of ranks asks for a batch, it is dealt again (`recording`): its new files are written and synced
beside the old ones; they replace them once the store has recorded them, at its next opening at the latest. So the batch
is whole at every instant.
"""

from __future__ import annotations

import errno
import hashlib
import heapq
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from safetensors.numpy import save

from colocated_rl_api.batch import HEADER_KEY, BatchHeader
from colocated_rl_api.durable import sync
from colocated_rl_api.member_wire import Climbed
from colocated_rl_api.names import PromptPosition
from colocated_rl_api.wire import Wire
from colocated_rl_rollout.rules.samples import Finish, Group, Sample, SampleId
from colocated_rl_rollout.rules.staleness import staleness
from colocated_rl_rollout.tasks.task_wire import FIGURES_AT_MOST

LEFT_BYTES = 16 * 1024 * 1024  # of the volume, kept free by a batch: where the store can't commit, the controller ends
ALIKE = 24_576  # tokens: attention of such a sample costs what its products with weights do; 6 x a width of 4,096


def free_on_volume(at: Path) -> int:
    """Return the free bytes of the volume that a path is on."""
    return disk_usage(at).free


class KeptClimb(Climbed):
    """The store keeps how the group climbed to a step, for whoever asks once its pods are gone."""

    ended: float = Field(description="when it was whole, as the rollout controller heard it: seconds since 1970, UTC")


class BatchRecord(Wire):
    """The store keeps this record of a sealed batch, for facts, logs and whoever fetches it."""

    step: int
    groups: int
    samples: int
    loss_tokens: int
    reward_mean: float
    staleness: dict[int, int] = Field(
        description="tokens by staleness, as the step will see them; without those whose weights are unknown"
    )
    unversioned_tokens: int = Field(
        default=0, description="tokens to be trained for which an engine named no weight version of the job"
    )
    resumed_samples: int | None = Field(
        default=None, description="samples that were interrupted at least once; None of a recording, which lacks it"
    )
    segments: int | None = Field(
        default=None, description="engine attempts that brought tokens, of all samples; None of a recording"
    )
    truncated: int = Field(description="samples that ended by the token limit")
    masked_tokens: int = Field(default=0, description="tokens that are too old to be trained, and are context alone")
    sha256: tuple[str, ...] = Field(description="of each shard; none once its files are gone")
    climb: KeptClimb | None = Field(
        default=None, description="the group's, to this step; only on the page of all batches, and once it was whole"
    )

    @property
    def staleness_mean(self) -> float | None:
        """Return the mean staleness of a token with a version, in steps; None where tokens have none."""
        known = self.loss_tokens - self.unversioned_tokens
        if self.unversioned_tokens and not known:
            return None
        return sum(age * count for age, count in self.staleness.items()) / max(1, known)


@dataclass(frozen=True)
class _Row:
    """Joins a sample with the rewards of its group: everything that a shard records about it."""

    sample: Sample
    group_mean: float
    group_std: float
    group_count: int

    @property
    def length(self) -> int:
        return len(self.sample.group.prompt.ids) + len(self.sample.tokens)


def write_batch(
    directory: Path,
    groups: Sequence[Group],
    *,
    step: int,
    shards: int,
    temperature: float,
    seed: int,
    oldest_step: int = 0,
    reference: Mapping[SampleId, NDArray[np.float32]] | None = None,
    prompt_position: PromptPosition | None = None,
    free_bytes: Callable[[Path], int] = free_on_volume,
) -> BatchRecord:
    """Make the files of a batch durable and return its record. `groups` are complete, in the batch's order.

    oldest_step: tokens of older weights are not trained. reference: its scores of each response, by sample; None where
    no reference has scored them yet. prompt_position: `Store.position_after`. Raises OSError.
    """
    rows = [row for group in groups for row in _rows(group)]
    samples = [row.sample for row in rows]
    spans = [span for row in rows for span in row.sample.tokens.spans]
    ages: Counter[int] = Counter()
    for span in spans:
        if span.version is not None and span.version.step >= oldest_step:
            ages[staleness(span.version.step, at_step=step)] += span.end - span.start
    unversioned = sum(row.sample.tokens.unversioned for row in rows)
    loss_tokens = ages.total() + unversioned
    names = _figure_names(samples)
    width = max((row.sample.experts.shape[1] for row in rows if row.sample.experts is not None), default=0)
    bodies = []
    for shard, part in enumerate(partition([row.length for row in rows], shards)):
        header = BatchHeader(
            step=step,
            shard=shard,
            shards=shards,
            groups=len(groups),
            samples=len(rows),
            loss_tokens=loss_tokens,
            temperature=temperature,
            seed=seed,
            prompt_position=prompt_position,
            has_experts=width > 0,
            has_reference=reference is not None,
            figures=names,
            has_unversioned=unversioned > 0,
        )
        bodies.append(_shard([rows[place] for place in part], header, oldest_step, reference, width))
    return BatchRecord(
        step=step,
        groups=len(groups),
        samples=len(rows),
        loss_tokens=loss_tokens,
        reward_mean=float(np.mean([_reward(sample) for sample in samples])),
        staleness=dict(sorted(ages.items())),
        unversioned_tokens=unversioned,
        resumed_samples=sum(sample.segments > 1 for sample in samples),
        segments=sum(sample.segments for sample in samples),
        truncated=sum(sample.finish is Finish.LENGTH for sample in samples),
        masked_tokens=sum(sample.tokens.generated for sample in samples) - loss_tokens,
        sha256=write_shards(directory, step, bodies, free_bytes=free_bytes),
    )


def write_shards(
    directory: Path,
    step: int,
    bodies: Sequence[bytes],
    *,
    beside: bool = False,
    free_bytes: Callable[[Path], int] = free_on_volume,
) -> tuple[str, ...]:
    """Make the files of a batch durable and return the digest of each. beside: leave its present files unchanged.

    Do not begin a batch that would use the last of the volume. Raises OSError.
    """
    if not directory.exists():
        directory.mkdir()
        sync(directory.parent)
    needed, free = sum(map(len, bodies)) + LEFT_BYTES, free_bytes(directory)
    if free < needed:
        raise OSError(errno.ENOSPC, f"{free >> 20} MiB are free, and it takes {needed >> 20} MiB")
    for shard, body in enumerate(bodies):
        path = _dealt_path(directory, step, shard, len(bodies)) if beside else shard_path(directory, step, shard)
        _write_durably(path, body)
    sync(directory)
    return tuple(hashlib.sha256(body).hexdigest() for body in bodies)


def take_places(directory: Path, record: BatchRecord) -> None:
    """Move the new files of a batch, written beside its own, into place: the record describes them already."""
    shards = len(record.sha256)
    for shard in range(shards):
        dealt = _dealt_path(directory, record.step, shard, shards)
        if dealt.exists():
            dealt.replace(shard_path(directory, record.step, shard))


def remove_other_shards(directory: Path, record: BatchRecord) -> None:
    """Remove the files of a batch that its record does not name: shards of another dealing."""
    for path in {*directory.glob(f"{record.step}-*")} - _files(directory, record):
        path.unlink()


def partition(lengths: Sequence[int], shards: int) -> list[list[int]]:
    """Return the places of each shard's samples, in order: longest first to the shard with the least work so far.

    A shard's work is less than a longest sample beyond another's, and at most 4/3 of what the best dealing would give
    it. Source: Graham 1969.
    """
    loads = [(0, 0, shard) for shard in range(shards)]  # work, samples, shard
    parts: list[list[int]] = [[] for _ in range(shards)]
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place], reverse=True):
        work, samples, shard = loads[0]
        parts[shard].append(place)
        heapq.heapreplace(loads, (work + work_of(lengths[place]), samples + 1, shard))
    return [sorted(part) for part in parts]


def work_of(length: int) -> int:
    """Return what a sample costs to train, in a unit of its own: products with weights, and attention.

    Source: verl's calculate_workload.
    """
    return ALIKE * length + length**2


def shard_path(directory: Path, step: int, shard: int) -> Path:
    """Return the path of a shard's file."""
    return directory / f"{step}-{shard}.safetensors"


def _dealt_path(directory: Path, step: int, shard: int, shards: int) -> Path:
    """Return the path of a shard that is not yet moved into place."""
    return directory / f"{step}-{shard}.of-{shards}.dealt"


def batch_is_there(directory: Path, record: BatchRecord) -> bool:
    """Return whether all files of a batch exist; the store records their removal only afterwards."""
    return all(shard_path(directory, record.step, shard).exists() for shard in range(len(record.sha256)))


def batch_bytes(directory: Path, record: BatchRecord | None) -> int:
    """Return the size of a batch's files, 0 without a batch."""
    shards = range(len(record.sha256)) if record else ()
    return sum(shard_path(directory, record.step, shard).stat().st_size for shard in shards if record)


def remove_batch(directory: Path, step: int) -> None:
    """Remove the files of a batch, also those of another dealing; missing files are no error."""
    for path in directory.glob(f"{step}-*"):
        path.unlink(missing_ok=True)


def remove_all_but(directory: Path, records: Iterable[BatchRecord]) -> None:
    """Remove the files that a kill may leave: of batches that never were sealed, or are no longer kept."""
    kept = set[Path]().union(*(_files(directory, record) for record in records))
    for path in set(directory.glob("*")) - kept:
        path.unlink()


def _files(directory: Path, record: BatchRecord) -> set[Path]:
    return {shard_path(directory, record.step, shard) for shard in range(len(record.sha256))}


def _rows(group: Group) -> list[_Row]:
    samples = group.kept
    rewards = np.array([_reward(sample) for sample in samples])
    return [_Row(sample, float(rewards.mean()), float(rewards.std()), len(samples)) for sample in samples]


def _figure_names(samples: Iterable[Sample]) -> tuple[str, ...]:
    """Return the names of a batch's figures, in order: those that most samples have, where there are too many."""
    count = Counter(name for sample in samples for name in sample.figures)
    commonest = sorted(sorted(count), key=lambda name: count[name], reverse=True)
    return tuple(sorted(commonest[:FIGURES_AT_MOST]))


def _reward(sample: Sample) -> float:
    if sample.reward is None:
        raise ValueError(f"sample {sample.id} goes into a batch without a reward")
    return sample.reward


def _shard(
    rows: Sequence[_Row],
    header: BatchHeader,
    oldest_step: int,
    reference: Mapping[SampleId, NDArray[np.float32]] | None,
    width: int,
) -> bytes:
    """Return one file: columns of `colocated_rl_api.batch`, prompt and response of each sample one after another.

    width: how many experts each token has in all layers; 0 without experts.
    """
    tokens = sum(row.length for row in rows)
    ids = np.empty(tokens, np.int32)
    loss_mask = np.zeros(tokens, np.uint8)
    behaviour_logp = np.zeros(tokens, np.float32)
    reference_logp = np.zeros(tokens, np.float32)
    token_step = np.full(tokens, -1, np.int32)
    experts = np.full((tokens, width), -1, np.int16)
    ends = np.cumsum([row.length for row in rows], dtype=np.int64)
    for row, end in zip(rows, ends, strict=True):
        prompt, response = row.sample.group.prompt.ids, row.sample.tokens
        start = end - len(response)
        ids[start - len(prompt) : start] = prompt
        ids[start:end] = response.ids
        if (chosen := row.sample.experts) is not None and width == chosen.shape[1]:
            chosen = chosen[: row.length]  # a stop string may have cut tokens off that were read
            experts[end - row.length : end - row.length + len(chosen)] = chosen
        for span in response.spans:
            if span.version is None or span.version.step >= oldest_step:
                place = slice(start + span.start, start + span.end)
                loss_mask[place] = 1
                behaviour_logp[place] = response.logp[span.start : span.end]
                token_step[place] = -1 if span.version is None else span.version.step
                if reference is not None:
                    reference_logp[place] = reference[row.sample.id][span.start : span.end]
    columns: dict[str, NDArray[Any]] = {
        "tokens": ids,
        "sample_end": ends,
        "loss_mask": loss_mask,
        "behaviour_logp": behaviour_logp,
        **({"experts": experts} if header.has_experts else {}),
        **({"reference_logp": reference_logp} if reference is not None else {}),
        "token_step": token_step,
        "reward": np.array([_reward(row.sample) for row in rows], np.float32),
        "group": np.array([row.sample.group.id for row in rows], np.int64),
        "group_mean": np.array([row.group_mean for row in rows], np.float32),
        "group_std": np.array([row.group_std for row in rows], np.float32),
        "group_count": np.array([row.group_count for row in rows], np.float32),
        "truncated": np.array([row.sample.finish is Finish.LENGTH for row in rows], np.uint8),
        **({"figures": _figures([row.sample for row in rows], header.figures)} if header.figures else {}),
        "sample": np.array([row.sample.id for row in rows], np.int64),
        "prompt_tokens": np.array([len(row.sample.group.prompt.ids) for row in rows], np.int32),
    }
    return bytes(save(columns, metadata={HEADER_KEY: header.model_dump_json(by_alias=True)}))


def _figures(samples: Sequence[Sample], names: Sequence[str]) -> NDArray[np.float32]:
    """Return the figures of each sample, [samples, names]; NaN where it has none of that name."""
    found = [[sample.figures.get(name, np.nan) for name in names] for sample in samples]
    return np.array(found, np.float32).reshape(len(samples), len(names))


def _write_durably(path: Path, body: bytes) -> None:
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
