"""A checkpoint is a directory: its name, the file that lists what it holds, and which of several a job begins from.

Written by the trainer; read by the trainer, and by the rollout controller of a job with `spec.restoreFrom`. The other
files are the trainer's alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ValidationError

from colocated_rl_api.file_names import names_a_file
from colocated_rl_api.logs import in_words
from colocated_rl_api.names import PromptPosition
from colocated_rl_api.weights import Digest

FORMAT = 2
CONTENTS = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8})")


def _file_name(name: str) -> str:
    if not names_a_file(name):
        raise ValueError("it names no file of this directory")
    return name


FileName = Annotated[str, AfterValidator(_file_name)]


class NoSuchCheckpoint(Exception):
    """There is no checkpoint to begin from. The message says where, and what there is."""


class Contents(BaseModel):
    """Lists what a checkpoint holds, in a file of it."""

    format: int
    step: int
    lineage: int = 0  # of the trainers that wrote the checkpoint
    digests: dict[FileName, Digest]  # of every other file, by file name
    prompt_position: PromptPosition | None = None  # of its last batch's header; None: of an older trainer
    replay_from: int = 0  # batches up to this step may be gone since it was written; 0: of an older trainer

    @classmethod
    def read(cls, checkpoint: Path) -> Contents:
        """Read the file in the directory `checkpoint`. Raises OSError, ValidationError."""
        return cls.model_validate_json((checkpoint / CONTENTS).read_bytes())


def checkpoint_name(step: int) -> str:
    """Return the name of the directory that holds the checkpoint of `step`."""
    return f"step-{step:08d}"


def steps_in(directory: Path) -> list[int]:
    """Return the steps of all checkpoints in `directory`, oldest first, unverified. Raises OSError."""
    return sorted(int(match[1]) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name)))


def choose(directory: Path, step: int | None) -> Contents:
    """Return the contents of the checkpoint of `step`, or of the newest where it is None.

    Its files are not verified: that is for whoever reads them. Raises NoSuchCheckpoint.
    """
    try:
        steps = steps_in(directory)
    except OSError as error:
        raise NoSuchCheckpoint(
            f"{directory}, which spec.restoreFrom names, can't be read: {in_words(error)}"
        ) from error
    if not steps or step not in (None, *steps):
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        there = f"it has those of steps {', '.join(map(str, steps))}" if steps else "it has none"
        raise NoSuchCheckpoint(f"{directory}, which spec.restoreFrom names, has {what}: {there}")
    chosen = directory / checkpoint_name(steps[-1] if step is None else step)
    try:
        contents = Contents.read(chosen)
    except (OSError, ValidationError) as error:
        why = in_words(error) if isinstance(error, OSError) else f"its {CONTENTS} is torn"
        raise NoSuchCheckpoint(f"{chosen} is not whole: {why}; {ANOTHER}") from error
    if (contents.format, checkpoint_name(contents.step)) != (FORMAT, chosen.name):
        held = f"step {contents.step} in format {contents.format}"
        raise NoSuchCheckpoint(f"{chosen} holds {held}, wanted is format {FORMAT}; {ANOTHER}")
    return contents


ANOTHER = "copy it again, or make a job that names another step in spec.restoreFrom"
