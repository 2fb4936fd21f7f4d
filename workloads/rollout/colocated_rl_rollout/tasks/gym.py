"""Tasks of reasoning-gym, which is imported without the one of its dependencies that is a C program.

It imports pycosat, a solver of which there is no wheel, for one of its more than a hundred tasks. Images hold no
compiler, so they hold no pycosat either; in its place stands a module that says so to whoever calls it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
import warnings
from types import ModuleType
from typing import Any, NoReturn

from colocated_rl_api.logs import in_words
from colocated_rl_api.prompts import ReasoningGym
from colocated_rl_rollout.tasks.task_wire import PromptContent


class GymUnusable(Exception):
    """reasoning-gym does not make what the job describes."""


class TaskLacking(ModuleNotFoundError):
    """A task needs what this image has not."""


class GymTask:
    """One task, in its own order: its seed makes the questions."""

    def __init__(self, task: ReasoningGym) -> None:
        gym = import_reasoning_gym()
        try:
            self._dataset = gym.create_dataset(task.name, seed=task.seed, size=task.size, **task.config)
        except Exception as error:  # in its words: no question is made yet that they could quote
            raise GymUnusable(in_words(error)) from error
        self._answer_after = task.answer_after
        self.size, self.digest = len(self._dataset), ""  # the job's own words make the problems
        if self.size != task.size:
            raise GymUnusable(f"it has {self.size} problems, not the {task.size} of its size")
        self.question(0)  # what a task lacks it says when it makes one

    def question(self, position: int) -> tuple[int, PromptContent]:
        index = position % self.size
        return index, self._dataset[index]["question"]

    def score(self, index: int, response: str) -> float:
        """1 if the verifier gives full marks, else 0."""
        answer = answer_in(response, self._answer_after)
        if answer is None:
            return 0.0
        return float(self._dataset.score_answer(answer, self._dataset[index]) == 1.0)


def answer_in(text: str, answer_after: str | None) -> str | None:
    """What follows the last mark; None when there is none. The whole text when no mark is asked for."""
    if answer_after is None:
        return text.strip()
    _before, mark, answer = text.rpartition(answer_after)
    return answer.strip() if mark else None


@functools.cache  # what stands in for pycosat can't be looked for a second time
def import_reasoning_gym() -> Any:
    """The package `reasoning_gym`. Takes seconds."""
    if importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = _stand_in()
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # where it keeps its list of fonts is no news
    with warnings.catch_warnings():  # of a package that it imports, when that is compiled
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
    return reasoning_gym


def _stand_in() -> ModuleType:
    module = ModuleType("pycosat", "Not installed.")
    for function in ("solve", "itersolve"):
        setattr(module, function, _refuse)
    return module


def _refuse(*_: object, **__: object) -> NoReturn:
    raise TaskLacking(
        "zebra_puzzles needs pycosat, which this image lacks: add it (`pip install pycosat` compiles it) to an image "
        "of your own, or choose another task",
        name="pycosat",
    )
