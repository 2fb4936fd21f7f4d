"""Begin a job with `spec.restoreFrom`: from a former job's checkpoint, and where wanted its store of samples.

Both are only read. The checkpoint says behind which step samples begin, and where the prompts go on. The store is
copied: batches first, the database last and by a rename, so that after a kill a store is here whole or not at all. In
the copy the job's identity is replaced, and what belongs to that job alone is dropped.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from colocated_rl_api.checkpoint import Contents, NoSuchCheckpoint, choose
from colocated_rl_api.durable import sync
from colocated_rl_api.logs import in_words
from colocated_rl_api.names import JobUid
from colocated_rl_rollout.store import tables
from colocated_rl_rollout.store.backup import damage_of
from colocated_rl_rollout.store.database import StoreFailed, copy_database, unused

# It runs, perhaps without an end, when others write to a table, or read one of that name.
_ADDED = "SELECT type FROM sqlite_master WHERE type NOT IN ('table', 'index') OR sql LIKE 'CREATE VIRTUAL%'"


@dataclass(frozen=True)
class FormerJob:
    """Says where a former job's files are. step: of its checkpoint; None: the newest. samples: its store, if wanted."""

    checkpoints: Path
    step: int | None = None
    samples: Path | None = None

    def checkpoint(self) -> Contents:
        """Return the checkpoint to go on from. Raises StoreFailed."""
        try:
            return choose(self.checkpoints, self.step)
        except NoSuchCheckpoint as error:
            raise StoreFailed(str(error)) from error

    def copy_samples(self, path: Path, batches: Path, *, job_uid: JobUid) -> None:
        """Make the database at `path` and the files in `batches` from those of the former job, if they are wanted.

        Blocks until they are durable. Raises StoreFailed.
        """
        if self.samples is None:
            return
        source = self.samples / path.name
        if source.is_symlink() or not source.is_file():
            raise StoreFailed(
                f"{self.samples} has no {path.name}: let spec.restoreFrom.samples name the directory of a job's store"
            )
        unfinished = path.with_name(f"{path.name}.part")
        ahead = source.with_name(f"{source.name}-wal")  # what was written ahead of it
        if ahead.is_symlink() or (ahead.exists() and not ahead.is_file()):
            raise StoreFailed(f"{ahead}, which spec.restoreFrom names, is no plain file: copy the store again")
        try:
            with unused(self.samples / "lock"):
                _copy_files(self.samples / batches.name, batches)
                copy_database(source, unfinished)
            _hand_over(unfinished, job_uid, step=self.checkpoint().step)
            sync(unfinished)
            unfinished.replace(path)
            sync(path.parent)
        except (OSError, sqlite3.Error) as error:
            raise StoreFailed(
                f"store {source} can't be copied: {in_words(error)}; see its volume and this job's"
            ) from error


def _copy_files(source: Path, target: Path) -> None:
    """Copy the batches. Raises StoreFailed for a link, which could lead out of the former job's volume."""
    target.mkdir(parents=True, exist_ok=True)
    for file in [*source.glob("*.safetensors"), *source.glob("*.dealt")]:  # of a dealing that its end interrupted
        if file.is_symlink() or not file.is_file():
            raise StoreFailed(f"{file}, which spec.restoreFrom names, is no plain file: copy the store again")
        shutil.copyfile(file, target / file.name)
        sync(target / file.name)
    sync(target)
    sync(target.parent)


def _hand_over(path: Path, job_uid: JobUid, *, step: int) -> None:
    """Make the database that of this job. Raises StoreFailed, sqlite3.Error.

    step: behind it this job has weights of its own, so evaluations of later ones are not its.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        if added := database.execute(_ADDED).fetchone():
            raise StoreFailed(
                f"the store that spec.restoreFrom names has what no job's store has, such as a {added[0]}: copy it "
                "again, or name none"
            )
        if damage := damage_of(database):
            raise StoreFailed(
                f"the store that spec.restoreFrom names is damaged: {damage}; copy it again, or name none"
            )
        database.execute("BEGIN")
        database.execute("DELETE FROM facts WHERE name IN ('epoch', 'began_at')")
        database.execute("DELETE FROM evaluations WHERE step > ?", (step,))
        trained = database.execute("SELECT value FROM facts WHERE name = 'trained_step'").fetchone()
        for statement in tables.FORGET_SESSIONS if step > (trained or (0,))[0] else ():  # they may be trained since
            database.execute(statement)
        database.execute("INSERT OR REPLACE INTO facts VALUES ('job_uid', ?)", (job_uid,))
        database.execute("COMMIT")
        database.execute("PRAGMA journal_mode = DELETE")  # everything is in the one file that is renamed
