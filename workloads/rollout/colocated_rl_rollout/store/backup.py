"""A damaged database is noticed at the start, named, and replaced by the backup of the newest checkpoint.

A page that a disk has spoilt makes no statement fail that does not read it, so all of the file is read when it is
opened. The damaged file is kept beside, for people. What can be read of it goes on: the epoch, the place in the
prompts, and evaluations. Of samples that the backup has under way, and of sessions, nobody knows any more whether they
were trained since: sessions are dropped, and the store gives those samples up, so that none is trained twice.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from colocated_rl_api.durable import sync
from colocated_rl_api.logs import in_words, log
from colocated_rl_rollout.store import tables

LOG = logging.getLogger(__name__)

_GOES_ON = "SELECT name, value FROM facts WHERE name IN ('job_uid', 'epoch', 'cursor', 'data_digest')"


def backup_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.backup")


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether an error is of what the file holds, and not of its volume or of who reads it."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def damage_of(database: sqlite3.Connection) -> str:
    """Return which tables are damaged, or "" if all of the file is whole. Reads all of it. Raises sqlite3.Error."""
    if _is_whole(database):
        return ""
    names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    damaged = [table for table in names if not _is_whole(database, f"('{table}')")]
    return ", ".join(damaged) or "pages of no table"


def _is_whole(database: sqlite3.Connection, of: str = "") -> bool:
    try:
        return [("ok",)] == database.execute(f"PRAGMA quick_check{of}").fetchall()
    except sqlite3.Error as error:
        if is_damage(error):
            return False
        raise


def back_up(path: Path) -> None:
    """Write a backup of the database at `path`, whole or not at all. One that fails costs a line in the log."""
    unfinished = path.with_name(f"{path.name}.part")
    try:
        unfinished.unlink(missing_ok=True)
        if shutil.disk_usage(path.parent).free < 2 * path.stat().st_size:
            log(LOG, "store not backed up", logging.WARNING, reason="its volume has no room for it")
            return
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute("VACUUM INTO ?", (str(unfinished),))
        sync(unfinished)
        unfinished.replace(backup_of(path))
        sync(path.parent)
    except (OSError, sqlite3.Error) as error:
        log(LOG, "store not backed up", logging.WARNING, reason=in_words(error))
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def restore(path: Path) -> bool:
    """Put the backup in the place of a damaged database, and return whether there is a whole one. Raises OSError."""
    unfinished = path.with_name(f"{path.name}.part")
    if not backup_of(path).exists():
        return False
    shutil.copyfile(backup_of(path), unfinished)
    try:
        with closing(sqlite3.connect(unfinished, isolation_level=None)) as database:
            if damage_of(database):
                return False
            _take_what_is_whole(database, path)
            for statement in tables.FORGET_SESSIONS:
                database.execute(statement)
    except sqlite3.Error:
        return False
    sync(unfinished)
    for end in ("", "-wal"):
        with contextlib.suppress(FileNotFoundError):
            Path(f"{path}{end}").replace(f"{path}.damaged{end}")
    Path(f"{path}-shm").unlink(missing_ok=True)
    unfinished.replace(path)
    sync(path.parent)
    return True


def _take_what_is_whole(database: sqlite3.Connection, damaged: Path) -> None:
    facts: list[Any] = []
    evaluations: list[Any] = []
    with contextlib.suppress(sqlite3.Error), closing(sqlite3.connect(damaged)) as source:
        facts = source.execute(_GOES_ON).fetchall()
        evaluations = source.execute("SELECT number, step, result FROM evaluations").fetchall()
    if ("job_uid", dict(database.execute(_GOES_ON)).get("job_uid")) in facts:
        database.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts)
        database.executemany("INSERT OR IGNORE INTO evaluations VALUES (?, ?, ?)", evaluations)
