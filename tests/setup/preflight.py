"""Names what this machine lacks, one line each with what to do about it, before anything is downloaded."""

import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from setup.layout import Layout

GIB = 1 << 30

# measured from an empty checkout with empty caches, and rounded up
DISK_EMPTY_GIB = 15
DISK_BUILT_GIB = 3  # with environments and binaries in place: models, cluster state, logs
MEMORY_CHECKS_GIB = 3  # type checker and unit tests, torch imported in both
MEMORY_JOB_GIB = 10  # two engines, two trainers and a control plane

NEWEST_PYTHON = (3, 13)  # that the pinned engine has a wheel for; `__main__` knows the oldest

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000


@dataclass(frozen=True)
class MachineFacts:
    """A Machine holds the facts that the checks read."""

    system: str
    architecture: str
    python: tuple[int, int]
    missing_programs: tuple[str, ...]
    has_venv: bool  # `python3 -m venv` can make environments, or there is a uv that can
    namespaces: str | None  # why namespaces are refused; None: they work
    has_ids: bool  # pods of a job may run as the users they ask for
    disk_free_gib: float
    disk_needed_gib: float
    disk_path: str
    memory_gib: float  # what can be had without swapping
    memory_needed_gib: float


def problems(machine: MachineFacts) -> Iterator[str]:
    """One line for each thing that is missing, with the fix."""
    if machine.system != "Linux":
        yield f"system: {machine.system}, but the local cluster needs Linux namespaces: use a Linux machine"
        return
    if machine.architecture != "x86_64":
        yield f"architecture: {machine.architecture}, but the pinned engine is for x86_64: use such a machine"
    for name in machine.missing_programs:
        yield f"{name}: not on PATH: install it, e.g. `apt-get install {name}`"
    if machine.python > NEWEST_PYTHON:
        python, newest = (".".join(map(str, version)) for version in (machine.python, NEWEST_PYTHON))
        yield f"python3: {python}, but the pinned engine has no wheel beyond {newest}: `make PYTHON=python{newest} ...`"
    if not machine.has_venv:
        yield "python3: has no ensurepip: install it, e.g. `apt-get install python3-venv`"
    if machine.namespaces is not None:
        yield (
            f"namespaces: refused ({machine.namespaces}): run as root, or allow them to ordinary users with "
            "`sysctl kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0`"
        )
    elif not machine.has_ids:
        yield (
            "users: pods of a job run as users of their own, and this user has no subordinate ids: run as root, or "
            "`apt-get install uidmap` and `usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER`"
        )
    if machine.disk_free_gib < machine.disk_needed_gib:
        yield (
            f"disk: {machine.disk_free_gib:.0f} GiB free at {machine.disk_path}, {machine.disk_needed_gib:.0f} GiB "
            "needed: free some, or move the checkout and UV_CACHE_DIR to a larger disk"
        )
    if machine.memory_gib < machine.memory_needed_gib:
        yield (
            f"memory: {machine.memory_gib:.0f} GiB available, {machine.memory_needed_gib:.0f} GiB needed: "
            "end other programs, or use a larger machine"
        )


def inspect(layout: Layout, *, runs_jobs: bool) -> MachineFacts:
    """Look at this machine. Changes nothing. runs_jobs: whole jobs are to run, not checks alone."""
    built = layout.localcluster.exists() and layout.images.exists()
    on_linux = platform.system() == "Linux"
    return MachineFacts(
        system=platform.system(),
        architecture=platform.machine(),
        python=sys.version_info[:2],
        missing_programs=tuple(name for name in ("git", "make") if shutil.which(name) is None),
        has_venv=importlib.util.find_spec("ensurepip") is not None or shutil.which("uv") is not None,
        namespaces=_try_namespaces() if on_linux else None,
        has_ids=not runs_jobs or _try_ids(),
        disk_free_gib=shutil.disk_usage(layout.root).free / GIB,
        disk_needed_gib=DISK_BUILT_GIB if built else DISK_EMPTY_GIB,
        disk_path=str(layout.root),
        memory_gib=_available_memory_bytes() / GIB if on_linux else 0,
        memory_needed_gib=MEMORY_JOB_GIB if runs_jobs else MEMORY_CHECKS_GIB,
    )


def _try_namespaces() -> str | None:
    """Enter the namespaces that the local cluster needs, in a process that ends at once; None, or what refuses."""
    wanted = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | (0 if os.geteuid() == 0 else CLONE_NEWUSER)
    libc = ctypes.CDLL(None, use_errno=True)
    child = os.fork()
    if child == 0:
        os._exit(0 if libc.unshare(wanted) == 0 else ctypes.get_errno() & 0xFF)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return None if code == 0 else os.strerror(code) if code > 0 else f"signal {-code}"


def _try_ids() -> bool:
    """Return whether the local cluster will get more users than this one, in the way that it will try."""
    if os.geteuid() == 0:
        return True
    command = ("unshare", "--user", "--map-root-user", "--map-auto", "true")
    return (
        shutil.which("unshare") is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


def _available_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no line MemAvailable: is /proc mounted?")
