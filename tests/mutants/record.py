"""The record names each definition of the core by a fingerprint of its code when its mutants were last tried.

`make mutants` tries every definition that is not in `tried.json` as it is now, and writes it there once none of its
mutants survives but those in `accepted.toml`. A fast test fails while a definition is not there, so whoever changes one
runs the command. The hash of a commit would be simpler than fingerprints, but a rebase changes it.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mutants.definitions import fingerprints_of
from mutants.targets import TARGETS
from mutants.work import Mutant
from setup.layout import CHECKOUT

ACCEPTED = Path(__file__).with_name("accepted.toml")
RECORD = Path(__file__).with_name("tried.json")


class Definition(NamedTuple):
    file: str  # from the root of the repository
    name: str


class Change(NamedTuple):
    was: str
    now: str


Survivors = dict[Definition, set[Change]]


class Tried(NamedTuple):
    """A Tried says which of the mutants of a definition survived. is_complete: all of them were tried."""

    definition: Definition
    survivors: set[Change]
    is_complete: bool


def untried(file: str) -> dict[Definition, str]:
    """Return the definitions of a file that are not in the record as they are now, each with its fingerprint."""
    recorded = read_record().get(file, {})
    fingerprints = fingerprints_of((CHECKOUT.root / file).read_text())
    return {Definition(file, name): value for name, value in fingerprints.items() if recorded.get(name) != value}


def record(definition: Definition, fingerprint: str, path: Path = RECORD) -> None:
    """Write that all mutants of a definition were tried, and remove definitions and files that are gone."""
    known = read_record(path)
    known.setdefault(definition.file, {})[definition.name] = fingerprint
    names = fingerprints_of((CHECKOUT.root / definition.file).read_text())
    known[definition.file] = {name: known[definition.file][name] for name in names if name in known[definition.file]}
    path.write_text(json.dumps({file: known[file] for file in TARGETS if file in known}, indent=2) + "\n")


def read_record(path: Path = RECORD) -> dict[str, dict[str, str]]:
    """Return the fingerprint of each definition that was tried, by file and name. Nothing was without the record."""
    found: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def read_accepted() -> Survivors:
    accepted: Survivors = {}
    for entry in tomllib.loads(ACCEPTED.read_text())["accepted"]:
        definition = Definition(entry["file"], entry["definition"])
        accepted.setdefault(definition, set()).add(Change(entry["was"], entry["now"]))
    return accepted


def by_definition(
    definitions: Iterable[Definition], mutants: Sequence[Mutant], tried: Iterable[tuple[Mutant, bool]]
) -> Iterator[Tried]:
    """Yield each definition once all of its mutants were tried, and in the end the others.

    tried: mutants, and whether each survived, in any order, perhaps not all.
    """
    left = Counter(Definition(mutant.file, mutant.definition) for mutant in mutants)
    survivors: Survivors = {definition: set() for definition in definitions}
    for definition in [each for each in survivors if not left[each]]:
        yield Tried(definition, survivors.pop(definition), is_complete=True)
    for mutant, survives in tried:
        definition = Definition(mutant.file, mutant.definition)
        left[definition] -= 1
        if survives:
            survivors[definition].add(Change(mutant.was, mutant.now))
        if not left[definition]:
            yield Tried(definition, survivors.pop(definition), is_complete=True)
    for definition, found in survivors.items():
        yield Tried(definition, found, is_complete=False)
