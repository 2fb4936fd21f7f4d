"""`docs/capabilities.md` claims only what a test shows, and names the test."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| F(?P<number>\d+) \| (?P<capability>[^|]+) \| (?P<shown>[^|]+) \|$")
TEST = re.compile(r"`(?P<file>tests/[\w/]+\.py)::(?P<name>\w+)`")
NOT_YET = "not yet"


def rows() -> list[tuple[int, str]]:
    lines = (ROOT / "docs/capabilities.md").read_text().splitlines()
    found = [ROW.match(line) for line in lines if line.startswith("| F")]
    assert None not in found, "a row is `| F1 | what it can do | test, or not yet |`"
    return [(int(row["number"]), row["shown"].strip()) for row in found if row is not None]


@cache
def functions_of(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_capability_is_accounted_for_once() -> None:
    numbers = [number for number, _ in rows()]
    assert list(range(1, len(numbers) + 1)) == numbers


@pytest.mark.parametrize(("number", "shown"), rows(), ids=lambda value: f"F{value}" if isinstance(value, int) else "")
def test_capability_is_not_there_yet_or_names_tests_that_exist(number: int, shown: str) -> None:
    named = TEST.findall(shown)
    assert named or shown == NOT_YET, f"F{number}: name a test as `tests/…/test_x.py::test_y`, or say {NOT_YET}"
    for file, name in named:
        assert (ROOT / file).is_file(), f"F{number} names {file}"
        assert name in functions_of(ROOT / file), f"F{number} names {name}, which {file} has not"
