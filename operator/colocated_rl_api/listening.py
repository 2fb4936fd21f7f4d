"""Where processes of a pod listen: at each of its addresses, be its cluster's network of IPv4, of IPv6 or of both."""

from __future__ import annotations

import socket

EVERYWHERE = ""
BACKLOG = 128


def listen(host: str, port: int, *, backlog: int = BACKLOG) -> socket.socket:
    """host: an address, or EVERYWHERE. port: 0 takes a free one. Raises OSError.

    Event loops and socket servers, asked for an address, take it of one family, or a socket and a port for each.
    """
    if host == EVERYWHERE and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)
