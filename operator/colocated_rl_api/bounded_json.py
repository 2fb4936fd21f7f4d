"""Read what the API server sends of jobs, whatever their authors have written into them.

The server takes 10,000 levels of nesting (k8s.io/apimachinery, pkg/util/json) and 1.5 MB of an object, where the
resource lets anything through, as for `trainer.config`. Python reads some 1,000 levels before a RecursionError, and a
`{},` becomes 72 bytes: one job of 1 MB could take 50 MB of the operator's memory. Everybody's jobs are in one list and
one watch: so a field that nobody could use is replaced by words that say so, and the job that has it is refused for
them.
"""

from __future__ import annotations

import json
import re
from typing import Any

MOST_LEVELS = 100
MOST_CHARACTERS = 256 * 1024  # of one field of a spec; a ConfigMap, in which the job's file is, holds 1 MiB
MOST_VALUES = 10_000  # of one field, inner ones too: each takes up to 150 bytes, however short it is written
ALONE, WATCHED, LISTED = 1, 2, 3  # levels at which an object begins: itself, in an event, among the items of a list
REFUSED = (
    f"not read: longer than {MOST_CHARACTERS // 1024} KiB, of more than {MOST_VALUES} values, or nested more than "
    f"{MOST_LEVELS} levels deep"
)

_BEGINS = ",[{"  # in front of each value but the first
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|[,\[{]|[\]}]', re.DOTALL)


def read_objects(text: str, *, level: int) -> Any:
    """Parse an answer of the API server whose objects begin at `level`. Raises ValueError."""
    if len(text) <= MOST_CHARACTERS and sum(map(text.count, _BEGINS)) <= MOST_VALUES:
        try:
            return json.loads(text)
        except RecursionError:
            pass
    try:
        return json.loads(without_excess(text, level=level))
    except RecursionError as error:
        raise ValueError("line 1: no object of an API server begins like this") from error


def without_excess(text: str, *, level: int) -> str:
    """Return the text without those fields of fields of objects that hold too much or are too deep.

    Of metadata, whose readers expect maps and lists, they are empty instead.
    """
    kept: list[str] = []
    field, depth, deepest, values, began, done = "", 0, 0, 0, 0, 0
    is_metadata = False
    for token in _TOKEN.finditer(text):
        mark = token[0]
        values += mark in _BEGINS
        if mark in "[{":
            depth += 1
            if depth == level + 1:
                is_metadata = field == '"metadata"'
            elif depth == level + 2:
                began, deepest, values = token.start(), 0, 0
            deepest = max(deepest, depth - level - 2)
        elif mark in "]}":
            is_long = token.end() - began > MOST_CHARACTERS or values > MOST_VALUES
            if depth == level + 2 and (is_long or deepest > MOST_LEVELS):
                kept += (text[done:began], text[began] + mark if is_metadata else json.dumps(REFUSED))
                done = token.end()
            depth -= 1
        elif depth == level:
            field = mark  # that comes next, unless it is a comma or a value that is no list and no map
    return "".join((*kept, text[done:]))
