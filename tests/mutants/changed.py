"""Git says which lines of a file are new since a commit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

NEW_LINES = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


def lines_since(commit: str, file: str, *, root: Path) -> set[int]:
    """Return the numbers of lines that the commit did not have, as they are in the working tree.

    file: from the root of the repository. Raises CalledProcessError if there is no such commit.
    """
    words = ("git", "diff", "--unified=0", "--no-ext-diff", commit, "--", file)
    said = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True).stdout
    places = ((int(start), int(count or 1)) for start, count in NEW_LINES.findall(said))
    return {line for start, count in places for line in range(start, start + count)}
