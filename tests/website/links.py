"""Links that lead out of `docs/`, to files of the repository: on the site they are text, because it holds no such page.

That the files are there is checked with all other links of the repository (tests/unit/test_links.py).
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[(?P<words>[^\]]+)\]\((?P<target>[^)#: ]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link["target"]))
        if not path.startswith("../"):
            return link[0]
        file = path.removeprefix("../")
        return f"`{file}`" if link["words"] == file else f"{link['words']} (`{file}`)"

    return LINK.sub(replaced, markdown)
