"""The volume lane lists, compares and removes exports, and reports what keeps it from that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from colocated_rl_agent.files.exports import Exports, ExportTorn
from colocated_rl_agent.files.volume import VolumeSilent
from colocated_rl_agent.lanes.trainers import Trainers
from colocated_rl_api.rungs import WeightVersion

VOLUME_AGAIN_S = 2.0


class VolumeLane:
    """The VolumeLane tends the volume of weights. writes: these trainers make the exports that are compared.

    changed: called when another export was found. failed: called with (reason, message) for the pod's problem.
    made_good: called with the reason that is over.
    """

    def __init__(
        self,
        exports: Exports,
        trainers: Trainers,
        *,
        writes: bool,
        changed: Callable[[], None],
        failed: Callable[[str, str], None],
        made_good: Callable[[str], None],
    ) -> None:
        self._exports, self._trainers, self._writes = exports, trainers, writes
        self._changed, self._failed, self._made_good = changed, failed, made_good
        self._look_again = asyncio.Event()

    def may_have_changed(self) -> None:
        """List the exports anew."""
        self._exports.may_have_changed()
        self._look_again.set()

    async def tend(self) -> NoReturn:
        """List the exports at the start, and after each action that may have changed them."""
        while True:
            self._look_again.clear()
            try:
                await self._exports.look()
            except VolumeSilent as error:
                self._failed("VolumeSilent", str(error))
            except OSError as error:
                self._failed("ExportsNotListed", f"nobody knows which weights there are: {error}")
            else:
                self._made_good("VolumeSilent")
                self._made_good("ExportsNotListed")
                self._changed()
                await self._look_again.wait()
                continue
            await asyncio.sleep(VOLUME_AGAIN_S)

    async def verify(self, version: WeightVersion) -> None:
        """Compare an export with its manifest. Raises VolumeSilent."""
        try:
            await self._exports.verify(version)
        except ExportTorn as error:
            if self._writes:
                self._trainers.export_torn(version, str(error))
            else:  # trainers of another pod do, and only reading the files again can help
                self._failed("ExportTorn", f"{error}; they are read again, and the engine serves what it has meanwhile")
        else:
            self._made_good("ExportTorn")
            self._made_good("VolumeSilent")

    async def remove_others_than(self, keep: WeightVersion) -> None:
        try:
            await self._exports.remove_others_than(keep)
        except OSError as error:
            self._failed(
                "ExportsNotRemoved", f"older weights stay: {error}; the agent removes them through the pod's group"
            )
            await asyncio.sleep(VOLUME_AGAIN_S)
        else:
            self._made_good("ExportsNotRemoved")
