"""Checkpoints as directories that are there whole or not at all: `step-00000012`, in a volume that the ranks share.

A checkpoint is filled under another name, hashed, flushed to the disk and renamed; what stands under its own name is
whole. It is verified against its hashes when it is read, and one that does not verify is passed over with a warning.
The model as the job began with it counts as the checkpoint of step 0. Of these the newest `keep` are kept, and with
them the sealed batches since the oldest, so that whichever is read, the steps after it can be done again. There is no
way back beyond them: then `NoneLeft`, rather than a step whose batches are gone.
A writer that was cut off, and whose job went on without it, finds checkpoints of a later lineage and writes none.
What the files hold is the caller's matter. No clean-up touches a name that is not a checkpoint's.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from colocated_rl_api.logs import log
from colocated_rl_api.weights import Digest
from colocated_rl_trainer.protocol.durable import flush, take_place
from colocated_rl_trainer.protocol.manifest import digests_of
from colocated_rl_trainer.protocol.rank import Refused

FORMAT = 2
CONTENTS = "checkpoint.json"
OPTIMIZER = (
    "optimizer.state"  # its state, where a checkpoint has some; no *.safetensors, which loaders take for weights
)
_NAME = re.compile(r"step-(\d{8})")
_DRAFT = re.compile(r"\.step-\d{8}-(\d+)\.draft")

_LOG = logging.getLogger(__name__)


class Contents(BaseModel):
    """The file that says what a checkpoint holds."""

    format: int
    step: int
    lineage: int = 0  # of the trainers that wrote it
    digests: dict[str, Digest]  # by file name, of every other file


@dataclass(frozen=True)
class Saved:
    step: int
    directory: Path


class Superseded(Refused):
    """Trainers of a later lineage write checkpoints here: the job has gone on without these."""


class NoneLeft(Exception):
    """No checkpoint verifies, and the batches since the job's beginning are gone. Only a person can help."""


class Checkpoints:
    """The checkpoints of one job. One rank of the newest lineage writes, any number may read."""

    def __init__(self, directory: Path, *, lineage: int, keep: int) -> None:
        self._directory = directory
        self._lineage = lineage
        self._keep = keep

    def newest(self) -> Saved | None:
        """The newest checkpoint that verifies; None: the model. Raises NoneLeft, and OSError if nothing can be read."""
        faults = []
        for saved in reversed(self._all()):
            fault = _fault(saved)
            if fault is None:
                return saved
            faults.append(fault)
            log(_LOG, "checkpoint passed over", logging.WARNING, step=saved.step, reason=fault)
        if self.oldest() > 0:
            raise NoneLeft(
                f"no checkpoint in {self._directory} can be read, and the batches up to step {self.oldest()} are gone: "
                f"restore one from a backup, or make a new job; {'; '.join(faults)}"
            )
        return None

    def oldest(self) -> int:
        """Step of the oldest that is kept; 0: the model."""
        return self._kept([saved.step for saved in self._all()])[0]

    def write(self, step: int, *, keep: int, fill: Callable[[Path], None]) -> Saved:
        """Let `fill` write files into an empty directory, make that the checkpoint of `step`, keep the newest `keep`.

        Any of a later step goes as well: it did not verify, or this step would not be written now.
        Raises OSError and Superseded; then no checkpoint has come or gone.
        """
        draft = self.begin(step)
        try:
            fill(draft)
            return self.finish(draft, step, keep=keep)
        except (OSError, Superseded):
            self.abandon(draft)
            raise

    def begin(self, step: int) -> Path:
        """An empty directory for the checkpoint of `step`. Raises OSError and Superseded."""
        self._refuse_if_superseded()
        for left in self._directory.iterdir():
            if (draft_of := _DRAFT.fullmatch(left.name)) and int(draft_of[1]) <= self._lineage:
                shutil.rmtree(left)  # one of a later lineage is being written
        draft = self._directory / f".step-{step:08d}-{self._lineage}.draft"
        draft.mkdir()
        return draft

    def finish(self, draft: Path, step: int, *, keep: int, digests: Mapping[str, Digest] | None = None) -> Saved:
        """Make what stands in the directory that `begin` gave the checkpoint of `step`. As `write` otherwise.

        digests: of the files that are hashed already.
        """
        self._keep = keep
        known = dict(digests or {})
        known |= digests_of(sorted(path for path in draft.iterdir() if path.name not in known))
        contents = Contents(format=FORMAT, step=step, lineage=self._lineage, digests=known)
        (draft / CONTENTS).write_text(contents.model_dump_json(indent=2))
        flush(draft)
        self._refuse_if_superseded()  # it may have taken minutes
        target = self._directory / f"step-{step:08d}"
        take_place(draft, target)
        kept = self._kept([saved.step for saved in self._all() if saved.step <= step])
        for saved in self._all():
            if saved.step not in kept:
                shutil.rmtree(saved.directory)
        return Saved(step, target)

    def abandon(self, draft: Path) -> None:
        """It may have filled the volume, which others need too."""
        shutil.rmtree(draft, ignore_errors=True)

    def _refuse_if_superseded(self) -> None:
        for saved in self._all():
            with contextlib.suppress(OSError, ValidationError):  # torn: nobody's any more
                lineage = _contents(saved).lineage
                if lineage > self._lineage:
                    raise Superseded(
                        f"{saved.directory} is of lineage {lineage}, these trainers are of {self._lineage}"
                    )

    def _kept(self, steps: list[int]) -> list[int]:
        """Oldest first."""
        return sorted({0, *steps})[-self._keep :]

    def _all(self) -> list[Saved]:
        """Oldest first, unverified."""
        if not self._directory.is_dir():
            return []
        named = ((_NAME.fullmatch(path.name), path) for path in self._directory.iterdir())
        return sorted((Saved(int(match[1]), path) for match, path in named if match), key=lambda saved: saved.step)


def _fault(saved: Saved) -> str | None:
    try:
        contents = _contents(saved)
        found = digests_of([saved.directory / name for name in contents.digests], like=contents.digests)
        for name, digest in contents.digests.items():
            if found[name] != digest:
                return f"{saved.directory / name} has changed since it was written"
    except (OSError, ValidationError) as error:
        return f"{saved.directory} is not whole: {error}"
    if (contents.format, contents.step) != (FORMAT, saved.step):
        return f"{saved.directory} holds step {contents.step} in format {contents.format}, not {saved.step} in {FORMAT}"
    return None


def _contents(saved: Saved) -> Contents:
    return Contents.model_validate_json((saved.directory / CONTENTS).read_bytes())
