"""This module reports how an engine or a trainer ended, with no line that could quote a prompt or a response.

Lines written before the first request quote neither, and explain a failed start. Later a traceback is reported only as
the exception's type and place. All lines are in the container's log.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LINES_TOLD = 3
PLACE = re.compile(r'\s*File "([^"]+)", line (\d+)')
KIND = re.compile(r"([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning))(?=:|\s*$)")


def last_words(tail: Sequence[str], *, was_asked: bool) -> str:
    """Return the report of a process's end. tail: its last lines. was_asked: it may have seen a prompt or response."""
    if not was_asked:
        return f"last words: {' | '.join(tail[-LINES_TOLD:])}"
    return f"{failure_in(tail) or 'it left no traceback'}; the log of container gpu has its last words"


def failure_in(tail: Sequence[str]) -> str | None:
    """Return type and place of the exception in the last traceback, or None."""
    place = failure = None
    for line in tail:
        if found := PLACE.match(line):
            place = f"{found[1]}:{found[2]}"
        elif place is not None and (kind := KIND.match(line)):
            failure, place = f"{kind[1]} at {place}", None
    return failure
