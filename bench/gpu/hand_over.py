"""New weights from one process to another on the same device: through shared memory, and by CUDA's own handles.

Shared memory is what a job uses: a file that the trainer writes and the engine reads. Handles (CUDA IPC) are what it
might use; both beside a copy on the device, which is the least that either can take.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.multiprocessing as processes
from safetensors.torch import load_file
from torch import Tensor

from bench.gpu.moves import finish
from bench.gpu.shapes import random_tensors, shapes_of
from bench.turns import in_turns, show
from colocated_rl_trainer.grpo.budget import gib
from colocated_rl_trainer.state.tensor_file import write_tensors

SHARED_MEMORY = Path("/dev/shm")
ANSWER_S = 300.0

Tensors = dict[str, Tensor]


def beside_a_copy_on_the_device(name: str, device: torch.device) -> None:
    shapes = shapes_of(name)
    weights = random_tensors(shapes, device)
    copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    size = sum(2 * tensor.numel() for tensor in weights.values())

    def copy() -> None:
        _copy(weights, copies, device)

    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder, _reader(shapes, device) as ask:
        file = Path(folder) / "model.safetensors"

        def by_file() -> None:
            write_tensors(file, weights)
            ask(file)

        took = in_turns({"copy": copy, "file": by_file, "handles": lambda: ask(weights)})
        wanted = digest(weights)
        for way, what in (("file", file), ("handles", weights)):
            ask(what)
            if (read := ask(None)) != wanted:
                raise RuntimeError(f"by {way} came other weights: digest {read} and not {wanted}")
    print(f"hand-over of {gib(size)} of weights to another process, {name}")
    show("copy on the device", size, took["copy"])
    show("CUDA's handles, and a copy by the other", size, took["handles"], beside=took["copy"])
    show("a file in shared memory, written and read", size, took["file"], beside=took["copy"])


def digest(weights: Tensors) -> int:
    """Return a number that depends on every bit, and not on the device that holds them."""
    return sum(int(tensor.view(torch.int16).sum(dtype=torch.int64)) for tensor in weights.values())


@contextmanager
def _reader(shapes: dict[str, torch.Size], device: torch.device) -> Iterator[Callable[[Path | Tensors | None], int]]:
    """Another process: into its own weights goes what it is given, and given nothing it tells their digest.

    What is yielded raises RuntimeError when the process ends, or after ANSWER_S.
    """
    context = processes.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_read, args=(there, shapes, str(device)), daemon=True)
    process.start()
    there.close()

    def ask(what: Path | Tensors | None) -> int:
        here.send(what)
        if not here.poll(ANSWER_S):
            raise RuntimeError(f"the process that reads gave no answer within {ANSWER_S:.0f} s")
        try:
            answer: int = here.recv()
        except EOFError as error:
            raise RuntimeError("the process that reads has ended: see its last words above") from error
        return answer

    try:
        yield ask
    finally:
        here.close()
        process.join(ANSWER_S)


def _read(link: Connection, shapes: dict[str, torch.Size], device_name: str) -> None:
    device = torch.device(device_name)
    own = random_tensors(shapes, device)
    while True:
        try:
            what = link.recv()
        except EOFError:
            return
        if what is not None:
            _copy(load_file(what) if isinstance(what, Path) else what, own, device)
        link.send(digest(own) if what is None else 0)
        del what  # handles: the sender's memory is its own again


def _copy(source: Tensors, into: Tensors, device: torch.device) -> None:
    for name, tensor in into.items():
        tensor.copy_(source[name])
    finish(device)
