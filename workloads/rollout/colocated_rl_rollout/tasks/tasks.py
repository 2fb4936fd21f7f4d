"""All the questions of a job and what their responses are worth, for `task_process`: its sources taking turns.

What is called here is other people's code. A *position* counts over all passes of the data, an *index* names one row of
it. The order of turns and of each pass depends on seeds and positions alone, so that a restart goes on where it was.
`make_tasks` looks at the whole of the data: what is wrong with it is said before the job begins.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import resource
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from colocated_rl_api.logs import in_places, is_ours
from colocated_rl_api.prompts import (
    Environment,
    HuggingFace,
    PromptFile,
    PromptFunction,
    Prompts,
    ReasoningGym,
    Source,
)
from colocated_rl_rollout.tasks.environments import EnvironmentTasks
from colocated_rl_rollout.tasks.gym import GymTask
from colocated_rl_rollout.tasks.passes import Passes
from colocated_rl_rollout.tasks.rewarded_rows import RewardedRows
from colocated_rl_rollout.tasks.task_wire import (
    Data,
    PromptContent,
    PromptRow,
    UnscoredRow,
)

SHORT_OF_MEMORY = ("cannot allocate memory", "failed to map segment")


class Task(Protocol):
    """One source. size: rows of it. digest: another one for other rows.

    Of one that is played a question says which it is, and is asked of nobody.
    """

    size: int
    digest: str

    def question(self, position: int) -> tuple[int, PromptContent]:
        """The index of the row at a position, and its question."""

    def score(self, index: int, response: str) -> float | dict[str, Any]:
        """The reward of a response to the question of a row; or the row, for an endpoint to reward."""


class MixPart(NamedTuple):
    task: Task
    weight: int = 1
    held_out_percent: int = 0


class Tasks:
    """Sources in turns: of as many positions in a row as all weights together, each source has its weight's.

    size: positions after which every source has been through its data. digest: of all of it. ends: of the rows of each.
    """

    def __init__(self, parts: Sequence[MixPart], *, seed: int) -> None:
        self._parts = parts
        turns = [number for number, part in enumerate(parts) for _ in range(part.weight)]
        self._turns = Passes(turns, seed=seed)
        self.ends = list(itertools.accumulate(part.task.size for part in parts))
        told = [f"{part.task.size} {part.task.digest}" for part in parts]
        self.digest = hashlib.sha256("\n".join(told).encode()).hexdigest()
        self.size = max(-(-part.task.size // part.weight) for part in parts) * len(turns)

    def question(self, position: int) -> PromptRow:
        block, place = divmod(position, len(self._turns))
        turns = self._turns[block]
        number = turns[place]
        part = self._parts[number]
        index, question = part.task.question(block * part.weight + turns[:place].count(number))
        held_out = is_held_out(question, percent=part.held_out_percent)
        played = isinstance(part.task, EnvironmentTasks)
        return PromptRow(self._start(number) + index, None if played else question, held_out)

    def score(self, index: int, response: str) -> float | UnscoredRow:
        number = bisect_right(self.ends, index)
        scored = self._parts[number].task.score(index - self._start(number), response)
        return UnscoredRow(source=number, **scored) if isinstance(scored, dict) else scored

    @property
    def data(self) -> Data:
        return Data(size=self.size, digest=self.digest, ends=tuple(self.ends))

    @property
    def environments(self) -> list[EnvironmentTasks]:
        return [part.task for part in self._parts if isinstance(part.task, EnvironmentTasks)]

    async def play(self, index: int, *, model: str, address: str) -> float:
        """Reward of an episode of a row that is played. Raises what its environment does."""
        number = bisect_right(self.ends, index)
        task = self._parts[number].task
        if not isinstance(task, EnvironmentTasks):
            raise NotPlayed(f"row {index} is of source {number}, which is no environment")
        return await task.play(index - self._start(number), model=model, address=address)

    def _start(self, number: int) -> int:
        return self.ends[number] - self._parts[number].task.size


class NotPlayed(Exception):
    """A row that is asked and not played was to be played."""


class SourceUnusable(Exception):
    """A source is not as the job says; the message says which, and what is wrong, to whoever wrote the job."""


def make_tasks(prompts: Prompts, *, claims: Path, cache: Path) -> Tasks:
    """claims: where they are mounted, each by its name. cache: for copies and downloads. Raises SourceUnusable."""
    parts = []
    for number, (source, weight) in enumerate(prompts.sources):
        try:
            task = _make_task(source, claims=claims, cache=cache)
        except (Exception, SystemExit) as error:  # of another's code too
            place = f"mix.sources[{number}]." if prompts.mix else ""
            raise SourceUnusable(f"{place}{source.title} can't be used: {described(error)}") from error
        parts.append(MixPart(task, weight, source.held_out_percent))
    return Tasks(parts, seed=prompts.seed)


def described(error: BaseException) -> str:
    """In words where they are ours. Of others the type, and where they were raised: their words may quote a prompt, a
    response or an answer, and what is said here is logged and told in the job's status.
    """
    if is_ours(error):
        said = str(error)
    elif isinstance(error, ModuleNotFoundError):
        said = f"{type(error).__name__}: No module named {error.name!r}"
    else:
        said = in_places(error)
    return said[:1000].encode(errors="replace").decode() + short_of_memory(error)


def short_of_memory(error: BaseException) -> str:
    """What to do about it, of an error for want of memory: neither Python nor a loader of libraries says how much."""
    size, _ = resource.getrlimit(resource.RLIMIT_AS)
    is_short = isinstance(error, MemoryError) or any(said in str(error).lower() for said in SHORT_OF_MEMORY)
    if not is_short or size == resource.RLIM_INFINITY:
        return ""
    return f"; its process may have {size >> 20} MiB: raise spec.rollout.prompts.resources.limits.memory"


def _make_task(source: Source, *, claims: Path, cache: Path) -> Task:
    match source:
        case ReasoningGym():
            return GymTask(source)
        case Environment():
            return EnvironmentTasks(source)
        case PromptFile() | HuggingFace() | PromptFunction():
            return RewardedRows(source, claims=claims, cache=cache)


def is_held_out(question: PromptContent, *, percent: int) -> bool:
    """Whether a question is kept from training: by its hash alone, so that every part of the system agrees."""
    text = question if isinstance(question, str) else json.dumps(question, sort_keys=True)
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % 100 < percent
