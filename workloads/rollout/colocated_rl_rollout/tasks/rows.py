"""Find each row by its number: in JSON lines, Parquet, Arrow, datasets saved by `datasets`, or made by a function.

JSON lines are read in place. Other files are copied to JSON lines once, in the cache: so rows are the same plain values
in every format, each is one read away, and none of the data stays in memory. Times, dates and decimals become text,
bytes Base64.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import itertools
import json
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO
from uuid import UUID

from colocated_rl_api.file_names import names_a_file
from colocated_rl_api.logs import in_words
from colocated_rl_api.prompts import FILE_ENDINGS, JSON_LINES, PARQUET

Row = dict[str, Any]

BATCH_ROWS = 256  # decoded at once
MAX_ROW_BYTES = 64 * 1024 * 1024  # as a line of JSON: the controller takes no longer one from a task process
UNREADABLE = (ValueError, OverflowError, LookupError)
"""Reading a value may raise these: text that is no UTF-8, years before 1 and after 9999, a zone that nobody knows."""


class RowsUnusable(ValueError):
    """The files do not match the job; the message names file and row."""


class Rows:
    """Holds rows of several files, one after another. Checks each of them first.

    cache: a directory for copies. check: returns what is wrong with a row, or None.
    digest: of all rows. Raises RowsUnusable.
    """

    def __init__(self, paths: Sequence[Path], *, cache: Path, check: Callable[[Row], str | None]) -> None:
        with ExitStack() as opened:
            self._files = [opened.enter_context(_as_json_lines(path, cache).open("rb")) for path in paths]
            hashed = hashlib.sha256()
            self._places = [
                array("Q", _look_through(path, _hashing(_lines(path, file), hashed), check))
                for path, file in zip(paths, self._files, strict=True)
            ]
            self.digest = hashed.hexdigest()
            self._ends = list(itertools.accumulate(map(len, self._places)))
            if not any(self._ends):
                raise RowsUnusable(f"{', '.join(path.name for path in paths)}: no rows")
            self.close = opened.pop_all().close

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Row:
        place = bisect_right(self._ends, number)
        file, places = self._files[place], self._places[place]
        file.seek(places[number - self._ends[place]])  # from the end of the file's rows
        row: Row = json.loads(file.readline())
        return row


class MadeRows:
    """Holds rows that a function makes, each on request, as plain as those of a file.

    digest: of the first, the middle and the last: enough to detect another function, or one that differs between
    processes. Raises RowsUnusable, also for a row that changes when it is made again.
    """

    def __init__(self, make: Callable[[int], Any], *, size: int, check: Callable[[Row], str | None]) -> None:
        self._make, self._size, self._check = make, size, check
        hashed = hashlib.sha256()
        for number in sorted({0, size // 2, size - 1}):
            line = self._line(number)
            if line != self._line(number):
                raise RowsUnusable(f"row {number} is another one each time: make it of its number, and seed with that")
            hashed.update(line)
        self.digest = hashed.hexdigest()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> Row:
        row: Row = json.loads(self._line(number))
        return row

    def _line(self, number: int) -> bytes:
        line = json.dumps(self._make(number), default=_plain).encode()
        if fault := _fault(line, self._check):
            raise RowsUnusable(f"row {number}: {fault}")
        return line


def member(row: Row, field: str) -> Any:
    """Return a member of a row, or of an object in it: `reward_model.ground_truth`. Raises RowsUnusable."""
    found: Any = row
    for name in [field] if field in row else field.split("."):
        if not isinstance(found, dict) or name not in found:
            raise RowsUnusable(f"has no {field!r}, only {', '.join(map(repr, row))}")
        found = found[name]
    return found


def _lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, and hold one of them at a time. Raises RowsUnusable for one that is too long."""
    for number in itertools.count(1):
        line = file.readline(MAX_ROW_BYTES + 1)
        if len(line) > MAX_ROW_BYTES:
            raise RowsUnusable(f"row {number} of {path.name} is longer than {MAX_ROW_BYTES} bytes")
        if not line:
            return
        yield line


def _hashing(lines: Iterable[bytes], hashed: hashlib._Hash) -> Iterator[bytes]:
    for line in lines:
        hashed.update(line)
        yield line


def data_files(path: Path) -> list[Path]:
    """Return the files that a path of the job stands for: itself, those that a `*` in it matches, or a saved dataset's.

    Raises RowsUnusable.
    """
    if path.is_dir():
        return _saved_files(path)
    found = sorted(path.parent.glob(path.name))
    if not found:
        raise RowsUnusable(f"there is no file {path.name} in the claim")
    return found


def _saved_files(directory: Path) -> list[Path]:
    splits = directory / "dataset_dict.json"
    if splits.exists():
        named = " or ".join(f"{directory.name}/{split}" for split in _read_json(splits)["splits"])
        raise RowsUnusable(f"{directory.name} has several splits: set path to {named}")
    state = directory / "state.json"
    if not state.exists():
        raise RowsUnusable(f"{directory.name} is a directory that datasets.save_to_disk did not write: name its files")
    if not (files := _read_json(state)["_data_files"]):
        raise RowsUnusable(f"{directory.name}: no rows")
    found = [str(file["filename"]) for file in files]
    if others := [name for name in found if not names_a_file(name)]:
        raise RowsUnusable(f"{directory.name}: state.json names {others[0]!a:.100}, which is not beside it")
    return [directory / name for name in found]


def _read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


# ------------------------------------------------------------------------------------------------------ looking through
def _look_through(path: Path, lines: Iterator[bytes], check: Callable[[Row], str | None]) -> Iterator[int]:
    """Yield the offset of each row, after checking it."""
    what = "line" if path.suffix == JSON_LINES else "row"
    start = 0
    for number, line in enumerate(lines, start=1):
        if line.strip():
            if fault := _fault(line, check):
                raise RowsUnusable(f"{what} {number} of {path.name}: {fault}")
            yield start
        start += len(line)


def _fault(line: bytes, check: Callable[[Row], str | None]) -> str | None:
    try:
        row = json.loads(line.decode("utf-8-sig"))  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        return f"no UTF-8: byte 0x{line[error.start]:02x} at place {error.start + 1}"
    except (ValueError, RecursionError) as error:
        return f"no JSON: {error}"
    if not isinstance(row, dict):
        return "no JSON object"
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"half of a character, {error.object[error.start]!a}, without its other half"
    return check(row)


# ------------------------------------------------------------------------------------------------------------- copies
def _as_json_lines(path: Path, cache: Path) -> Path:
    """Return the file itself, or its copy. Raises RowsUnusable."""
    if path.suffix == JSON_LINES:
        return path
    if path.suffix not in FILE_ENDINGS:
        raise RowsUnusable(f"{path.name}: a file of prompts ends with one of {', '.join(FILE_ENDINGS)}")
    is_it = path.stat()
    name = hashlib.sha256(f"{path.absolute()} {is_it.st_size} {is_it.st_mtime_ns}".encode()).hexdigest()[:32]
    copy = cache / f"{name}{JSON_LINES}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("wb") as lock:  # several processes start at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not copy.exists():
            unfinished = copy.with_suffix(".part")
            with unfinished.open("w", encoding="utf-8") as file:
                for row in _arrow_rows(path):
                    file.write(json.dumps(row, default=_plain) + "\n")
            unfinished.replace(copy)
    return copy


def _arrow_rows(path: Path) -> Iterator[Row]:
    import pyarrow  # takes a while, and most jobs don't need it
    import pyarrow.ipc
    import pyarrow.parquet

    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # the other pools reserve more than a process here may have
    try:
        if path.suffix == PARQUET:
            file = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
            batches: Iterator[Any] = file.iter_batches(BATCH_ROWS, use_threads=False)
        else:
            batches = _ipc_batches(path)
        before = 0
        for batch in batches:
            if twice := [name for name, count in Counter(batch.schema.names).items() if count > 1]:
                raise RowsUnusable(
                    f"{path.name} has several columns of one name, {twice[0]!a:.100}: rename or drop some"
                )
            for column in batch.columns:
                _validate(column)
            kinds = [_in_microseconds(column.type) for column in batch.columns]
            columns = [  # what is as it should be is left alone: not all that is nested can be cast
                column if kind == column.type else column.cast(kind, safe=False)
                for column, kind in zip(batch.columns, kinds, strict=True)
            ]
            names = batch.schema.names
            values = [_values(column, name, before) for name, column in zip(names, columns, strict=True)]
            yield from (dict(zip(names, row, strict=True)) for row in zip(*values, strict=True))
            before += batch.num_rows
    except (pyarrow.ArrowException, OSError, *UNREADABLE) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk; Arrow's own, of the content, has none
            raise
        raise RowsUnusable(f"{path.name} can't be read: {error}") from error


def _validate(column: Any) -> None:
    """Check offsets and sizes, which Arrow believes otherwise: it reads outside of the file. Raises ArrowInvalid.

    A text that is no UTF-8 is left to who names its row.
    """
    import pyarrow

    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        is_text = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
        if not (is_text and "UTF8" in str(error)):  # which is checked last, of a text
            raise


def _values(column: Any, name: str, before: int) -> list[Any]:
    """Return a column's values. before: rows in front of it. Raises RowsUnusable for a date out of Python's range."""
    try:
        return list(column.to_pylist())
    except UNREADABLE:
        for number, value in enumerate(column, start=before + 1):
            try:
                value.as_py()
            except UNREADABLE as error:
                message = f"row {number}, column {name!r}: {in_words(error)}: leave the column out, or write it as text"
                raise RowsUnusable(message) from error
        raise


def _in_microseconds(kind: Any) -> Any:
    """Return a type whose times Python can hold: it refuses some in nanoseconds."""
    import pyarrow

    match kind:
        case pyarrow.TimestampType(unit="ns"):
            return pyarrow.timestamp("us", kind.tz)
        case pyarrow.DurationType(unit="ns"):
            return pyarrow.duration("us")
        case pyarrow.Time64Type(unit="ns"):
            return pyarrow.time64("us")
        case pyarrow.ListType():
            return pyarrow.list_(kind.value_field.with_type(_in_microseconds(kind.value_type)))
        case pyarrow.LargeListType():  # as polars writes them
            return pyarrow.large_list(kind.value_field.with_type(_in_microseconds(kind.value_type)))
        case pyarrow.FixedSizeListType():
            return pyarrow.list_(kind.value_field.with_type(_in_microseconds(kind.value_type)), kind.list_size)
        case pyarrow.MapType():
            return pyarrow.map_(kind.key_type, kind.item_field.with_type(_in_microseconds(kind.item_type)))
        case pyarrow.DictionaryType():
            value_type = _in_microseconds(kind.value_type)
            return kind if value_type == kind.value_type else value_type
        case pyarrow.StructType():
            return pyarrow.struct([field.with_type(_in_microseconds(field.type)) for field in kind])
        case _:
            return kind


def _ipc_batches(path: Path) -> Iterator[Any]:
    """Yield batches of a stream, as `datasets` writes, or of a file, as others do."""
    import pyarrow.ipc

    with pyarrow.OSFile(str(path)) as source:
        try:
            yield from pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            source.seek(0)
            file = pyarrow.ipc.open_file(source)
            for number in range(file.num_record_batches):
                yield file.get_batch(number)


def _plain(value: Any) -> Any:
    """Convert a value that JSON can't hold."""
    match value:
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode()
        case UUID():
            return str(value)
        case _ if callable(getattr(value, "tolist", None)):  # numpy's and torch's
            return value.tolist()
        case _:
            raise RowsUnusable(f"a value of type {type(value).__name__} can't be written in JSON")
