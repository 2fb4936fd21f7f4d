"""The page of the chart's values, from the comments above them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from setup.layout import CHECKOUT

HEAD = """\
<!-- Made by `make generate` from charts/colocated-rl/values.yaml: change that instead. -->
# Values of the chart

Unknown names and wrong types are refused when the chart is installed. `helm show values charts/colocated-rl` prints the
same as a file.

| value | default | |
|---|---|---|"""

LINE = re.compile(r"(?P<indent> *)(?P<name>[A-Za-z]+):(?: (?P<default>.*))?")


class Value(NamedTuple):
    path: str
    default: str  # "" for a group of values
    meaning: str


def documented() -> Iterator[Value]:
    """Each value with what is said of it: above it, above the line before it, or above its group."""
    open_groups: list[tuple[int, str, str]] = []  # indentation, name, meaning
    comment: list[str] = []
    before = ""
    for line in (CHECKOUT.root / "charts/colocated-rl/values.yaml").read_text().splitlines():
        match = LINE.fullmatch(line)
        if line.lstrip().startswith("#"):
            comment.append(line.lstrip("# "))
        elif match is None:
            comment, before = [], ""
        else:
            indent = len(match["indent"])
            open_groups = [group for group in open_groups if group[0] < indent]
            meaning = " ".join(comment) or before or (open_groups[-1][2] if open_groups else "")
            path = ".".join([*(name for _, name, _ in open_groups), match["name"]])
            yield Value(path, match["default"] or "", meaning)
            if not match["default"]:
                open_groups.append((indent, match["name"], meaning))
            comment, before = [], "" if not match["default"] else meaning


def page() -> str:
    rows = [f"| `{each.path}` | `{each.default}` | {each.meaning} |" for each in documented() if each.default]
    return "\n".join([HEAD, *rows]) + "\n"
