"""What is kept of a run: the job as it ended and the log lines of its members. The report comes from this alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

JOB_TOOK = "job, from its creation to its end"


@dataclass(frozen=True)
class Records:
    """`took_s`: by name, what the demo measured itself, on its own clock."""

    job: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    took_s: Mapping[str, float]

    @property
    def job_s(self) -> float | None:
        """From the job's creation to its end."""
        return self.took_s.get(JOB_TOOK)

    @classmethod
    def read(cls, file: Path) -> Self:
        return cls(**json.loads(file.read_text()))

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))
