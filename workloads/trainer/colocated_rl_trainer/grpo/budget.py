"""What the training state takes, known before anything of it is made: shown, and refused where it can't fit.

Counted is what is certain. Activations, logits, the programs and, in host memory, engine and exports come on top: what
is accepted here may still be too much, and what is refused never fits. Pinned copies are compared with the machine's
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
LESS = "a smaller model, optimizer: SGD, trainingState: Sharded, or more pods"


@dataclass(frozen=True)
class Budget:
    """In bytes. What nobody knows of the machine is None."""

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
    ) -> Budget:
        """parameters: of the whole model. shared_by: ranks that divide it. parameters_leave: when they offload."""
        part = BYTES * -(-parameters // shared_by)
        moments = 2 * part if with_moments else 0
        device = part + part + moments  # parameters, gradients
        if on_cpu:
            return cls(None, ranks_in_pod * (device + (part if keeps_reference else 0)))
        copies = int(parameters_leave) + (2 if with_moments else 0) + int(keeps_reference)
        return cls(device, ranks_in_pod * copies * _pinned(part))

    def refuse_what_never_fits(self, *, device_has: int | None, host_has: int | None) -> None:
        """Raises ConfigError."""
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
    """Of the machine; of_container: or the container's limit, where that is less. None: nobody says."""
    found = []
    try:
        [total] = [line for line in machine.read_text().splitlines() if line.startswith("MemTotal:")]
        found.append(1024 * int(total.split()[1]))
        if of_container and (text := limit.read_text().strip()).isdigit():
            found.append(int(text))
    except (OSError, ValueError):
        pass  # then what was read so far
    return min(found, default=None)
