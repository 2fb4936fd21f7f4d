"""Find the network interface by which a pod reaches another one. Linux."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h: primary IPv4 address of an interface
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")  # one per line: hexadecimal digits, four numbers, interface
_INTERFACE_NAME_BYTES = 16


def interface_towards(address: str) -> str:
    """Return the network interface that owns the route to `address` (IPv6, IPv4 or a name for it).

    Left to themselves, gloo and NCCL ask what the host's own name resolves to: in a pod often loopback, or nothing.
    Raises OSError if there is no route, or no interface has the address that it starts from.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: asks for the route
        source = probe.getsockname()[0]
        for interface, own in _addresses(probe):
            if own == source:
                return interface
    raise OSError(errno.EADDRNOTAVAIL, f"no interface has {source}, the source of packets to {address}")


def _addresses(probe: socket.socket) -> Iterator[tuple[str, str | None]]:
    """Yield each interface with an address that it has, of the probe's family."""
    if probe.family == socket.AF_INET6:
        for digits, *_, interface in map(str.split, _IPV6_ADDRESSES.read_text().splitlines()):
            yield interface, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    else:
        for _, interface in socket.if_nameindex():
            yield interface, _address_of(interface, probe)


def _address_of(interface: str, probe: socket.socket) -> str | None:
    request = struct.pack(f"{_INTERFACE_NAME_BYTES}s24x", interface.encode())
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:  # the interface has no address
            return None
        raise
    return socket.inet_ntoa(answer[20:24])
