"""Write and read checkpoints, which are there whole or not at all: `step-00000012`, in a volume that the ranks share.

A checkpoint is filled under another name, hashed, flushed to the disk and renamed, so one under its own name is whole.
It is verified against its hashes when it is read, each file by one rank; one that does not verify is skipped with a
warning.
What the job began with counts as one: the model, of step 0, or a checkpoint of a former job, which stays where it is
and which the file ORIGIN names from then on. The newest `keep` checkpoints are kept, and with them the sealed batches
since the oldest, so that the steps after any of them can be repeated. Milestones are kept too, for others: there is no
way back beyond those `keep`: `NoneLeft` is raised, rather than a step returned whose batches are gone. A larger `keep`
brings no batches back, so each checkpoint says how far back the way went when it was written.
A writer that was cut off, and whose job went on without it, finds checkpoints of a later lineage and writes none.
The caller decides what the files hold. Clean-up removes nothing whose name is not a checkpoint's, and what it can't
remove costs room alone: the next one tries again.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, Self, TypeVar

from pydantic import BaseModel, ValidationError

from colocated_rl_api.checkpoint import (
    ANOTHER,
    CONTENTS,
    FORMAT,
    Contents,
    NoSuchCheckpoint,
    checkpoint_name,
    choose,
    steps_in,
)
from colocated_rl_api.durable import sync
from colocated_rl_api.logs import in_words, log
from colocated_rl_api.names import PromptPosition
from colocated_rl_api.weights import Digest
from colocated_rl_trainer.protocol.durable import flush, take_place
from colocated_rl_trainer.protocol.manifest import digests_of
from colocated_rl_trainer.protocol.rank import Refused
from colocated_rl_trainer.protocol.settings import RankSettings, Unready

OPTIMIZER = "optimizer.state"  # where a checkpoint has one; not *.safetensors, which loaders take for weights
ORIGIN = "origin.json"
Item = TypeVar("Item")
_DRAFT = re.compile(r"\.step-\d{8}-(\d+)\.draft")
_REMOVED = ".{}.removed"  # a checkpoint from then on: what is left half removed is none

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    step: int
    directory: Path


@dataclass(frozen=True)
class Former:
    """Names the checkpoints of a former job, of which this one begins from one. step: None for the newest."""

    directory: Path
    step: int | None = None


class Origin(BaseModel):
    """Names, in a file, the former checkpoint that the job began from, so that no later start takes another."""

    step: int


class Ranks(Protocol):
    """Verifies a checkpoint on all ranks together (`group.Collectives`)."""

    rank: int
    size: int

    def led(self, do: Callable[[], Item]) -> Item: ...
    def each(self, do: Callable[[], Item]) -> list[Item]: ...


class OneRank:
    """Stands for all ranks where there is one."""

    rank, size = 0, 1

    def led(self, do: Callable[[], Item]) -> Item:
        return do()

    def each(self, do: Callable[[], Item]) -> list[Item]:
        return [do()]


class Superseded(Refused):
    """Trainers of a later lineage write checkpoints here: the job has gone on without these."""


class NoneLeft(Exception):
    """No checkpoint verifies, and the batches since the start of the job are gone. Only a person can help."""


class Checkpoints:
    """Keeps the checkpoints of one job. One rank of the newest lineage writes, any number may read."""

    def __init__(
        self,
        directory: Path,
        *,
        lineage: int,
        keep: int,
        former: Former | None = None,
        milestone_every: int | None = None,
    ) -> None:
        self._directory = directory
        self._milestone_every = milestone_every
        self._lineage = lineage
        self._keep = keep
        self._former = former

    @classmethod
    def of(cls, settings: RankSettings) -> Self:
        """Return the checkpoints of the job that this rank works for. Raises ConfigError."""
        spec = settings.read_job().spec
        former = None
        if spec.restore_from is not None and settings.former is not None:
            former = Former(settings.former, spec.restore_from.step)
        return cls(
            settings.checkpoints,
            lineage=settings.lineage,
            keep=spec.checkpoint.keep,
            former=former,
            milestone_every=spec.checkpoint.milestone_every_steps,
        )

    def newest(self, ranks: Ranks | None = None) -> Saved | None:
        """Return the newest checkpoint that verifies, None for the model. Every rank of `ranks` reads a part of it.

        Raises NoneLeft; ConfigError if the job begins from a former checkpoint that can't be used; OSError.
        """
        ranks = ranks or OneRank()
        faults: list[str] = []
        for saved in ranks.led(self._candidates):
            found = [fault for fault in ranks.each(partial(_fault, saved, ranks.rank, ranks.size)) if fault is not None]
            if not found:
                ranks.led(partial(self._begin_from, saved))
                return saved
            faults += found
            log(_LOG, "checkpoint skipped", logging.WARNING, step=saved.step, reason="; ".join(found))
        ranks.led(partial(self._refuse, faults))
        return None

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint, unverified; 0 for the model. Raises ConfigError as `newest`."""
        return max((saved.step for saved in self._candidates()), default=0)

    def _candidates(self) -> list[Saved]:
        """Return the checkpoints whose next batches are kept, newest first."""
        oldest, origin = self.oldest(), self._origin()
        own = [saved for saved in reversed(self._all()) if saved.step >= oldest]
        return [*own, origin] if origin is not None and oldest == origin.step else own

    def _refuse(self, faults: Sequence[str]) -> None:
        """Raise what no rank can go on from; return if the job begins with the model."""
        origin = self._origin()
        if self.oldest() > (origin.step if origin else 0):
            raise NoneLeft(
                f"no checkpoint in {self._directory} can be read, and the batches up to step {self.oldest()} are gone: "
                f"restore one from a backup, or make a new job; {'; '.join(faults)}"
            )
        if origin is not None:
            found = "; ".join(faults)
            raise Unready(f"the job can't begin from the checkpoint that spec.restoreFrom names: {found}; {ANOTHER}")

    def oldest(self) -> int:
        """Return the step of the oldest checkpoint that is kept, that which the job began from among them."""
        saved = self._all()
        return max(self._kept([each.step for each in saved])[0], self._replayed_from(saved))

    def _replayed_from(self, checkpoints: Sequence[Saved]) -> int:
        """Return the step up to which batches may be gone, as these checkpoints say."""
        found = 0
        for saved in checkpoints:
            with contextlib.suppress(OSError, ValidationError):  # torn: it says nothing
                found = max(found, Contents.read(saved.directory).replay_from)
        return found

    def write(
        self,
        step: int,
        *,
        keep: int,
        fill: Callable[[Path], None],
        prompt_position: PromptPosition | None = None,
    ) -> Saved:
        """Let `fill` write files into an empty directory, make that the checkpoint of `step`, keep the newest `keep`.

        Checkpoints of later steps are removed too: they did not verify, or this step would not be written now.
        Raises OSError and Superseded; no checkpoint has been added or removed then.
        """
        draft = self.begin(step)
        try:
            fill(draft)
            return self.finish(draft, step, keep=keep, prompt_position=prompt_position)
        except (OSError, Superseded):
            self.abandon(draft)
            raise

    def begin(self, step: int) -> Path:
        """Make an empty directory for the checkpoint of `step`. Raises OSError and Superseded."""
        self._refuse_if_superseded()
        for left in self._directory.iterdir():
            if (draft_of := _DRAFT.fullmatch(left.name)) and int(draft_of[1]) <= self._lineage:
                self._remove(left)  # one of a later lineage is being written
        draft = self._directory / f".step-{step:08d}-{self._lineage}.draft"
        draft.mkdir()
        return draft

    def finish(
        self,
        draft: Path,
        step: int,
        *,
        keep: int,
        digests: Mapping[str, Digest] | None = None,
        prompt_position: PromptPosition | None = None,
    ) -> Saved:
        """Make the directory that `begin` returned the checkpoint of `step`. Otherwise as `write`.

        digests: of the files that are hashed already.
        """
        self._keep = keep
        known = dict(digests or {})
        known |= digests_of(sorted(path for path in draft.iterdir() if path.name not in known))
        earlier = [saved for saved in self._all() if saved.step <= step]
        kept = self._kept([*(saved.step for saved in earlier), step])
        contents = Contents(
            format=FORMAT,
            step=step,
            lineage=self._lineage,
            digests=known,
            prompt_position=prompt_position,
            replay_from=max(kept[0], self._replayed_from(earlier)),
        )
        (draft / CONTENTS).write_text(contents.model_dump_json(indent=2))
        flush(draft)
        self._refuse_if_superseded()  # it may have taken minutes
        target = self._directory / checkpoint_name(step)
        take_place(draft, target)
        for left in self._directory.glob(_REMOVED.format("step-*")):
            self._remove(left)
        for saved in self._all():
            if saved.step not in kept and not (saved.step <= step and self._is_milestone(saved.step)):
                self._remove(saved.directory)
        return Saved(step, target)

    def _remove(self, directory: Path) -> None:
        """Remove a directory, or leave it under a name that is no checkpoint's, or as it is: others own files of it."""
        try:
            gone = directory
            if not directory.name.startswith("."):
                gone = directory.rename(directory.with_name(_REMOVED.format(directory.name)))
            shutil.rmtree(gone)
        except OSError as error:
            log(_LOG, "checkpoint not removed", logging.WARNING, reason=f"{directory}: {in_words(error)}")

    def abandon(self, draft: Path) -> None:
        """Remove an unfinished checkpoint, which may have filled a volume that others need too."""
        shutil.rmtree(draft, ignore_errors=True)

    def _refuse_if_superseded(self) -> None:
        for saved in self._all():
            with contextlib.suppress(OSError, ValidationError):  # torn: it belongs to no lineage
                lineage = Contents.read(saved.directory).lineage
                if lineage > self._lineage:
                    raise Superseded(
                        f"{saved.directory} is of lineage {lineage}, these trainers are of {self._lineage}"
                    )

    def _kept(self, steps: list[int]) -> list[int]:
        """Return the steps to keep, oldest first."""
        origin = self._origin()
        return sorted({origin.step if origin else 0, *steps})[-self._keep :]

    def _is_milestone(self, step: int) -> bool:
        return self._milestone_every is not None and step % self._milestone_every == 0

    def _origin(self) -> Saved | None:
        """Return the former checkpoint that the job began from, or will, unverified; None for the model.

        Raises ConfigError if there is no such checkpoint.
        """
        if self._former is None:
            return None
        try:
            step = Origin.model_validate_json((self._directory / ORIGIN).read_bytes()).step
        except FileNotFoundError:
            try:
                step = choose(self._former.directory, self._former.step).step
            except NoSuchCheckpoint as error:
                raise Unready(str(error)) from error
        return Saved(step, self._former.directory / checkpoint_name(step))

    def _begin_from(self, saved: Saved) -> None:
        """Write down which former checkpoint the job began from."""
        path, draft = self._directory / ORIGIN, self._directory / f".{ORIGIN}.draft"
        if self._former is not None and saved.directory.parent == self._former.directory and not path.exists():
            draft.write_text(Origin(step=saved.step).model_dump_json())
            sync(draft)
            draft.replace(path)
            sync(self._directory)

    def _all(self) -> list[Saved]:
        """Return all checkpoints, oldest first, unverified."""
        if not self._directory.is_dir():
            return []
        return [Saved(step, self._directory / checkpoint_name(step)) for step in steps_in(self._directory)]


def _fault(saved: Saved, rank: int, size: int) -> str | None:
    """Return what is wrong with the part of a checkpoint that this rank of so many verifies, or None."""
    try:
        contents = Contents.read(saved.directory)
        part = sorted(contents.digests)[rank::size]
        if others := [name for name in part if not (saved.directory / name).is_file()]:  # a device may have no end
            return f"{saved.directory / others[0]} is no file"
        found = digests_of([saved.directory / name for name in part], like=contents.digests)
        for name in part:
            if found[name] != contents.digests[name]:
                return f"{saved.directory / name} has changed since it was written"
    except (OSError, ValidationError) as error:
        return f"{saved.directory} is not whole: {error}"
    if (contents.format, contents.step) != (FORMAT, saved.step):
        return f"{saved.directory} holds step {contents.step} in format {contents.format}, not {saved.step} in {FORMAT}"
    return None
