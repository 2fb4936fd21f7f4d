"""`docs/capabilities.md` claims only what a test shows, names the test, and says what was real in it."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| F(?P<number>\d+) \| (?P<capability>[^|]+) \| (?P<real>[^|]+) \| (?P<shown>[^|]+) \|$")
TEST = re.compile(r"`(?P<file>tests/[\w/]+\.py)::(?P<name>\w+)`")
NOT_YET = "not yet"
WHOLE_JOBS = "whole jobs"
CONTAINERS = "containers"
PARTS = {  # what a test outside tests/unit has of the real thing, by the modules that its file imports
    "SGLang": {"engines"},
    "API server": {"cluster", "contract.api_server", "real_operator"},
    "operator": {"colocated_rl_operator", "fakes.world", "real_operator"},
    "agent": {"colocated_rl_agent", "fakes.pod", "fakes.small_pod"},
    "rollout": {"colocated_rl_rollout", "fakes.rollout"},
    "trainer": {"colocated_rl_trainer", "contract.trainer_in_process"},
}
LOGIC = "logic"


class Row(NamedTuple):
    number: int
    real: str
    shown: str


def rows() -> list[Row]:
    lines = (ROOT / "docs/capabilities.md").read_text().splitlines()
    found = [ROW.match(line) for line in lines if line.startswith("| F")]
    assert None not in found, "a row is `| F1 | what it can do | real in it | test, or not yet |`"
    return [Row(int(row["number"]), row["real"].strip(), row["shown"].strip()) for row in found if row is not None]


def real_in(shown: str) -> str:
    """Return which parts are real in the tests of a row, or that it is logic alone."""
    files = {file for file, _ in TEST.findall(shown)}
    if all(file.startswith("tests/containerd/") for file in files):
        return CONTAINERS
    if any(file.startswith("tests/e2e/") for file in files):
        return WHOLE_JOBS
    modules = set().union(*(imports_of(ROOT / file) for file in files if not file.startswith("tests/unit/")))
    return ", ".join(part for part, marks in PARTS.items() if marks & modules) or LOGIC


@cache
def imports_of(path: Path) -> set[str]:
    """Modules that a file imports from, each with the packages that it lies in."""
    nodes = ast.walk(ast.parse(path.read_text()))
    modules = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {".".join(module.split(".")[:depth]) for module in modules for depth in (1, 2)}


@cache
def functions_of(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_capability_is_accounted_for_once() -> None:
    numbers = [row.number for row in rows()]
    assert list(range(1, len(numbers) + 1)) == numbers


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"F{row.number}")
def test_capability_is_not_there_yet_or_names_tests_that_exist(row: Row) -> None:
    named = TEST.findall(row.shown)
    assert named or row.shown == NOT_YET, f"F{row.number}: name a test as `tests/…/test_x.py::test_y`, or say {NOT_YET}"
    for file, name in named:
        assert (ROOT / file).is_file(), f"F{row.number} names {file}"
        assert name in functions_of(ROOT / file), f"F{row.number} names {name}, which {file} has not"


@pytest.mark.parametrize("row", [row for row in rows() if row.shown != NOT_YET], ids=lambda row: f"F{row.number}")
def test_capability_says_what_was_real_in_its_tests(row: Row) -> None:
    assert real_in(row.shown) == row.real, f"F{row.number}: real in its tests"
