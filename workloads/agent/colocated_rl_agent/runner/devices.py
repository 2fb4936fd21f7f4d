"""Memory of the pod's devices, as the runner reads it, and the two places where a switch depends on it.

An engine answers a release with 200 whether or not it freed anything (H43), and an offload may leave more behind than
it says. So a release counts only if most of what weights and KV pool mapped came free, and an offload only if there is
room for all that the release had freed. Where a device can't tell, nothing is made up: unmeasured is None, and goes on.
"""

from __future__ import annotations

from collections.abc import Mapping

from colocated_rl_agent.runner.runner_link import RunnerLink
from colocated_rl_api.facts import DeviceFacts

FREED_SHARE = 0.9  # of what the engine says that it maps; the rest is rounding and what others do meanwhile
GIB = 2**30


class MemoryHeld(Exception):
    """Memory that should be free is not."""


class Devices:
    """facts: as they were read last. gpus: of this pod; without any, nothing is read."""

    def __init__(self, runner: RunnerLink, *, gpus: int) -> None:
        self._runner = runner
        self._gpus = gpus
        self.facts: tuple[DeviceFacts, ...] = ()

    async def read(self, *, nobody: bool = False) -> tuple[DeviceFacts, ...]:
        """nobody: no engine, and no trainer on a device; what is used then is the residue. Raises RunnerError."""
        if self._gpus == 0:
            return ()
        residues = {device.index: device.residue_bytes for device in self.facts}
        self.facts = tuple(
            DeviceFacts(
                index=device.index,
                total_bytes=device.total_bytes,
                used_bytes=device.used_bytes,
                residue_bytes=device.used_bytes if nobody else residues.get(device.index),
            )
            for device in await self._runner.devices()
        )
        return self.facts


def freed_bytes(
    before: tuple[DeviceFacts, ...], after: tuple[DeviceFacts, ...], *, mapped_bytes: int | None
) -> dict[int, int]:
    """What came free on each device that can tell. mapped_bytes: of the engine on each. Raises MemoryHeld."""
    used = {device.index: device.used_bytes for device in before}
    freed: dict[int, int] = {}
    for device in after:
        was = used.get(device.index)
        if was is None or device.used_bytes is None:
            continue
        freed[device.index] = fell = was - device.used_bytes
        if mapped_bytes is not None and fell < FREED_SHARE * mapped_bytes:
            raise MemoryHeld(
                f"{fell / GIB:.1f} GiB of device {device.index} came free, weights and KV pool had"
                f" {mapped_bytes / GIB:.1f}: was the engine started with --enable-memory-saver?"
            )
    return freed


def require_room(devices: tuple[DeviceFacts, ...], needed: Mapping[int, int]) -> None:
    """needed: bytes that the engine gave up on each device, and wants back. Raises MemoryHeld."""
    for device in devices:
        if device.total_bytes is None or device.used_bytes is None or device.index not in needed:
            continue
        free = device.total_bytes - device.used_bytes
        if free < needed[device.index]:
            raise MemoryHeld(
                f"{free / GIB:.1f} GiB of device {device.index} are free after the offload, the engine needs"
                f" {needed[device.index] / GIB:.1f}"
            )
