"""Write JSON log lines with the same fields in every process: one filter follows a switch through all of them.

There is one line per transition. `configure` sets fields for the whole process, in all its threads; `bind` adds fields
to every later line of the current task and of what it starts; `ts` is seconds since the epoch, UTC. No line holds
prompts, tokens or secrets, so an exception is logged by its type and where it was raised (`failure_of`): its message
may quote its data. Text of others that people are to read holds nothing by which it could act on a terminal, or look
like something that it is not (`printable`).
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from typing import IO, Any

FIELDS = ("event", "job", "job_uid", "pod", "role", "epoch", "step", "rung", "version", "reason", "took_s")
"""Fields that keep their meaning everywhere; a line may have more."""

SHOW_MESSAGES = "COLOCATED_RL_SHOW_EXCEPTIONS"
"""Environment variable: set to 1, a process logs the message of every exception. Off unless a person sets it."""

PLACES_AT_MOST = 3
FAILURE_CHARS = 1000

REPLACED = "\N{REPLACEMENT CHARACTER}"

# Control characters of C0 (but tab and newline) and C1, marks of writing direction, other ends of lines, and halves of
# characters, which can't be written at all.
_REFUSED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_of_process: dict[str, object] = {}
_bound: contextvars.ContextVar[dict[str, object]] = contextvars.ContextVar("colocated_rl_log_fields", default={})  # noqa: B039 - never mutated


class JsonLines(logging.Formatter):
    """The formatter writes one JSON object per record; a mapping in `record.args` becomes fields.

    quotes: log messages of exceptions, in a process that sees neither prompts nor responses.
    """

    def __init__(self, *, quotes: bool = False) -> None:
        super().__init__()
        self._quotes = quotes or shows_messages()

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "event": record.msg,
        }
        line |= _of_process | _bound.get()
        if isinstance(record.args, dict):
            line |= record.args
        elif record.args:  # a library's message with ordinary arguments
            line["event"] = record.getMessage()
        if record.name == "asyncio" and not self._quotes:
            line["event"] = _without_objects(str(line["event"]))
        if record.exc_info and record.exc_info[1] is not None:
            shown = self.formatException if self._quotes else _traced
            line["exception"] = shown(record.exc_info)
        return json.dumps(line, default=str, separators=(",", ":"))


def shows_messages() -> bool:
    """Return whether a person wants the messages of all exceptions in the logs of this process."""
    return os.environ.get(SHOW_MESSAGES) == "1"


def configure(*, level: str = "INFO", stream: IO[str] | None = None, quotes: bool = False, **fields: object) -> None:
    """Send every logger of this process to `stream` (standard output) as JSON lines.

    The lines carry `fields`, and those of earlier calls. quotes: as in `JsonLines`.
    """
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(JsonLines(quotes=quotes))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    _of_process.update(fields)


def in_words(error: BaseException) -> str:
    """Return the error's type and message, for people: the `repr` of a client's error has its whole connection."""
    return ": ".join(filter(None, (type(error).__name__, str(error))))


def printable(text: str) -> str:
    """Return the text with a replacement character for each one that a terminal would obey instead of showing it."""
    return _REFUSED.sub(REPLACED, text)


def one_line(text: str) -> str:
    """Return the text as `printable` does, and on one line."""
    return printable(text).replace("\n", " ").replace("\t", " ")


def failure_of(error: BaseException) -> str:
    """Describe an error without quoting a prompt, a response or an answer.

    An error of our own classes or of the operating system keeps its message; any other has its type and places.
    """
    is_of_the_system = isinstance(error, OSError) and error.errno is not None
    return in_words(error) if is_ours(error) or is_of_the_system else in_places(error)


def is_ours(error: BaseException) -> bool:
    """Return whether the error's class is of this project: such messages quote nothing."""
    return type(error).__module__.startswith("colocated_rl_")


def in_places(error: BaseException) -> str:
    """Return the error's type and the last places in its traceback, without its message."""
    frames = traceback.walk_tb(error.__traceback__)
    places = [f"{frame.f_code.co_filename}:{line}" for frame, line in frames][: -PLACES_AT_MOST - 1 : -1]
    return " at ".join(filter(None, (type(error).__name__, ", called at ".join(places))))[:FAILURE_CHARS]


def _traced(info: tuple[Any, ...]) -> str:
    """Format a traceback without others' messages and without lines of source: either may quote anything."""
    return "\n".join(_trace_lines(info[1], set()))


def _trace_lines(error: BaseException, seen: set[int]) -> Iterator[str]:
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        yield from _trace_lines(before, seen)
        yield "which led to:"
    yield "Traceback (most recent call last):"
    for frame, line in traceback.walk_tb(error.__traceback__):
        yield f'  File "{frame.f_code.co_filename}", line {line}, in {frame.f_code.co_name}'
    yield in_words(error) if is_ours(error) else type(error).__name__
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _trace_lines(each, seen)


def _without_objects(event: str) -> str:
    """Cut an asyncio message at the first object in it: a task shows its exception, a callback its arguments."""
    return re.split(r"[\n<(]", event, maxsplit=1)[0].strip()


@contextlib.contextmanager
def bind(**fields: object) -> Iterator[None]:
    """Add fields to the lines of this block."""
    token = _bound.set(_bound.get() | fields)
    try:
        yield
    finally:
        _bound.reset(token)


def log(logger: logging.Logger, event: str, level: int = logging.INFO, **fields: object) -> None:
    """Log one line: `log(LOG, "rung reached", rung=rung, took_s=took)`."""
    if logger.isEnabledFor(level):
        given = {key: value for key, value in fields.items() if value is not None}
        logger.log(level, event, *([given] if given else []))  # an empty mapping would be taken for a format's argument
