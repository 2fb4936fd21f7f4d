"""Faults of the network between two pods of the local cluster lose packets, cut the pods off, or slow them down.

By the kernel's own means in one pod's network namespace, and so by root, nft and tc. A delay alone would need netem,
which not every kernel has: a slow network is one of few bytes a second, behind a queue of seconds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

TABLE = "colocated-rl-fault"
TOOLS = ("nsenter", "ip", "nft", "tc")


class NetworkFault(StrEnum):
    LOSES = "loses a third of all packets"
    CUTS = "passes nothing on"
    IS_SLOW = "passes 256 kbit/s on"


def missing_tools() -> list[str]:
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def address_of(pid: int) -> str:
    """The IPv4 address of a process's pod."""
    found = json.loads(_inside(pid, "ip", "-json", "-4", "address", "show", "eth0"))
    return str(found[0]["addr_info"][0]["local"])


@contextmanager
def faulty(fault: NetworkFault, pid: int, peer: int) -> Iterator[None]:
    """Between the pods of two processes, both ways; a slow network is that of the first pod to everybody."""
    if fault is NetworkFault.IS_SLOW:
        _inside(
            pid, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "256kbit", "burst", "16kb", "latency", "3s"
        )
    else:
        _inside(pid, "nft", "--file", "-", stdin=_rules(fault, address_of(peer)))
    try:
        yield
    finally:
        if fault is NetworkFault.IS_SLOW:
            _inside(pid, "tc", "qdisc", "delete", "dev", "eth0", "root")
        else:
            _inside(pid, "nft", "delete", "table", "ip", TABLE)


def _rules(fault: NetworkFault, address: str) -> str:
    drop = "drop" if fault is NetworkFault.CUTS else "numgen random mod 3 == 0 drop"
    return f"""
    table ip {TABLE} {{
      chain in {{ type filter hook input priority 0; ip saddr {address} {drop}; }}
      chain out {{ type filter hook output priority 0; ip daddr {address} {drop}; }}
    }}
    """


def _inside(pid: int, *command: str, stdin: str = "") -> str:
    """Run a command of this machine in the network of a process. Raises CalledProcessError."""
    words = ("nsenter", "--target", str(pid), "--net", *command)
    return subprocess.run(words, input=stdin, capture_output=True, text=True, check=True, timeout=60).stdout
