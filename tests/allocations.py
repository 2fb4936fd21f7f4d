"""These helpers tell how much memory a call takes at its highest, on the CPU or on a GPU. Nothing is estimated."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from peers.resident import peak_bytes, resident_bytes
from torch.profiler import ProfilerActivity, profile

CPU = torch.device("cpu")
M_MMAP_THRESHOLD = -3  # of mallopt(3): blocks from this size on go back to the system when they are freed


@dataclass(frozen=True)
class Allocated:
    """Bytes beyond those that were there before."""

    peak: int
    left: int  # when the call had returned


def allocated_by(do: Callable[[], object], device: torch.device = CPU) -> Allocated:
    """Call `do` and return what torch's allocator of the device was asked for. The result of `do` is released."""
    gc.collect()  # what is released meanwhile, and was there before, would be subtracted
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        do()
        return Allocated(torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        do()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = [0, *accumulate(event.nbytes() for event in events)]
    return Allocated(peak=max(held), left=held[-1])


def resident_growth(do: Callable[[], object]) -> int:
    """Call `do` and return by how many bytes this process grew at its highest, mapped pages of files included.

    The C library keeps none of what is freed, now and from now on: how much it would keep is a matter of chance.
    """
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    before = resident_bytes()
    do()
    return peak_bytes() - before
