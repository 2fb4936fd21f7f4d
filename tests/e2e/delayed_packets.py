"""This process holds each packet from its network namespace to one address for a while: `ADDRESS SECONDS`.

netem would do that, and not every kernel has it. Here a route leads the packets into a device of this process, which
sends each on by a raw socket once it is due. The process prints a line when the route is there, ends with its standard
input, and then prints how many packets it delayed; the device and its route end with it. It needs root and Linux.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

DEVICE = "delay0"
BEHIND = "eth0"  # the interface of a pod
MTU = 1500
IPV4 = 4
_SET_NAME = 0x400454CA  # TUNSETIFF
_PACKETS_ALONE = 0x0001 | 0x1000  # IFF_TUN, IFF_NO_PI


def main(address: str, delay_s: float) -> None:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_NAME, struct.pack("16sH", DEVICE.encode(), _PACKETS_ALONE))
    onward = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    onward.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, BEHIND.encode())
    for name in ("all", BEHIND):  # answers come by another way than the route leads
        Path(f"/proc/sys/net/ipv4/conf/{name}/rp_filter").write_text("0")
    subprocess.run(["ip", "link", "set", DEVICE, "mtu", str(MTU), "up"], check=True)
    subprocess.run(["ip", "route", "add", address, "dev", DEVICE, "src", own_address()], check=True)
    report("delaying")
    report(str(pass_on(device, onward, address, delay_s)))


def report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def own_address() -> str:
    words = ("ip", "-brief", "-4", "address", "show", BEHIND)
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[2].split("/")[0]


def pass_on(device: int, onward: socket.socket, address: str, delay_s: float) -> int:
    """Send each packet of the device on, so long after it came, until standard input ends; return their number."""
    held: deque[tuple[float, bytes]] = deque()
    passed = 0
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready, _, _ = select.select([device, sys.stdin], [], [], wait_s)
        if device in ready:
            packet = os.read(device, MTU)
            if packet[0] >> 4 == IPV4:  # not what the kernel says of itself to neighbours by IPv6
                held.append((time.monotonic() + delay_s, packet))
        while held and held[0][0] <= time.monotonic():
            onward.sendto(held.popleft()[1], (address, 0))
            passed += 1
        if sys.stdin in ready:
            return passed


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
