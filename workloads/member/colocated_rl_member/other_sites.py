"""Pages on the loopback are for who is there, and not for a website in the browser of who forwards the port.

Such a site has its name lead to the loopback (DNS rebinding) and then reads what the browser takes for its own, or it
sends a request without reading the answer. Both name the site: the first in `Host`, the second in `Origin`. An address
in their place belongs to no site, so it is served, whichever it is: port-forward, a tunnel, another container.
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
    host, origin = request.headers.get("Host"), request.headers.get("Origin")
    if (host is None or _is_local(f"http://{host}")) and (origin is None or _is_local(origin)):
        return await handler(request)
    return web.json_response(REFUSED, status=403)


def _is_local(origin: str) -> bool:
    try:
        host = URL(origin).host or ""
        return host == "localhost" or host.endswith(".localhost") or bool(ipaddress.ip_address(host))
    except ValueError:
        return False
