"""I3: every sample is in exactly one state after every operation, none is lost, none is trained twice.

A state machine drives the real store over a real file. A crash is what a kill -9 leaves: the file as it was last
committed, whatever the process still had in memory.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from colocated_rl_api import names
from colocated_rl_api.checkpoint import CONTENTS, FORMAT, Contents, checkpoint_name
from colocated_rl_api.facts import EvaluationResult
from colocated_rl_api.names import PromptPosition
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.pages.words import in_words
from colocated_rl_rollout.rules.samples import (
    LIVE,
    NO_TOKENS,
    Finish,
    Group,
    GroupId,
    Prompt,
    Sample,
    SampleState,
    Span,
    Tokens,
)
from colocated_rl_rollout.store.backup import backup_of
from colocated_rl_rollout.store.batches import (
    BatchRecord,
    KeptClimb,
    shard_path,
    write_batch,
    write_shards,
)
from colocated_rl_rollout.store.database import StoreFailed, open_database
from colocated_rl_rollout.store.former import FormerJob
from colocated_rl_rollout.store.recording import deal_anew
from colocated_rl_rollout.store.store import SPARE_BYTES, BatchNotDealt, Store, WrongMove
from colocated_rl_rollout.store.transcripts import in_batch

JOB = names.JobUid("6f0d1c52-8a35-4a7c-9d55-0c8a3f1b2e4d")
S = SampleState
GROUP_SIZE = 2
BATCH = 2


def segment(count: int, step: int = 0) -> Tokens:
    if count == 0:
        return NO_TOKENS
    ids = np.arange(3, 3 + count, dtype=np.int32)
    return Tokens(ids, -np.ones(count, np.float32), (Span(WeightVersion(step, 1), 0, count),))


def prompt(position: int) -> Prompt:
    return Prompt(PromptPosition(position), position % 7, (1, 2, 3))


def seal(store: Store, groups: list[Group]) -> BatchRecord:
    record = write_batch(store.batch_directory, groups, step=store.next_step, shards=2, temperature=1.0, seed=0)
    store.seal(record, groups)
    return record


def recorded(store: Store) -> BatchRecord:
    """A batch that another job has sealed: groups of two samples and of one."""
    files = write_shards(store.batch_directory, store.next_step, [b"one", b"other"])
    sums: dict[str, Any] = {"groups": 2, "samples": 3, "loss_tokens": 6, "reward_mean": 0.5, "staleness": {0: 6}}
    record = BatchRecord(step=store.next_step, truncated=0, sha256=files, **sums)
    store.seal_recorded(record, [[0.0, 1.0], [0.5]])
    return record


class StoreMachine(RuleBasedStateMachine):
    """Any order of operations, restarts and crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp())
        self.life = 0
        self.store = Store(self.directory / "0", job_uid=JOB)
        self.batches: dict[int, set[int]] = {}  # sample ids by step, of batches that were made durable
        self.blocker: sqlite3.Connection | None = None

    def teardown(self) -> None:
        self.release()
        self.store.close()
        self.loop.close()
        shutil.rmtree(self.directory)

    def samples(self, *states: SampleState) -> list[Sample]:
        return [sample for group in self.store.groups.values() for sample in group.samples if sample.state in states]

    def one(self, data: st.DataObject, *states: SampleState) -> Sample | None:
        found = self.samples(*states)
        return data.draw(st.sampled_from(found)) if found else None

    def tokens(self) -> dict[int, tuple[int, int]]:
        """Return, for each sample, its number of tokens, and how many of them were sent again."""
        kept = [sample for group in self.store.groups.values() for sample in group.kept]
        return {sample.id: (len(sample.tokens), sample.resent) for sample in kept}

    # ------------------------------------------------------------------------------------------------- operations
    @precondition(lambda self: len(self.store.groups) < 6)
    @rule()
    def admit(self) -> None:
        self.store.admit(prompt(self.store.cursor), size=GROUP_SIZE)

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        if sample := self.one(data, S.ADMITTED, S.INTERRUPTED):
            self.store.start(sample)

    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        if sample := self.one(data, S.RUNNING):
            self.store.park(sample)

    @rule(data=st.data(), count=st.integers(0, 3), step=st.integers(0, 3), keep=st.booleans())
    def interrupt(self, data: st.DataObject, count: int, step: int, keep: bool) -> None:
        if sample := self.one(data, S.RUNNING):
            self.store.interrupt(sample, segment(count, step), keep=keep)

    @rule(data=st.data(), count=st.integers(1, 3), step=st.integers(0, 3))
    def finish(self, data: st.DataObject, count: int, step: int) -> None:
        if sample := self.one(data, S.RUNNING):
            self.store.finish(sample, segment(count, step), Finish.STOP)

    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]))
    def score(self, data: st.DataObject, reward: float) -> None:
        if sample := self.one(data, S.SCORING):
            self.store.score(sample, reward)

    @rule()
    def go_all_the_way(self) -> None:
        for sample in self.samples(S.ADMITTED, S.INTERRUPTED):
            self.store.start(sample)
        for sample in self.samples(S.RUNNING):
            self.store.finish(sample, segment(2), Finish.LENGTH)
        for sample in self.samples(S.SCORING):
            self.store.score(sample, 1.0)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        if sample := self.one(data, S.RUNNING, S.SCORING):
            assert self.store.replace(sample, S.FAILED, "EngineRejected").state is S.ADMITTED

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        if sample := self.one(data, S.COMPLETED, S.INTERRUPTED):
            self.store.replace(sample, S.DISCARDED, "TooStale")

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        if sample := self.one(data, *LIVE, S.COMPLETED):
            self.store.give_up(sample.group, "GroupGivenUp")

    @precondition(lambda self: self.store.sealed_groups == 0)
    @rule()
    def seal(self) -> None:
        groups = [group for group in self.store.groups.values() if group.is_complete][:BATCH]
        if len(groups) == BATCH:
            ids = {int(sample.id) for group in groups for sample in group.kept}
            record = seal(self.store, groups)
            self.flush()
            self.batches[record.step] = ids

    @precondition(lambda self: self.store.sealed_groups == 0)
    @rule()
    def seal_recorded(self) -> None:
        first = self.store.counts.total() + 1
        record = recorded(self.store)
        self.flush()
        self.batches[record.step] = {*range(first, first + record.samples)}

    @rule()
    def commit(self) -> None:
        if self.store.sealed is not None:
            self.store.commit(self.store.sealed.step)

    @rule(back=st.integers(0, 2))
    def forget(self, back: int) -> None:
        self.store.forget(self.store.trained_step - back)

    @rule()
    def flush(self) -> None:
        self.release()
        self.loop.run_until_complete(self.store.flushed())

    @precondition(lambda self: self.blocker is None)
    @rule()
    def hold_up(self) -> None:
        """The disk is slow: nothing is committed until it is let go."""
        self.flush()
        self.blocker = sqlite3.connect(self.store.path, isolation_level=None)
        self.blocker.execute("BEGIN IMMEDIATE")

    def release(self) -> None:
        if self.blocker is not None:
            self.blocker.close()
            self.blocker = None

    # ------------------------------------------------------------------------------------------------- restarts
    @rule()
    def restart(self) -> None:
        """A clean end loses nothing at all."""
        before = Counter(self.store.counts)
        before[S.INTERRUPTED] += before.pop(S.RUNNING, 0)
        tokens = self.tokens()
        ended, cursor = self.store.ended, self.store.cursor
        self.release()
        self.store.close()
        self.store = Store(self.directory / str(self.life), job_uid=JOB)
        assert (ended, cursor, +before) == (self.store.ended, self.store.cursor, +self.store.counts)
        assert tokens == self.tokens()

    @rule(flushed=st.booleans())
    def crash(self, flushed: bool) -> None:
        """Kill the store: what was durable is there again, and with it everything that anybody was told.

        While the disk is held up, that is what was there before. Otherwise everything is made durable first: how far
        the writer had come by itself would be a matter of time, and the run could not be repeated.
        """
        if flushed := flushed or self.blocker is None:
            self.flush()
            counts = Counter(self.store.counts)
            counts[S.INTERRUPTED] += counts.pop(S.RUNNING, 0)
            cursor = self.store.cursor
        old, self.life = self.directory / str(self.life), self.life + 1
        new = self.directory / str(self.life)
        new.mkdir()
        with (
            closing(sqlite3.connect(old / "store.sqlite3")) as source,
            closing(sqlite3.connect(new / "store.sqlite3")) as copy,
        ):
            source.backup(copy)
        if (old / "batches").exists():
            shutil.copytree(old / "batches", new / "batches")
        self.release()
        self.store.close()
        self.store = Store(new, job_uid=JOB)
        if flushed:
            assert (cursor, +counts) == (self.store.cursor, +self.store.counts)

    # ------------------------------------------------------------------------------------------------- what holds
    @invariant()
    def every_sample_is_in_exactly_one_state(self) -> None:
        store = self.store
        alive = Counter(sample.state for group in store.groups.values() for sample in group.samples)
        for state in (*LIVE, S.COMPLETED):
            assert alive[state] == store.counts[state], "only groups that are in no batch have live samples"
        assert all(count >= 0 for count in store.counts.values())
        ids = [sample.id for group in store.groups.values() for sample in group.samples]
        assert len(ids) == len(set(ids))
        assert all(number <= store.counts.total() for number in ids)

    @invariant()
    def no_prompt_is_taken_twice(self) -> None:
        positions = [group.prompt.position for group in self.store.groups.values()]
        assert len(positions) == len(set(positions))
        assert self.store.cursor > max(positions, default=-1), "the next prompt is one that no group has"

    @invariant()
    def what_ended_has_its_place_among_all_that_did(self) -> None:
        store = self.store
        assert store.ended == sum(count for state, count in store.counts.items() if state not in LIVE)
        places = [sample.ended for sample in self.samples(*set(S) - LIVE)]
        assert len(places) == len(set(places))
        assert {*places} <= {*range(1, store.ended + 1)}
        assert {None} >= {sample.ended for sample in self.samples(*LIVE)}

    @invariant()
    def what_waits_is_known_to_wait(self) -> None:
        assert {sample.id for sample in self.samples(S.ADMITTED, S.INTERRUPTED)} == set(self.store.waiting)
        for group in self.store.groups.values():
            assert group.unfinished == sum(sample.state in LIVE for sample in group.samples)
            assert GROUP_SIZE == len(group.kept)

    @invariant()
    def a_groups_oldest_tokens_are_those_of_its_samples(self) -> None:
        for group in self.store.groups.values():
            versions = [span.version for sample in group.kept for span in sample.tokens.spans]
            assert group.oldest_step == min((version.step for version in versions if version), default=None)
            assert group.has_unversioned == (None in versions)

    @invariant()
    def no_sample_is_in_two_batches(self) -> None:
        sealed = [number for ids in self.batches.values() for number in ids]
        assert len(sealed) == len(set(sealed))
        assert not set(sealed) & {sample.id for group in self.store.groups.values() for sample in group.samples}
        assert len(sealed) == self.store.counts[S.SEALED] + self.store.counts[S.TRAINED]
        assert self.store.next_step == max(self.batches, default=0) + 1

    @invariant()
    def a_batch_that_is_kept_has_its_files(self) -> None:
        for step in self.batches:
            record = self.store.batch(step)
            files = sorted(self.store.batch_directory.glob(f"{step}-*.safetensors"))
            assert (len(record.sha256) if record else 0) in (len(files), 0)


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40)
TestStore = StoreMachine.TestCase


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, job_uid=JOB)


def completed_group(store: Store) -> Group:
    group = store.admit(prompt(store.cursor), size=GROUP_SIZE)
    for sample in group.samples:
        store.start(sample)
        store.finish(sample, segment(2), Finish.STOP)
        store.score(sample, 1.0)
    return group


async def test_f70_a_store_that_is_opened_again_goes_on_at_the_prompt_after_the_last_one(store: Store) -> None:
    """Nothing of the group is left to count from: it was trained, and its rows were removed."""
    groups = [completed_group(store) for _ in range(3)]
    step = seal(store, groups).step
    store.commit(step)
    store.forget(step)
    store.close()
    again = Store(store.path.parent, job_uid=JOB)
    assert ({}, 3) == (again.groups, again.cursor)
    again.close()


async def test_a_move_that_the_table_does_not_have_is_refused(store: Store) -> None:
    sample = store.admit(prompt(0), size=1).samples[0]
    with pytest.raises(WrongMove, match="from admitted to completed"):
        store.score(sample, 1.0)
    with pytest.raises(WrongMove):
        store.interrupt(sample, NO_TOKENS)
    store.close()


async def test_a_batch_is_sealed_once(store: Store) -> None:
    record = seal(store, [completed_group(store)])
    with pytest.raises(WrongMove, match="can't be sealed"):
        store.seal(record, [completed_group(store)])
    store.close()


async def test_the_volume_of_another_job_is_refused(store: Store, tmp_path: Path) -> None:
    store.close()
    with pytest.raises(StoreFailed, match="belongs to job"):
        Store(tmp_path, job_uid=names.JobUid("another"))


async def test_two_controllers_do_not_share_a_volume(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match="another rollout controller"):
        Store(tmp_path, job_uid=JOB)
    store.close()


async def test_attempts_without_a_token_are_counted_until_one_brings_some(store: Store, tmp_path: Path) -> None:
    """H6: an engine may abort a request before it begins, again and again."""
    sample = store.admit(prompt(0), size=1).samples[0]
    for count, idle in [(0, 1), (0, 2), (3, 0), (0, 1)]:
        store.start(sample)
        store.interrupt(sample, segment(count))
        assert idle == sample.idle_attempts
    store.start(sample)
    store.park(sample)  # refused at a gate: nothing was tried
    assert (4, 1, 3) == (sample.attempts, sample.idle_attempts, sample.resent)
    store.close()
    again = Store(tmp_path, job_uid=JOB)
    [sample] = again.waiting.values()
    assert (4, 1, 3) == (sample.attempts, sample.idle_attempts, sample.resent)
    again.close()


async def test_figures_beside_a_reward_are_shown_and_outlast_a_restart(store: Store, tmp_path: Path) -> None:
    one, other = store.admit(prompt(0), size=2).samples
    for sample, figures in ((one, {"format": 0.5}), (other, {})):
        store.start(sample)
        store.finish(sample, segment(2), Finish.STOP)
        store.score(sample, 1.0, figures)
    await store.flushed()
    assert [{}, {"format": 0.5}] == [row["figures"] for row in store.recent(None, limit=2)]
    store.close()
    again = Store(tmp_path, job_uid=JOB)
    assert [{"format": 0.5}, {}] == [sample.figures for sample in again.groups[one.group.id].samples]
    again.close()


async def test_starting_over_drops_what_was_kept(store: Store, tmp_path: Path) -> None:
    sample = store.admit(prompt(0), size=1).samples[0]
    for keep in (True, False, True):
        store.start(sample)
        store.interrupt(sample, segment(2), keep=keep)
    assert (2, 1) == (len(sample.tokens), sample.segments)
    store.close()
    again = Store(tmp_path, job_uid=JOB)
    assert [2] == [len(sample.tokens) for sample in again.waiting.values()]
    again.close()


async def test_an_epoch_is_durable_when_the_call_returns(store: Store) -> None:
    store.remember_epoch(41)
    with closing(sqlite3.connect(store.path)) as reader:
        assert [(41,)] == reader.execute("SELECT value FROM facts WHERE name = 'epoch'").fetchall()
    store.close()


async def test_the_newest_result_of_each_set_survives_a_restart(store: Store, tmp_path: Path) -> None:
    for name, step in (("aime", 10), ("gone", 10), ("aime", 0), ("sums", 0)):  # the job went back, with other sets
        store.record_evaluation(EvaluationResult(name=name, step=step, samples=4, mean=0.5, stderr=0.25))
    store.close()
    again = Store(tmp_path, job_uid=JOB)
    assert {"aime": 0, "gone": 10, "sums": 0} == {name: one.step for name, one in again.evaluated.items()}
    assert store.evaluated == again.evaluated
    assert [("aime", 10), ("gone", 10), ("aime", 0), ("sums", 0)] == [
        (one.name, one.step) for one in again.evaluations()
    ]
    again.close()


OLD_RESULT = '{"step":2,"samples":4,"mean":0.5,"stderr":0.25,"best":null,"bestOf":[]}'


async def test_a_result_of_an_older_program_is_of_the_held_out_prompts(store: Store, tmp_path: Path) -> None:
    """It had one set, which had no name."""
    store.write(("INSERT INTO evaluations (step, result) VALUES (?, ?)", [(2, OLD_RESULT)]))
    await store.flushed()
    store.close()
    again = Store(tmp_path, job_uid=JOB)
    assert {"held-out": 2} == {name: one.step for name, one in again.evaluated.items()}
    again.close()


async def test_a_lost_store_goes_on_after_what_the_trainers_have(store: Store) -> None:
    """The volume is new, the trainers are not: the next batch is the one they lack."""
    store.commit(12)
    assert 13 == store.next_step
    record = seal(store, [completed_group(store)])
    assert (13, 1) == (record.step, store.sealed_groups)
    store.close()


def spoil(path: Path, table: str) -> None:
    """Change the first page of a table, as a disk may."""
    with closing(sqlite3.connect(path)) as database:
        (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", [table]).fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    with path.open("r+b") as file:
        file.seek((root - 1) * size)
        file.write(b"\xff" * 64)


async def backed_up(store: Store) -> None:
    async with asyncio.timeout(60):
        while not backup_of(store.path).exists():  # noqa: ASYNC110 - a thread writes it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("table", ["samples", "turns", "segments", "groups_by_step", "evaluations"])
async def test_a_damaged_store_is_named_and_goes_on_from_the_backup_of_a_checkpoint(
    store: Store, tmp_path: Path, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A page that no statement read at the start was noticed hours later, or never."""
    step = seal(store, [completed_group(store)]).step
    completed_group(store)  # whoever restores can't know whether it was trained since
    store.commit(step)
    store.forget(step)
    await backed_up(store)
    completed_group(store)
    store.remember_epoch(7)
    cursor, path = store.cursor, store.path
    store.close()
    spoil(path, table)
    again = Store(path.parent, job_uid=JOB)
    assert "store restored" in caplog.text
    name = "groups" if table == "groups_by_step" else table
    assert name in str(caplog.records[-1].args)
    assert {} == again.groups
    assert {S.TRAINED: GROUP_SIZE, S.DISCARDED: GROUP_SIZE} == +again.counts
    assert (7, cursor, step + 1) == (again.epoch, again.cursor, again.next_step)
    assert path.with_name("store.sqlite3.damaged").exists()
    again.close()
    whole = Store(path.parent, job_uid=JOB)
    assert again.counts == whole.counts
    whole.close()


async def test_no_epoch_waits_for_a_backup(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 1.3 GB took as long as an epoch may: the controller stood still for 10 s, and lost its operator."""
    ends = Event()
    monkeypatch.setattr("colocated_rl_rollout.store.database.back_up", lambda path: ends.wait(60))
    step = seal(store, [completed_group(store)]).step
    store.commit(step)
    store.forget(step)
    monkeypatch.setattr("colocated_rl_rollout.store.store.EPOCH_DEADLINE_S", 5.0)
    store.remember_epoch(7)
    await store.flushed()
    ends.set()


async def test_a_backup_finds_a_batch_that_was_dealt_to_other_ranks_since(store: Store) -> None:
    for step in (1, 2):
        seal(store, [completed_group(store)])
        if step == 1:
            store.commit(step)
    store.forget(1)
    await backed_up(store)
    before = samples_of(store, 2)
    assert await store.dealt(2, 3) is not None
    store.close()
    spoil(store.path, "turns")
    again = Store(store.path.parent, job_uid=JOB)
    assert 3 == len(kept(again, 2))
    assert before == samples_of(again, 2)
    assert again.sealed == again.batch(2)
    again.close()


async def test_a_damaged_store_without_a_backup_says_what_is_damaged_and_is_left_alone(store: Store) -> None:
    completed_group(store)
    path = store.path
    store.close()
    spoil(path, "turns")
    before = path.read_bytes()
    with pytest.raises(StoreFailed, match="is damaged: turns, and there is no intact backup"):
        Store(path.parent, job_uid=JOB)
    assert before == path.read_bytes()


async def test_a_file_that_is_no_database_is_a_damaged_store(store: Store) -> None:
    store.commit(1)
    store.forget(1)
    store.close()
    store.path.write_bytes(b"lost" * 4096)
    again = Store(store.path.parent, job_uid=JOB)
    assert 1 == again.trained_step
    again.close()


async def test_a_batch_that_is_not_trained_stays_whatever_a_checkpoint_claims_to_hold(store: Store) -> None:
    step = seal(store, [completed_group(store)]).step
    store.forget(step)
    assert store.batch(step) is not None
    store.commit(step)
    store.forget(step)
    assert store.batch(step) is None
    store.close()


async def test_batches_that_are_a_recording_stay_when_checkpoints_hold_them(tmp_path: Path) -> None:
    store = Store(tmp_path, job_uid=JOB, keeps_batches=True)
    for _ in range(3):
        step = seal(store, [completed_group(store)]).step
        store.commit(step)
        store.forget(step)
    assert {S.TRAINED: 6} == +store.counts
    store.close()
    again = Store(tmp_path, job_uid=JOB, keeps_batches=True)
    assert all(again.batch(step) for step in (1, 2, 3))
    assert 6 == len(list(again.batch_directory.iterdir())), "shards"
    assert [] == again.recent(None, limit=10), "samples are only counted all the same"
    again.close()


async def test_counts_survive_what_retention_removes(store: Store, tmp_path: Path) -> None:
    group = completed_group(store)
    store.replace(group.samples[0], S.DISCARDED, "TooStale")
    store.give_up(group, "GroupGivenUp")
    for _ in range(3):
        step = seal(store, [completed_group(store)]).step
        store.commit(step)
        store.forget(step)
    counts, reasons = +store.counts, dict(store.reasons)
    assert {S.TRAINED: 6, S.DISCARDED: 3} == counts
    store.close()
    again = Store(tmp_path, job_uid=JOB)
    assert (counts, reasons) == (+again.counts, dict(again.reasons))
    assert [] == again.recent(None, limit=10)
    assert [] == list(again.batch_directory.iterdir())
    again.close()


@contextmanager
def held_up(store: Store) -> Iterator[Callable[[], int]]:
    """The disk takes nothing; how many entries wait for it."""
    sample = busy(store)
    store._writer.flush(deadline_s=60)  # else it may take an earlier entry alone, and wait with that
    with closing(sqlite3.connect(store.path, isolation_level=None)) as blocker:
        blocker.execute("BEGIN IMMEDIATE")
        store.park(sample)  # the writer takes this one, and waits with it
        waiting = store._writer._queue.qsize
        deadline = time.monotonic() + 60
        while waiting():
            assert time.monotonic() < deadline
        yield waiting


def busy(store: Store) -> Sample:
    sample = store.admit(prompt(store.cursor), size=1).samples[0]
    store.start(sample)
    return sample


OPERATIONS: dict[str, Callable[[Store], object]] = {
    "admit": lambda store: store.admit(prompt(9), size=GROUP_SIZE),
    "interrupt": lambda store: store.interrupt(running(store), segment(2)),
    "interrupt and drop": lambda store: store.interrupt(running(store), segment(2), keep=False),
    "finish": lambda store: store.finish(running(store), segment(2), Finish.STOP),
    "replace": lambda store: store.replace(running(store), S.FAILED, "EngineRejected"),
    "give up": lambda store: store.give_up(running(store).group, "GroupGivenUp"),
    "leave out": lambda store: store.leave_out(store.groups[GroupId(2)].kept[:1], "Truncated"),
    "filter": lambda store: store.give_up(store.groups[GroupId(2)], "EqualRewards", S.FILTERED),
    "commit": lambda store: store.commit(1),
    "seal a recorded batch": recorded,
    "forget": lambda store: store.forget(1),
}


def running(store: Store) -> Sample:
    return next(sample for group in store.groups.values() for sample in group.kept if sample.state is S.RUNNING)


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_kill_leaves_the_whole_of_an_operation_or_nothing(store: Store, operation: str) -> None:
    """A sample's end and its successor were two entries: a kill between them left a group that was too small."""
    record = seal(store, [completed_group(store)])
    if operation == "forget":
        store.commit(record.step)
    completed_group(store)
    for sample in store.admit(prompt(1), size=GROUP_SIZE).samples:
        store.start(sample)
    await store.flushed()
    with held_up(store) as waiting:
        OPERATIONS[operation](store)
        assert 1 == waiting()
    store.close()


async def test_files_that_a_kill_left_are_removed(store: Store, tmp_path: Path) -> None:
    """They filled the volume, one kill after another."""
    for step in (1, 2):
        seal(store, [completed_group(store)])
        store.commit(step)
    write_batch(store.batch_directory, [completed_group(store)], step=3, shards=2, temperature=1.0, seed=0)  # no seal
    (store.batch_directory / "4-0.tmp").write_bytes(b"half")
    files = {path: path.read_bytes() for path in store.batch_directory.glob("1-*")}
    store.forget(1)
    store.close()
    for path, body in files.items():
        path.write_bytes(body)
    again = Store(tmp_path, job_uid=JOB)
    assert {"2-0.safetensors", "2-1.safetensors"} == {path.name for path in again.batch_directory.iterdir()}
    again.close()


def kept(store: Store, step: int) -> dict[str, str]:
    """Digests of the files of a batch, which are those that the store names."""
    record = store.batch(step)
    assert record is not None
    files = {path.name: sha256(path.read_bytes()).hexdigest() for path in store.batch_directory.glob(f"{step}-*")}
    named = {shard_path(Path(), step, shard).name: digest for shard, digest in enumerate(record.sha256)}
    assert named == files
    return files


class Killed(Exception):
    pass


@contextmanager
def killed_after(calls: int) -> Iterator[None]:
    """Kill before the next call that changes what is on the disk, also in a thread that this test's loop starts."""
    left = calls

    def count(_: object, event: str, call: object) -> None:
        nonlocal left
        if event == "c_call" and call in (os.fsync, os.replace, os.unlink):
            left -= 1
            if left < 0:
                raise Killed

    threads = ThreadPoolExecutor(initializer=sys.setprofile, initargs=(count,))
    asyncio.get_running_loop().set_default_executor(threads)
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
        threads.shutdown()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())


def samples_of(store: Store, step: int) -> list[tuple[Any, ...]]:
    found = in_batch(store.batch_directory, step)
    return sorted((each.id, each.group, each.reward, *(part.tolist() for part in each.transcript)) for each in found)


@pytest.mark.parametrize("ranks", [1, 3])
async def test_batches_that_trainers_may_ask_for_are_dealt_anew_for_more_or_fewer_of_them(
    store: Store, tmp_path: Path, ranks: int
) -> None:
    for step in (1, 2, 3):
        seal(store, [completed_group(store), completed_group(store)])
        if step < 3:
            store.commit(step)
    store.forget(1)
    before, counts = [samples_of(store, step) for step in (2, 3)], +store.counts
    for step in (2, 3):
        await store.dealt(step, ranks)
    for opened in (store, Store):
        again = opened if isinstance(opened, Store) else opened(tmp_path, job_uid=JOB)
        assert [ranks, ranks] == [len(kept(again, step)) for step in (2, 3)]
        assert (before, counts) == ([samples_of(again, step) for step in (2, 3)], +again.counts)
        assert again.sealed == again.batch(3)
        again.close()


async def test_a_recording_stays_as_it_was_sealed(tmp_path: Path) -> None:
    store = Store(tmp_path, job_uid=JOB, keeps_batches=True)
    for step in (1, 2):
        seal(store, [completed_group(store)])
        store.commit(step)
    store.forget(1)
    await store.dealt(2, 1)
    assert [2, 1] == [len(kept(store, step)) for step in (1, 2)]
    store.close()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
async def test_a_kill_while_a_batch_is_dealt_anew_loses_no_sample(
    store: Store, tmp_path: Path, before: int, after: int
) -> None:
    """The kill comes before each file is synced, before each takes its place, before each that is left over goes."""
    group = completed_group(store)
    record = write_batch(store.batch_directory, [group], step=1, shards=before, temperature=1.0, seed=0)
    store.seal(record, [group])
    whole = samples_of(store, 1)
    store.close()
    sizes: list[int] = []
    is_done = False
    while not is_done:
        place = tmp_path / f"killed-{len(sizes)}"
        shutil.copytree(tmp_path, place, ignore=shutil.ignore_patterns("killed-*"))
        left = Store(place, job_uid=JOB)
        with suppress(Killed), killed_after(len(sizes)):
            await left.dealt(1, after)
            is_done = True
        left.close()
        again = Store(place, job_uid=JOB)
        sizes.append(len(kept(again, 1)))
        assert whole == samples_of(again, 1)
        await again.dealt(1, after)
        assert (after, whole) == (len(kept(again, 1)), samples_of(again, 1))
        again.close()
    assert [before] * sizes.count(before) + [after] * sizes.count(after) == sizes
    assert min(sizes.count(before), sizes.count(after)) > after, "before the store knew of it, and afterwards"


async def test_a_batch_that_can_not_be_dealt_anew_is_named_and_what_to_do(store: Store) -> None:
    seal(store, [completed_group(store)])
    path = shard_path(store.batch_directory, 1, 1)
    whole = path.read_bytes()
    path.write_bytes(b"torn")
    with pytest.raises(BatchNotDealt, match=r"batch 1 was sealed for 2 trainer ranks .* to 1: .*set replicas back"):
        await store.dealt(1, 1)
    assert store.deal_problem is not None
    assert "BatchNotDealt" == store.deal_problem.reason
    path.write_bytes(whole)
    await store.dealt(1, 1)
    assert [None] == [store.deal_problem]
    store.close()


async def test_a_batch_is_dealt_once_to_all_who_ask_for_it_at_once(store: Store) -> None:
    seal(store, [completed_group(store)])
    asked = await asyncio.gather(*(store.dealt(1, ranks) for ranks in (3, 3, 1)))
    assert [3, 3, 1] == [len(record.sha256) for record in asked if record]
    assert asked[0] is asked[1]
    assert 1 == len(kept(store, 1))
    store.close()


async def test_a_batch_is_dealt_once_though_who_asked_first_has_left(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads wrote the same files, and the next caller was told to make room on the volume."""
    seal(store, [completed_group(store)])
    begun, ends = asyncio.Event(), Event()
    dealt: list[int] = []
    loop = asyncio.get_running_loop()

    def deal_slowly(directory: Path, record: BatchRecord, *, shards: int) -> BatchRecord:
        dealt.append(shards)
        loop.call_soon_threadsafe(begun.set)
        ends.wait(60)
        return deal_anew(directory, record, shards=shards)

    monkeypatch.setattr("colocated_rl_rollout.store.store.deal_anew", deal_slowly)
    first = asyncio.create_task(store.dealt(1, 3))
    await begun.wait()
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(store.dealt(1, 3))
    await asyncio.sleep(0)
    ends.set()
    assert [3] == [len(record.sha256) for record in [await second] if record]
    assert [3] == dealt
    store.close()


async def test_a_batch_that_is_forgotten_while_it_is_dealt_leaves_no_file(store: Store) -> None:
    seal(store, [completed_group(store)])
    store.commit(1)
    dealing = asyncio.create_task(store.dealt(1, 3))
    for _ in range(2):
        await asyncio.sleep(0)  # it has begun, in a task of its own
    store.forget(1)
    assert await dealing is None
    assert [] == [*store.batch_directory.glob("*")]
    store.close()


async def test_a_volume_without_write_ahead_is_refused() -> None:
    with pytest.raises(StoreFailed, match="use a local or block volume"):
        open_database(Path(":memory:"))


async def test_a_store_that_cannot_be_read_says_what_to_do(store: Store, tmp_path: Path) -> None:
    store.close()
    with closing(sqlite3.connect(store.path)) as other:
        other.execute("DROP TABLE retired")
    with pytest.raises(StoreFailed, match=r"can't be read: no such table: retired; restore the volume"):
        Store(tmp_path, job_uid=JOB)


async def test_a_batch_whose_files_are_gone_is_reported(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seal(store, [completed_group(store)])
    store.close()
    shard_path(store.batch_directory, 1, 0).unlink()
    Store(tmp_path, job_uid=JOB).close()
    assert ["batch lost"] == [record.message for record in caplog.records]


async def test_a_crash_while_files_are_removed_leaves_no_batch_without_files(store: Store, tmp_path: Path) -> None:
    seal(store, [completed_group(store)])
    store.commit(1)
    store.close()
    for path in store.batch_directory.iterdir():
        path.unlink()
    again = Store(tmp_path, job_uid=JOB)
    assert again.batch(1) is None
    assert again.sealed is not None
    again.close()


async def test_a_failed_write_reaches_whoever_waits_and_whoever_comes_later(store: Store) -> None:
    with closing(sqlite3.connect(store.path)) as other:
        other.execute("DROP TABLE groups")
    store.admit(prompt(0), size=1)
    with pytest.raises(StoreFailed, match=r"could not be written: .*no such table.*what was committed is kept"):
        await store.flushed()
    with pytest.raises(StoreFailed):
        store.admit(prompt(1), size=1)
    store.close()


@pytest.mark.parametrize("row", [(1,), (2**70, "too large"), ("half a character: \ud800", 1)])
async def test_a_write_that_never_comes_to_the_database_fails_the_store_too(store: Store, row: tuple[Any, ...]) -> None:
    """The thread ended of it, and everybody waited for a volume that was well."""
    store.write(("INSERT INTO facts VALUES (?, ?)", [row]))
    with pytest.raises(StoreFailed, match=r"could not be written: .*what was committed is kept"):
        await store.flushed()
    with pytest.raises(StoreFailed):
        store.admit(prompt(1), size=1)
    store.close()


async def test_slime_a_thousand_and_one_groups_that_finish_wait_for_nobody(store: Store, tmp_path: Path) -> None:
    """slime's published queue is full, and its callbacks must not block the event loop. Here the disk takes nothing."""
    with held_up(store) as waiting:
        for _ in range(1001):
            completed_group(store)
        assert waiting() > 1001
    await store.flushed()
    store.close()
    again = Store(tmp_path, job_uid=JOB)
    assert 1001 * GROUP_SIZE == again.counts[S.COMPLETED]
    again.close()


async def test_a_full_volume_is_named_in_the_failure(store: Store) -> None:
    await store.flushed()
    database = store._writer._database
    database.execute(f"PRAGMA max_page_count = {database.execute('PRAGMA page_count').fetchone()[0]}")
    store.admit(prompt(0), size=10_000)
    with pytest.raises(StoreFailed, match="its volume is full: enlarge its claim"):
        await store.flushed()
    store.close()


async def test_the_room_that_is_kept_grows_with_the_batches(tmp_path: Path) -> None:
    free = [SPARE_BYTES]
    store = Store(tmp_path, job_uid=JOB, free_bytes=lambda _: free[0])
    assert store.has_room()
    seal(store, [completed_group(store)])
    assert not store.has_room()
    free[0] += 2 * sum(path.stat().st_size for path in store.batch_directory.iterdir())
    assert store.has_room()
    store.close()


async def test_a_week_of_steps_takes_no_more_room_than_a_day(tmp_path: Path) -> None:
    store, sizes = Store(tmp_path, job_uid=JOB, records_at_most=50), []
    for _ in range(2):
        for _ in range(60):
            record = seal(store, [completed_group(store) for _ in range(8)])
            store.commit(record.step)
            store.forget(record.step)
        await store.flushed()
        with closing(sqlite3.connect(store.path)) as database:  # the log's length says how busy the writer was
            assert database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        sizes.append(sum(path.stat().st_size for path in store.path.parent.rglob("*") if path.is_file()))
    assert sizes[1] < 1.2 * sizes[0]
    assert 120 * 16 == store.counts[S.TRAINED]
    store.close()
    with closing(sqlite3.connect(store.path)) as reader:
        tables = ("groups", "samples", "segments", "batches")
        assert [0, 0, 0, 50] == [reader.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in tables]


async def test_records_of_batches_stay_for_the_learning_curve_without_digests_of_files_that_are_gone(
    store: Store, tmp_path: Path
) -> None:
    sealed = []
    for _ in range(4):
        sealed.append(seal(store, [completed_group(store)]))
        store.commit(sealed[-1].step)
        store.forget(sealed[-1].step - 1)
    await store.flushed()
    without = [record.model_copy(update={"sha256": ()}) for record in sealed]
    assert [*without[:3], sealed[3]] == store.records(after=0, limit=10)
    assert without[1:3] == store.records(after=1, limit=2)
    store.close()
    again = Store(tmp_path, job_uid=JOB)
    assert [*without[:3], sealed[3]] == again.records(after=0, limit=10)
    assert (sealed[3], 5) == (again.sealed, again.next_step)
    again.close()


def climb_to(step: int, *, epoch: int, **changes: Any) -> KeptClimb:
    return KeptClimb(**{"epoch": epoch, "step": step, "took_s": {"Trained": 2.5}, "ended": 10.0 * epoch} | changes)


async def test_the_climb_to_a_step_stays_beside_its_batch(store: Store, tmp_path: Path) -> None:
    """The first one does: when a job goes on, its group climbs once more to the step at which it stopped."""
    records = [seal(store, [completed_group(store)])]
    store.remember_climb(climb_to(0, epoch=1))
    store.remember_climb(climb_to(1, epoch=2))
    store.remember_climb(climb_to(1, epoch=2, ended=99.0))
    store.commit(1)
    records.append(seal(store, [completed_group(store)]))
    await store.dealt(1, 3)
    store.remember_epoch(2)
    store.close()
    again = Store(tmp_path, job_uid=JOB)
    again.remember_climb(climb_to(1, epoch=3, took_s={}))
    await again.flushed()
    kept, without = again.records(after=0, limit=10)
    assert (climb_to(1, epoch=2), 3) == (kept.climb, len(kept.sha256))
    assert (records[1], records[1]) == (without, again.sealed)
    again.close()


async def test_a_store_of_a_program_that_kept_no_climbs_goes_on(store: Store, tmp_path: Path) -> None:
    record = seal(store, [completed_group(store)])
    store.close()
    with closing(sqlite3.connect(store.path)) as database:
        database.execute("ALTER TABLE batches DROP COLUMN climb")
    again = Store(tmp_path, job_uid=JOB)
    again.remember_climb(climb_to(1, epoch=2))
    await again.flushed()
    assert [record.model_copy(update={"climb": climb_to(1, epoch=2)})] == again.records(after=0, limit=1)
    again.close()


async def test_a_volume_that_hangs_is_not_waited_for_for_ever(store: Store) -> None:
    """The job stood still, and every part of it said that it was well."""
    await store.flushed()
    with held_up(store), pytest.raises(StoreFailed, match="did not take a commit within 0 s: see why it hangs"):
        await store._writer.flushed(deadline_s=0.05)
    store.close()


async def test_people_see_the_newest_samples_first(store: Store) -> None:
    completed_group(store)
    store.admit(prompt(1), size=1)
    await store.flushed()
    assert [3, 2, 1] == [row["id"] for row in store.recent(None, limit=10)]
    assert [2] == [row["id"] for row in store.recent(S.COMPLETED, limit=1)]
    store.close()


@dataclass
class PlainDecoder:
    """Decodes whole texts alone."""

    text: Callable[[list[int]], str] = str
    special_ids: frozenset[int] = frozenset()
    byte_ids: frozenset[int] = frozenset()


WORDS = partial(in_words, decoder=PlainDecoder())


async def test_people_read_what_was_written_wherever_it_is_kept(store: Store) -> None:
    group = completed_group(store)
    store.admit(prompt(1), size=1)
    await store.flushed()
    words = {row["id"]: (row["prompt"], row["response"]) for row in store.recent(None, limit=10, words=WORDS)}
    asked, answer = (str(list(group.prompt.ids)), str(group.samples[0].tokens.ids.tolist()))
    assert ((asked, answer), (str(list(prompt(1).ids)), None)) == (words[1], words[3])
    seal(store, [group])
    await store.flushed()
    assert {(asked, answer)} == {
        (row["prompt"], row["response"]) for row in store.recent(S.SEALED, limit=9, words=WORDS)
    }
    for file in store.batch_directory.iterdir():
        file.unlink()
    assert {(None, None)} == {(row["prompt"], row["response"]) for row in store.recent(S.SEALED, limit=9, words=WORDS)}
    store.close()


# ------------------------------------------------------------------------------------------- going on from another job
OTHER = names.JobUid("0b9f0a0e-5d0c-4f5c-8a55-6a1f0c3d2e1b")


def checkpoint(place: Path, step: int, *, position: int | None = None) -> Path:
    directory = place / "checkpoints" / checkpoint_name(step)
    directory.mkdir(parents=True)
    contents = Contents(format=FORMAT, step=step, digests={}, prompt_position=position)
    (directory / CONTENTS).write_text(contents.model_dump_json())
    return directory.parent


def three_steps(place: Path) -> dict[S, int]:
    """The store of a job that trained two steps, sealed a third, has a group under way and a checkpoint of step 1."""
    store = Store(place / "first", job_uid=OTHER)
    for step in (1, 2, 3):
        seal(store, [completed_group(store)])
        store.commit(min(step, 2))
        store.forget(min(step, 1))
    store.interrupt(started(store), segment(3))
    store.remember_epoch(57)
    for step in (1, 2):
        store.record_evaluation(EvaluationResult(step=step, samples=4, mean=0.5, stderr=0.1))
    counts = dict(+store.counts)
    store.close()
    return counts


def started(store: Store) -> Sample:
    sample = store.admit(prompt(store.cursor), size=GROUP_SIZE).samples[0]
    store.start(sample)
    return sample


def test_a_store_begins_behind_a_former_checkpoint_and_stays_there(tmp_path: Path) -> None:
    former = FormerJob(checkpoint(tmp_path, 40, position=160))
    for _ in range(2):
        store = Store(tmp_path / "own", job_uid=JOB, former=former)
        assert (40, 40, 41, 160) == (store.began_at, store.trained_step, store.next_step, store.cursor)
        store.close()
        former = FormerJob(tmp_path / "gone")  # nothing of it is needed any more


def test_a_former_jobs_samples_go_on_as_they_were_and_belong_to_the_new_job(tmp_path: Path) -> None:
    counts = three_steps(tmp_path)
    former = FormerJob(checkpoint(tmp_path, 1, position=1), samples=tmp_path / "first")
    before = {path: path.read_bytes() for path in (tmp_path / "first").rglob("*.safetensors")}

    store = Store(tmp_path / "own", job_uid=JOB, former=former)

    assert counts == +store.counts
    assert (1, 2, 4, 0) == (store.began_at, store.trained_step, store.next_step, store.epoch)
    assert [2, 3] == [step for step in (1, 2, 3, 4) if store.batch(step)], "replayed, and next"
    assert 3 == len(next(iter(store.waiting.values())).tokens)
    assert {"held-out": 1} == {name: each.step for name, each in store.evaluated.items()}, "step 2 is made again"
    store.close()
    with pytest.raises(StoreFailed, match=f"belongs to job {JOB}"):
        Store(tmp_path / "own", job_uid=OTHER)
    assert before == {path: path.read_bytes() for path in before}


def test_samples_that_are_older_than_the_checkpoint_are_given_up(tmp_path: Path) -> None:
    """They may have been trained in the steps that the samples know nothing of."""
    three_steps(tmp_path)

    store = Store(tmp_path / "own", job_uid=JOB, former=FormerJob(checkpoint(tmp_path, 5), samples=tmp_path / "first"))

    assert (5, 6, {}, 0) == (store.trained_step, store.next_step, store.groups, len(store.waiting))
    assert GROUP_SIZE == store.reasons[S.DISCARDED, "CheckpointNewer"]
    store.close()


def test_samples_that_do_not_follow_the_checkpoint_are_refused(tmp_path: Path) -> None:
    three_steps(tmp_path)
    old = Store(tmp_path / "first", job_uid=OTHER)
    old.forget(2)
    old.close()
    with pytest.raises(StoreFailed, match="begin behind step 2, its checkpoint is of step 1"):
        Store(tmp_path / "own", job_uid=JOB, former=FormerJob(checkpoint(tmp_path, 1), samples=tmp_path / "first"))


def test_batches_that_are_missing_among_the_samples_are_named(tmp_path: Path) -> None:
    three_steps(tmp_path)
    shard_path(tmp_path / "first" / "batches", 2, 0).unlink()
    with pytest.raises(StoreFailed, match="batch 2, which follows the checkpoint, is not among the samples"):
        Store(tmp_path / "own", job_uid=JOB, former=FormerJob(checkpoint(tmp_path, 1), samples=tmp_path / "first"))


@pytest.mark.parametrize("linked", ["a batch", "the database"])
def test_links_among_a_former_jobs_samples_are_not_followed(tmp_path: Path, linked: str) -> None:
    """They could lead to the keys of the pod that copies."""
    three_steps(tmp_path)
    first = tmp_path / "first"
    file = shard_path(first / "batches", 2, 0) if linked == "a batch" else first / "store.sqlite3"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreFailed, match="is no plain file" if linked == "a batch" else "has no store.sqlite3"):
        Store(tmp_path / "own", job_uid=JOB, former=FormerJob(checkpoint(tmp_path, 1), samples=first))


def test_what_was_written_ahead_of_a_former_jobs_store_is_no_link(tmp_path: Path) -> None:
    """It could lead to the keys of the pod that copies, or to a device without an end."""
    three_steps(tmp_path)
    (tmp_path / "first" / "store.sqlite3-wal").symlink_to("/etc/hostname")
    with pytest.raises(StoreFailed, match=r"store\.sqlite3-wal, which spec\.restoreFrom names, is no plain file"):
        Store(tmp_path / "own", job_uid=JOB, former=FormerJob(checkpoint(tmp_path, 1), samples=tmp_path / "first"))


@pytest.mark.parametrize(
    "added",
    [
        "CREATE TRIGGER a BEFORE DELETE ON facts BEGIN INSERT INTO facts SELECT value, 1 FROM numbers; END",
        "CREATE VIEW a AS WITH RECURSIVE n(v) AS (SELECT 1 UNION ALL SELECT v + 1 FROM n) SELECT v FROM n",
        "CREATE VIRTUAL TABLE a USING fts5(b)",
    ],
)
def test_a_former_store_does_nothing_by_itself(tmp_path: Path, added: str) -> None:
    """Somebody else may have made it. A trigger ran, and could run for ever, as the new job took its copy over."""
    three_steps(tmp_path)
    with closing(sqlite3.connect(tmp_path / "first" / "store.sqlite3")) as database:
        database.execute(added)
        database.commit()
    with pytest.raises(StoreFailed, match=r"has what no job's store has, such as a (trigger|view|table)"):
        Store(tmp_path / "own", job_uid=JOB, former=FormerJob(checkpoint(tmp_path, 1), samples=tmp_path / "first"))


def test_samples_of_a_job_that_still_runs_are_refused(tmp_path: Path) -> None:
    running = Store(tmp_path / "first", job_uid=OTHER)
    with pytest.raises(StoreFailed, match="its job still runs; suspend or delete it first"):
        Store(tmp_path / "own", job_uid=JOB, former=FormerJob(checkpoint(tmp_path, 1), samples=tmp_path / "first"))
    running.close()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_samples_on_a_volume_without_locks_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A job could not begin from samples whose volume knows no locks, as some of object stores and networks."""
    counts, flock = three_steps(tmp_path), fcntl.flock

    def refuse_to_share(file: Any, operation: int) -> None:
        if operation & fcntl.LOCK_SH:
            raise OSError(code, os.strerror(code))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", refuse_to_share)
    store = Store(tmp_path / "own", job_uid=JOB, former=FormerJob(checkpoint(tmp_path, 1), samples=tmp_path / "first"))
    assert counts == +store.counts
    store.close()


@pytest.mark.parametrize("harm", ["absent", "damaged"])
def test_samples_that_can_not_be_read_are_refused(tmp_path: Path, harm: str) -> None:
    three_steps(tmp_path)
    path = tmp_path / "first" / "store.sqlite3"
    if harm == "absent":
        path.unlink()
    else:
        path.write_bytes(b"x" * 8192)
    with pytest.raises(StoreFailed, match="has no store.sqlite3" if harm == "absent" else "not a database|damaged"):
        Store(tmp_path / "own", job_uid=JOB, former=FormerJob(checkpoint(tmp_path, 1), samples=tmp_path / "first"))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
async def test_samples_of_a_job_that_ended_while_a_batch_was_dealt_anew_are_taken_as_they_were_dealt(
    tmp_path: Path, before: int, after: int
) -> None:
    """Files that were not in their places yet were left behind: the record named others, which no trainer could get."""
    begins, kills, is_done = checkpoint(tmp_path, 0), 0, False
    while not is_done:
        place = tmp_path / f"killed-{kills}"
        store = Store(place, job_uid=OTHER)
        group = completed_group(store)
        store.seal(write_batch(store.batch_directory, [group], step=1, shards=before, temperature=1.0, seed=0), [group])
        whole = samples_of(store, 1)
        with suppress(Killed), killed_after(kills):
            await store.dealt(1, after)
            is_done = True
        store.close()
        own = Store(tmp_path / f"own-{kills}", job_uid=JOB, former=FormerJob(begins, samples=place))
        assert whole == samples_of(own, 1)
        assert {before, after} >= {len(kept(own, 1))}
        own.close()
        kills += 1
    assert kills > after


async def test_a_kill_while_samples_are_copied_leaves_all_of_them_or_none(tmp_path: Path) -> None:
    """The kill comes before each file is synced, and each time the store's own files change afterwards."""
    counts = three_steps(tmp_path)
    former = FormerJob(checkpoint(tmp_path, 1), samples=tmp_path / "first")
    kills, is_done = 0, False
    while not is_done:
        place = tmp_path / f"killed-{kills}"
        with suppress(Killed), killed_after(kills):
            Store(place, job_uid=JOB, former=former).close()
            is_done = True
        left = shutil.copytree(place, tmp_path / f"left-{kills}", ignore=shutil.ignore_patterns("lock"))
        again = Store(left, job_uid=JOB, former=former)
        assert (counts, 1, 2) == (+again.counts, again.began_at, again.trained_step)
        again.close()
        kills += 1
    assert kills > 8, "four shards, their directories, the database and its place"


def test_where_prompts_go_on_without_the_store_leaves_none_out(tmp_path: Path) -> None:
    store = Store(tmp_path, job_uid=JOB)
    first, second, third = (store.admit(prompt(position), size=GROUP_SIZE) for position in (0, 1, 2))
    assert [3, 1, 0] == [store.position_after(groups) for groups in ([first, second, third], [first, third], [third])]
    store.close()
