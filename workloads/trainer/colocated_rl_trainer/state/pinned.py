"""Allocate host memory that a GPU copies to and from by itself, of exactly the size that was asked for.

torch rounds what it pins up to a power of two (ATen/core/CachingHostAllocator.h), which is up to twice the state. Here
the pages are the process's own, as with any other allocation, and the driver is asked to pin them. So a container's
limit counts them. If the driver refuses, they stay pageable: copies take longer, and nothing else changes.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from colocated_rl_api.logs import log

_LOG = logging.getLogger(__name__)


class Driver(Protocol):
    """A driver pins pages of host memory."""

    def pin(self, address: int, size: int) -> str | None:
        """Return why the driver refuses, or None."""

    def unpin(self, address: int) -> None: ...


class Cuda:
    """Calls the CUDA driver."""

    def pin(self, address: int, size: int) -> str | None:
        runtime = torch.cuda.cudart()
        error = runtime.cudaHostRegister(address, size, 0)
        if error == runtime.cudaError.success:
            return None
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # fails for the error that the runtime remembers, instead of a later kernel
        return str(runtime.cudaGetErrorString(error))

    def unpin(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


class HostMemory:
    """Takes memory on the host, pinned if there is a driver."""

    def __init__(self, driver: Driver | None) -> None:
        self._driver = driver
        self.pageable_bytes = 0  # which the driver has refused to pin

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor, [elements], whose content means nothing."""
        size = elements * dtype.itemsize
        if self._driver is None or size == 0:
            return torch.empty(elements, dtype=dtype)
        pages = _Pages(-1, size)
        memory = torch.frombuffer(pages, dtype=dtype)  # keeps the pages as long as a tensor is in them
        if reason := self._driver.pin(memory.data_ptr(), size):
            self.pageable_bytes += size
            log(_LOG, "host memory not pinned", logging.WARNING, bytes=size, reason=reason)
        else:
            pages.unpin = partial(self._driver.unpin, memory.data_ptr())
        return memory


class _Pages(mmap.mmap):
    """Holds memory of the process, unpinned before it is unmapped."""

    unpin: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()
