"""Pins are compared with a database of known vulnerabilities that is at hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from audit.__main__ import Pin, concerns, pins

from setup.layout import CHECKOUT

ADVISORY = {
    "id": "PYSEC-1",
    "aliases": ["CVE-1"],
    "modified": "2026-01-02T03:04:05Z",
    "affected": [
        {
            "package": {"ecosystem": "PyPI", "name": "Some_Library"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "1.0"}, {"fixed": "1.10"}]}],
            "versions": ["0.3"],
        }
    ],
}


def audit(database: Path, *files: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "audit", str(database), *map(str, files)]
    return subprocess.run(words, cwd=CHECKOUT.root / "tests", capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("version", "is_known"),
    [("0.3", True), ("0.9", False), ("1.0", True), ("1.9", True), ("1.10", False), ("2.0", False), ("strange", True)],
)
def test_a_version_is_named_if_it_lies_within_what_an_advisory_says(version: str, is_known: bool) -> None:
    assert is_known is concerns(ADVISORY, Pin("some-library", version))


def test_a_last_version_is_within() -> None:
    affected = {"package": {"name": "a"}, "ranges": [{"type": "SEMVER", "events": [{"introduced": "0"}]}]}
    affected["ranges"][0]["events"].append({"last_affected": "1.2"})  # type: ignore[index]
    assert [True, False] == [concerns({"affected": [affected]}, Pin("a", each)) for each in ("1.2", "1.3")]


def test_each_pin_of_a_requirement_file_is_asked_about() -> None:
    text = "a.b==1.0 ; python_version > '3' \\\n    --hash=sha256:00\nc[d,e]==2\n# f==3\n"
    assert [Pin("a-b", "1.0"), Pin("c", "2")] == pins(text)
    for file in CHECKOUT.root.glob("workloads/*/requirements.txt"):
        lines = [line for line in file.read_text().splitlines() if line[:1].isalnum()]
        assert len(lines) == len(pins(file.read_text())) > 0


def test_what_is_known_is_printed_and_ends_with_1_and_a_withdrawn_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "vulns/some-library"
    folder.mkdir(parents=True)
    (tmp_path / "pins.txt").write_text("Some.Library==1.2\nother==1\n")
    found = folder / "PYSEC-1.yaml"
    found.write_text(yaml.safe_dump(ADVISORY))
    ended = audit(tmp_path, tmp_path / "pins.txt")
    assert (1, "some-library 1.2: PYSEC-1 CVE-1") == (ended.returncode, ended.stdout.splitlines()[0])
    assert "2 libraries, 1 advisories about them, the newest of 2026-01-02: 1 concern" in ended.stdout
    found.write_text(yaml.safe_dump({**ADVISORY, "withdrawn": "2026-02-02T00:00:00Z"}))
    assert 0 == audit(tmp_path, tmp_path / "pins.txt").returncode
    assert "has no folder vulns" in audit(folder, tmp_path / "pins.txt").stderr
