"""An engine's memory given back and taken again through torch_memory_saver, which is how SGLang does it."""

from __future__ import annotations

import time

import torch

from bench.gpu.moves import finish, free_bytes
from bench.gpu.shapes import random_tensors, shapes_of
from bench.turns import GIB
from colocated_rl_agent.runner.devices import FREED_SHARE

KV_BYTES = 8 * GIB


def beside_what_is_mapped(name: str, device: torch.device) -> None:
    """Print how much of the mapped memory the driver reports free again: an agent wants at least FREED_SHARE of it."""
    try:
        from torch_memory_saver import torch_memory_saver as saver
    except ImportError:
        print("release: not measured, torch-memory-saver is not installed: pip install torch-memory-saver")
        return
    if device.type != "cuda":
        print("release: not measured, a CPU has no memory of its own")
        return
    saver.hook_mode = "torch"  # without LD_PRELOAD
    mapped = {}
    with saver.region(tag="weights"):
        weights = random_tensors(shapes_of(name), device)
        mapped["weights"] = sum(2 * tensor.numel() for tensor in weights.values())
    with saver.region(tag="kv_cache"):
        pool = torch.zeros(KV_BYTES, dtype=torch.uint8, device=device)
        mapped["kv_cache"] = len(pool)
    finish(device)
    print(f"release of {sum(mapped.values()) / GIB:.1f} GiB, {name} and a KV pool")
    for tag, size in mapped.items():
        before, began = _free(device), time.perf_counter()
        saver.pause(tag)
        finish(device)
        took_s, fell = time.perf_counter() - began, _free(device) - before
        share = f"{fell / size:5.3f}{'' if fell >= FREED_SHARE * size else f', LESS THAN {FREED_SHARE}'}"
        print(f"  {tag:10} {fell / GIB:6.2f} of {size / GIB:6.2f} GiB came free: {share}  {took_s:.3f} s")
    for tag, size in reversed(mapped.items()):
        before, began = _free(device), time.perf_counter()
        saver.resume(tag)
        finish(device)
        took_s, rose = time.perf_counter() - began, before - _free(device)
        print(f"  {tag:10} {rose / GIB:6.2f} of {size / GIB:6.2f} GiB taken again: {rose / size:5.3f}  {took_s:.3f} s")
    for tensor in (*weights.values(), pool):
        tensor.zero_()  # where it was, and to be written to
    finish(device)


def _free(device: torch.device) -> int:
    free = free_bytes(device)
    assert free is not None
    return free
