"""Run tasks of reasoning-gym, which is imported without the one of its dependencies that is a C program.

It imports pycosat, a solver without a wheel, for one of its more than a hundred tasks. Images hold no compiler, so they
hold no pycosat either; a module in its place raises an error that names the lack to whoever calls it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import random
import sys
import warnings
from types import ModuleType
from typing import Any, NoReturn

from colocated_rl_api.logs import in_words
from colocated_rl_api.prompts import ReasoningGym
from colocated_rl_rollout.tasks.task_wire import PromptContent


class GymUnusable(Exception):
    """reasoning-gym can't make what the job describes."""


class TaskLacking(ModuleNotFoundError):
    """A task needs a package that this image lacks."""


class GymTask:
    """Makes the prompts of one task, in its own order, from its seed."""

    def __init__(self, task: ReasoningGym) -> None:
        gym = import_reasoning_gym()
        try:
            self._dataset = gym.create_dataset(task.name, seed=task.seed, size=task.size, **task.config)
        except Exception as error:  # its message is safe: no prompt exists yet that it could quote
            raise GymUnusable(in_words(error)) from error
        self._answer_after = task.answer_after
        self._seed = task.seed
        self.size, self.digest = len(self._dataset), ""  # the job's own settings make the problems
        if self.size != task.size:
            raise GymUnusable(f"it has {self.size} problems, not the {task.size} of its size")
        self.prompt(0)  # a task reports a missing package only when it makes a prompt

    def prompt(self, position: int) -> tuple[int, PromptContent]:
        index = position % self.size
        return index, self.row(index)["question"]

    def row(self, index: int) -> dict[str, Any]:
        """Make a problem: the same one each time, also of a task that draws from a generator of the whole process."""
        random.seed(f"{self._seed}/{index}")
        sys.modules["numpy"].random.seed(random.getrandbits(32))  # reasoning-gym imports it, and no other task needs it
        entry: dict[str, Any] = self._dataset[index]
        return entry

    def score(self, index: int, response: str) -> float:
        """Return 1 if the verifier gives full marks, else 0."""
        answer = answer_in(response, self._answer_after)
        if answer is None:
            return 0.0
        return float(self._dataset.score_answer(answer, self.row(index)) == 1.0)


def answer_in(text: str, answer_after: str | None) -> str | None:
    """Return the text after the last mark, or None without one; the whole text when no mark is required."""
    if answer_after is None:
        return text.strip()
    _before, mark, answer = text.rpartition(answer_after)
    return answer.strip() if mark else None


@functools.cache  # the stand-in for pycosat can't be looked up a second time
def import_reasoning_gym() -> Any:
    """Import the package `reasoning_gym`. Takes seconds."""
    if importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = _stand_in()
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # the place of its list of fonts is no news
    with warnings.catch_warnings():  # of a package that it imports, when Python compiles that
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
