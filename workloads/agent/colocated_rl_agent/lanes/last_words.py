"""What is told of the end of an engine or a trainer: as much of its last lines as can quote no prompt and no response.

What a process writes before anybody has asked it for anything quotes neither, and says what is wrong with its start.
Later on a traceback is told by the type of the exception and where it was raised. All of it is in the container's log.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LINES_TOLD = 3
PLACE = re.compile(r'\s*File "([^"]+)", line (\d+)')
KIND = re.compile(r"([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning))(?=:|\s*$)")


def last_words(tail: Sequence[str], *, was_asked: bool) -> str:
    """tail: its last lines. was_asked: whether it may have seen a prompt or a response."""
    if not was_asked:
        return f"last words: {' | '.join(tail[-LINES_TOLD:])}"
    return f"{failure_in(tail) or 'it left no traceback'}; the log of container gpu has its last words"


def failure_in(tail: Sequence[str]) -> str | None:
    """Type and place of the exception in the last traceback, None where there is none."""
    place = failure = None
    for line in tail:
        if found := PLACE.match(line):
            place = f"{found[1]}:{found[2]}"
        elif place is not None and (kind := KIND.match(line)):
            failure, place = f"{kind[1]} at {place}", None
    return failure
