"""Find out whether ranks meet by TCP although their pod has an RDMA device: NCCL takes TCP without an error.

Only NCCL's log tells which network it chose, once it has made its first communicator. So the log of a rank goes to a
file, unless the job has NCCL's messages logged elsewhere. What keeps containers from RDMA is most often the limit of
locked memory: a user who is not root gets that of the container runtime, and NCCL can't register its buffers.
"""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Mapping, MutableMapping
from pathlib import Path

DEVICES = Path("/dev/infiniband")  # uverbs0 and so on: of InfiniBand, RoCE and EFA alike
TCP = "Socket"

# NCCL 2.30, src/init.cc: INFO(NCCL_INIT, "Using network %s", ...), behind src/debug.cc's "HOST:PID:TID [DEVICE] "
_CHOICE = re.compile(r" NCCL INFO Using network (.+)$", re.MULTILINE)


def log_choice(log: Path, environment: MutableMapping[str, str]) -> None:
    """Have NCCL write to `log` which network it chooses. Call it before NCCL is initialized in this process."""
    if "NCCL_DEBUG" not in environment:
        log.unlink(missing_ok=True)
        environment.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT", NCCL_DEBUG_FILE=str(log))


def network_fault(
    log: Path, environment: Mapping[str, str], *, devices: Path = DEVICES, limit_bytes: int | None = None
) -> str:
    """Return why this process reaches other pods more slowly than its devices could, with what to do; "" if it doesn't.

    log: what NCCL has logged so far; it need not be there. Before NCCL has chosen, a limit of locked memory is enough.
    limit_bytes: of locked memory, RLIM_INFINITY for none; that of this process when absent.
    """
    device = min(devices.glob("uverbs*"), default=None)
    if device is None or environment.get("NCCL_NET", "").lower() == TCP.lower():
        return ""
    if environment.get("NCCL_IB_DISABLE", "0") != "0":
        return ""
    chosen = _chosen(log)
    if limit_bytes is None:
        limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_limited = limit_bytes != resource.RLIM_INFINITY
    if chosen not in (None, TCP) or (chosen is None and not is_limited):
        return ""
    takes = "takes" if chosen else "may take"
    remedy = (
        f"locked memory is limited to {limit_bytes // 1024} KiB: set LimitMEMLOCK=infinity for containerd on the node, "
        "then make the pod again"
        if is_limited
        else "locked memory is not limited: see that the image has NCCL's plugin for that network, and that the "
        "container's user may write to the device"
    )
    return (
        f"NCCL {takes} TCP to other pods, and the pod has an RDMA device ({device}); {remedy}. To use TCP all the "
        f"same, set NCCL_NET to {TCP}"
    )


def _chosen(log: Path) -> str | None:
    """Return the network that NCCL chose last, by NCCL's name for it; None if it has not said so."""
    text = ""
    with contextlib.suppress(FileNotFoundError):
        text = log.read_text(encoding="utf-8", errors="replace")
    found: list[str] = _CHOICE.findall(text)
    return found[-1].strip() if found else None
