"""The memory of the training state, computed before any of it is allocated: logged, and rejected where it can't fit.

Only what is certain is counted. Activations, logits, the programs and, in host memory, engine and exports come on top:
an accepted state may still be too large, and a rejected one never fits. Pinned copies are compared with the machine's
memory and not with the container's limit, because not every driver counts them there; on the CPU the state is like any
other memory. Each pinned copy takes the next power of two: torch's allocator rounds what it pins
(ATen/core/CachingHostAllocator.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from colocated_rl_trainer.protocol.settings import ConfigError

BYTES = 4  # of a float32
MACHINE = Path("/proc/meminfo")
LIMIT = Path("/sys/fs/cgroup/memory.max")
LESS = "a smaller model, lora, optimizer: SGD, trainingState: Sharded, or more pods"


@dataclass(frozen=True)
class Budget:
    """The budget states what the training state takes, in bytes."""

    device: int | None  # of each rank, on its device, while it trains; None on the CPU
    host: int  # of all ranks of a pod while the engines have the devices, or at any time on the CPU

    @classmethod
    def of(
        cls,
        parameters: int,
        *,
        on_cpu: bool,
        shared_by: int = 1,
        ranks_in_pod: int = 1,
        with_moments: bool = True,
        keeps_reference: bool = False,
        parameters_leave: bool = True,
        adapters: int | None = None,
        frozen_bytes: int = 2,
    ) -> Budget:
        """Compute the budget.

        parameters: of the whole model. shared_by: ranks that divide it. parameters_leave: they are offloaded.
        adapters: parameters that are trained in place of the model's, by each rank; the model's are then frozen, take
        `frozen_bytes` each and are the reference too.
        """
        share = -(-parameters // shared_by)
        frozen = 0 if adapters is None else frozen_bytes * share
        part = BYTES * (share if adapters is None else adapters)
        moments = 2 * part if with_moments else 0
        device = frozen + part + part + moments  # parameters, gradients
        copies_reference = keeps_reference and adapters is None
        if on_cpu:
            return cls(None, ranks_in_pod * (device + (part if copies_reference else 0)))
        copies = int(parameters_leave) + (2 if with_moments else 0) + int(copies_reference)
        leaving = _pinned(frozen) if frozen and parameters_leave else 0
        return cls(device, ranks_in_pod * (leaving + copies * _pinned(part)))

    def refuse_what_never_fits(self, *, device_has: int | None, host_has: int | None) -> None:
        """Raise ConfigError if the state exceeds the memory of device or host. None: unknown, and not compared."""
        if self.device is not None and device_has is not None and self.device > device_has:
            raise ConfigError(
                f"the training state takes {gib(self.device)} of each device, which has {gib(device_has)}, and "
                f"activations come on top: {LESS} or devices"
            )
        if host_has is not None and self.host > host_has:
            raise ConfigError(
                f"the training state of a pod takes {gib(self.host)} of host memory, and there are {gib(host_has)}: "
                f"{LESS}; or more memory (gpus.resources.limits.memory)"
            )


def _pinned(size: int) -> int:
    return 1 << (size - 1).bit_length()


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def host_memory(*, of_container: bool, machine: Path = MACHINE, limit: Path = LIMIT) -> int | None:
    """Return the memory of the machine, or with `of_container` the container's limit if that is less; None: unknown."""
    found = []
    try:
        [total] = [line for line in machine.read_text().splitlines() if line.startswith("MemTotal:")]
        found.append(1024 * int(total.split()[1]))
        if of_container and (text := limit.read_text().strip()).isdigit():
            found.append(int(text))
    except (OSError, ValueError):
        pass  # the values that were read so far count
    return min(found, default=None)
