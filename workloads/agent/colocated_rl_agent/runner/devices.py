"""This module checks the pod's devices, as the runner reads them: their faults, and memory after a release or offload.

An engine answers a release with 200 whether or not it freed anything (H43), and an offload may leave more behind than
the trainer reports. So a release counts only if most bytes mapped by weights and KV pool came free, and an offload only
if there is room for all bytes that the release had freed. No value is made up for a device that can't be measured: it
is None, and the switch goes on.

With tensor parallelism the engine's answer may come before every rank has freed (H61), so one reading that shows too
little proves nothing: devices are read again until it is enough or FREED_S are over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping

from colocated_rl_agent.runner.runner_link import RunnerLink
from colocated_rl_api.facts import DeviceFacts

FREED_SHARE = 0.9  # of the bytes that the engine reports as mapped; the rest is rounding and other users of the device
FREED_S = 10.0  # for all ranks of an engine to unmap what the first has unmapped: it takes far less than a second
FREED_POLL_S = 0.05
GIB = 2**30


class MemoryHeld(Exception):
    """Device memory that should be free is still in use."""


class Devices:
    """The Devices are the pod's GPUs. facts: as they were read last. fault: of the first that has one, in words. gpus:
    their number; with 0, nothing is read.
    """

    def __init__(self, runner: RunnerLink, *, gpus: int) -> None:
        self._runner = runner
        self._gpus = gpus
        self.facts: tuple[DeviceFacts, ...] = ()
        self.fault: str | None = None

    async def read(self, *, nobody: bool = False) -> tuple[DeviceFacts, ...]:
        """Read and return the facts. nobody: no process of the job is on a device, so bytes in use are the residue.
        Raises RunnerError.
        """
        if self._gpus == 0:
            return ()
        residues = {device.index: device.residue_bytes for device in self.facts}
        found = await self._runner.devices()
        faults = [f"device {device.index}: {device.fault}" for device in found if device.fault]
        self.fault = faults[0] if faults else None
        self.facts = tuple(
            DeviceFacts(
                index=device.index,
                total_bytes=device.total_bytes,
                used_bytes=device.used_bytes,
                residue_bytes=device.used_bytes if nobody else residues.get(device.index),
            )
            for device in found
        )
        return self.facts


async def until_freed(
    devices: Devices,
    before: tuple[DeviceFacts, ...],
    *,
    of: Collection[int],
    mapped_bytes: int | None,
    deadline_s: float = FREED_S,
) -> dict[int, int]:
    """Read the devices until a release shows on those of an engine, and return its `freed_bytes`. Raises MemoryHeld
    past the deadline, and RunnerError.
    """
    give_up = time.monotonic() + deadline_s
    while True:
        try:
            after = tuple(device for device in await devices.read() if device.index in of)
            return freed_bytes(before, after, mapped_bytes=mapped_bytes)
        except MemoryHeld:
            if time.monotonic() >= give_up:
                raise
        await asyncio.sleep(FREED_POLL_S)


def freed_bytes(
    before: tuple[DeviceFacts, ...], after: tuple[DeviceFacts, ...], *, mapped_bytes: int | None
) -> dict[int, int]:
    """Return the bytes freed on each device that can be measured. mapped_bytes: mapped by the engine on each device
    before. Raises MemoryHeld.
    """
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
    """Require free memory for the engine. needed: bytes that it freed on each device. Raises MemoryHeld."""
    for device in devices:
        if device.total_bytes is None or device.used_bytes is None or device.index not in needed:
            continue
        free = device.total_bytes - device.used_bytes
        if free < needed[device.index]:
            raise MemoryHeld(
                f"{free / GIB:.1f} GiB of device {device.index} are free after the offload, the engine needs"
                f" {needed[device.index] / GIB:.1f}"
            )
