"""This module yields the commands and manifests that pages show for users to copy, in their order."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

from setup.layout import CHECKOUT

PROGRAMS = (
    "cat", "colocated-rl", "curl", "export", "for", "helm", "kind", "kubectl", "ln", "localcluster", "make", "pip",
    "python", "python3", "sed", "vf-eval",
)  # fmt: skip


class Block(NamedTuple):
    page: str  # from the repository's root
    heading: str  # the newest above it
    language: str  # of a fence; empty where none is named, and of text that is indented
    text: str

    @property
    def is_command(self) -> bool:
        words = [word for word in self.text.split() if not re.fullmatch(r"\w+=\S*", word)]  # but variables for it
        return self.language == "sh" or (self.language == "" and words[0] in PROGRAMS)

    @property
    def commands(self) -> list[str]:
        """A line each; one that goes on after a backslash is whole, and what a comment says is not in it."""
        whole = re.sub(r"\\\n\s*", "", self.text)
        return [command for line in whole.splitlines() if (command := re.sub(r"\s+# .*$", "", line).strip())]


def pages() -> list[str]:
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    found = subprocess.run(words, cwd=CHECKOUT.root, capture_output=True, text=True, timeout=60, check=True)
    return found.stdout.split()


def blocks(page: str) -> list[Block]:
    return list(_blocks(page, (CHECKOUT.root / page).read_text()))


def under(page: str, heading: str) -> list[str]:
    """Commands of a page below one heading. Raises LookupError where there are none."""
    found = [
        command for each in blocks(page) if each.heading == heading for command in each.commands if each.is_command
    ]
    if not found:
        raise LookupError(f"{page} has no commands below {heading}")
    return found


def _blocks(page: str, text: str) -> Iterator[Block]:
    parts = re.split(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    heading = ""
    for place in range(0, len(parts), 3):
        for line in re.findall(
            r"^(#+ .*|(?:(?:(?<=\n\n)|(?<=\A)) {4}.*\n)(?: {4}.*\n|\n(?= {4}))*)", parts[place], re.MULTILINE
        ):
            if line.startswith("#"):
                heading = line.lstrip("# ")
            else:
                yield Block(page, heading, "", re.sub("^    ", "", line, flags=re.MULTILINE))
        if place + 2 < len(parts):
            yield Block(page, heading, parts[place + 1], parts[place + 2])
