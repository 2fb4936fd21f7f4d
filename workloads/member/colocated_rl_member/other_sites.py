"""Pages on the loopback are for who is there, and not for a website in the browser of who forwards the port.

Such a site has its name lead to the loopback (DNS rebinding) and then reads what the browser takes for its own, or it
sends a request without reading the answer. Both name the site: the first in `Host`, the second in `Origin`. An address
as `Host` is where the page was asked for, so it is served, whichever it is: port-forward, a tunnel, another container.
As `Origin` it may be a site without a name: only the same address, and those of the loopback, are served.
"""

from __future__ import annotations

import ipaddress

from aiohttp import web
from aiohttp.typedefs import Handler
from yarl import URL

from colocated_rl_member.connection import error_body

REFUSED = error_body(403, "these pages are for localhost, or an address: http://127.0.0.1:PORT")


@web.middleware
async def refuse_other_sites(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer requests whose Host or Origin names a site with 403. Programs that are no browsers may send neither."""
    host = _host_of(f"http://{request.headers.get('Host', 'localhost')}")
    origin = _host_of(request.headers.get("Origin", "http://localhost"))
    if (_is_loopback(host) or _is_address(host)) and (_is_loopback(origin) or origin == host):
        return await handler(request)
    return web.json_response(REFUSED, status=403)


def _host_of(url: str) -> str:
    try:
        return URL(url).host or ""
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    if _is_address(host):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")
