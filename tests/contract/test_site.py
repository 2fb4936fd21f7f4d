"""`make docs`: a site of the pages, strict about what leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from contract.test_packages import run

from setup.layout import CHECKOUT

SETTINGS = CHECKOUT.root / "tests/website"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    # not --quiet: what it does not say it does not count either
    libraries = ("--no-project", "--with-requirements", SETTINGS / "requirements.txt")
    words = ("--strict", "--config-file", SETTINGS / "mkdocs.yml", "--site-dir", place)
    assert "" == run(CHECKOUT.uv, "run", "--quiet", *libraries, "mkdocs", "build", *words)
    return place


def test_every_page_is_on_the_site(site: Path) -> None:
    for page in (CHECKOUT.root / "docs").rglob("*.md"):
        name = page.relative_to(CHECKOUT.root / "docs").with_suffix("")
        folder = name.parent if name.name == "index" else name
        title = re.findall(r"^# (.*)$", page.read_text(), re.MULTILINE)[0]
        assert title in (site / folder / "index.html").read_text()


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]* (?:src|href)="(https?:[^"]*)"', page.read_text())
        assert [] == [address for address in loaded if not address.startswith("https://www.mkdocs.org")], page
