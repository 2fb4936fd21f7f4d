"""Commands print tables for people, JSON and YAML for programs.

What they print may be a sample, an error or a name that others wrote: nothing of it reaches a terminal as a command to
it. This module and `live.Terminal` are the only ways out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from colocated_rl_api.logs import one_line, printable

FORMATS = ("text", "json", "yaml")


def print_out(text: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(f"{printable(text)}\n")


def print_error(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"{printable(text)}\n")


def document(value: Any, form: str) -> str:
    """Return plain data as JSON or YAML. form: json or yaml."""
    from colocated_rl_cli.base.yaml_text import written  # PyYAML loads slowly, and --help needs this module

    plain = json.loads(json.dumps(value, default=str))
    return json.dumps(plain, indent=2) if form == "json" else written(plain).rstrip()


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Align columns under their names in upper case, as kubectl does; print a missing value as a dash."""
    cells = [[column.upper() for column in columns]]
    cells += [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
    return "\n".join(_spaced(line, widths) for line in cells)


def row_of(row: Mapping[str, Any], columns: Mapping[str, int]) -> str:
    """Return one row of a table that is printed as its rows arrive. columns: name to usual width of the values."""
    widths = [max(len(name), width) for name, width in columns.items()]
    return _spaced([_cell(row.get(name)) for name in columns], widths)


def _spaced(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "   ".join(f"{text:{width}}" for text, width in zip(cells, widths, strict=True)).rstrip()


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else one_line(str(value))
