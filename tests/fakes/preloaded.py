"""Libraries that a process loads before all others: its clock, disk or resolver is what a test makes of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

HOUR_S = 3600


def preload(name: str, directory: Path) -> dict[str, str]:
    """Compile NAME.c of this folder; return the environment of a process that loads it, and of its children."""
    library = directory / f"{name}.so"
    source = Path(__file__).with_name(f"{name}.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return {"LD_PRELOAD": str(library)}


class WallClock:
    """A wall clock that a test sets. OpenSSL reads it too."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "wall_clock"
        self.environment = {**preload("wall_clock", directory), "WALL_CLOCK": str(self._file)}
        self.set(0)

    def set(self, ahead_s: int) -> None:
        """Set it so many seconds ahead of what it would be, in running processes too."""
        set_clock(self._file, ahead_s)


def set_clock(file: Path, ahead_s: int) -> None:
    """Set the clock of processes that have loaded it with this file."""
    with file.open("r+b" if file.exists() else "wb") as opened:
        opened.write(ahead_s.to_bytes(8, "little", signed=True))
