"""Takes CUDA out of an environment for machines without GPUs: `python without_cuda.py SITE-PACKAGES`.

The package index has torch for Linux only as one that is linked with CUDA's libraries, 2.7 GB. Without a GPU torch
calls the runtime (libcudart), which reports that there is none, and none of the others; the loader only demands that
each is there and has the symbols that torch names. Each is replaced by a library of the same name, versions and
symbols, whose code is one illegal instruction. What compiles kernels for a GPU is removed, and the largest libraries
lose their tables for debuggers. Needs nm, as, ld and strip (binutils).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

KEPT = "libcudart."  # and 0.7 MB
VENDORS = ("cu", "nccl", "nv")  # how the names of symbols without a version begin
FOR_GPUS_ALONE = (
    "torch/include",
    "torch/lib/libtorch_cuda_linalg.so",  # loaded by the first call that needs it
    "triton/backends/nvidia/bin",
    "triton/backends/nvidia/lib",
)
STRIPPED = ("torch/lib/*.so", "triton/_C/*.so", "llvmlite/binding/*.so")


def main(site_packages: Path) -> None:
    for path in (site_packages / name for name in FOR_GPUS_ALONE):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    wanted = symbols_by_version(site_packages / "torch/lib")
    with tempfile.TemporaryDirectory() as scratch:
        for file in [*(site_packages / "nvidia").rglob("*")]:
            if file.is_dir() or file.suffix == ".py" or file.name.startswith(KEPT):
                continue
            file.unlink()
            if ".so" in file.name:
                version = "NVSHMEM" if file.name.startswith("libnvshmem_host.") else file.name
                write_hollow(file, wanted[version] or wanted[""], version if wanted[version] else "", Path(scratch))
    for pattern in STRIPPED:
        run("strip", "--strip-unneeded", *site_packages.glob(pattern))


def symbols_by_version(folder: Path) -> dict[str, set[str]]:
    """Return the symbols of CUDA that torch needs, by the version that they name: a library's name but for NVSHMEM."""
    found: dict[str, set[str]] = defaultdict(set)
    for line in run("nm", "--dynamic", "--undefined-only", "--quiet", *folder.glob("*.so*")).splitlines():
        name, _, version = (line.split() or [""])[-1].partition("@")
        if version or name.startswith(VENDORS):
            found[version].add(name)
    return found


def write_hollow(library: Path, symbols: set[str], version: str, scratch: Path) -> None:
    code, versions, compiled = scratch / "code.s", scratch / "versions", scratch / "code.o"
    labels = "".join(f".globl {name}\n.type {name}, @function\n{name}:\n" for name in sorted(symbols))
    code.write_text(f".text\n{labels}ud2\n")
    versions.write_text(f"{version} {{ global: *; }};\n")
    run("as", "-o", compiled, code)
    run("ld", "-shared", f"-soname={library.name}", f"--version-script={versions}", "-o", library, compiled)


def run(*words: str | Path) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
