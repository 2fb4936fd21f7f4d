"""Steps in the memory of pods (`spec.checkpoint.inMemory`), beside plain writes of the same bytes, on the CPU.

Two ranks in pods of their own share the state of a model. Both keep a step: each writes its part, sends it to the
other, and verifies what it received. Then the second pod's memory is lost, and both find the step again and read it. A
plain write is of one part, by each rank at the same time.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from contract.trainer_ranks_in_process import UnwatchedTrainer, in_ranks

from bench.turns import GIB, TURNS, show
from colocated_rl_trainer.state.mirror import Mirrors
from colocated_rl_trainer.state.sharding import part_of

RANKS = 2


def beside_plain_writes(model: Path, shared: Path) -> None:
    """Print the figures. shared: a directory in shared memory."""
    folder = shared / "mirrors"
    folder.mkdir()
    (size, took), *_ = in_ranks(RANKS, folder, model, mirror_in_turns)
    print(f"steps in the memory of two pods, {size / GIB:.2f} GiB of parameters and moments in each")
    show("plain write", size, took["plain"])
    show("kept: written, sent, received and verified", size, took["keep"], beside=took["plain"])
    show("found and read, of which one pod has none", size, took["read"], beside=took["plain"])


def mirror_in_turns(trainer: UnwatchedTrainer) -> tuple[int, dict[str, float]]:
    """Return the bytes of a part, and median seconds; ranks begin together, and end together."""
    group, directory = trainer.group, trainer.folder / f"pod-{trainer.rank}"
    directory.mkdir()
    state = trainer.state_to_keep()
    parts = [part_of(tensor) for tensor in state.values()]
    flat = torch.cat([part.flatten().view(torch.uint8) for part in parts]).numpy()
    mirrors = Mirrors(directory, group, lineage=1, ranks_in_pod=1, is_divided=True)

    def write_plain() -> None:
        (directory / "plain").write_bytes(flat.data)

    def read() -> None:
        found = mirrors.newest(after=0)
        assert found is not None
        mirrors.read(found, state)

    def lose_a_pod() -> None:
        if group.rank == 1:
            shutil.rmtree(directory)
            directory.mkdir()

    took: dict[str, list[float]] = {"plain": [], "keep": [], "read": []}

    def time_it(name: str, do: Callable[[], object]) -> None:
        group.gather(None)
        began = time.perf_counter()
        do()
        group.gather(None)
        took[name].append(time.perf_counter() - began)

    for turn in range(1, TURNS + 2):
        time_it("plain", write_plain)
        (directory / "plain").unlink()
        time_it("keep", lambda turn=turn: mirrors.keep(turn, state))  # type: ignore[misc]
        lose_a_pod()
        time_it("read", read)
    return flat.nbytes, {name: median(times[1:]) for name, times in took.items()}
