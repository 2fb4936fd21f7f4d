"""Runs a program in Python, to which the kernel refuses some calls from SIGUSR1 on: of a disk that fails, for instance.

    python refusing_kernel.py TROUBLE MODULE-OR-FILE [ARGUMENT...]

By a filter of system calls (seccomp), so that what is tested is the program as it is, whichever library makes the call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import runpy
import signal
import struct
import sys
from typing import NamedTuple


class RefusedCall(NamedTuple):
    """A system call by its number on x86_64, what it answers, and one of its arguments that has one of these bits."""

    number: int
    answer: int
    argument: int = 0
    bits: int = 0


FSYNC, FDATASYNC, PWRITE64, OPENAT, CLONE, FORK, VFORK, CLONE3 = 74, 75, 18, 257, 56, 57, 58, 435
TROUBLES = {
    "forks": tuple(RefusedCall(number, errno.EAGAIN) for number in (CLONE, FORK, VFORK, CLONE3)),
    "fsync": (RefusedCall(FSYNC, errno.EIO), RefusedCall(FDATASYNC, errno.EIO)),
    "quota": (RefusedCall(PWRITE64, errno.EDQUOT),),
    "inodes": (RefusedCall(OPENAT, errno.ENOSPC, argument=2, bits=os.O_CREAT),),
}

_LOAD, _EQUAL, _BITS, _RETURN = 0x20, 0x15, 0x45, 0x06  # of BPF
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_SECCOMP, _SET_FILTER, _ALL_THREADS, _NO_NEW_PRIVILEGES = 317, 1, 1, 38


def refuse(calls: tuple[RefusedCall, ...]) -> None:
    """Refuse these calls to all threads of this process, and to what it starts, for good. Raises OSError."""
    program: list[tuple[int, int, int, int]] = []
    for call in calls:
        tail = [(_RETURN, 0, 0, _ERRNO | call.answer)]
        if call.bits:
            tail = [(_LOAD, 0, 0, 16 + 8 * call.argument), (_BITS, 0, 1, call.bits), *tail]
        program += [(_LOAD, 0, 0, 0), (_EQUAL, 0, len(tail), call.number), *tail]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.syscall(_SECCOMP, _SET_FILTER, _ALL_THREADS, filter_):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    assert platform.machine() == "x86_64"
    trouble, program = sys.argv[1:3]
    del sys.argv[1:3]
    signal.signal(signal.SIGUSR1, lambda *_: refuse(TROUBLES[trouble]))
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
