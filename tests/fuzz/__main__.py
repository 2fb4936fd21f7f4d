"""`make fuzz`: libFuzzer, by atheris, runs each target for its part of the time, from its corpus on.

What is found is in `.build/fuzz/TARGET`: `crash-*`, `timeout-*`, `oom-*`. Mend its cause, and keep the input in the
corpus under a name that says what it is. Inputs that led somewhere new stay there too: the next run begins with them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import atheris

from fuzz.targets import CORPUS, PLACES, load
from setup.layout import CHECKOUT

INPUT_S = 20  # an input that takes longer is a finding
MEMORY_MB = 2048
SCRATCH = Path("/dev/shm")  # what a target writes needs no disk


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"all by default: {', '.join(PLACES)}")
    parser.add_argument("--seconds", type=int, default=3600, help="of all targets together")
    parser.add_argument("--seed", type=int, default=0, help="of the search; 0 draws one")
    parser.add_argument("--in-this-process", action="store_true", help="one target, for as long as --seconds says")
    options = parser.parse_args()
    if SCRATCH.is_dir():
        tempfile.tempdir = str(SCRATCH)
    if unknown := set(options.targets) - set(PLACES):
        parser.error(f"no target {', '.join(sorted(unknown))}")
    if options.in_this_process:
        [name] = options.targets
        _fuzz(name, options.seconds, options.seed)
    names = options.targets or list(PLACES)
    part_s = max(1, options.seconds // len(names))
    found = [name for name in names if _run(name, part_s, options.seed)]
    return 1 if found else 0


def _run(name: str, seconds: int, seed: int) -> bool:
    """Fuzz a target in a process of its own, and return whether something was found."""
    began = time.monotonic()
    log = _found(name) / "log"
    with log.open("wb") as output:
        words = ["-m", "fuzz", "--in-this-process", "--seconds", str(seconds), "--seed", str(seed), name]
        code = subprocess.run([sys.executable, *words], stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    lines = log.read_text(errors="replace").splitlines()
    tries = next((line for line in reversed(lines) if line.startswith("Done ")), "")
    print(f"{name}: {tries or f'ended with {code} after {time.monotonic() - began:.0f} s: {log}'}", flush=True)  # noqa: T201
    return code != 0


def _found(name: str) -> Path:
    place = CHECKOUT.build / "fuzz" / name
    (place / "corpus").mkdir(parents=True, exist_ok=True)
    return place


def _fuzz(name: str, seconds: int, seed: int) -> None:
    """Fuzz until the time is over; does not return."""
    place = PLACES[name]
    with atheris.instrument_imports(include=list(place.packages)):
        target = load(name)
    found = _found(name)
    atheris.Setup(
        [
            "fuzz",
            f"-max_total_time={seconds}",
            f"-seed={seed}",
            f"-max_len={place.longest}",
            f"-timeout={INPUT_S}",
            f"-rss_limit_mb={MEMORY_MB}",
            f"-artifact_prefix={found}/",
            str(found / "corpus"),
            str(CORPUS / name),
        ],
        target,
    )
    atheris.Fuzz()


sys.exit(main())
