"""`make prove-gpu`: one pod through 50 switches on one NVIDIA GPU, and what they showed, in docs/measurements.md.

Its agent, runner and trainer are the product's own. The engine is SGLang where this Python has it, and otherwise that
of the tests with a real model and a KV pool on the device. What has to hold is in `bench.gpu.switches`: where it does
not, the command fails, and the page says so too. On a CPU it runs to its end, prints, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.gpu.models import MODELS, peak_flops, write_model
from bench.gpu.one_pod import OnePod, prove
from bench.gpu.switches import GIB, MeasuredSwitch, Proof, placed, show

PAGE = Path(__file__).parents[2] / "docs/measurements.md"
SWITCHES = 50
SIZES = ("0.6B", "7B-LoRA")
PREPARE_S = 900.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.prove", description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append", help="0.6B, and 7B with LoRA")
    parser.add_argument("--switches", type=int, default=SWITCHES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program")
    parser.add_argument("--within-s", type=float, help="of each model: no switch begins after so many seconds")
    parser.add_argument("--without-sglang", action="store_true", help="the engine of the tests, whatever there is")
    parser.add_argument("--page", type=Path, default=PAGE, help="to write to, on a GPU")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no NVIDIA GPU: run it where `nvidia-smi` shows one, or with --device cpu", file=sys.stderr)
        return 2
    is_cpu, proofs = given.device == "cpu", list[Proof]()
    has_sglang = not is_cpu and not given.without_sglang and importlib.util.find_spec("sglang") is not None
    name, peak = apart(name_and_peak, given.device)
    told = conditions(name, has_sglang=has_sglang, peak=peak)
    print(told, flush=True)
    for model in given.model or SIZES:
        pod = OnePod(MODELS[model], is_cpu=is_cpu, has_sglang=has_sglang, steps=given.switches)
        proofs.append(prove_model(pod, peak=peak, within_s=given.within_s))
        print("\n".join([model, *show(proofs[-1])]), flush=True)
        if not is_cpu:  # after each: what comes later may take the machine with it
            given.page.write_text(placed(given.page.read_text(), proofs[-1], conditions=told))
    return int(any(any(proof.shortfalls()) for proof in proofs))


def prove_model(pod: OnePod, *, peak: float, within_s: float | None) -> Proof:
    with tempfile.TemporaryDirectory() as folder:
        apart(write_model, pod.model.name, Path(folder), "cpu" if pod.is_cpu else "cuda")
        return asyncio.run(prove(pod, Path(folder), peak_flops=peak, told=told_of, within_s=within_s))


def told_of(step: int, switch: MeasuredSwitch) -> None:
    used = " ".join(
        f"{size / GIB:.3f}"
        for size in (switch.serving, switch.released, switch.trained, switch.offloaded, switch.served_again)
    )
    print(f"  switch {step}: {switch.took_s:.2f} s, its step {switch.step_s:.2f} s; GiB in use: {used}", flush=True)


def conditions(device: str, *, has_sglang: bool, peak: float) -> str:
    engine = "SGLang" if has_sglang else "that of the tests, with a real model and a KV pool, and made-up tokens"
    return (
        f"{datetime.now(UTC).date()}, {device}, torch {torch.__version__}; a product of matrices reaches "
        f"{peak / 1e12:.2f} TFLOP/s. The engine is {engine}."
    )


def name_and_peak(device: str) -> tuple[str, float]:
    name = torch.cuda.get_device_name(device) if device == "cuda" else "a CPU: figures mean nothing"
    return name, peak_flops(device)


def apart(do: Callable[..., Any], *arguments: object) -> Any:
    """Return what a process of its own returns: it leaves nothing on the device."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(do, *arguments).result(PREPARE_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
