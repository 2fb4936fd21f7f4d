"""Mutants of a small package are tried by its tests: in forks, or in new processes where a fork could not show them."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants.trials import trials
from mutants.work import Mutant

FILE = "operator/core/rules.py"
RULES = """\
LIMIT = 3


def is_late(now, ends):
    return now >= ends


def countdown(start):
    while start > 0:
        start -= 1
    return start


def nobody_asks():
    return 1
"""
TESTS = """\
from core.rules import LIMIT, countdown, is_late


def test_what_ends_later_is_not_late():
    assert is_late(2, 1)
    assert not is_late(0, 1)


def test_limit():
    assert LIMIT == 3


def test_a_count_ends_at_nought():
    assert countdown(3) == 0
"""


def repository(place: Path, tests: str) -> Path:
    checkout = place / "checkout"
    for name, text in {
        "operator/core/__init__.py": "",
        FILE: RULES,
        "tests/pyproject.toml": "[tool.pytest.ini_options]\nasyncio_default_fixture_loop_scope = 'function'\n",
        "tests/test_rules.py": tests,
    }.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    return checkout


def mutant(was: str, now: str) -> Mutant:
    before, found, after = RULES.partition(was)
    assert found
    line = before.count("\n") + 1
    return Mutant(FILE, "", was, now, line, line, before + now + after)


def test_a_mutant_survives_if_no_test_notices_it(tmp_path: Path) -> None:
    killed = [
        mutant("now >= ends", "now <= ends"),
        mutant("start -= 1", "start += 1"),  # loops for ever
        mutant("LIMIT = 3", "LIMIT = 4"),  # imported before there is a mutant
        mutant("LIMIT = 3", "LIMIT ="),
    ]
    survive = [
        mutant("now >= ends", "now > ends"),
        mutant("LIMIT = 3", "LIMIT = 3.0"),
        mutant("return 1", "return 2"),
    ]
    checkout = repository(tmp_path, TESTS)
    found = dict(trials(checkout, [*killed, *survive], ["test_*.py"], at_once=2, spare_s=1))
    assert dict.fromkeys(killed, False) | dict.fromkeys(survive, True) == found


SLOW_TEST = """

def test_what_ends_now_is_late():
    began = process_time()
    while process_time() < began + 0.4:
        pass
    assert is_late(1, 1)
"""


def test_an_accepted_mutant_is_tried_by_quick_tests_alone(tmp_path: Path) -> None:
    mutants = [
        mutant("now >= ends", "now > ends"),  # the slow test would notice it
        mutant("LIMIT = 3", "LIMIT = 4"),  # a new process would
        mutant("now >= ends", "now <= ends"),
    ]
    checkout = repository(tmp_path, f"from time import process_time\n{TESTS}{SLOW_TEST}")
    tried = trials(checkout, mutants, ["test_*.py"], at_once=1, accepted=frozenset({0, 1, 2}))
    assert [True, True, False] == [survives for _, survives in tried]
    assert [(mutants[0], False)] == [*trials(checkout, mutants[:1], ["test_*.py"], at_once=1)]


def test_no_mutant_is_tried_with_tests_that_fail_without_one(tmp_path: Path) -> None:
    checkout = repository(tmp_path, TESTS + "    assert LIMIT == 4\n")
    with pytest.raises(SystemExit, match=r"fail without a mutant[\s\S]*assert LIMIT == 4"):
        list(trials(checkout, [mutant("return 1", "return 2")], ["test_*.py"], at_once=1))


def test_no_mutant_is_begun_late(tmp_path: Path) -> None:
    checkout = repository(tmp_path, TESTS)
    assert [] == list(trials(checkout, [mutant("return 1", "return 2")], ["test_*.py"], at_once=1, until=0.0))
