"""GPUs of which only the memory and its faults are there: what the runner reads, and who holds how much.

The driver's library is a real one (`device.c`), so the runner's way to it is the one it takes to a real device.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

GIB = 2**30
TOTAL_BYTES = 80 * GIB


class FakeDevice:
    def __init__(self, root: Path, *, count: int = 1, functions: str = "ALL") -> None:
        self._count = count
        self._libraries, self._held = root / "driver", root / "held"
        self._libraries.mkdir()
        self._held.mkdir()
        source = Path(__file__).with_name("device.c")
        library = self._libraries / "libnvidia-ml.so.1"
        subprocess.run(["cc", "-shared", "-fPIC", f"-D{functions}", "-o", str(library), str(source)], check=True)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a runner whose container has the devices; its children inherit it."""
        found = {"LD_LIBRARY_PATH": str(self._libraries), "FAKE_DEVICE": str(self._held)}
        return found | {"FAKE_DEVICES": str(self._count)}

    def breaks(self, what: str, *, device: int = 0, count: int = 1) -> None:
        """Let the driver tell of `ecc` errors, of a failed `remap`, or that the device is `lost`."""
        (self._held / f"{what}.{device}").write_text(str(count))

    def reports(self, *xids: int, device: int = 0) -> None:
        """Let the driver tell of XIDs, after those that it has told of."""
        with (self._held / f"xid.{device}").open("a") as file:
            file.writelines(f"{xid}\n" for xid in xids)

    def hold(self, held_bytes: int, pid: int | None = None) -> None:
        (self._held / str(pid or os.getpid())).write_text(str(held_bytes))
