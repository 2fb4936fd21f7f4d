"""Read what is durable of a store, for people: beside the job's controller, or a copy once the job has no pods."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from colocated_rl_api.facts import EvaluationResult, RolloutFacts, SealedBatch
from colocated_rl_api.logs import in_words
from colocated_rl_api.names import JobUid
from colocated_rl_rollout.rules.samples import LIVE, SampleState
from colocated_rl_rollout.store import tables, transcripts
from colocated_rl_rollout.store.batches import BatchRecord
from colocated_rl_rollout.store.database import StoreFailed, copy_database, open_database, unused

Words = Callable[[transcripts.Transcript], Mapping[str, Any]]
"""Returns what people are shown of a sample's tokens."""


class StoreReader:
    """Reads the file anew at each call, and only what is durable.

    counts: samples by state; they add up to every sample ever admitted.
    reasons: samples by state and reason, for the states that have one.
    ended: samples that ever ended, each of which has its place among them. followers: set when another sample ends.
    sealed: the newest batch. began_at: step of the former checkpoint that the job began from.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "store.sqlite3"
        self.batch_directory = directory / "batches"
        self.epoch = 0
        self.trained_step = 0
        self.began_at: int | None = None
        self.counts: Counter[SampleState] = Counter()
        self.reasons: Counter[tuple[SampleState, str]] = Counter()
        self.ended = 0
        self.followers: set[asyncio.Event] = set()
        self.sealed: BatchRecord | None = None

    async def flushed(self) -> None:
        """Return once every change so far is durable: here, at once."""

    @property
    def counted(self) -> dict[str, int]:
        """Return the samples by state, of states that some have."""
        return {state.value: count for state, count in self.counts.items() if count}

    def facts(self, **others: Any) -> RolloutFacts:
        """Return how far the job is, as far as the store says. others: further facts."""
        sealed = self.sealed and SealedBatch(
            step=self.sealed.step,
            groups=self.sealed.groups,
            samples=self.sealed.samples,
            loss_tokens=self.sealed.loss_tokens,
        )
        return RolloutFacts(
            epoch=self.epoch,
            sealed=sealed,
            trained_step=self.trained_step,
            began_at=self.began_at,
            samples=self.counted,
            reward_mean=self.sealed and self.sealed.reward_mean,
            staleness_mean=self.sealed and self.sealed.staleness_mean,
            **others,
        )

    def _read_counts(self, database: sqlite3.Connection, job_uid: JobUid) -> dict[str, Any]:
        """Read how far the job is, and return all facts. Raises StoreFailed if they are another job's."""
        facts: dict[str, Any] = dict(database.execute("SELECT name, value FROM facts"))
        if facts.get("job_uid", job_uid) != job_uid:
            raise StoreFailed(
                f"{self.path} belongs to job {facts['job_uid']}, not to {job_uid}: give the job its own volume"
            )
        self.epoch = facts.get("epoch", 0)
        self.trained_step = facts.get("trained_step", 0)
        self.began_at = facts.get("began_at")
        for state, reason, count in [
            *database.execute("SELECT state, reason, COUNT(*) FROM samples GROUP BY state, reason"),
            *database.execute("SELECT state, reason, count FROM retired"),
        ]:
            self.counts[SampleState(state)] += count
            if reason:
                self.reasons[SampleState(state), reason] += count
        self.ended = sum(count for state, count in self.counts.items() if state not in LIVE)
        return facts

    def rows(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        """Return the durable rows of those tables. Blocks."""
        with contextlib.closing(self._reader()) as database:
            return database.execute(statement, values).fetchall()

    def _reader(self) -> sqlite3.Connection:
        database = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)
        database.row_factory = sqlite3.Row
        return database

    def recent(
        self,
        state: SampleState | None,
        *,
        limit: int,
        before: int | None = None,
        words: Words | None = None,
    ) -> list[dict[str, Any]]:
        """Return the newest samples, for people; those of batches that a checkpoint holds are only counted. Blocks.

        before: return only smaller ids. words: adds what it returns of a sample's tokens.
        """
        return self._shown(tables.RECENT, words, state=state, before=before, limit=limit)

    def ended_after(
        self,
        after: int,
        up_to: int,
        state: SampleState | None,
        *,
        limit: int,
        words: Words | None = None,
    ) -> list[dict[str, Any]]:
        """Return those that ended after place `after`, in that order, as far as they are durable. Blocks."""
        return self._shown(tables.ENDED, words, state=state, after=after, up_to=up_to, limit=limit)

    def _shown(self, statement: str, words: Words | None, **asked: Any) -> list[dict[str, Any]]:
        with contextlib.closing(self._reader()) as database:
            database.execute("BEGIN")  # rows and tokens as they were at one moment
            found = [tables.shown(row) for row in database.execute(statement, asked)]
            if words is not None:
                for sample, transcript in transcripts.of(database, self.batch_directory, found):
                    sample |= words(transcript)
            return found

    def records(self, *, after: int, limit: int) -> list[BatchRecord]:
        """Return the records of the batches behind step `after`, the oldest first, as far as durable. Blocks.

        Those that a checkpoint holds have no digests of their files, which are gone; of these the oldest are removed.
        """
        found = self.rows(tables.RECORDS, after, limit)
        return [BatchRecord.model_validate_json(row["record"]) for row in found]

    def evaluations(self) -> list[EvaluationResult]:
        """Return all finished evaluations, the newest last, as far as they are durable. Blocks."""
        found = self.rows("SELECT result FROM evaluations ORDER BY number")
        return [EvaluationResult.model_validate_json(row["result"]) for row in found]


class StoreCopy(StoreReader):
    """Reads a copy of the database of a job without pods, and its batches where they are: their volume is read-only."""

    def __init__(self, source: Path, directory: Path, *, job_uid: JobUid) -> None:
        """Copy the database from `source` to `directory`, which is empty. Raises StoreFailed."""
        super().__init__(directory)
        origin = source / self.path.name
        if not origin.is_file():
            raise StoreFailed(f"{source} has no {self.path.name}: the job never began")
        try:
            with unused(source / "lock"):
                copy_database(origin, self.path)
            self.batch_directory.symlink_to(source / self.batch_directory.name)
            with contextlib.closing(open_database(self.path)) as database:
                self._read_counts(database, job_uid)
        except (OSError, sqlite3.Error) as error:
            raise StoreFailed(f"store {origin} can't be read: {in_words(error)}; see its volume") from error
        for record in self.rows("SELECT record FROM batches ORDER BY step DESC LIMIT 1"):
            self.sealed = BatchRecord.model_validate_json(record["record"])
