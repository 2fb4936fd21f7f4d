"""Faults of the network between two pods of the local cluster, and what a pod has open to it.

They lose packets, cut the pods off, slow or delay them, by the kernel's own means in one pod's network namespace, and
so by root, nft and tc; a delay is made by a process, as not every kernel has netem. Each fault counts the packets that
it met: one that met none would show nothing.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

TABLE = "colocated-rl-fault"
TOOLS = ("nsenter", "ip", "nft", "tc")
_ENTER = ("nsenter", "--target")
DELAY_S = 0.3  # of a round trip
DELAYED = Path(__file__).with_name("delayed_packets.py")

# run in a pod, prints the ports at which it listens for others
OPEN_PORTS = """
import json, pathlib
LOOPBACK, LISTENS = {"0100007F", 24 * "0" + "01000000", 16 * "0" + "FFFF00000100007F"}, "0A"
rows = [row.split() for of in ("tcp", "tcp6") for row in pathlib.Path("/proc/net", of).read_text().splitlines()[1:]]
found = {int(row[1].split(":")[1], 16) for row in rows if row[3] == LISTENS and row[1].split(":")[0] not in LOOPBACK}
print(json.dumps(sorted(found)))
"""


class NetworkFault(StrEnum):
    LOSES = "loses a third of all packets"
    CUTS = "passes nothing on"
    IS_SLOW = "passes 256 kbit/s on"
    DELAYS = "takes 0.3 s longer for each round trip"


def missing_tools() -> list[str]:
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def address_of(pid: int) -> str:
    """The IPv4 address of a process's pod."""
    found = json.loads(_inside(pid, "ip", "-json", "-4", "address", "show", "eth0"))
    return str(found[0]["addr_info"][0]["local"])


@contextmanager
def faulty(fault: NetworkFault, pid: int, peer: int) -> Iterator[None]:
    """Between the pods of two processes, both ways; a slow network is that of the first pod to everybody.

    Raises AssertionError at the end if no packet met the fault.
    """
    kind = {NetworkFault.IS_SLOW: _slow, NetworkFault.DELAYS: _delaying}.get(fault, _dropping)
    met: list[int] = []
    with kind(fault, pid, address_of(peer), met):
        yield
    assert sum(met), f"no packet met a network that {fault}"


@contextmanager
def _slow(_: NetworkFault, pid: int, __: str, met: list[int]) -> Iterator[None]:
    of_pod = ("dev", "eth0", "root")
    _inside(pid, "tc", "qdisc", "add", *of_pod, "tbf", "rate", "256kbit", "burst", "16kb", "latency", "3s")
    try:
        yield
        said = _inside(pid, "tc", "-statistics", "qdisc", "show", *of_pod)
        met += map(int, re.findall(r"Sent \d+ bytes (\d+) pkt", said))
    finally:
        _inside(pid, "tc", "qdisc", "delete", *of_pod)


@contextmanager
def _dropping(fault: NetworkFault, pid: int, address: str, met: list[int]) -> Iterator[None]:
    _inside(pid, "nft", "--file", "-", stdin=_rules(fault, address))
    try:
        yield
        met += map(int, re.findall(r"packets (\d+)", _inside(pid, "nft", "list", "table", "ip", TABLE)))
    finally:
        _inside(pid, "nft", "delete", "table", "ip", TABLE)


@contextmanager
def _delaying(__: NetworkFault, pid: int, address: str, met: list[int]) -> Iterator[None]:
    words = (*_ENTER, str(pid), "--net", sys.executable, str(DELAYED), address, str(DELAY_S))
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline(), "the process that delays ended"
            yield
            passed, _ = process.communicate(timeout=60)
            met.append(int(passed or 0))
        finally:
            process.kill()


def _rules(fault: NetworkFault, address: str) -> str:
    drop = "counter drop" if fault is NetworkFault.CUTS else "numgen random mod 3 == 0 counter drop"
    return f"""
    table ip {TABLE} {{
      chain in {{ type filter hook input priority 0; ip saddr {address} {drop}; }}
      chain out {{ type filter hook output priority 0; ip daddr {address} {drop}; }}
    }}
    """


def _inside(pid: int, *command: str, stdin: str = "") -> str:
    """Run a command of this machine in the network of a process. Raises CalledProcessError."""
    words = (*_ENTER, str(pid), "--net", *command)
    return subprocess.run(words, input=stdin, capture_output=True, text=True, check=True, timeout=60).stdout
