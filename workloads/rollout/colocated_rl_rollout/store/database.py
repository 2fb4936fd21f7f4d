"""Open the store's database file, and run the one thread that writes to it, and one that backs it up now and then.

Statements are queued in order and committed together: while one commit is on its way to the disk, all further ones wait
for the next commit, so a thousand samples a second cost a few commits a second. An entry of the queue is never split
over two commits. Nothing is written after a failure: every later write or wait raises `StoreFailed`.

WAL with `synchronous=FULL`: what was committed survives the loss of the process and of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from colocated_rl_api.logs import in_words
from colocated_rl_rollout.store.backup import back_up, damage_of, is_damage
from colocated_rl_rollout.store.tables import ADDED_COLUMNS, SCHEMA, SCHEMA_VERSION

BUSY_MS = 10_000
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # of volumes without: some of object stores and networks
BACKUP_EVERY_S = 60.0  # and no sooner

Statement = tuple[str, Sequence[Sequence[Any]]]
"""SQL and the rows it is executed for."""


class Entry(NamedTuple):
    """Statements that are committed together, and the path of the database if a backup of it follows."""

    statements: Sequence[Statement]
    backs_up: Path | None


class StoreFailed(Exception):
    """The store can't be written, or belongs to another job. It accepts nothing more: the process ends, and its next
    start resumes from the last commit.
    """


class StoreDamaged(StoreFailed):
    """The database's file holds something else than was written: its disk, or somebody, has changed it."""


def open_database(path: Path) -> sqlite3.Connection:
    """Open the database at `path`; create it when absent. Raises StoreDamaged, StoreFailed."""
    try:
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        database.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        mode = database.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StoreFailed(f"store {path} can't be written ahead (mode {mode}): use a local or block volume")
        if damage := damage_of(database):
            database.close()
            raise StoreDamaged(f"store {path} is damaged: {damage}")
        database.execute("PRAGMA synchronous = FULL")
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            database.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            raise StoreFailed(
                f"{path} has schema {version}, this program writes {SCHEMA_VERSION}: use the matching image"
            )
        for (table, column), added in ADDED_COLUMNS.items():
            if (column,) not in database.execute("SELECT name FROM pragma_table_info(?)", [table]):
                database.executescript(f"BEGIN; {added} COMMIT;")
    except (OSError, sqlite3.Error) as error:
        if isinstance(error, sqlite3.Error) and is_damage(error):
            database.close()
            raise StoreDamaged(f"store {path} is damaged: {error}") from error
        raise StoreFailed(
            f"store {path} can't be opened: {error}; its volume must be local or block storage"
        ) from error
    return database


def hold(path: Path) -> int:
    """Take the lock file at `path` until the handle is closed: two writers would each trust their own memory.

    Raises StoreFailed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise StoreFailed(f"{path} is held: another rollout controller uses this volume; end it first") from error
    return handle


@contextlib.contextmanager
def unused(lock: Path) -> Iterator[None]:
    """Raise StoreFailed while a job's controller has its store, as far as this node can tell."""
    try:
        file = lock.open("rb")
    except FileNotFoundError:  # a copy
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreFailed(f"{lock} is held: its job still runs; suspend or delete it first") from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


def copy_database(source: Path, target: Path) -> None:
    """Copy the file of a database that nobody writes, and of what was written ahead. Raises OSError."""
    for end in ("", "-wal"):
        Path(f"{target}{end}").unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(f"{source}{end}", f"{target}{end}")


class DatabaseWriter:
    """Owns the connection once it has started. Only one thread may call `write`."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._queue: SimpleQueue[Entry | asyncio.Future[None] | threading.Event | None] = SimpleQueue()
        self._failure: StoreFailed | None = None
        self._backed_up_at: float | None = None
        self._backup = threading.Thread()  # the newest; none has begun yet
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def write(self, *statements: Statement, backs_up: Path | None = None) -> None:
        """Queue statements that are committed together. Raises StoreFailed when an earlier commit failed.

        backs_up: path of the database, of which a backup is written once they are committed.
        """
        if self._failure is not None:
            raise self._failure
        self._queue.put(Entry(statements, backs_up))

    async def flushed(self, *, deadline_s: float) -> None:
        """Return once everything queued so far is committed. Raises StoreFailed."""
        if self._failure is not None:
            raise self._failure
        committed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put(committed)
        try:
            async with asyncio.timeout(deadline_s):
                await committed
        except TimeoutError as error:
            raise _late(deadline_s) from error

    def flush(self, *, deadline_s: float) -> None:
        """Do as `flushed`, but block the thread; for the rare caller that can't await."""
        committed = threading.Event()
        self._queue.put(committed)
        in_time = committed.wait(deadline_s)
        if self._failure is not None:
            raise self._failure
        if not in_time:
            raise _late(deadline_s)

    def close(self, *, deadline_s: float) -> bool:
        """Commit the queue and close the file. Return whether it is done: past the deadline it may still finish."""
        self._queue.put(None)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------------------------------------------- the thread
    def _run(self) -> None:
        closing = False
        while not closing:
            entries = [self._queue.get()]
            with contextlib.suppress(Empty):
                while True:
                    entries.append(self._queue.get_nowait())
            closing = None in entries
            if self._failure is None:
                self._commit([entry.statements for entry in entries if isinstance(entry, Entry)])
            self._answer(entries)
            for path in [entry.backs_up for entry in entries if isinstance(entry, Entry) and entry.backs_up]:
                self._back_up(path)
        if self._backup.ident is not None:
            self._backup.join()
        self._database.close()

    def _commit(self, writes: Sequence[Sequence[Statement]]) -> None:
        if not writes:
            return
        try:
            self._database.execute("BEGIN IMMEDIATE")
            for statements in writes:
                for sql, rows in statements:
                    self._database.executemany(sql, rows)
            self._database.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - a full disk, a lost volume, or a bug: all of them end the process
            match getattr(error, "sqlite_errorcode", None):  # which only SQLite's own errors have
                case sqlite3.SQLITE_FULL:
                    hint = "its volume is full: enlarge its claim or free some"
                case sqlite3.SQLITE_IOERR_WRITE:
                    hint = "a quota of its volume is used up, or its disk fails; what was committed is kept"
                case _:
                    hint = "what was committed is kept"
            self._failure = StoreFailed(f"the store could not be written: {in_words(error)}; {hint}")
            if self._database.in_transaction:
                with contextlib.suppress(sqlite3.Error):  # the volume may be lost: nothing more is written
                    self._database.execute("ROLLBACK")

    def _back_up(self, path: Path) -> None:
        """Begin a backup, of a moment from which on others commit: a large one takes longer than an epoch may."""
        now = time.monotonic()
        is_due = self._backed_up_at is None or now >= self._backed_up_at + BACKUP_EVERY_S
        if self._failure is None and is_due and not self._backup.is_alive():
            self._backed_up_at = now
            self._backup = threading.Thread(target=back_up, args=(path,), name="store-backup", daemon=True)
            self._backup.start()

    def _answer(self, entries: Sequence[object]) -> None:
        futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for entry in entries:
            if isinstance(entry, threading.Event):
                entry.set()
            elif isinstance(entry, asyncio.Future):
                futures.setdefault(entry.get_loop(), []).append(entry)
        for loop, waiting in futures.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._resolve, waiting)

    def _resolve(self, waiting: Sequence[asyncio.Future[None]]) -> None:
        for future in waiting:
            if future.done():  # its task was cancelled
                continue
            if self._failure is None:
                future.set_result(None)
            else:
                future.set_exception(self._failure)


def _late(deadline_s: float) -> StoreFailed:
    return StoreFailed(f"the store's volume did not take a commit within {deadline_s:.0f} s: see why it hangs")
