#!/usr/bin/env python3
"""Joins the pieces of a kit, once each is what was packed, and unpacks it: `python3 unpack.py DIRECTORY`.

It stands beside the pieces and SHA256SUMS, and needs nothing but Python 3.12 or newer.
"""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
from pathlib import Path

SUMS = "SHA256SUMS"


class PieceTorn(Exception):
    """A piece is not there, or is not what was packed."""


def pieces(kit: Path) -> list[Path]:
    """Return the pieces in their order. Raises PieceTorn."""
    found = []
    for line in (kit / SUMS).read_text().splitlines():
        expected, name = line.split("  ")
        piece = kit / name
        if not piece.is_file():
            raise PieceTorn(f"{name} is not beside {SUMS}: bring it here")
        with piece.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != expected:
                raise PieceTorn(f"{name} is not what was packed ({piece.stat().st_size} bytes): bring it here again")
        found.append(piece)
    return found


def unpack(kit: Path, into: Path) -> None:
    """Unpack a whole kit. Nothing is written if a piece is torn, which raises PieceTorn."""
    joined = io.BytesIO(b"".join(piece.read_bytes() for piece in pieces(kit)))
    into.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=joined, mode="r:gz") as packed:
        packed.extractall(into, filter="data")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python3 unpack.py DIRECTORY")
    try:
        unpack(Path(__file__).parent, Path(sys.argv[1]))
    except PieceTorn as torn:
        sys.exit(f"nothing unpacked: {torn}")
    print(f"unpacked: {sys.argv[1]}/run check says what this machine has")
