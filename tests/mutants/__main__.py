"""Changes the pure core in small ways, and names each change that no fast test notices: `make mutants`.

Definitions that changed since their mutants were last tried are tried, and all of them without `tried.json`. The tests
that `targets.py` names for a file run with each mutant, those first that are quick and ran the changed statement. A
survivor that can't be told from the original is in `accepted.toml` with its reason; any other one fails the run, as
does an accepted one that a quick test notices by now, or that can't be made any more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from mutants.making import mutants_of
from mutants.record import ACCEPTED, Change, Definition, Survivors, by_definition, read_accepted, record, untried
from mutants.targets import TARGETS
from mutants.trials import trials
from setup.layout import CHECKOUT


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="try no further mutants past this time")
    parser.add_argument("--at-once", type=int, default=2, help="mutants, each in a process")
    options = parser.parse_args(words)
    files = [file for file in TARGETS if options.only in file]
    if not files:
        print(f"no file of the core has {options.only!r} in its path: they are {', '.join(TARGETS)}")
        return 2
    until = None if options.within is None else time.monotonic() + options.within
    accepted, were_right = read_accepted(), []
    for tests in dict.fromkeys(TARGETS[file] for file in files):
        together = [file for file in files if TARGETS[file] == tests]
        definitions = {
            definition: fingerprint for file in together for definition, fingerprint in untried(file).items()
        }
        if definitions:
            were_right.append(run(definitions, tests, accepted, options.at_once, until))
    if not were_right:
        print("nothing to try: the record has each definition as it is now")
    return 0 if all(were_right) else 1


def run(
    definitions: dict[Definition, str], tests: Sequence[str], accepted: Survivors, at_once: int, until: float | None
) -> bool:
    """Try the mutants of some definitions, and record definitions of which only accepted ones survive.

    definitions: with their fingerprints. until: on the monotonic clock; what is not tried by then is counted and left.
    Returns whether all that were tried are as expected. Raises SystemExit where the tests fail without a mutant.
    """
    began, cpu_began, are_right, count = time.monotonic(), processor_s(), True, 0
    with TemporaryDirectory() as place:
        checkout = Path(place) / "checkout"
        copy_checkout(checkout)
        files = {file: {each.name for each in definitions if each.file == file} for file, _ in definitions}
        mutants = [each for file in files for each in mutants_of(file, (checkout / file).read_text(), files[file])]
        print(f"{', '.join(files)}: {len(definitions)} definitions, {len(mutants)} mutants", flush=True)
        expected = frozenset(
            number
            for number, mutant in enumerate(mutants)
            if Change(mutant.was, mutant.now) in accepted.get(Definition(mutant.file, mutant.definition), ())
        )
        tried = trials(checkout, mutants, tests, at_once=at_once, until=until, accepted=expected) if mutants else ()
        for definition, survivors, is_complete in by_definition(definitions, mutants, tried):
            may = accepted.get(definition, set())
            unexpected, gone = survivors - may, may - survivors if is_complete else set()
            for change in sorted(unexpected):
                print(f"survived: {shown(definition, change)}", flush=True)
            for change in sorted(gone):
                print(f"no survivor any more, take it out of {ACCEPTED.name}: {shown(definition, change)}", flush=True)
            if unexpected or gone:
                are_right = False
            elif is_complete:
                record(definition, definitions[definition])
                count += 1
    took_s, cpu_s = time.monotonic() - began, processor_s() - cpu_began
    print(
        f"{count} recorded, {len(definitions) - count} not, {took_s:.0f} s, {cpu_s:.0f} s of processor time", flush=True
    )
    return are_right


def shown(definition: Definition, change: Change) -> str:
    return f"{definition.file}: {definition.name}\n  - {change.was}\n  + {change.now}"


def processor_s() -> float:
    """Return the processor time of this process and of all that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def copy_checkout(into: Path) -> None:
    """Copy the files of this checkout, changes that are not committed among them, as a repository with its history."""
    subprocess.run(["git", "clone", "--quiet", "--shared", CHECKOUT.root, into], check=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT.root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (CHECKOUT.root / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            (into / name).write_bytes((CHECKOUT.root / name).read_bytes())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
