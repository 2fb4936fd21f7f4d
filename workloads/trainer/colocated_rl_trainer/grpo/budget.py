"""Compute the memory of a trainer before any of it is allocated: it is logged, and rejected where it can't fit.

On a device that is the training state and the largest pass (`state.rehearsal`); in a pod's host memory the state that
leaves the devices, or the model while it is read, for all of its ranks, and two exports. The programs themselves, their
libraries and, in host memory, the engine come on top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from colocated_rl_trainer.protocol.settings import ConfigError
from colocated_rl_trainer.state.residency import PIECE

BYTES = 4  # of a float32
MACHINE = Path("/proc/meminfo")
LIMIT = Path("/sys/fs/cgroup/memory.max")
LESS = "a smaller model, lora, optimizer: SGD, trainingState: Sharded, or more pods"
ROOM = 0.8  # of the memory: what a step may take before activations are computed again instead of kept
HEADER = 1 << 20  # of a file with a rank's state, at most: a hundred bytes for each of its tensors
VERSIONS = 2  # of the weights in the memory that trainer and engine share: one is written while the other is served


@dataclass(frozen=True)
class Budget:
    """The budget states what a trainer takes, in bytes."""

    device: int | None  # of each rank, on its device, at the peak of a step; None on the CPU
    host: int  # of all ranks of a pod while the engines have the devices, or at the peak of a step on the CPU
    exports: int = 0  # of those, in the volume of weights
    mirrors: int = 0  # of those, in the volume of the state between checkpoints
    one_pass: int = 0  # of a rank: what a pass holds beside the state
    reference: int = 0  # on each device beside the trainer: the model of a reference that stays there

    @classmethod
    def of(
        cls,
        parameters: int,
        *,
        on_cpu: bool,
        shared_by: int = 1,
        largest_part: int | None = None,
        ranks_in_pod: int = 1,
        with_moments: bool = True,
        updates_on_host: bool = False,
        keeps_reference: bool = False,
        parameters_leave: bool = True,
        adapters: int | None = None,
        frozen_bytes: int = 2,
        one_pass: int = 0,
        export_bytes: int = 0,
        mirrored: int = 0,
        mirrors_at_most: int | None = None,
        reference: int = 0,
    ) -> Budget:
        """Compute the budget.

        parameters: of the whole model. shared_by: ranks that divide it, alike unless `largest_part` says what one has.
        parameters_leave: they are offloaded. updates_on_host: moments never come to the device.
        adapters: parameters that are trained in place of the model's, by each rank; the model's are then frozen, take
        `frozen_bytes` each and are the reference too.
        one_pass: bytes. export_bytes: of one version of the weights in the pod's memory. mirrored: files with a rank's
        state there, at most. mirrors_at_most: bytes that are kept of them; what finds no room is not kept.
        reference: bytes of the model that another process of the pod holds on each device, or on the CPU once.
        """
        share = -(-parameters // shared_by) if largest_part is None else largest_part
        frozen = 0 if adapters is None else frozen_bytes * share
        part = BYTES * (share if adapters is None else adapters)
        moments = 2 * part if with_moments else 0
        on_device = moments if on_cpu or not updates_on_host else 0
        device = frozen + part + part + on_device + one_pass  # parameters, gradients
        copies_reference = keeps_reference and adapters is None
        exports, mirrors = VERSIONS * export_bytes, mirrored * (part + moments + HEADER)
        mirrors = mirrors if mirrors_at_most is None else min(mirrors, mirrors_at_most)
        if on_cpu:
            host = ranks_in_pod * (device + (part if copies_reference else 0)) + exports + mirrors + reference
            return cls(None, host, exports, mirrors, one_pass, reference)
        copies = int(parameters_leave) + (2 if with_moments else 0) + int(copies_reference)
        leaving = frozen if parameters_leave else 0
        staged = 2 * min(part, BYTES * PIECE) if updates_on_host else 0
        starting = (frozen or part) if shared_by == 1 else 0  # read into host memory; ranks that share read to devices
        host = ranks_in_pod * max(leaving + copies * part + staged, starting) + exports + mirrors
        return cls(device, host, exports, mirrors, one_pass, reference)

    def is_tight(self, *, device_has: int | None, host_has: int | None) -> bool:
        """Return True if a step takes more than ROOM of the memory in which it computes."""
        takes, has = (self.host, host_has) if self.device is None else (self.device + self.reference, device_has)
        return has is not None and takes > ROOM * has

    def refuse_what_never_fits(
        self,
        *,
        device_has: int | None,
        host_has: int | None,
        exports_have: int | None = None,
        mirrors_have: int | None = None,
    ) -> None:
        """Raise ConfigError if a step exceeds the memory of device, host or a volume. None: unknown, not compared."""
        passes = f"a pass takes {gib(self.one_pass)} of it (microBatchTokens, activationCheckpointing)"
        if self.device is not None and device_has is not None and self.device + self.reference > device_has:
            beside = f" beside the {gib(self.reference)} of the reference" if self.reference else ""
            raise ConfigError(
                f"a training step takes {gib(self.device)} of each device{beside}, which has {gib(device_has)}, and "
                f"{passes}: updatesOnHost, {LESS} or devices"
            )
        if host_has is not None and self.host > host_has:
            raise ConfigError(
                f"the trainers of a pod take {gib(self.host)} of host memory, and there are {gib(host_has)}; "
                f"{gib(self.exports)} of it are exports"
                + (f" and {gib(self.mirrors)} the state that checkpoint.inMemory keeps" if self.mirrors else "")
                + (f", and {passes} for each rank" if self.device is None else "")
                + f": {LESS}; or more memory (gpus.resources.limits.memory)"
            )
        if exports_have is not None and self.exports > exports_have:
            raise ConfigError(
                f"{VERSIONS} versions of the weights take {gib(self.exports)}, and their volume has "
                f"{gib(exports_have)}: set weightSync.sizeLimit"
            )
        if mirrors_have is not None and self.mirrors > mirrors_have:
            raise ConfigError(
                f"the state of a pod's ranks takes up to {gib(self.mirrors)} of memory between checkpoints, and "
                f"its volume has {gib(mirrors_have)}: set checkpoint.inMemory.sizeLimit"
            )


def choose_recomputing(
    wanted: bool | None, budget_of: Callable[[bool], Budget], *, device_has: int | None, host_has: int | None
) -> tuple[bool, Budget]:
    """Return whether activations are computed again, with the budget of that: as wanted, or where keeping is tight.

    budget_of: the budget of a trainer that computes them again, or keeps them.
    """
    budget = budget_of(bool(wanted))
    if wanted is None and budget.is_tight(device_has=device_has, host_has=host_has):
        return True, budget_of(True)
    return bool(wanted), budget


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def host_memory(*, machine: Path = MACHINE, limit: Path = LIMIT) -> int | None:
    """Return the memory of the machine, or the container's limit if that is less; None: unknown."""
    found = []
    try:
        [total] = [line for line in machine.read_text().splitlines() if line.startswith("MemTotal:")]
        found.append(1024 * int(total.split()[1]))
        if (text := limit.read_text().strip()).isdigit():
            found.append(int(text))
    except (OSError, ValueError):
        pass  # the values that were read so far count
    return min(found, default=None)
