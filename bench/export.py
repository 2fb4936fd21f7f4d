"""New weights from the last gradient to an engine that has them, beside a plain copy of the same bytes, on the CPU.

Ranks that share a model write an export into shared memory, with its manifest; then it is verified as an agent does it,
and a real engine loads it. The plain copy is of the same files, by one thread, into the same memory. The probe is left
out: a device computes it in no time, and a CPU for longer than all the rest takes.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp
from contract.trainer_ranks_in_process import UnwatchedTrainer, in_ranks
from peers.resident import peak_bytes, resident_bytes

from bench import restart
from bench.turns import GIB, TURNS, show
from colocated_rl_agent.drivers.sglang import SGLang
from colocated_rl_agent.files.exports import verify_export
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_trainer.protocol.manifest import Exported, write_manifest
from colocated_rl_trainer.state.export import write_index
from engines import ADMIN_KEY, engine_process
from setup.layout import CHECKOUT

RANKS = (1, 2, 4)
VERSION = WeightVersion(1, 1)
FLAGS = ("--dtype", "bfloat16", "--max-total-tokens", "2048", "--context-length", "512")
UPDATE_S = 300.0


@dataclass(frozen=True)
class Took:
    """Holds seconds on the clock, and of processors, which other work on the machine lengthens less."""

    clock_s: float
    processor_s: float

    @classmethod
    def now(cls) -> Took:
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, began: Took) -> Took:
        return Took(self.clock_s - began.clock_s, self.processor_s - began.processor_s)


@dataclass(frozen=True)
class ExportTimes:
    """Holds medians of one rank, and by how many bytes it grew while it wrote. Rank 0 alone copies and verifies."""

    grew: int
    export: Took
    copy: Took | None = None
    verify: Took | None = None


def from_gradient_to_engine(model: Path, shared: Path) -> None:
    """Print the figures for a model in bfloat16. shared: a directory in shared memory."""
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    found = {ranks: times_of(ranks, model, shared / f"{ranks}-ranks") for ranks in RANKS}
    update_s = asyncio.run(update_seconds(model, shared / f"{RANKS[-1]}-ranks" / str(VERSION), shared))
    print(f"export of {size / GIB:.2f} GiB of bfloat16 into shared memory, and on to an engine")
    if update_s is None:
        print("  no engine: `make setup` installs it")
    for ranks, times in found.items():
        copy, verify, export = times[0].copy, times[0].verify, times[0].export
        assert copy is not None
        assert verify is not None
        if ranks == RANKS[0]:
            show("plain copy", size, copy.clock_s)
            print(f"    of a core: {size / copy.processor_s / GIB:.2f} GiB/s")
            show("verified by an agent", size, verify.clock_s, beside=copy.clock_s)
            print(f"    processor time, beside the copy's: {verify.processor_s / copy.processor_s:.2f}")
            if update_s is not None:
                show("loaded by a running engine", size, update_s, beside=copy.clock_s)
        show(f"written by {ranks}, with the manifest", size, export.clock_s, beside=copy.clock_s)
        whole_s = export.clock_s + verify.clock_s + (update_s or 0.0)
        show(f"written by {ranks}, verified and loaded", size, whole_s, beside=copy.clock_s)
        processors = [each.export.processor_s / copy.processor_s for each in times]
        print(f"    ranks' processor time, beside the copy's: {', '.join(f'{each:.2f}' for each in processors)}")
        print(f"    they grow by {', '.join(f'{each.grew / 2**20:.0f}' for each in times)} MiB")
    core = size / found[RANKS[0]][0].export.processor_s
    print(f"time to a restart, by what one rank writes in a second of a core ({core / GIB:.2f} GiB)")
    print(restart.table(restart.RestartRates(core=core)))


def times_of(ranks: int, model: Path, folder: Path) -> list[ExportTimes]:
    """Return the times of each rank; the last export stays in the folder."""
    folder.mkdir()
    config = {"dtype": "bfloat16", "optimizer": "SGD"}
    times: list[ExportTimes] = []
    for each in in_ranks(ranks, folder, model, export_in_turns, in_pod=ranks, **config):
        if isinstance(each, BaseException):
            raise each
        times.append(each)
    return times


def export_in_turns(trainer: UnwatchedTrainer) -> ExportTimes:
    """Let all ranks write an export; rank 0 then verifies and copies it, while the others wait."""
    group, directory, copy = trainer.group, trainer.folder / str(VERSION), trainer.folder / "copy"
    exports, copies, checks = list[Took](), list[Took](), list[Took]()
    grew = 0
    for _ in range(TURNS + 1):
        if group.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        group.gather(None)
        before, began = resident_bytes(), Took.now()
        written = group.each(lambda: trainer.write_weights(directory))
        if group.rank == 0:
            write_index(directory)
            digests = {name: digest for of_rank in written for name, digest in of_rank.items()}
            write_manifest(directory, VERSION, Exported(digests=digests))
        exports.append(Took.now() - began)
        grew = max(grew, peak_bytes() - before)
        if group.rank == 0:
            began = Took.now()
            verify_export(directory.parent, VERSION)
            checks.append(Took.now() - began)
            began = Took.now()
            shutil.copytree(directory, copy)
            copies.append(Took.now() - began)
            shutil.rmtree(copy)
    return ExportTimes(grew, _median(exports), *(_median(each) for each in (copies, checks) if each))


def _median(took: list[Took]) -> Took:
    """Return the medians of all but the first."""
    return Took(median(each.clock_s for each in took[1:]), median(each.processor_s for each in took[1:]))


async def update_seconds(model: Path, export: Path, scratch: Path) -> float | None:
    """Return how long a running engine takes to load an export; None without one."""
    if not CHECKOUT.environment("gpu").exists():
        return None
    took = []
    with (
        tempfile.TemporaryDirectory(dir=scratch) as root,
        engine_process(model, version=WeightVersion(0, 1), root=Path(root), flags=FLAGS) as engine,
    ):
        engine.wait_until_up()
        async with aiohttp.ClientSession() as session:
            client = SGLang(session, url=engine.url, admin_key=ADMIN_KEY, call_s=UPDATE_S)
            await client.pause()
            for _ in range(TURNS + 1):
                began = time.perf_counter()
                await client.update(export, VERSION)
                took.append(time.perf_counter() - began)
    return median(took[1:])
