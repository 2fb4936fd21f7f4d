"""These helpers record every allocation and release of torch on the CPU, in order. Nothing is estimated."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Allocated:
    """Bytes beyond those that were there before."""

    peak: int
    left: int  # when the call had returned


def allocated_by(do: Callable[[], object]) -> Allocated:
    """Call `do` and return what torch's CPU allocator was asked for. The result of `do` is released."""
    gc.collect()  # what is released meanwhile, and was there before, would be subtracted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        do()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = [0, *accumulate(event.nbytes() for event in events)]
    return Allocated(peak=max(held), left=held[-1])
