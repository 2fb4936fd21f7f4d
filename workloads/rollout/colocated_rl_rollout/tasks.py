"""Where questions and rewards come from: a task of reasoning-gym, or a file of one's own with a function of one's own.

Lives in `task_process`: what it calls is other people's code. A *position* counts over all passes of the data, an
*index* names one row of it; the order of a pass depends on the seed and the pass alone, so that a restart goes on where
it was. `make_task` looks at the whole of the data: what is wrong with it is said before the job begins.
"""

from __future__ import annotations

import importlib
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from colocated_rl_api.job import PromptFile, Prompts, ReasoningGym
from colocated_rl_rollout.gym import import_reasoning_gym
from colocated_rl_rollout.task_wire import Question


class Task(Protocol):
    size: int

    def question(self, position: int) -> tuple[int, Question]:
        """The index of the row at a position, and its question."""

    def score(self, index: int, response: str) -> float:
        """The reward of a response to the question of a row."""


def make_task(prompts: Prompts, directory: Path) -> Task:
    """directory: where the claim of a file is mounted. Raises whatever is wrong, in words for whoever wrote the job."""
    source = prompts.source
    return GymTask(source) if isinstance(source, ReasoningGym) else FileTask(source, directory)


class GymTask:
    """One task of reasoning-gym, in its own order: its seed makes the questions."""

    def __init__(self, task: ReasoningGym) -> None:
        self._dataset = import_reasoning_gym().create_dataset(task.name, seed=task.seed, size=task.size, **task.config)
        self._answer_after = task.answer_after
        self.size = len(self._dataset)
        if self.size != task.size:
            raise ValueError(f"it has {self.size} problems, not the {task.size} of its size")
        self.question(0)  # what a task lacks it says when it makes one

    def question(self, position: int) -> tuple[int, Question]:
        index = position % self.size
        return index, self._dataset[index]["question"]

    def score(self, index: int, response: str) -> float:
        """1 if the verifier gives full marks, else 0."""
        answer = answer_in(response, self._answer_after)
        if answer is None:
            return 0.0
        return float(self._dataset.score_answer(answer, self._dataset[index]) == 1.0)


class FileTask:
    """Rows of a file in JSON lines, in another order in each pass, scored by a function that finds them whole."""

    def __init__(self, source: PromptFile, directory: Path) -> None:
        self._field = source.prompt_field
        self._seed = source.seed
        self._path = directory / source.path
        self._file = self._path.open("rb")
        self._lines = self._look_through()
        self.size = len(self._lines)
        self._reward = _function(source.reward, self._path.parent)
        self._pass = -1
        self._order: Sequence[int] = ()

    def question(self, position: int) -> tuple[int, Question]:
        data_pass, place = divmod(position, self.size)
        if data_pass != self._pass:
            order = list(range(self.size))
            random.Random(f"{self._seed}/{data_pass}").shuffle(order)
            self._pass, self._order = data_pass, order
        index = self._order[place]
        question: Question = self._row(index)[self._field]
        return index, question

    def score(self, index: int, response: str) -> float:
        """What the function says: any finite number."""
        reward = self._reward(response, self._row(index))
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise ValueError(f"{reward!r} is no reward: return a finite number")
        return float(reward)

    def _row(self, index: int) -> dict[str, Any]:
        self._file.seek(self._lines[index])
        row: dict[str, Any] = json.loads(self._file.readline())
        return row

    def _look_through(self) -> list[int]:
        """Where each row begins. Raises ValueError, which names the line that is wrong."""
        starts, start = [], 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                if fault := _fault(line, self._field):
                    raise ValueError(f"line {number} of {self._path.name}: {fault}")
                starts.append(start)
            start += len(line)
        if not starts:
            raise ValueError(f"{self._path.name} has no lines")
        return starts


def _fault(line: bytes, field: str) -> str | None:
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"no JSON: {error}"
    if not isinstance(row, dict):
        return "no JSON object"
    if field not in row:
        return f"has no {field!r}, only {', '.join(map(repr, row))}: set promptField"
    question = row[field]
    is_conversation = isinstance(question, list) and all(
        isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in question
    )
    if not question or not (isinstance(question, str) or is_conversation):
        return f"{field!r} should be a text, or a list of messages with role and content"
    return None


def _function(name: str, directory: Path) -> Callable[[str, dict[str, Any]], Any]:
    """MODULE:FUNCTION, in the image or beside the file."""
    sys.path.append(str(directory))  # last: a file `random.py` there is nobody else's random
    sys.dont_write_bytecode = True  # a claim is mounted read-only
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise ValueError(f"module {module} has no function {function}: set reward to MODULE:FUNCTION")
    return found  # type: ignore[no-any-return]


def answer_in(response: str, answer_after: str | None) -> str | None:
    """What the verifier is shown of a response; None when it has no answer."""
    if answer_after is None:
        return response.strip()
    _before, mark, answer = response.rpartition(answer_after)
    return answer.strip() if mark else None
