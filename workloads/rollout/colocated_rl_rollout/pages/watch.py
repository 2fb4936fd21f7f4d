"""Serve the page on which people watch a job: one document, with its style and its script inside.

Responses are words of strangers, and this port also has the gateway. So the page can only read:

* the browser runs no script and no style but those of this package, by their digests, and loads nothing else;
* requests go to this port alone, and the script makes only GETs;
* text becomes text nodes: no string is ever parsed as HTML, which the browser would refuse (Trusted Types);
* no other site may show the page in a frame, or keep a handle of its window.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from functools import cache
from importlib.resources import files

from aiohttp import web

STYLE, SCRIPT = "/* style */", "/* script */"
ICON = "img-src data:"  # the one in the document


@cache
def document() -> tuple[str, str]:
    """Return the document, and the policy under which it may run."""
    here = files(__package__)
    page, style, script = ((here / f"watch.{kind}").read_text() for kind in ("html", "css", "js"))
    policy = [
        "default-src 'none'",
        f"script-src '{_digest(script)}'",
        f"style-src '{_digest(style)}'",
        "connect-src 'self'",
        ICON,
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return page.replace(STYLE, style).replace(SCRIPT, script), "; ".join(policy)


async def watch_page(_: web.Request) -> web.Response:
    """Answer with the document."""
    text, policy = document()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }
    return web.Response(text=text, content_type="text/html", headers=headers)


def _digest(text: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
