"""`make gpu-kit`: all that a machine with a GPU and without a network needs, in pieces that can be carried to it.

A kit has the working tree and the libraries that such a machine lacks, unpacked already: there, nothing is installed.
It has torch and transformers itself, with what they need; torch is 4 GB with CUDA's libraries, and SGLang asks for one
version of it, so neither is in the kit.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.gpu.unpack import SUMS

ROOT = Path(__file__).parents[2]
UV = ROOT / ".build/tools/bin/uv"
OUT = ROOT / ".build/gpu-kit"
HERE = Path(__file__).parent
PYTHON = "3.12"  # of the machine
PLATFORM = "x86_64-manylinux_2_28"
PIECE_BYTES = 60 * 2**20
OURS = ("colocated-rl-agent", "colocated-rl-member", "colocated-rl-trainer")  # in the tree: their needs count
TESTS = ("cryptography", "hypothesis", "pytest", "pytest-asyncio", "rich")  # beside those
THERE = (  # torch and transformers, and what transformers needs
    "torch", "transformers", "filelock", "huggingface-hub", "numpy", "packaging", "pyyaml", "regex", "safetensors",
    "tokenizers", "tqdm", "typer",
)  # fmt: skip
SAVER = "torch-memory-saver==0.0.10"  # its wheels bring libraries for CUDA 12 and 13
README = """# A kit for one NVIDIA GPU

Linux on x86-64, Python {python} with torch 2.11 or newer for CUDA and transformers 5. No network.

Bring all files of this folder into one folder of the machine, one after the other if need be, and there:

    python3 unpack.py /tmp/kit        # checks each piece first
    /tmp/kit/run check                # what the machine has, and what is done without what it lacks
    /tmp/kit/run test-gpu             # what must hold
    /tmp/kit/run bench-gpu            # what a switch moves
    /tmp/kit/run prove-gpu            # 50 switches with 0.6 billion parameters, then with 7 and LoRA

`prove-gpu --model 0.6B` is one of the two, and `--within-s 540` begins no further switch of a model after so many
seconds. It writes `tree/docs/measurements.md` after each model, or with `--page FILE` another copy of that page.
`/dev/shm` has to hold two exports (31 GB with 7 billion parameters), and the disk the model (15 GB).

| missing or different | what is done |
|---|---|
| torch 2.11 or 2.12, not 2.13 | the same; but if one rank can't read a checkpoint, 2.11 does not say why |
| SGLang | the engine of the tests takes its place, with a real model and KV pool on the device; tokens are made up |
| a torch_memory_saver that loads | that engine frees its memory and allocates it again, and the figures say so |
"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.kit", description=__doc__)
    parser.add_argument("--python", default=PYTHON, help="version of the machine's")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    made = make_kit(given.out, python=given.python, libraries=[*needed(given.python), SAVER])
    for piece in made:
        print(f"{piece.stat().st_size / 2**20:5.1f} MiB  {piece}")
    print(f"{given.out / 'README.md'} says what to do with them")
    return 0


def make_kit(out: Path, *, python: str, libraries: Sequence[str], piece_bytes: int = PIECE_BYTES) -> list[Path]:
    """Write the kit into an empty folder, and return its pieces. libraries: pinned, without what they need."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        site, packed = Path(folder, "site"), Path(folder, "kit.tar.gz")
        download(libraries, site, python=python)
        with tarfile.open(packed, "w:gz") as tar:
            tar.add(HERE / "run.sh", "run")
            tar.add(site, "site")
            for path in tree():
                tar.add(ROOT / path, f"tree/{path}")
        made = list(divided(packed, out, piece_bytes))
    sums = (f"{hashlib.sha256(piece.read_bytes()).hexdigest()}  {piece.name}\n" for piece in made)
    (out / SUMS).write_text("".join(sums))
    (out / "README.md").write_text(README.replace("{python}", python))
    shutil.copy(HERE / "unpack.py", out)
    return made


def needed(python: str) -> Iterator[str]:
    """Yield what OURS and TESTS need and the machine has not, at the versions of this environment."""
    there = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    names, known = [*OURS, *TESTS], set(THERE)
    while names:
        name = canonicalize_name(names.pop())
        if name in known:
            continue
        known.add(name)
        found = distribution(name)
        if not name.startswith("colocated-rl"):
            yield f"{name}=={found.version}"
        wanted = map(Requirement, found.requires or ())
        names += [each.name for each in wanted if each.marker is None or each.marker.evaluate(there)]


def download(libraries: Sequence[str], site: Path, *, python: str) -> None:
    """Unpack the wheels of libraries for the machine's Python."""
    subprocess.run(
        [
            UV, "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--target", site,
            "--python-version", python, "--python-platform", PLATFORM, "--python", sys.executable, *libraries,
        ],
        check=True,
    )  # fmt: skip


def tree() -> Iterator[str]:
    """Yield the files of the working tree, as they are now, without ignored ones."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    yield from (path for path in listed.stdout.decode().split("\0") if path and (ROOT / path).is_file())


def divided(packed: Path, out: Path, piece_bytes: int) -> Iterator[Path]:
    """Yield pieces of at most so many bytes."""
    with packed.open("rb") as stream:
        for number in itertools.count():
            if not (data := stream.read(piece_bytes)):
                return
            piece = out / f"kit.{number:02}"
            piece.write_bytes(data)
            yield piece


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
