"""`make bench-gpu`: what a switch moves on one NVIDIA GPU, beside what the device itself can do.

* offload and onload of training state, to copies between the device and pinned memory; what the offload leaves;
* new weights to another process, through shared memory and by CUDA's handles, to a copy on the device;
* an engine's memory released and resumed through torch_memory_saver, to what was mapped.

Weights are random, in shapes of Qwen2.5. Each part of each size is a process of its own: what one leaves on the device
is not another's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

import torch

from bench.gpu.hand_over import beside_a_copy_on_the_device
from bench.gpu.moves import beside_pinned_copies
from bench.gpu.release import beside_what_is_mapped
from bench.gpu.shapes import SHAPES

PARTS = {
    "moves": beside_pinned_copies,
    "hand-over": beside_a_copy_on_the_device,
    "release": beside_what_is_mapped,
}
PART_S = 900.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--size", choices=SHAPES, action="append", help="of the model (0.5B, 1.5B and 7B)")
    parser.add_argument("--only", choices=PARTS, action="append", help="of the parts")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"), help="cpu: to try the program")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one part, in this process
    given = parser.parse_args(arguments)
    if given.device.type == "cuda" and not torch.cuda.is_available():
        print("torch finds no NVIDIA GPU: run it where `nvidia-smi` shows one, or with --device cpu", file=sys.stderr)
        return 2
    sizes, parts = given.size or ["0.5B", "1.5B", "7B"], given.only or list(PARTS)
    if given.here:
        for part in parts:
            PARTS[part](sizes[0], given.device)
        return 0
    name = torch.cuda.get_device_name(given.device) if given.device.type == "cuda" else "a CPU: figures mean nothing"
    print(f"torch {torch.__version__}, {name}", flush=True)
    failed = 0
    for size in sizes:
        for part in parts:
            command = [sys.executable, "-m", "bench.gpu", "--here", "--size", size, "--only", part]
            failed |= subprocess.run([*command, "--device", str(given.device)], timeout=PART_S, check=False).returncode
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
