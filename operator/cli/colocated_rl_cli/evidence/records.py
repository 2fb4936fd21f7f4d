"""Keep the records of a job: its last observed object, its members' log lines, its events.

Reports are made from these records alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import pydantic

from colocated_rl_api.job import ColocatedRLJobSpec
from colocated_rl_api.ladder import TIME_SLICED, Ladder, ladder_for
from colocated_rl_api.rungs import Placement, ReferencePlacement


def ladder_of(job: Mapping[str, Any]) -> Ladder:
    """Return the job's ladder by its status or, before there is one, its spec; time-sliced if neither is readable."""
    placement = job.get("status", {}).get("placement")
    if placement in set(Placement):
        reference, default = job.get("spec", {}).get("reference"), ReferencePlacement.WITH_TRAINER
        is_trainers = reference is not None and reference.get("placement", default) == default
        return ladder_for(Placement(placement), scores=is_trainers)
    try:
        return ColocatedRLJobSpec.model_validate(job.get("spec")).ladder
    except pydantic.ValidationError:
        return TIME_SLICED


def read_line(text: str) -> dict[str, Any] | None:
    """Parse a line of a member's log; return None for other output, or a line cut off as its container ended."""
    if not text.startswith("{"):
        return None
    try:
        line: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line.get("ts"), int | float) else None


@dataclass(frozen=True)
class Records:
    """Holds the records of one job. took_s: durations by name that the recorder measured on its own clock."""

    job: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]] = ()
    took_s: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read the records in a file. Raises OSError, TypeError or ValueError if it holds none."""
        found = cls(**json.loads(file.read_text(encoding="utf-8")))
        if not all(isinstance(one, dict) for one in (found.job, *found.lines, *found.events)):
            raise TypeError("a job, lines and events are objects")
        return found

    @property
    def ladder(self) -> Ladder:
        return ladder_of(self.job)

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def write(self, file: Path) -> None:
        file.write_text(self.as_json(), encoding="utf-8")
