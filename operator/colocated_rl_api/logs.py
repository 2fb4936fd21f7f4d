"""JSON log lines with the same fields in every process, so that one filter follows a switch through all of them.

One line per transition. `configure` says what is true of the process, in all its threads; `bind` adds fields to every
later line of the current task and what it starts; `ts` is seconds since the epoch, UTC. No prompts, tokens or secrets.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import sys
from collections.abc import Iterator
from typing import IO

FIELDS = ("event", "job", "job_uid", "pod", "role", "epoch", "step", "rung", "version", "reason", "took_s")
"""Fields that keep their meaning everywhere; a line may have more."""

_of_process: dict[str, object] = {}
_bound: contextvars.ContextVar[dict[str, object]] = contextvars.ContextVar("colocated_rl_log_fields", default={})  # noqa: B039 - never mutated


class JsonLines(logging.Formatter):
    """One JSON object per record; `record.args` that are a mapping become fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "event": record.msg,
        }
        line |= _of_process | _bound.get()
        if isinstance(record.args, dict):
            line |= record.args
        elif record.args:  # of a library: an ordinary message with arguments
            line["event"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, separators=(",", ":"))


def configure(*, level: str = "INFO", stream: IO[str] | None = None, **fields: object) -> None:
    """Send every logger of this process to `stream` (standard output) as JSON lines.

    They carry `fields`, and those of earlier calls.
    """
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    _of_process.update(fields)


def in_words(error: BaseException) -> str:
    """Its kind and what it says, for people: the `repr` of a client's error names each field of its connection."""
    return ": ".join(filter(None, (type(error).__name__, str(error))))


@contextlib.contextmanager
def bind(**fields: object) -> Iterator[None]:
    """Add fields to the lines of this block."""
    token = _bound.set(_bound.get() | fields)
    try:
        yield
    finally:
        _bound.reset(token)


def log(logger: logging.Logger, event: str, level: int = logging.INFO, **fields: object) -> None:
    """One line: `log(LOG, "rung reached", rung=rung, took_s=took)`."""
    if logger.isEnabledFor(level):
        given = {key: value for key, value in fields.items() if value is not None}
        logger.log(level, event, *([given] if given else []))  # an empty mapping would be taken for a format's argument
