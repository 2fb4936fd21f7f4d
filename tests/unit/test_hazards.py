"""`docs/hazards.md` knows every number that code and tests cite, and the tests that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| H(\d+) \| [^|]+ \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ROWS = [(int(number), shown) for number, shown in ROW.findall((ROOT / "docs/hazards.md").read_text())]
OF_THE_ROLLOUT_CONTROLLER = {27, 28, 29, 30, 32, 33, 34, 35, 36, 49}


def test_every_hazard_is_accounted_for_once() -> None:
    assert list(range(1, 66)) == [number for number, _ in ROWS]


@pytest.mark.parametrize(("number", "shown"), ROWS, ids=lambda value: f"H{value}" if isinstance(value, int) else "")
def test_hazard_names_tests_that_exist_and_carry_its_number_if_it_is_the_agents(number: int, shown: str) -> None:
    named = TEST.findall(shown)
    assert named, f"H{number}: name a test as `tests/…/test_x.py::test_y`"
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(), f"H{number} names {name}, which {file} has not"
    carries = [name for _, name in named if number in map(int, re.findall(r"(?<=_)h(\d+)(?=_)", name))]
    assert carries or number in OF_THE_ROLLOUT_CONTROLLER


def test_every_number_in_the_name_of_a_test_is_in_the_row_of_its_hazard() -> None:
    shown = {number: {name for _, name in TEST.findall(tests)} for number, tests in ROWS}
    for path in sorted(ROOT.glob("tests/*/test_*.py")):
        for name in re.findall(r"def (test_\w+)\(", path.read_text()):
            for number in map(int, re.findall(r"(?<=_)h(\d+)(?=_)", name)):
                assert name in shown[number], f"H{number} lacks {path.name}::{name}"
