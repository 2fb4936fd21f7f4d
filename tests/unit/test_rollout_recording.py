"""Batches of one job become batches of another: the same bytes, or the same samples dealt out anew."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from waiting import until

from builders import PLACED, make_job
from colocated_rl_api import names
from colocated_rl_api.batch import HEADER_KEY, BatchHeader
from colocated_rl_api.names import PromptPosition
from colocated_rl_api.rungs import Placement, WeightVersion
from colocated_rl_rollout.replay import Replay
from colocated_rl_rollout.rules.samples import (
    Finish,
    Group,
    GroupId,
    Prompt,
    Sample,
    SampleId,
    SampleState,
    Span,
    Tokens,
)
from colocated_rl_rollout.store.batches import BatchRecord, shard_path, write_batch
from colocated_rl_rollout.store.recording import RecordingUnusable, take_batch
from colocated_rl_rollout.store.store import Store

JOB = names.JobUid("6f0d1c52-8a35-4a7c-9d55-0c8a3f1b2e4d")
Row = tuple[object, ...]


def group_of(number: int, lengths: list[int]) -> Group:
    """Samples of so many tokens, each written by two versions and with a word of a tool between them."""
    group = Group(GroupId(number), Prompt(PromptPosition(number), number, (number, 1)))
    for place, length in enumerate(lengths):
        versions = WeightVersion(0, 1), WeightVersion(1, 1)
        spans = (
            (Span(versions[0], 0, 1), Span(versions[1], 2, length)) if length > 2 else (Span(versions[1], 0, length),)
        )
        ids = np.arange(length, dtype=np.int32) + 100 * place
        tokens = Tokens(ids, np.linspace(-2, -0.1, length, dtype=np.float32), spans)
        sample = Sample(SampleId(10 * number + place), group, SampleState.COMPLETED, tokens, segments=1)
        sample.finish, sample.reward = (Finish.LENGTH if place == 1 else Finish.STOP), 0.25 * (place + number % 2)
        group.samples.append(sample)
    return group


GROUPS = [group_of(4, [3, 7]), group_of(6, [1, 5]), group_of(9, [2, 2])]


def record_batch(
    directory: Path, step: int = 1, *, shards: int = 2, groups: list[Group] = GROUPS, scored: bool = False
) -> BatchRecord:
    """Record a batch. scored: by a reference on devices of its own, that finds each sample as likely as its number."""
    samples = [sample for group in groups for sample in group.samples]
    scores = {sample.id: np.full(len(sample.tokens), -float(sample.id), np.float32) for sample in samples}
    reference = scores if scored else None
    return write_batch(directory, groups, step=step, shards=shards, temperature=0.7, seed=5, reference=reference)


def rows_of(directory: Path, step: int, shards: int) -> tuple[list[Row], set[BatchHeader]]:
    """Every sample with all that its shard says of it; the headers, but for their place."""
    rows, headers = [], set()
    for shard in range(shards):
        with safe_open(shard_path(directory, step, shard), framework="np") as file:
            header = BatchHeader.model_validate_json(file.metadata()[HEADER_KEY])
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        assert (shard, shards) == (header.shard, header.shards)
        headers.add(header.model_copy(update={"shard": 0, "shards": 0}))
        start = 0
        for place, end in enumerate(columns["sample_end"].tolist()):
            by_token = [columns[name][start:end].tobytes() for name in sorted(columns) if name in BY_TOKEN]
            others = [name for name in sorted(columns) if name not in (*BY_TOKEN, "sample_end")]
            rest = [str(columns[name][place].tolist()) for name in others]  # NaN is no equal of itself
            rows.append((*by_token, *rest))
            start = end
    return sorted(rows, key=repr), headers


BY_TOKEN = ("tokens", "loss_mask", "behaviour_logp", "token_step", "experts", "reference_logp")


# ------------------------------------------------------------------------------------------------------- one batch
def test_a_batch_for_as_many_ranks_is_the_same_byte_by_byte_and_counted_alike(tmp_path: Path) -> None:
    sealed = record_batch(tmp_path / "recording")
    taken = take_batch(tmp_path / "recording", tmp_path / "own", step=1, shards=2)
    unknown = {"resumed_samples": None, "segments": None}  # which no file says
    assert sealed.model_copy(update=unknown) == taken.record
    for shard in range(2):
        paths = (shard_path(tmp_path / place, 1, shard) for place in ("recording", "own"))
        assert 1 == len({path.read_bytes() for path in paths})
    alike = [group_of(number, [3, 3]) for number in (2, 4, 6)]  # which could be dealt out in many ways
    record_batch(tmp_path / "alike", groups=alike)
    again = take_batch(tmp_path / "alike", tmp_path / "other", step=1, shards=2).record.sha256
    assert record_batch(tmp_path / "once more", groups=alike).sha256 == again
    assert [[0.0, 0.25], [0.0, 0.25], [0.25, 0.5]] == sorted(sorted(rewards) for rewards in taken.rewards)


@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=3), min_size=1, max_size=4),
    ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    scored=st.booleans(),
    routed=st.booleans(),
    judged=st.booleans(),
)
@settings(max_examples=25)
def test_for_another_number_of_ranks_the_samples_are_the_same_whoever_gets_them(
    lengths: list[list[int]], ranks: tuple[int, int], scored: bool, routed: bool, judged: bool
) -> None:
    groups = [group_of(number, each) for number, each in enumerate(lengths)]
    for sample in (sample for group in groups[1:] for sample in group.samples if routed):
        sample.experts = np.full((len(sample.tokens) + 1, 4), sample.id, np.int16)
    for sample in (sample for group in groups[1:] for sample in group.samples if judged):
        sample.figures = {"number": float(sample.id)}
    with TemporaryDirectory() as name:
        directory = Path(name)
        sealed = record_batch(directory / "recording", shards=ranks[0], groups=groups, scored=scored)
        taken = take_batch(directory / "recording", directory / "own", step=1, shards=ranks[1])
        assert rows_of(directory / "recording", 1, ranks[0]) == rows_of(directory / "own", 1, ranks[1])
        same = ("samples", "groups", "loss_tokens", "reward_mean", "staleness", "truncated")
        assert [getattr(sealed, each) for each in same] == [pytest.approx(getattr(taken.record, each)) for each in same]


def test_files_that_are_no_whole_batch_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    recording = tmp_path / "recording"

    def refused(words: str) -> None:
        with pytest.raises(RecordingUnusable, match=words):
            take_batch(recording, tmp_path / "own", step=1, shards=2)
        assert not (tmp_path / "own").exists()

    refused("has no batch 1")
    record_batch(recording)
    shard_path(recording, 1, 1).unlink()
    refused("1-1.safetensors is not there")
    record_batch(recording, 2)
    shard_path(recording, 2, 1).rename(shard_path(recording, 1, 1))
    refused("do not belong together")
    record_batch(tmp_path / "other", groups=GROUPS[:2])
    shard_path(tmp_path / "other", 1, 1).rename(shard_path(recording, 1, 1))
    refused("do not belong together")
    record_batch(recording)
    with safe_open(shard_path(recording, 1, 1), framework="np") as file:
        columns = {name: file.get_tensor(name) for name in file.keys() if name != "sample"}  # noqa: SIM118 - no mapping
        save_file(columns, shard_path(recording, 1, 1), metadata=file.metadata())  # as an earlier release wrote it
    refused("do not belong together")
    shard_path(recording, 1, 1).write_bytes(shard_path(recording, 1, 0).read_bytes()[:-1])
    refused("no shard of a batch")
    shard_path(recording, 1, 1).unlink()
    shard_path(recording, 1, 1).mkdir()
    refused("1-1.safetensors can't be read: .*[Ii]s a directory")


def test_a_job_takes_tokens_without_a_version_only_where_it_accepts_them(tmp_path: Path) -> None:
    group = group_of(4, [3, 7])
    last = group.samples[1].tokens
    group.samples[1].tokens = replace(last, spans=(last.spans[0], replace(last.spans[1], version=None)))
    sealed = record_batch(tmp_path / "recording", groups=[group])
    with pytest.raises(RecordingUnusable, match=r"make a job with rollout.unversionedTokens: Accept"):
        take_batch(tmp_path / "recording", tmp_path / "own", step=1, shards=2)
    taken = take_batch(tmp_path / "recording", tmp_path / "own", step=1, shards=1, accepts_unversioned=True).record
    assert (5, sealed.staleness) == (taken.unversioned_tokens, taken.staleness)
    assert sealed.loss_tokens == taken.loss_tokens == 5 + sum(taken.staleness.values())


def test_a_job_whose_batches_have_scores_takes_none_without_them(tmp_path: Path) -> None:
    record_batch(tmp_path / "plain")
    with pytest.raises(RecordingUnusable, match="sealed without the scores of a reference: let trainers score it"):
        take_batch(tmp_path / "plain", tmp_path / "own", step=1, shards=2, needs_scores=True)
    record_batch(tmp_path / "scored", scored=True)
    take_batch(tmp_path / "scored", tmp_path / "own", step=1, shards=2, needs_scores=True)
    _, (header,) = rows_of(tmp_path / "own", 1, 2)
    assert header.has_reference


# -------------------------------------------------------------------------------------------------------- the worker
@contextlib.asynccontextmanager
async def replaying(directory: Path, *, steps: int = 3) -> AsyncIterator[tuple[Replay, Store]]:
    """Replay a job with two ranks."""
    store, changed = Store(directory / "store", job_uid=JOB), asyncio.Event()
    spec = make_job(steps=steps, **PLACED[Placement.TRAIN_ONLY]).spec
    worker = Replay(spec, store=store, recording=directory / "recording", changed=changed.set, full_retry_s=0.01)
    running = asyncio.create_task(worker.run())
    try:
        yield worker, store
    finally:
        worker.drain()
        async with asyncio.timeout(60):
            await running
        store.close()


async def test_one_batch_after_another_is_sealed_as_steps_are_trained(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        record_batch(tmp_path / "recording", step)
    async with replaying(tmp_path) as (worker, store):
        for step in (1, 2, 3):
            await until(lambda step=step: store.sealed and store.sealed.step == step)  # type: ignore[misc]
            assert (6, 6 * (step - 1)) == (store.counts[SampleState.SEALED], store.counts[SampleState.TRAINED])
            store.commit(step)
            worker.wake()
        await store.flushed()
    assert 3 == store.sealed.step if store.sealed else None, "the job has no fourth step"


async def test_a_restart_takes_nothing_twice(tmp_path: Path) -> None:
    record_batch(tmp_path / "recording")
    for _ in range(2):
        async with replaying(tmp_path) as (_, store):
            await until(lambda: store.sealed)
            assert 6 == store.counts[SampleState.SEALED] == store.counts.total()


async def test_a_recording_that_ends_is_reported_and_taken_up_again_when_it_goes_on(tmp_path: Path) -> None:
    async with replaying(tmp_path) as (worker, store):
        await until(lambda: worker.problem)
        assert worker.problem is not None
        assert "RecordingUnusable" == worker.problem.reason
        assert "has no batch 1" in worker.problem.message
        assert "lower spec.steps to 0" in worker.problem.message
        record_batch(tmp_path / "recording")
        await until(lambda: store.sealed)
        assert worker.problem is None
