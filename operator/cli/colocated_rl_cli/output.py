"""What commands print: tables for people, JSON and YAML for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

FORMATS = ("text", "json", "yaml")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def complain(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def document(value: Any, form: str) -> str:
    """form: json or yaml."""
    plain = json.loads(json.dumps(value, default=str))
    return json.dumps(plain, indent=2) if form == "json" else yaml.safe_dump(plain, sort_keys=False).rstrip()


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Columns as wide as they have to be, headed by their names as kubectl does; nothing is a dash."""
    cells = [[column.upper() for column in columns]]
    cells += [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
    return "\n".join(
        "   ".join(f"{text:{width}}" for text, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
