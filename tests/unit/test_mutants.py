"""Mutants of what changes in the core are tried again: `make mutants` does it, and these tests ask for it."""

from __future__ import annotations

import json
from pathlib import Path

from mutants.definitions import REST, definitions_at, fingerprints_of
from mutants.record import Change, Definition, Tried, by_definition, read_accepted, read_record, record, untried
from mutants.targets import TARGETS
from mutants.work import Mutant

from setup.layout import CHECKOUT

FILE = """\
from time import time

LIMIT = 3


class Clock:
    ends: float = 1.0

    @property
    def late(self):
        return time() > self.ends

    @late.setter
    def late(self, value):
        self.ends = value


def count(start):
    def less():
        return start - 1
    return less() if start else None
"""


def changed(was: str, now: str) -> set[str]:
    before, after = fingerprints_of(FILE), fingerprints_of(FILE.replace(was, now))
    assert was in FILE
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def test_mutants_of_each_definition_were_tried_since_it_changed() -> None:
    names = [f"{name} in {file}" for file in TARGETS for _, name in untried(file)]
    assert not names, f"`make mutants` (ONLY=plan.py: of one file) tries and records {', '.join(names)}"


def test_each_accepted_mutant_is_of_a_definition_that_there_is() -> None:
    there = {Definition(file, name) for file in TARGETS for name in fingerprints_of((CHECKOUT.root / file).read_text())}
    assert set() == read_accepted().keys() - there


def test_a_change_of_code_is_one_of_the_definition_around_it() -> None:
    assert {"count"} == changed("start - 1", "start - 2")
    assert {"count"} == changed("else None", "else 0")
    assert {"Clock.late"} == changed("= value", "= -value")  # one name with what reads it
    assert {"Clock.late"} == changed("@property", "@cached")
    assert {"count", "counted"} == changed("def count", "def counted")
    assert {"LIMIT"} == changed("LIMIT = 3", "LIMIT = 4")
    assert {"Clock.ends"} == changed("1.0", "2.0")
    assert {"Clock"} == changed("Clock:", "Clock(Base):")
    assert {REST} == changed("LIMIT = 3", "LIMIT = 3\nassert LIMIT")


def test_words_form_and_imports_are_no_change() -> None:
    assert set() == changed("    ends: float", "    # of the clock\n    ends : float")
    assert set() == changed("class Clock:\n", 'class Clock:\n    """A Clock."""\n\n')
    assert set() == changed("count(start):\n", 'count(\n    start,\n):\n    """Count."""\n')
    assert set() == changed("import time", "import sleep, time")


def test_lines_are_of_definitions_with_their_decorators() -> None:
    names = definitions_at(FILE)
    lines = FILE.splitlines()
    assert {"Clock.late"} == {names[lines.index(line) + 1] for line in ("    @property", "    @late.setter")}
    assert "count" == names[lines.index("        return start - 1") + 1]
    assert "Clock" == names[lines.index("class Clock:") + 1]
    assert 1 not in names, "an import defines nothing"


def test_a_definition_is_complete_once_each_of_its_mutants_was_tried() -> None:
    late, count, simple = Definition("core.py", "late"), Definition("core.py", "count"), Definition("core.py", "simple")
    first, second, third, fourth = (
        Mutant(*definition, was, now, 1, 1, "")
        for definition, was, now in ((late, ">", ">="), (count, "1", "2"), (late, ">", "<"), (count, "1", "0"))
    )
    tried = [(first, True), (second, True), (third, False)]
    found = by_definition([late, count, simple], [first, second, third, fourth], iter(tried))
    expected = [
        Tried(simple, set(), is_complete=True),
        Tried(late, {Change(">", ">=")}, is_complete=True),
        Tried(count, {Change("1", "2")}, is_complete=False),
    ]
    assert expected == [*found]


def test_what_was_tried_is_recorded_and_what_is_gone_is_not(tmp_path: Path) -> None:
    path = tmp_path / "tried.json"
    held, ladder = "operator/colocated_rl_api/holders.py", "operator/colocated_rl_api/ladder.py"
    record(Definition(ladder, "Ladder"), "1", path)
    path.write_text(json.dumps(read_record(path) | {held: {"gone": "2"}, "gone.py": {"gone": "3"}}))
    record(Definition(held, "holder_of"), "4", path)
    assert {held: {"holder_of": "4"}, ladder: {"Ladder": "1"}} == read_record(path)
