"""Ranks of the default trainer without the protocol: each a process that does one function and tells its result."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from contract.trainer_in_process import only_rank
from torch import Tensor

from colocated_rl_api.weights import Digest
from colocated_rl_trainer.conformance.ranks import free_port
from colocated_rl_trainer.grpo.loop import GRPOTrainer
from colocated_rl_trainer.protocol.settings import RankSettings, TrainerConfig
from colocated_rl_trainer.state.export import Writers
from fakes.watched_trainer import forking

ANSWER_S = 600.0  # two minutes were seen, and four at a low priority


class UnwatchedTrainer(GRPOTrainer):
    """Loaded and onloaded; its steps are watched by nobody."""

    def __init__(self, settings: RankSettings, config: Mapping[str, object]) -> None:
        super().__init__(settings, TrainerConfig.model_validate({"threads": 1} | dict(config)))
        self.rank = settings.rank
        self.folder = settings.checkpoints.parent
        self.step = self.load()
        self.group = self._group
        self.onload()

    def write_weights(self, directory: Path, *, apart: bool = False) -> Mapping[str, Digest]:
        """Write this rank's part of an export, as if all ranks were in one pod. apart: as if each had its own."""
        ranks = range(self.group.size)
        return self._write_weights(directory, Writers(self.rank, [[rank] for rank in ranks] if apart else [ranks]))

    def state_to_keep(self) -> dict[str, Tensor]:
        return self._to_keep()

    def progress(self) -> None:
        pass

    def mark_dirty(self) -> None:
        pass


def in_ranks(
    size: int,
    folder: Path,
    model: Path,
    do: Callable[[UnwatchedTrainer], object],
    *,
    replays: object = False,
    in_pod: object = 1,
    longest: object = None,
    **config: object,
) -> list[Any]:
    """Return what `do`, a function of a module, returned or raised on each rank.

    replays, longest: as for `only_rank`. in_pod: ranks of each pod.
    """
    assert isinstance(in_pod, int)
    assert isinstance(longest, int | None)
    settings = replace(
        only_rank(folder, model, config, replays=bool(replays), longest=longest),
        world_size=size,
        master_port=free_port(),
    )
    with contextlib.ExitStack() as stack:
        ranks = [replace(settings, rank=rank, local_rank=rank % in_pod) for rank in range(size)]
        pipes = [stack.enter_context(_started(each, do, config)) for each in ranks]
        return [_answer(pipe) for pipe in pipes]


@contextlib.contextmanager
def _started(
    settings: RankSettings, do: Callable[[UnwatchedTrainer], object], config: Mapping[str, object]
) -> Iterator[Connection]:
    here, there = forking.Pipe()
    process = forking.Process(target=_be, args=(settings, do, config, there), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        process.kill()
        process.join()


def _answer(pipe: Connection) -> object:
    assert pipe.poll(ANSWER_S), "a rank did not answer"
    try:
        return pipe.recv()
    except EOFError as error:  # it ended without a word
        return error


def _be(
    settings: RankSettings, do: Callable[[UnwatchedTrainer], object], config: Mapping[str, object], pipe: Connection
) -> None:
    """A rank that fails ends at once, without waiting for its peers. One that is done stays for those that are not: the
    first holds what all have told each other.
    """
    try:
        pipe.send(do(UnwatchedTrainer(settings, config)))
        pipe.poll(ANSWER_S)  # until the test has all answers, or is gone
    except Exception as error:  # noqa: BLE001 - told to the test
        pipe.send(error)
    os._exit(0)
