"""Work is what the command gives to the process that tries mutants, in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

FILE = "MUTANTS_WORK"  # environment variable: where it is


class Mutant(NamedTuple):
    """A Mutant is a changed file. first, last: lines of the innermost statement that is changed."""

    file: str  # from the root of the repository
    definition: str  # that is changed: its qualified name
    was: str
    now: str
    first: int
    last: int
    text: str


@dataclass(frozen=True)
class Work:
    """Work names what to try.

    until: on the monotonic clock; later no mutant is begun. accepted: numbers of mutants that are expected to survive:
    quick tests alone try them. spare_s: of processor time, besides three times what the tests need: past it, a mutant
    loops for ever. results: a file descriptor for the number of each mutant that was tried and 1 if it survived, a line
    each.
    """

    root: Path  # of the copy of the repository
    mutants: list[Mutant]
    at_once: int
    until: float | None
    accepted: frozenset[int]
    spare_s: int
    results: int
