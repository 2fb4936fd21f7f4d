"""The store keeps every group and sample, each in exactly one state (I3), durable before anybody learns of it.

Live groups and samples are held in memory and changed here, at once and in one place; the same call queues each change
for the database, in order and as one entry, and `flushed` returns when it is durable. So no other decision comes
between a decision and its change, a kill leaves the whole of a change or nothing of it, and a caller awaits `flushed`
before it acknowledges anything. A restart reads the database: running samples become interrupted, with the tokens that
were accepted.

Before its volume is full the store reports so (`has_room`), and admission stops: what is accepted already can still be
generated, sealed and written.

It refuses every move that `samples.NEXT` does not have: WrongMove is a bug, and ends the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colocated_rl_api.checkpoint import Contents
from colocated_rl_api.facts import EvaluationResult, Problem
from colocated_rl_api.logs import log
from colocated_rl_api.names import JobUid, PromptPosition
from colocated_rl_rollout.rules.resume import join
from colocated_rl_rollout.rules.samples import (
    LIVE,
    NEXT,
    NO_FIGURES,
    NO_TOKENS,
    OF_RECORDING,
    OF_SESSIONS,
    WAITING,
    Finish,
    Group,
    GroupId,
    Prompt,
    Sample,
    SampleId,
    SampleState,
    Tokens,
    Trajectory,
)
from colocated_rl_rollout.store import tables
from colocated_rl_rollout.store.backup import restore
from colocated_rl_rollout.store.batches import (
    BatchRecord,
    KeptClimb,
    batch_bytes,
    batch_is_there,
    free_on_volume,
    remove_all_but,
    remove_batch,
    remove_other_shards,
    take_places,
)
from colocated_rl_rollout.store.database import (
    DatabaseWriter,
    Statement,
    StoreDamaged,
    StoreFailed,
    hold,
    open_database,
)
from colocated_rl_rollout.store.former import FormerJob
from colocated_rl_rollout.store.reader import StoreReader
from colocated_rl_rollout.store.recording import RecordingUnusable, as_dealt, deal_anew

LOG = logging.getLogger(__name__)

COMMIT_DEADLINE_S = 60.0
EPOCH_DEADLINE_S = 10.0
CLOSE_DEADLINE_S = 10.0
RECORDS_AT_MOST = 10_000  # of batches whose files are gone, about 800 bytes each
SPARE_BYTES = 64 * 1024 * 1024  # of the volume, for what is accepted already; plus twice the newest batch


class BatchNotDealt(Exception):
    """A batch can't be dealt to another number of ranks now; it is unchanged. Asking again later is safe."""


class WrongMove(Exception):
    """The caller asked for a move that the sample's state does not allow: a bug of the caller."""


class Store(StoreReader):
    """Holds all groups and samples of one job. Used from one thread.

    groups: those that are in no batch, by id, oldest first.
    waiting: samples that wait for an engine, by id.
    free_bytes: returns the free bytes of the volume that a path is on.
    """

    def __init__(
        self,
        directory: Path,
        *,
        job_uid: JobUid,
        keeps_batches: bool = False,
        records_at_most: int = RECORDS_AT_MOST,
        former: FormerJob | None = None,
        free_bytes: Callable[[Path], int] = free_on_volume,
    ) -> None:
        """Open or make the store. keeps_batches: also keep those that no trainer needs any more. records_at_most: of
        batches that are not kept.

        former: what a job that has no store yet goes on from.
        Raises StoreFailed when it can't be used, or belongs to another job.
        """
        super().__init__(directory)
        self._keeps_batches = keeps_batches
        self._records_at_most = records_at_most
        self.free_bytes = free_bytes
        self.problem: Problem | None = None
        self.deal_problem: Problem | None = None  # why a batch could not be dealt to those who asked for it last
        self._dealing = asyncio.Lock()
        self._lock = hold(directory / "lock")
        if former is not None and not self.path.exists():
            former.copy_samples(self.path, self.batch_directory, job_uid=job_uid)
        database, is_restored = self._open()
        self.cursor = PromptPosition(0)
        self.data_digest: str | None = None
        self._saved_step = 0
        self._climb_epoch = 0  # of the newest climb that this process was told of
        self._group_count = 0
        self.groups: dict[GroupId, Group] = {}
        self.waiting: dict[SampleId, Sample] = {}
        self._sealed_samples: dict[int, int] = {}  # by step, of batches that are not trained
        self._batches: dict[int, BatchRecord] = {}  # those whose files are kept
        self.evaluated: dict[str, EvaluationResult] = {}  # newest of each set that was ever evaluated
        try:
            self._read(database, job_uid)
        except sqlite3.Error as error:
            raise StoreFailed(f"store {self.path} can't be read: {error}; restore the volume, or remove it") from error
        if is_restored:
            self._read_dealings()
        else:  # files that the backup does not know of are what is left of later batches
            remove_all_but(self.batch_directory, self._batches.values())
        self._writer = DatabaseWriter(database)
        self._writer.write((tables.FACT, [("job_uid", job_uid)]))
        for sample in [sample for group in self.groups.values() for sample in group.kept]:
            if sample.state is SampleState.RUNNING:
                self._writer.write(self._move(sample, SampleState.INTERRUPTED))
        for group in [*self.groups.values()] if is_restored else []:
            self.give_up(group, "StoreDamaged")
        if former is not None and self.began_at is None:
            self._begin_at(former.checkpoint(), has_samples=former.samples is not None)

    def _read_dealings(self) -> None:
        """Take each batch as its files are dealt, which may be to other ranks than when the backup was written."""
        for step, record in self._batches.items():
            try:
                self._batches[step] = as_dealt(self.batch_directory, record)
            except RecordingUnusable as error:
                log(LOG, "batch unreadable", logging.ERROR, step=step, reason=str(error))
            if self.sealed is record:
                self.sealed = self._batches[step]

    def _begin_at(self, checkpoint: Contents, *, has_samples: bool) -> None:
        """Go on behind a former job's checkpoint. has_samples: the store is a copy of that job's.

        That it has begun is written last, and everything before it is the same when it is done again after a kill.
        """
        step = checkpoint.step
        if has_samples and step < self._saved_step:
            raise StoreFailed(
                f"the samples that spec.restoreFrom names begin behind step {self._saved_step}, its checkpoint is of "
                f"step {step}: make a job that names a newer checkpoint, or no samples"
            )
        if has_samples and (lost := sorted({*range(step + 1, self.trained_step + 1)} - self._batches.keys())):
            raise StoreFailed(
                f"batch {lost[0]}, which follows the checkpoint, is not among the samples: copy them again"
            )
        if step > self.trained_step:  # nobody knows which samples were trained since
            for group in [*self.groups.values()]:
                self.give_up(group, "CheckpointNewer")
        self.commit(step)
        if not has_samples:
            self.cursor = checkpoint.prompt_position or PromptPosition(0)
        self.began_at = step
        self._writer.write(
            (tables.FORGET_CLIMBS, [()]),  # which pods of the former job made
            (tables.FACT, [("cursor", self.cursor), ("began_at", step)]),
        )

    def _open(self) -> tuple[sqlite3.Connection, bool]:
        """Open the database, and return it and whether it is a backup in the place of a damaged one."""
        try:
            return open_database(self.path), False
        except StoreDamaged as damage:
            if not restore(self.path):
                raise StoreDamaged(
                    f"{damage}, and there is no intact backup: restore the volume, or remove the file to continue "
                    "after the trainers' step, without the samples in progress"
                ) from damage
            log(LOG, "store restored", logging.ERROR, reason=str(damage))
            return open_database(self.path), True

    # ------------------------------------------------------------------------------------------------- durability
    async def flushed(self) -> None:
        """Return once every change so far is durable. Raises StoreFailed."""
        await self._writer.flushed(deadline_s=COMMIT_DEADLINE_S)

    def close(self) -> None:
        """Make all changes durable, and close the file."""
        if self._writer.close(deadline_s=CLOSE_DEADLINE_S):
            os.close(self._lock)  # else the volume hangs, and the lock stays until the process ends

    def remember_epoch(self, epoch: int) -> None:
        """Make an epoch durable before it is acted on; block until it is."""
        self.epoch = epoch
        self._writer.write((tables.FACT, [("epoch", epoch)]))
        self._writer.flush(deadline_s=EPOCH_DEADLINE_S)

    def write(self, *statements: Statement) -> None:
        """Queue changes of tables that others own (`sessions`), committed together and in order with all others."""
        self._writer.write(*statements)

    def remember_data(self, digest: str) -> None:
        """Record the digest of the data that the cursor and the rows of groups refer to."""
        if digest != self.data_digest:
            self.data_digest = digest
            self._writer.write((tables.FACT, [("data_digest", digest)]))

    def has_room(self) -> bool:
        """Return whether the volume can take more than what is accepted already; if not, `problem` has the remedy."""
        newest = self._batches.get(self.sealed.step) if self.sealed else None
        needed = SPARE_BYTES + 2 * batch_bytes(self.batch_directory, newest)
        free = self.free_bytes(self.batch_directory.parent)
        if free >= needed:
            self.problem = None
        elif self.problem is None:
            self.tell_full(f"{free >> 20} MiB are free, {needed >> 20} MiB are kept for what is accepted already")
        return free >= needed

    def tell_full(self, why: str) -> None:
        """Report that the volume is full; `has_room` looks again."""
        message = f"no more prompts are taken, the store's volume is full: {why}; enlarge its claim or free some"
        log(LOG, "store full", logging.WARNING, reason=message)
        self.problem = Problem(reason="StoreFull", message=message)

    # ------------------------------------------------------------------------------------------------- one sample
    def admit(self, prompt: Prompt, *, size: int) -> Group:
        """Admit a group of `size` samples, and record the position in the prompts that the next one comes from."""
        self._group_count += 1
        group = Group(GroupId(self._group_count), prompt)
        self.groups[group.id] = group
        self.cursor = PromptPosition(prompt.position + 1)
        ids = np.asarray(prompt.ids, np.int32).tobytes()
        self._writer.write(
            (tables.GROUP, [(group.id, prompt.position, prompt.index, ids)]),
            (tables.FACT, [("cursor", self.cursor), ("groups", group.id)]),
            self._new_samples(group, size),
        )
        return group

    def admit_whole(self, prompt: tuple[int, ...], trajectories: Sequence[Trajectory], *also: Statement) -> Group:
        """Admit a group of samples that are completed already. also: statements to commit together with it."""
        self._group_count += 1
        group = Group(GroupId(self._group_count), Prompt(PromptPosition(OF_SESSIONS), OF_SESSIONS, prompt))
        first = self.counts.total() + 1
        for number, each in enumerate(trajectories, first):
            sample = Sample(SampleId(number), group, SampleState.COMPLETED, each.tokens, segments=1, attempts=1)
            sample.finish, sample.reward, sample.figures = each.finish, each.reward, each.figures
            sample.ended = self._end()
            group.samples.append(sample)
        self.groups[group.id] = group
        self.counts[SampleState.COMPLETED] += len(trajectories)
        self._writer.write(
            (tables.GROUP, [(group.id, OF_SESSIONS, OF_SESSIONS, np.asarray(prompt, np.int32).tobytes())]),
            (tables.FACT, [("groups", group.id)]),
            (
                tables.WHOLE_SAMPLE,
                [
                    (
                        *(each.id, group.id, each.state, each.attempts, each.finish, each.reward, each.ended),
                        *(each.tokens.unversioned, tables.packed_figures(each.figures), of.session, of.grouping),
                    )
                    for each, of in zip(group.samples, trajectories, strict=True)
                ],
            ),
            (tables.SEGMENT, [(each.id, each.attempts, *tables.packed(each.tokens)) for each in group.samples]),
            *also,
        )
        return group

    def start(self, sample: Sample) -> None:
        """Record that an engine attempt begins."""
        self._writer.write(self._move(sample, SampleState.RUNNING))

    def park(self, sample: Sample) -> None:
        """Record that the attempt did not begin after all: no engine took it."""
        self._writer.write(self._move(sample, SampleState.INTERRUPTED))

    def interrupt(
        self, sample: Sample, segment: Tokens, *, keep: bool = True, experts: NDArray[np.int16] | None = None
    ) -> None:
        """Record that the attempt ended before the response; add its tokens, or drop all tokens where `keep` is off.

        experts: of prompt and response, where the engine reported them.
        """
        brought = len(segment) > 0
        if experts is not None:
            sample.experts = experts
        ended = self._end_attempt(sample, SampleState.INTERRUPTED, segment if keep else NO_TOKENS, brought=brought)
        if not keep:
            sample.tokens, sample.segments = NO_TOKENS, 0
            sample.experts = None
            ended.append((tables.DROP_SEGMENTS, [(sample.id,)]))
        self._writer.write(*ended)

    def finish(
        self, sample: Sample, segment: Tokens, finish: Finish, *, experts: NDArray[np.int16] | None = None
    ) -> None:
        """Complete the response with this segment, which is empty when the end was found in earlier tokens."""
        sample.finish = finish
        if experts is not None:
            sample.experts = experts
        self._writer.write(*self._end_attempt(sample, SampleState.SCORING, segment, brought=True))

    def turned(self, sample: Sample, oldest_step: int | None) -> None:
        """Record that a turn of the sample's episode has ended; the turn is durable with its session."""
        steps = (sample.playing_since, oldest_step)
        sample.playing_since = min((step for step in steps if step is not None), default=None)
        sample.group.ages_are_known = False

    def complete(self, sample: Sample, played: Trajectory, *also: Statement) -> None:
        """Record that the sample's episode has ended. also: statements to commit together with it."""
        sample.finish, sample.reward, sample.figures = played.finish, played.reward, played.figures
        sample.experts = played.experts
        ended = self._end_attempt(sample, SampleState.SCORING, played.tokens, brought=True)
        self._writer.write(*ended, self._scored(sample), *also)

    def score(self, sample: Sample, reward: float, figures: Mapping[str, float] = NO_FIGURES) -> None:
        """Record the reward, and the figures beside it."""
        sample.reward, sample.figures = reward, figures
        self._writer.write(self._scored(sample))

    def replace(self, sample: Sample, state: SampleState, reason: str) -> Sample:
        """End a sample as failed or discarded; a new one of the same group takes its place."""
        moved = self._move(sample, state, reason)
        sample.tokens, sample.experts = NO_TOKENS, None
        self._writer.write(moved, (tables.DROP_SEGMENTS, [(sample.id,)]), self._new_samples(sample.group, 1))
        return sample.group.samples[-1]

    def leave_out(self, samples: Sequence[Sample], reason: str) -> None:
        """Filter completed samples; their group continues with the others."""
        moved = [self._move(sample, SampleState.FILTERED, reason) for sample in samples]
        self._writer.write(*moved, (tables.DROP_SEGMENTS, [(sample.id,) for sample in samples]))

    def give_up(self, group: Group, reason: str, state: SampleState = SampleState.DISCARDED) -> None:
        """End what is left of a group in this state; admission makes another one."""
        dropped = group.kept
        moved = [self._move(sample, state, reason) for sample in dropped]
        del self.groups[group.id]
        self._writer.write(
            *moved,
            (tables.GIVE_UP_GROUP, [(reason, group.id)]),
            (tables.DROP_SEGMENTS, [(sample.id,) for sample in dropped]),
        )

    # ------------------------------------------------------------------------------------------------- batches
    def position_after(self, groups: Sequence[Group]) -> PromptPosition:
        """Return where a job that has only a checkpoint of the batch `groups` goes on: no prompt is left out."""
        sealed = {group.id for group in groups}
        ahead = [group.prompt.position for group in self.groups.values() if group.id not in sealed]
        return min([self.cursor, *(position for position in ahead if position >= 0)])

    @property
    def next_step(self) -> int:
        """Return the step of the batch that is collected now."""
        return max(self.sealed.step if self.sealed else 0, self.trained_step) + 1

    @property
    def sealed_groups(self) -> int:
        """Return how many groups are in a batch that is not trained."""
        return self.sealed.groups if self.sealed and self.sealed.step > self.trained_step else 0

    def batch(self, step: int) -> BatchRecord | None:
        """Return the sealed batch of a step whose files are kept, or None."""
        return self._batches.get(step)

    def seal(self, record: BatchRecord, groups: Sequence[Group]) -> None:
        """Seal groups as batch `record.step`, whose files are durable already."""
        self._check_next(record)
        samples = [sample for group in groups for sample in group.kept]
        for sample in samples:
            self._check(sample, SampleState.SEALED)
        self._writer.write(
            (tables.MOVE, [(SampleState.SEALED, "", sample.ended, sample.id) for sample in samples]),
            (tables.DROP_SEGMENTS, [(sample.id,) for sample in samples]),
            *self._seal(record, [group.id for group in groups]),
        )
        for sample in samples:
            self._count(sample, SampleState.SEALED)
        for group in groups:
            del self.groups[group.id]
        self._sealed_samples[record.step] = len(samples)

    def seal_recorded(self, record: BatchRecord, rewards: Sequence[Sequence[float]]) -> None:
        """Seal a batch of a recording as batch `record.step`; its files are durable already, and its samples begin as
        sealed.

        rewards: one for each sample of each group.
        """
        self._check_next(record)
        first, sample, state = self._group_count + 1, self.counts.total() + 1, SampleState.SEALED
        groups = range(first, first + len(rewards))
        owned = [(group, reward) for group, each in zip(groups, rewards, strict=True) for reward in each]
        self._group_count += len(rewards)
        self._writer.write(
            (tables.GROUP, [(group, OF_RECORDING, OF_RECORDING, None) for group in groups]),
            (tables.FACT, [("groups", self._group_count)]),
            (
                tables.WHOLE_SAMPLE,
                [
                    (number, group, state, 0, None, reward, self._end(), None, None, None, None)
                    for number, (group, reward) in enumerate(owned, sample)
                ],
            ),
            *self._seal(record, groups),
        )
        self.counts[state] += len(owned)
        self._sealed_samples[record.step] = len(owned)

    def _check_next(self, record: BatchRecord) -> None:
        if record.step != self.next_step or record.step in self._batches:
            raise WrongMove(f"batch {record.step} can't be sealed: the next one is {self.next_step}")

    def _seal(self, record: BatchRecord, groups: Iterable[int]) -> tuple[Statement, ...]:
        self._batches[record.step] = self.sealed = record
        return (
            (tables.SEAL_GROUP, [(record.step, group) for group in groups]),
            (tables.BATCH, [(record.step, record.model_dump_json(by_alias=True))]),
        )

    async def dealt(self, step: int, shards: int) -> BatchRecord | None:
        """Return the batch of a step, durably dealt to `shards` ranks; None if it is not kept. Raises BatchNotDealt.

        A caller that leaves does not end it: the thread would write on, beside that of the next caller.
        """
        return await asyncio.shield(asyncio.create_task(self._dealt(step, shards), name=f"deal/{step}"))

    async def _dealt(self, step: int, shards: int) -> BatchRecord | None:
        async with self._dealing:
            before = self.batch(step)
            if before is None or len(before.sha256) == shards:
                return before
            try:
                record = await asyncio.to_thread(deal_anew, self.batch_directory, before, shards=shards)
            except (RecordingUnusable, OSError) as error:
                if self.batch(step) is before:
                    raise self._not_dealt(before, shards, str(error)) from error
            else:
                if self.batch(step) is before:
                    written = record.model_dump_json(by_alias=True)
                    self._writer.write(("UPDATE batches SET record = ? WHERE step = ?", [(written, step)]))
                    await self.flushed()
            if self.batch(step) is not before:
                remove_batch(self.batch_directory, step)  # a checkpoint has it: it was forgotten meanwhile
                return None
            take_places(self.batch_directory, record)
            remove_other_shards(self.batch_directory, record)
            self._batches[step] = record
            if self.sealed is before:
                self.sealed = record
            self.deal_problem = None
            log(LOG, "batch redistributed", step=step, ranks=shards, ranks_before=len(before.sha256))
            return record

    def _not_dealt(self, record: BatchRecord, shards: int, why: str) -> BatchNotDealt:
        message = (
            f"batch {record.step} was sealed for {len(record.sha256)} trainer ranks and can't be dealt out to "
            f"{shards}: {why}; make room on the volume or restore it, or set replicas back"
        )
        if self.deal_problem is None:
            log(LOG, "batch not redistributed", logging.ERROR, step=record.step, reason=message)
        self.deal_problem = Problem(reason="BatchNotDealt", message=message[:1024])
        return BatchNotDealt(message)

    def commit(self, step: int) -> bool:
        """Record that every rank has trained the batches up to `step`; return False when that was known."""
        if step <= self.trained_step:
            return False
        self.trained_step = step
        self._writer.write((tables.COMMIT, [(step,)]), (tables.FACT, [("trained_step", step)]))
        for done in [sealed for sealed in self._sealed_samples if sealed <= step]:
            count = self._sealed_samples.pop(done)
            self.counts[SampleState.SEALED] -= count
            self.counts[SampleState.TRAINED] += count
        return True

    def remember_climb(self, climb: KeptClimb) -> None:
        """Record the group's first whole climb to a step, beside the batch of that step, if there is one."""
        if climb.epoch > self._climb_epoch:
            self._climb_epoch = climb.epoch
            self._writer.write((tables.CLIMB, [(climb.model_dump_json(by_alias=True), climb.step)]))

    def forget(self, saved_step: int) -> None:
        """Forget steps that a checkpoint holds: their batches need no replay, their samples are only counted."""
        saved, before = min(saved_step, self.trained_step), self._saved_step
        if saved <= before:
            return
        self._saved_step = saved
        removed: list[Statement] = [
            (tables.DROP_BATCHES, [(saved,)]),
            (tables.DROP_DIGESTS, [(before, saved)]),
            (tables.DROP_RECORDS, [(self._records_at_most,)]),
        ]
        self._writer.write(
            (tables.RETIRE, [(saved,)]),
            (f"DELETE FROM samples WHERE group_id IN ({tables.DONE})", [(saved,)]),
            ("DELETE FROM groups WHERE step <= ? OR given_up IS NOT NULL", [(saved,)]),
            *([] if self._keeps_batches else removed),
            (tables.FACT, [("saved_step", saved)]),
            backs_up=self.path,
        )
        for step in [step for step in self._batches if step <= saved and not self._keeps_batches]:
            del self._batches[step]
            remove_batch(self.batch_directory, step)

    def record_evaluation(self, result: EvaluationResult) -> None:
        """Record a finished evaluation of one set."""
        self.evaluated[result.name] = result
        self._writer.write(
            (
                "INSERT INTO evaluations (step, result) VALUES (?, ?)",
                [(result.step, result.model_dump_json(by_alias=True))],
            )
        )

    # ------------------------------------------- moves: made in memory at once, returned for the caller's one entry
    def _new_samples(self, group: Group, count: int) -> Statement:
        first = self.counts.total() + 1
        added = [Sample(SampleId(first + place), group) for place in range(count)]
        group.samples += added
        group.unfinished += count
        self.counts[SampleState.ADMITTED] += count
        self.waiting.update((sample.id, sample) for sample in added)
        return tables.SAMPLE, [(sample.id, group.id, SampleState.ADMITTED) for sample in added]

    def _end_attempt(self, sample: Sample, state: SampleState, segment: Tokens, *, brought: bool) -> list[Statement]:
        self._check(sample, state)
        attempted = sample.state is SampleState.RUNNING
        sample.playing_since = None
        sample.attempts += attempted
        sample.resent += attempted * len(sample.tokens)
        sample.idle_attempts = 0 if brought else sample.idle_attempts + 1
        statements: list[Statement] = []
        if len(segment):
            sample.tokens = join(sample.tokens, segment)
            sample.segments += 1
            statements.append((tables.SEGMENT, [(sample.id, sample.attempts, *tables.packed(segment))]))
        counts = (sample.attempts, sample.idle_attempts, sample.resent)
        row = (state, *counts, sample.finish, sample.tokens.unversioned, sample.id)
        self._count(sample, state)
        return [*statements, (tables.ATTEMPT, [row])]

    def _move(self, sample: Sample, state: SampleState, reason: str = "") -> Statement:
        self._check(sample, state)
        self._count(sample, state)
        if reason:
            self.reasons[state, reason] += 1
        return tables.MOVE, [(state, reason, sample.ended, sample.id)]

    def _scored(self, sample: Sample) -> Statement:
        self._check(sample, SampleState.COMPLETED)
        self._count(sample, SampleState.COMPLETED)
        figures = tables.packed_figures(sample.figures)
        return tables.SCORE, [(sample.state, sample.reward, sample.ended, figures, sample.id)]

    def _check(self, sample: Sample, state: SampleState) -> None:
        if state not in NEXT[sample.state]:
            raise WrongMove(f"sample {sample.id} can't go from {sample.state} to {state}")

    def _count(self, sample: Sample, state: SampleState) -> None:
        self.counts[sample.state] -= 1
        self.counts[state] += 1
        sample.group.unfinished += (state in LIVE) - (sample.state in LIVE)
        sample.group.ages_are_known = False
        if state not in LIVE and sample.state in LIVE:
            sample.ended = self._end()
        sample.state = state
        if state in WAITING:
            self.waiting[sample.id] = sample
        else:
            self.waiting.pop(sample.id, None)

    def _end(self) -> int:
        """Return the place of a sample that ends now, and wake the followers."""
        self.ended += 1
        for follower in self.followers:
            follower.set()
        return self.ended

    # ------------------------------------------------------------------------------------------------- reading
    def _read(self, database: sqlite3.Connection, job_uid: JobUid) -> None:
        facts = self._read_counts(database, job_uid)
        self.cursor = PromptPosition(facts.get("cursor", 0))
        self.data_digest = facts.get("data_digest")
        self._saved_step = facts.get("saved_step", 0)
        self._group_count = facts.get("groups", 0)
        for number, position, index, ids in database.execute(
            "SELECT id, position, prompt_index, prompt FROM groups WHERE step IS NULL AND given_up IS NULL ORDER BY id"
        ):
            prompt = Prompt(PromptPosition(position), index, tuple(np.frombuffer(ids, np.int32).tolist()))
            self.groups[number] = Group(number, prompt)
        samples: dict[SampleId, Sample] = {}
        for row in database.execute(tables.ALIVE):
            sample = tables.sample_of(row, self.groups[row[1]])
            sample.group.samples.append(sample)
            sample.group.unfinished += sample.state in LIVE
            samples[sample.id] = sample
            if sample.state in WAITING:
                self.waiting[sample.id] = sample
        for sample_id, *packed in database.execute(
            "SELECT sample_id, ids, logp, spans FROM segments ORDER BY sample_id, attempt"
        ):
            sample = samples[sample_id]
            sample.tokens = join(sample.tokens, tables.unpacked(*packed))
            sample.segments += 1
        self._sealed_samples = dict(
            database.execute(
                "SELECT step, COUNT(*) FROM samples JOIN groups ON groups.id = group_id"
                " WHERE state = 'sealed' GROUP BY step"
            )
        )
        for record, kept in database.execute("SELECT record, kept FROM batches ORDER BY step"):
            self.sealed = BatchRecord.model_validate_json(record)
            take_places(self.batch_directory, self.sealed)
            if kept and batch_is_there(self.batch_directory, self.sealed):
                self._batches[self.sealed.step] = self.sealed
            elif self.sealed.step > self._saved_step:
                reason = "its files are gone from the volume: no trainer can train or replay it"
                log(LOG, "batch lost", logging.ERROR, step=self.sealed.step, reason=reason)
        for (line,) in database.execute("SELECT result FROM evaluations ORDER BY number"):
            result = EvaluationResult.model_validate_json(line)
            self.evaluated[result.name] = result
