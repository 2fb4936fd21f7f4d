"""Combine the sources of a job, which take turns, into its prompts and their rewards, for `task_process`.

This module calls other people's code. A *position* counts over all passes of the data, an *index* names one row of it.
The order of turns and of each pass depends on seeds and positions alone, so that a restart resumes where it was.
`make_tasks` reads the whole of the data: faults in it are reported before the job begins.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import resource
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from colocated_rl_api.job import EvaluationSet
from colocated_rl_api.logs import in_places, is_ours
from colocated_rl_api.prompts import (
    HELD_OUT_PERCENT,
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
from colocated_rl_rollout.tasks.rewarded_rows import RewardedRows, beside, load_function
from colocated_rl_rollout.tasks.task_wire import (
    Data,
    PromptContent,
    PromptRow,
    RewardAnswer,
    UnscoredRow,
)

GroupFilter = Callable[[Sequence[Any], dict[str, Any] | None], Any]  # of the job
SHORT_OF_MEMORY = ("cannot allocate memory", "failed to map segment")


class Task(Protocol):
    """Reads one source. size: its number of rows. digest: differs for other rows.

    For a source that is played a prompt only identifies the task, and nobody is asked it.
    """

    size: int
    digest: str

    def prompt(self, position: int) -> tuple[int, PromptContent]:
        """Return the index of the row at a position, and its prompt."""

    def row(self, index: int) -> dict[str, Any] | None:
        """Return a row as reward functions see it; None where there is none."""

    def score(self, index: int, response: str) -> float | RewardAnswer | dict[str, Any]:
        """Return the reward of a response to the prompt of a row; or the row, for an endpoint to reward."""


class MixPart(NamedTuple):
    """A source, with its share of the prompts of rollout: 0 of a set of the evaluation."""

    task: Task
    weight: int = 1
    held_out_percent: int = 0


class Tasks:
    """Takes turns between sources: of as many positions in a row as the weights add up to, each source has its
    weight's.

    size: positions after which every such source has been through its data. digest: of all of their rows. sets_digest:
    of the others'. ends: of each source's rows.
    """

    def __init__(
        self, parts: Sequence[MixPart], *, seed: int, filters: Mapping[str, GroupFilter] | None = None
    ) -> None:
        self._parts = parts
        self._filters = filters or {}
        turns = [number for number, part in enumerate(parts) for _ in range(part.weight)]
        self._turns = Passes(turns, seed=seed)
        self.ends = list(itertools.accumulate(part.task.size for part in parts))
        self.digest = _digest([part.task for part in parts if part.weight])
        self.sets_digest = _digest([part.task for part in parts if not part.weight])
        self.size = max(-(-part.task.size // part.weight) for part in parts if part.weight) * len(turns)

    def prompt(self, position: int) -> PromptRow:
        """Return the prompt at a position of rollout's prompts."""
        block, place = divmod(position, len(self._turns))
        turns = self._turns[block]
        number = turns[place]
        return self.prompt_of(number, block * self._parts[number].weight + turns[:place].count(number))

    def prompt_of(self, number: int, position: int) -> PromptRow:
        """Return the prompt at a position of one source."""
        part = self._parts[number]
        index, prompt = part.task.prompt(position)
        held_out = is_held_out(prompt, percent=part.held_out_percent)
        played = isinstance(part.task, EnvironmentTasks)
        return PromptRow(self._start(number) + index, None if played else prompt, held_out)

    def score(self, index: int, response: str) -> float | RewardAnswer | UnscoredRow:
        number = bisect_right(self.ends, index)
        scored = self._parts[number].task.score(index - self._start(number), response)
        return UnscoredRow(source=number, **scored) if isinstance(scored, dict) else scored

    def dropped_by(self, index: int | None, samples: Sequence[Any]) -> str | None:
        """Return the first filter function that drops a group, or None. index: of its row; None: it has none.

        Raises the function's own errors, and NoVerdict.
        """
        row = None
        if index is not None:
            number = bisect_right(self.ends, index)
            row = self._parts[number].task.row(index - self._start(number))
        for name, keeps in self._filters.items():
            if not _verdict(name, keeps(samples, row)):
                return name
        return None

    @property
    def data(self) -> Data:
        return Data(size=self.size, digest=self.digest, sets_digest=self.sets_digest, ends=tuple(self.ends))

    @property
    def environments(self) -> list[EnvironmentTasks]:
        return [part.task for part in self._parts if isinstance(part.task, EnvironmentTasks)]

    async def play(self, index: int, *, model: str, address: str) -> RewardAnswer:
        """Play an episode of a row and return its reward. Raises the environment's errors."""
        number = bisect_right(self.ends, index)
        task = self._parts[number].task
        if not isinstance(task, EnvironmentTasks):
            raise NotPlayed(f"row {index} is of source {number}, which is no environment")
        return await task.play(index - self._start(number), model=model, address=address)

    def _start(self, number: int) -> int:
        return self.ends[number] - self._parts[number].task.size


def _verdict(name: str, given: Any) -> bool:
    if type(given).__name__ not in ("bool", "bool_"):  # the latter is numpy's, which this module does not load
        raise NoVerdict(
            f"filter function {name} returned a {type(given).__name__}: return True to keep the group, or False"
        )
    return bool(given)


def _digest(tasks: Sequence[Task]) -> str:
    digested = [f"{task.size} {task.digest}" for task in tasks]
    return hashlib.sha256("\n".join(digested).encode()).hexdigest()


class NotPlayed(Exception):
    """The row is asked and not played, but an episode of it was requested."""


class NoVerdict(ValueError):
    """A filter function returned something that is no verdict."""


class SourceUnusable(Exception):
    """A source does not match the job; the message names it and what is wrong."""


def make_tasks(
    prompts: Prompts, sets: Iterable[EvaluationSet] = (), filters: Iterable[str] = (), *, claims: Path, cache: Path
) -> Tasks:
    """Make the tasks, and load functions that judge groups.

    claims: where they are mounted, by name. cache: for copies, downloads. Raises SourceUnusable.
    """
    make = partial(_make_part, claims=claims, cache=cache)
    parts = []
    for number, (source, weight) in enumerate(prompts.sources):
        place = "rollout.prompts." + (f"mix.sources[{number}]." if prompts.mix else "")
        parts.append(make(source, weight, place=place, held_out_percent=HELD_OUT_PERCENT))
    parts += [
        make(each.source, 0, place=f"evaluation.sets, {each.name}: ", held_out_percent=100)
        for each in sets
        if each.source is not None
    ]
    places = [path for source, _ in prompts.sources for path in beside(source, claims=claims)]
    return Tasks(parts, seed=prompts.seed, filters={name: _load_filter(name, places) for name in filters})


def _load_filter(name: str, places: list[Path]) -> GroupFilter:
    """Load a filter function. Raises SourceUnusable."""
    try:
        return load_function(name, places, of={"the samples of a group": [], "their row": {}})
    except (Exception, SystemExit) as error:  # of another's code too
        raise SourceUnusable(f"rollout.filterFunctions, {name}, can't be used: {described(error)}") from error


def _make_part(source: Source, weight: int, *, place: str, held_out_percent: int, claims: Path, cache: Path) -> MixPart:
    """Make one part. held_out_percent: where the source names none. Raises SourceUnusable."""
    try:
        task = _make_task(source, claims=claims, cache=cache)
    except (Exception, SystemExit) as error:  # of another's code too
        raise SourceUnusable(f"{place}{source.title} can't be used: {described(error)}") from error
    return MixPart(task, weight, held_out_percent if source.held_out_percent is None else source.held_out_percent)


def described(error: BaseException) -> str:
    """Describe an error by its message where it is ours. Otherwise by its type, and where it was raised: its message
    may quote a prompt, a response or an answer, and the description goes into the log and the job's status.
    """
    if is_ours(error):
        message = str(error)
    elif isinstance(error, ModuleNotFoundError):
        message = f"{type(error).__name__}: No module named {error.name!r}"
    else:
        message = in_places(error)
    return message[:1000].encode(errors="replace").decode() + short_of_memory(error)


def short_of_memory(error: BaseException) -> str:
    """Return advice for an error for want of memory, else an empty text: neither Python nor a loader of libraries gives
    an amount.
    """
    size, _ = resource.getrlimit(resource.RLIMIT_AS)
    told = str(error).lower() if isinstance(error, OSError | ImportError) else ""  # another's text may raise an error
    is_short = isinstance(error, MemoryError) or any(words in told for words in SHORT_OF_MEMORY)
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


def is_held_out(prompt: PromptContent, *, percent: int) -> bool:
    """Return whether a prompt is kept from training: by its hash alone, so that every part of the system agrees."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % 100 < percent
