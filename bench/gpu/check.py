"""Say what a machine has of what `make test-gpu`, `bench-gpu` and `prove-gpu` can use, and what is done without it."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from bench.gpu.engine import choose_memory
from colocated_rl_agent.runner.runner import read_devices

PINNED = Path(__file__).parents[2] / "tests/requirements.txt"
NEEDED = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "aiohttp", "pydantic", "pytest")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.check", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program")
    device = parser.parse_args(arguments).device
    pinned = pins(PINNED.read_text())
    print(f"Python {platform.python_version()}")
    for name in NEEDED:
        print(f"{name} {found_version(name)}, {pinned[name]} is what is tested")
    lacking = list(lacks(device))
    for line in lacking:
        print(f"LACKS {line}")
    if not lacking:
        print("\n".join(choices(device)))
    return int(bool(lacking))


def pins(requirements: str) -> dict[str, str]:
    """Return the version of each library in a file of pinned requirements."""
    pinned = (line.split()[0].split("==") for line in requirements.splitlines() if "==" in line and line[0].isalpha())
    return dict(pinned)


def found_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "is not there"


def lacks(device: str) -> Iterator[str]:
    """Yield what nothing can be done without."""
    yield from (f"the library {name}" for name in NEEDED if importlib.util.find_spec(name) is None)
    if device == "cuda" and not torch.cuda.is_available():
        yield "an NVIDIA GPU that torch finds: see `nvidia-smi`"
    if device == "cuda" and not read_devices():
        yield "NVIDIA's libnvidia-ml.so.1, by which the runner reads the device's memory"


def choices(device: str, *, has_sglang: bool | None = None) -> Iterator[str]:
    """Yield what is chosen by what is there. has_sglang: as this Python has it when None."""
    is_there = importlib.util.find_spec("sglang") is not None if has_sglang is None else has_sglang
    if is_there and device == "cuda":
        yield "prove-gpu: with SGLang"
    else:
        memory, why = choose_memory(torch.device(device))
        yield (
            "prove-gpu: without SGLang, with the engine of the tests: a real model and a KV pool on the device; its "
            f"tokens are made up. Its memory is released by: {memory.name}{f' ({why})' if why else ''}"
        )
    if importlib.util.find_spec("torch_memory_saver") is None:
        yield "bench-gpu: its part `release` is not measured, there is no torch_memory_saver"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
