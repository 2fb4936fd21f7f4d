"""Every link in a page of the repository leads to something that is there, down to the heading."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from setup.layout import CHECKOUT

ROOT = CHECKOUT.root
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


def pages() -> list[str]:
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.split()


def links(page: Path) -> list[str]:
    """Return the links of the page's prose into this repository."""
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [link for link in LINK.findall(text) if not re.match(r"https?://|mailto:", link)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of headings, as both GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    broken = []
    for link in links(file):
        path, _, anchor = link.partition("#")
        target = file.parent / path if path else file
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert [] == broken


def test_every_page_of_docs_has_its_place_on_the_site() -> None:
    named = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "tests/website/mkdocs.yml").read_text(), re.MULTILINE)
    docs = ROOT / "docs"
    assert sorted(named) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))


def test_every_page_of_docs_is_reached_from_its_index() -> None:
    docs = ROOT / "docs"
    seen, ahead = set[Path](), [docs / "index.md"]
    while ahead:
        page = ahead.pop()
        if page in seen:
            continue
        seen.add(page)
        linked = ((page.parent / link.partition("#")[0]).resolve() for link in links(page))
        ahead += [each for each in linked if each.suffix == ".md" and docs in each.parents]
    assert set() == set(docs.rglob("*.md")) - seen
