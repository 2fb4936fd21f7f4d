"""Compares pins with a checkout of PyPA's advisory database: `python -m audit DIRECTORY FILE...`.

For machines that do not reach PyPI's, which has the same advisories. It reports no more than that checkout knows, and
prints how new that is. Ends with 1 if an advisory concerns a pin.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

PIN = re.compile(r"^([\w.-]+)(?:\[[\w,.-]+\])?==([^\s;\\]+)", re.MULTILINE)


class Pin(NamedTuple):
    name: str
    version: str


def pins(text: str) -> list[Pin]:
    return [Pin(canonicalize_name(name), version) for name, version in PIN.findall(text)]


def advisories(database: Path, pin: Pin) -> Iterator[dict[str, Any]]:
    """Yield what is known of a library, whatever its version, but for what was withdrawn."""
    for file in sorted((database / "vulns" / pin.name).glob("*.yaml")):
        advisory = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not advisory.get("withdrawn"):
            yield advisory


def concerns(advisory: dict[str, Any], pin: Pin) -> bool:
    for affected in advisory.get("affected", ()):
        if canonicalize_name(affected["package"]["name"]) != pin.name:
            continue
        if pin.version in affected.get("versions", ()):
            return True
        if any(_is_within(span["events"], pin.version) for span in affected.get("ranges", ()) if span["type"] != "GIT"):
            return True
    return False


def _is_within(events: list[dict[str, str]], version: str) -> bool:
    """Return whether the newest event up to this version began a fault. A version that can't be read is within."""
    try:
        own, found = Version(version), False
        for event in sorted(events, key=lambda event: Version(next(iter(event.values())))):
            [(kind, at)] = event.items()
            if Version(at) < own or (Version(at) == own and kind != "last_affected"):
                found = kind == "introduced"
    except InvalidVersion:
        return True
    return found


def main() -> int:
    database, files = Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
    if not (database / "vulns").is_dir():
        sys.exit(f"{database} has no folder vulns: name a checkout of https://github.com/pypa/advisory-database")
    asked = sorted({pin for file in files for pin in pins(file.read_text())})
    newest, known, count = "", 0, 0
    for pin in asked:
        for advisory in advisories(database, pin):
            known += 1
            newest = max(newest, str(advisory.get("modified", ""))[:10])
            if concerns(advisory, pin):
                count += 1
                names = " ".join([advisory["id"], *advisory.get("aliases", ())])
                print(f"{pin.name} {pin.version}: {names}")  # noqa: T201
    print(  # noqa: T201
        f"{len(asked)} libraries, {known} advisories about them, the newest of {newest or 'no day'}: "
        f"{count} concern a pinned version"
    )
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
