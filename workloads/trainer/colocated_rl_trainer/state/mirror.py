"""Keep the state of a finished step in host memory of two pods, so that trainers that restart go on from there.

Between checkpoints on the volume each rank writes its part of the state into memory that outlives its process, and
sends a copy to the rank in the same place of another pod, half of the group away: pods side by side may share a node.
So every part is still there after any one pod is lost. A part that a rank's own pod has not comes from the pod that has
it. Where all ranks hold the same state, the first rank of each pod writes it, and nothing is sent.

A step's files get their names once every rank has verified what it received, and those of the step before are removed
after that. So one of the two steps is whole at any moment, and a step that is not whole is ignored. The loss of both
pods that have a part, or ranks of another number that share the state, leave the checkpoint on the volume.
Source: Wang et al. 2023, Gemini: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from colocated_rl_api.logs import log
from colocated_rl_api.names import PromptPosition
from colocated_rl_trainer.protocol.manifest import digest_of
from colocated_rl_trainer.protocol.settings import ConfigError
from colocated_rl_trainer.state.group import Collectives
from colocated_rl_trainer.state.sharding import part_of
from colocated_rl_trainer.state.tensor_file import write_tensors

CHUNK_BYTES = 64 * 1024**2  # of one message
_NAME = re.compile(r"step-(\d{8})-(\d+)\.(\d+)-of-(\d+)\.([0-9a-f]{32})")
_POSITION = "promptPosition"

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class MirrorPart:
    """Names the file of one part of the state after a step."""

    step: int
    lineage: int
    part: int
    parts: int
    digest: str  # of the file, in hexadecimal digits

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}-{self.lineage}.{self.part}-of-{self.parts}.{self.digest}"

    @property
    def age(self) -> tuple[int, int]:
        """Return what orders steps: a later lineage began with the newest whole step of those before it."""
        return self.lineage, self.step

    @classmethod
    def named(cls, name: str) -> Self | None:
        if (found := _NAME.fullmatch(name)) is None:
            return None
        step, lineage, part, parts = map(int, found.groups()[:4])
        return cls(step, lineage, part, parts, found[5])


class Mirrors:
    """Keeps the newest step of one rank's part, and of another's. Every rank makes the same calls."""

    def __init__(
        self, directory: Path, group: Collectives, *, lineage: int, ranks_in_pod: int, is_divided: bool
    ) -> None:
        """Use the pod's `directory` in memory. is_divided: each rank has a part of its own; else all have the same."""
        self._directory = directory
        self._group = group
        self._lineage = lineage
        self._ranks_in_pod = ranks_in_pod
        self._is_divided = is_divided
        self._parts = group.size if is_divided else 1
        self._sends = is_divided and ranks_in_pod < group.size
        self._own = directory / f".{group.rank}.own"  # drafts
        self._copy = directory / f".{group.rank}.copy"

    def keep(self, step: int, state: Mapping[str, Tensor], *, prompt_position: PromptPosition | None = None) -> None:
        """Keep this rank's part of `state`, by name, in memory of two pods, in place of an earlier step's.

        Raises OSError or Refused on every rank, with the earlier step still there, or on none; GroupLost.
        """
        group = self._group
        try:
            written = group.each(lambda: self._write(step, state, prompt_position))
            held = {self._own: written[group.rank]}
            if self._sends:
                half = max(1, group.size // self._ranks_in_pod // 2) * self._ranks_in_pod
                to, source = (group.rank + half) % group.size, (group.rank - half) % group.size
                self._exchange(written, to=to, source=source)
                held[self._copy] = written[source]
            group.each(lambda: self._publish({draft: each[0] for draft, each in held.items() if each}))
            self._remove_others((self._lineage, step))
        finally:
            self._remove(self._own, self._copy)

    def newest(self, *, after: int) -> MirrorPart | None:
        """Return this rank's part, verified, of the newest whole step beyond `after`, or None. Raises GroupLost."""
        self._remove(self._own, self._copy)  # of a predecessor
        for _ in range(2):  # a damaged part is there a second time
            found = self._group.each(self._listed)
            holders = self._newest_whole(found, after=after)
            if not holders:
                break
            if (mine := self._take(found, holders)) is not None:
                return mine
        self._remove_others(None)
        return None

    def read(self, part: MirrorPart, into: Mapping[str, Tensor]) -> PromptPosition | None:
        """Fill this rank's tensors in place, and return the position after the step's batch. Raises ConfigError."""
        file = self._directory / part.name
        with safe_open(file, framework="pt") as stored:
            wanted = {name: list(part_of(tensor).shape) for name, tensor in into.items()}
            shapes = {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118 - no mapping
            if shapes != wanted:
                raise ConfigError(
                    f"{file} is of another model or optimizer: suspend and resume the job, and it continues from its "
                    "newest checkpoint"
                )
            for name, tensor in into.items():
                part_of(tensor).copy_(stored.get_tensor(name))
            position: PromptPosition | None = json.loads(stored.metadata()[_POSITION])
        return position

    # ------------------------------------------------------------------------------------------------------- writing
    def _has_part(self, rank: int) -> bool:
        """Return whether a rank writes, and verifies, a part."""
        return self._is_divided or rank % self._ranks_in_pod == 0

    def _part_of_rank(self, rank: int) -> int:
        return rank if self._is_divided else 0

    def _write(
        self, step: int, state: Mapping[str, Tensor], prompt_position: PromptPosition | None
    ) -> tuple[MirrorPart, int] | None:
        """Write this rank's part, and return it with the size of its file."""
        if not self._has_part(self._group.rank):
            return None
        parts = {name: part_of(tensor) for name, tensor in state.items()}
        metadata = {_POSITION: json.dumps(prompt_position)}
        digest = write_tensors(self._own, parts, metadata=metadata)
        part = MirrorPart(step, self._lineage, self._part_of_rank(self._group.rank), self._parts, _digits(digest))
        return part, self._own.stat().st_size

    def _exchange(self, written: Sequence[tuple[MirrorPart, int] | None], *, to: int, source: int) -> None:
        """Send this rank's part to one rank while that of another arrives, and verify that."""
        mine, theirs = written[self._group.rank], written[source]
        assert mine is not None
        assert theirs is not None
        part, size = theirs
        self._group.each(lambda: _reserve(self._copy, size))
        with self._group.together("mirror"):
            out, into = _mapped(self._own, mine[1]), _mapped(self._copy, size)
            for outgoing, incoming in zip_longest(out.split(CHUNK_BYTES), into.split(CHUNK_BYTES)):
                under_way = [] if outgoing is None else [dist.isend(outgoing, to)]
                if incoming is not None:
                    under_way.append(dist.irecv(incoming, source))
                for each in under_way:
                    if each is not None:
                        each.wait()
        self._group.each(lambda: _require(self._copy, part))

    def _publish(self, drafts: Mapping[Path, MirrorPart]) -> None:
        for draft, part in drafts.items():
            draft.rename(self._directory / part.name)

    def _remove_others(self, age: tuple[int, int] | None) -> None:
        for part in self._listed():
            if part.age != age:
                self._remove(self._directory / part.name)

    def _remove(self, *files: Path) -> None:
        for file in files:
            try:
                file.unlink(missing_ok=True)
            except OSError as error:  # costs room alone, and the next step tries again
                log(_LOG, "mirror not removed", logging.WARNING, reason=f"{file}: {error.strerror}")

    # ------------------------------------------------------------------------------------------------------- reading
    def _listed(self) -> list[MirrorPart]:
        """Return the parts that this rank's pod has, by name."""
        return [part for file in sorted(self._directory.iterdir()) if (part := MirrorPart.named(file.name))]

    def _newest_whole(
        self, found: Sequence[Sequence[MirrorPart]], *, after: int
    ) -> Mapping[int, tuple[int, MirrorPart]]:
        """Return, for each part of the newest whole step, the first rank that has it; nothing if there is no such step.

        found: what each rank's pod has.
        """
        ages = {part.age for parts in found for part in parts if part.step > after and part.parts == self._parts}
        for age in sorted(ages, reverse=True):
            holders: dict[int, tuple[int, MirrorPart]] = {}
            for rank, parts in enumerate(found):
                holders |= {part.part: (rank, part) for part in parts if part.age == age and part.part not in holders}
            if len(holders) == self._parts:
                return holders
        return {}

    def _take(
        self, found: Sequence[Sequence[MirrorPart]], holders: Mapping[int, tuple[int, MirrorPart]]
    ) -> MirrorPart | None:
        """Bring each pod the parts of its ranks, from the pods that have them, and verify them.

        Return this rank's; None, with the damaged ones removed, if a pod has a damaged one.
        """
        mine = holders[self._part_of_rank(self._group.rank)][1]
        try:
            self._fetch(
                {
                    rank: holders[self._part_of_rank(rank)]
                    for rank in range(self._group.size)
                    if self._has_part(rank) and holders[self._part_of_rank(rank)][1] not in found[rank]
                }
            )
            faults = self._group.each(
                lambda: _fault(self._directory / mine.name, mine) if self._has_part(self._group.rank) else None
            )
        finally:
            self._remove(self._copy)
        if any(faults):
            damaged = [self._directory / mine.name] if faults[self._group.rank] else []
            self._group.each(lambda: self._remove(*damaged))  # before anybody lists them again
            reason = "; ".join(fault for fault in faults if fault)
            log(_LOG, "mirror damaged", logging.WARNING, step=mine.step, reason=reason)
            return None
        self._remove_others(mine.age)
        return mine

    def _fetch(self, lacking: Mapping[int, tuple[int, MirrorPart]]) -> None:
        """Send parts to the ranks that lack them. lacking: by rank, the rank that has the part, and the part."""
        rank = self._group.rank
        sent = {part.part: self._directory / part.name for holder, part in lacking.values() if holder == rank}
        sizes: dict[int, int] = {}
        for of_rank in self._group.each(lambda: {part: file.stat().st_size for part, file in sent.items()}):
            sizes |= of_rank
        self._group.each(lambda: _reserve(self._copy, sizes[lacking[rank][1].part]) if rank in lacking else None)
        with self._group.together("mirror"):
            for receiver, (holder, part) in lacking.items():
                if rank in (holder, receiver):
                    file, size = (self._copy if rank == receiver else sent[part.part], sizes[part.part])
                    for chunk in _mapped(file, size).split(CHUNK_BYTES):
                        dist.recv(chunk, holder) if rank == receiver else dist.send(chunk, receiver)
        self._group.each(lambda: self._publish({self._copy: lacking[rank][1]} if rank in lacking else {}))


def _reserve(file: Path, size: int) -> None:
    """Make a file of that size, all of whose memory is taken. Raises OSError if there is no room."""
    file.unlink(missing_ok=True)
    with file.open("xb") as stream:
        os.posix_fallocate(stream.fileno(), 0, size)


def _mapped(file: Path, size: int) -> Tensor:
    return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)


def _digits(digest: str) -> str:
    return digest.partition(":")[2]


def _fault(file: Path, part: MirrorPart) -> str | None:
    found = _digits(digest_of(file))
    return None if found == part.digest else f"part {part.part} has changed since it was written"


def _require(file: Path, part: MirrorPart) -> None:
    if fault := _fault(file, part):
        raise OSError(fault)
