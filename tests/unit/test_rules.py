"""The rules of the resource are CEL, which the API server evaluates and, with the same verdict, `colocated_rl_api.cel`.

tests/contract/test_manifest_corpus.py compares the two: here each rule is shown to be among what it compares.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from colocated_rl_api.cel import UnknownCel, compiled
from colocated_rl_api.job import ColocatedRLJob
from colocated_rl_api.parts import Part
from scenarios.corpus import BAD


class Tank(BaseModel, alias_generator=to_camel, validate_by_name=True):
    """A model as the rules see one."""

    full_size: int = 4
    drained_at: int | None = None
    kinds: list[str] = ["ice", "tea"]
    by_name: dict[str, int] = {"tea": 3}


def subclasses(part: type[Part]) -> Iterator[type[Part]]:
    for each in part.__subclasses__():
        yield from (each, *subclasses(each))


def test_every_rule_is_broken_by_a_manifest_of_the_corpus() -> None:
    """Rules over changes are the server's alone: test_manifest_corpus.py has a test for each of their fields."""
    rules = {rule.rule for part in subclasses(Part) for rule in part.RULES if "oldSelf" not in rule.rule}
    broken = {error["ctx"]["rule"] for case in BAD.values() for error in errors(case.text) if error["type"] == "rule"}
    assert rules == broken


def errors(manifest: str) -> list[ErrorDetails]:
    with pytest.raises(ValidationError) as refusal:
        ColocatedRLJob.read(yaml.safe_load(manifest))
    return refusal.value.errors()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("has(self.fullSize) && !has(self.drainedAt)", True),
        ("has(self.drainedAt) || self.fullSize == 5", False),
        ("!has(self.drainedAt) == false", False),  # the ! is of has(), not of the comparison
        ("has(self.drainedAt) && self.drainedAt > 3", False),  # what is absent is not compared
        ("self.fullSize > 4", False),
        ("self.fullSize <= 4 && self.fullSize != 5", True),
        ("(self.fullSize + 1) * 2 % 4", 2),
        ("'tea' in self.kinds && 'tea' in self.byName && !('ice' in self.byName)", True),
        ("self.kinds == ['ice', 'tea']", True),
        ("self.kinds.all(kind, size(kind) == 3)", True),
        ("self.kinds.exists(kind, kind.startsWith('t'))", True),
        ("self.kinds.exists(kind, self.kinds.all(other, other == kind))", False),
        ("['a', 'b'].all(kind, kind in self.kinds)", False),
        ("self.byName.exists(name, self.byName[name] == 3)", True),
        ("self.byName.exists(name, name == 'ice' && self.byName[name] == 3)", False),
        ("[true, false, true].filter(given, given).size()", 2),
        ("'a && !b'", "a && !b"),
        ("'%s of %d'.format(['tea', self.fullSize])", "tea of 4"),
        (r"'ab'.matches(r'^(a|b)+$')", True),
        ("text.matches('^ab$')", False),  # as in RE2: not before a newline at the end
        ("text.matches('a')", True),
    ],
)
def test_expression_has_the_value_that_it_has_in_cel(text: str, value: object) -> None:
    assert value == compiled(text)({"self": Tank(), "text": "ab\n", "true": True, "false": False})


@pytest.mark.parametrize(
    "text",
    [
        "self.a < 1",
        "self.a - 1",
        "-self.a",
        "self[0]",
        "a ? b : c",
        "type(self)",
        "self.map(x, x)",
        "1 == 1 == 1",
        "{1: 2}",
    ],
)
def test_what_is_not_known_of_cel_is_an_error(text: str) -> None:
    with pytest.raises(UnknownCel):
        compiled(text)
