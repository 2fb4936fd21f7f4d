"""Training state off the device and back, beside copies between the device and pinned memory; and what it leaves."""

from __future__ import annotations

import torch

from bench.gpu.shapes import Parameters, shapes_of
from bench.turns import GIB, in_turns, show
from colocated_rl_trainer.grpo.budget import Budget, gib
from colocated_rl_trainer.state.residency import Residency

PIECE = 4 * GIB  # of a plain copy; more of them goes no faster


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory that the driver reports, beside all processes. None on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_state(name: str, device: torch.device) -> Residency:
    """Offloaded, of random numbers, with the moments of AdamW where the device has room for them."""
    shapes = shapes_of(name)
    count = sum(shape.numel() for shape in shapes.values())
    needed, free = Budget.of(count, on_cpu=False).device, free_bytes(device)
    assert needed is not None
    state = Residency(Parameters(shapes), device, moves=True, with_moments=free is None or needed < 0.95 * free)
    state.onload()
    for block in state.parameters:
        block.uniform_(-1, 1)
    for moment in state.moments.values():
        moment.uniform_(0, 1)
    state.offload()
    return state


def beside_pinned_copies(name: str, device: torch.device) -> None:
    torch.zeros(1, device=device)  # the context, which no offload gives back
    before = free_bytes(device)
    state = make_state(name, device)
    after = free_bytes(device)
    kinds = "parameters and moments" if state.moments else "parameters (no room for moments: SGD)"
    size = 4 * len(state.gradients) * (1 + len(state.moments))
    piece = min(size, PIECE) // 4
    there, here = torch.empty(piece, device=device), torch.empty(piece, pin_memory=device.type == "cuda")

    def copy_in() -> None:
        there.copy_(here, non_blocking=True)
        finish(device)

    def copy_out() -> None:
        here.copy_(there, non_blocking=True)
        finish(device)

    took = in_turns({"copy in": copy_in, "onload": state.onload}, before=state.offload)
    took |= in_turns({"copy out": copy_out, "offload": state.offload}, before=state.onload)
    state.offload()
    scale = size / (4 * piece)
    print(f"moves of {gib(size)} of {kinds}, {name}")
    show("pinned memory to the device", 4 * piece, took["copy in"])
    show("onload", size, took["onload"], beside=took["copy in"] * scale)
    show("the device to pinned memory", 4 * piece, took["copy out"])
    show("offload", size, took["offload"], beside=took["copy out"] * scale)
    if before is not None and after is not None:
        print(f"  left on the device by the offload: {(before - after) / 2**20:.0f} MiB over a context of its own")
