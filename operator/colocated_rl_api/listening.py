"""Open listening sockets at every address of a pod, on a cluster network of IPv4, of IPv6 or of both."""

from __future__ import annotations

import socket

EVERYWHERE = ""
BACKLOG = 4096  # beyond it the kernel lets whoever comes try again a second later


def listen(host: str, port: int, *, backlog: int = BACKLOG) -> socket.socket:
    """Return a listening socket. host: an address, or EVERYWHERE. port: 0 takes a free one. Raises OSError.

    Event loops and socket servers would listen in one address family only, or open a socket and a port for each.
    """
    if host == EVERYWHERE and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)
