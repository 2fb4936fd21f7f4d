"""The rollout controller's process is killed at each statement that its store is about to execute, one life for each.

The job in it is a whole one, in virtual time: the real worker, store, database and batch files. What the dead process
had told, an operator that lived on still knows.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from bench import virtual_time
from bench.simulated_engines import Rates
from bench.simulated_job import SimulatedController, SimulatedJob
from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.rules.samples import SampleState
from colocated_rl_rollout.store.batches import shard_path
from colocated_rl_rollout.store.store import Store

JOB = SimulatedJob(
    trace=lambda prompt, number: 1 + 7 * (prompt % 3 == 0),  # some groups span a switch
    steps=3,
    batch_size=2,
    group_size=2,
    engines=1,
    rates=Rates(slots=3),
)


class FileOperator:
    """Goes by what it was told, which it keeps in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.sealed: dict[int, list[str]] = {}  # hashes of its shards, by step
        self.trained_step = 0
        for line in file.read_text().splitlines() if file.exists() else ():
            step, entry = json.loads(line)
            if entry:
                self.sealed[step] = entry
            else:
                self.trained_step = step

    def note(self, step: int, entry: tuple[str, ...] = ()) -> None:
        with self._file.open("a") as file:  # a kill leaves what was written to a file
            file.write(json.dumps((step, entry)) + "\n")


async def live(directory: Path, operator: FileOperator, begun: Callable[[Store], None] = lambda _: None) -> Store:
    """Run the job from wherever it stands to its end."""
    scene = SimulatedController(JOB, directory / "store")
    begun(scene.store)
    async with asyncio.TaskGroup() as group:
        following = group.create_task(scene.engines.run())
        working = group.create_task(scene.worker.run())
        await asyncio.sleep(0)
        scene.trained(operator.trained_step)
        for step in range(operator.trained_step + 1, JOB.steps + 1):
            scene.open_gates(WeightVersion(step - 1, 1))
            batch = await scene.sealed(step)
            operator.note(step, batch.sha256)
            scene.close_gates()
            await asyncio.sleep(1)
            keep(directory, scene.store, step)
            operator.note(step)
            scene.trained(step)
        scene.worker.drain()
        await working
        following.cancel()
    await scene.store.flushed()
    scene.store.close()
    return scene.store


def made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def keep(directory: Path, store: Store, step: int) -> None:
    """Keep a batch that was trained, which the store forgets."""
    body = shard_path(store.batch_directory, step, 0).read_bytes()
    (directory / f"{step}.safetensors").write_bytes(body)


def killed_at(statement: int, directory: Path) -> bool:
    """One life in a process of its own, killed when its store is about to execute this one; False: there are fewer."""
    process = os.fork()
    if process == 0:
        left = statement

        def count(_: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        def watch(store: Store) -> None:
            store._writer._database.set_trace_callback(count)

        code = 1
        try:
            virtual_time.run(live(directory, FileOperator(directory / "told"), watch))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return os.WIFSIGNALED(status)


@pytest.fixture
def lives() -> Iterator[Path]:
    """Yield a folder in memory, because each commit of some hundred lives waits for its disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        yield Path(directory)


def test_a_kill_at_any_operation_of_the_store_loses_no_sample_and_trains_none_twice(lives: Path) -> None:
    statement = 1
    while killed_at(statement, directory := made(lives / str(statement))):
        before = FileOperator(directory / "told")
        store = virtual_time.run(live(directory, before))
        after = FileOperator(directory / "told")
        assert JOB.steps == after.trained_step
        assert before.sealed.items() <= after.sealed.items(), "a batch that was told never changes"
        assert JOB.steps * JOB.samples == store.counts[SampleState.TRAINED] == store.counts.total()
        trained: list[tuple[int, ...]] = []
        for step in range(1, JOB.steps + 1):
            columns: dict[str, Any] = load_file(directory / f"{step}.safetensors")
            trained += [tuple(part.tolist()) for part in np.split(columns["tokens"], columns["sample_end"][:-1])]
        prompts = sorted(tokens[0] for tokens in trained)
        assert [prompt for prompt in range(JOB.steps * JOB.batch_size) for _ in range(JOB.group_size)] == prompts
        assert JOB.tokens == sum(len(tokens) - 1 for tokens in trained)
        statement += 1
    assert statement > 100
