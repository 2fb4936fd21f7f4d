"""Mutants are made of the lines that changed, wherever the command is started."""

from __future__ import annotations

import subprocess
from pathlib import Path

from mutants.changed import lines_since


def test_lines_are_those_that_a_commit_did_not_have(tmp_path: Path) -> None:
    """`make mutants SINCE=COMMIT` tried none: git was asked in tests/, where no file of the core is."""

    def git(*words: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.com")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    file = tmp_path / "core/plan.py"
    file.parent.mkdir()
    file.write_text("a\nb\nc\nd\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message=first")
    file.write_text("a\nB\nc\nd\ne\nf\n")
    assert {2, 5, 6} == lines_since("HEAD", "core/plan.py", root=tmp_path)
    file.write_text("a\nd\n")
    assert set() == lines_since("HEAD", "core/plan.py", root=tmp_path)
    assert set() == lines_since("HEAD", "core/other.py", root=tmp_path)
