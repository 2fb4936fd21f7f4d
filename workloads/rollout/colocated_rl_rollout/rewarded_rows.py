"""Rows of data as questions, rewarded as their source says: by a function, by mathematics, by an endpoint."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from colocated_rl_api.prompts import HuggingFace, PromptFile, Reward, RowSource
from colocated_rl_rollout.hub import fetch
from colocated_rl_rollout.mathematics import answer_fault, load_math_reward
from colocated_rl_rollout.passes import Passes
from colocated_rl_rollout.rows import Row, Rows, data_files
from colocated_rl_rollout.task_wire import REWARD_AT_MOST, Question

Score = Callable[[str, Row], Any]


class RewardedRows:
    """Rows of a source, in another order in each pass."""

    def __init__(self, source: PromptFile | HuggingFace, *, claims: Path, cache: Path) -> None:
        self._field = source.prompt_field
        if isinstance(source, PromptFile):
            path = claims / source.claim_name / source.path
            files, beside = data_files(path), [path.parent]
        else:
            files, beside = fetch(source, cache=cache / "hub"), []
        self._rows = Rows(files, cache=cache / "rows", check=lambda row: _fault(row, source))
        self.size, self.digest = len(self._rows), self._rows.digest
        self._score = _score(source.reward, beside)
        self._passes = Passes(range(self.size), seed=source.seed)

    def question(self, position: int) -> tuple[int, Question]:
        data_pass, place = divmod(position, self.size)
        index = self._passes[data_pass][place]
        question: Question = self._rows[index][self._field]
        return index, question

    def score(self, index: int, response: str) -> float | dict[str, Any]:
        """A number; or the row, for an endpoint."""
        row = self._rows[index]
        if self._score is None:
            return {"prompt": row[self._field], "fields": row}
        reward = self._score(response, row)
        if not isinstance(reward, int | float) or not abs(reward) <= REWARD_AT_MOST:
            what = str(reward) if isinstance(reward, float) else f"a {type(reward).__name__}"  # a str may be a response
            raise ValueError(f"{what} is no reward: return a finite number, at most {REWARD_AT_MOST:.0f} either way")
        return float(reward)


def _score(reward: Reward, beside: list[Path]) -> Score | None:
    """None: an endpoint is asked, and not from here."""
    if reward.function:
        return _function(reward.function, beside)
    return load_math_reward(reward.math) if reward.math else None


def _function(name: str, beside: list[Path]) -> Score:
    """MODULE:FUNCTION, in the image or beside the file."""
    sys.path += map(str, beside)  # last: a file `random.py` there is nobody else's random
    sys.dont_write_bytecode = True  # a claim is mounted read-only
    module, _, function = name.partition(":")
    loaded = importlib.import_module(module)
    origin = getattr(loaded, "__file__", None)
    for path in beside:
        own = path / f"{module.replace('.', '/')}.py"
        if own.exists() and not (origin and own.samefile(origin)):
            raise ValueError(f"module {module} beside the file is hidden by {origin or 'Python'}: give it another name")
    found = getattr(loaded, function, None)
    if not callable(found):
        raise ValueError(f"module {module} has no function {function}: set reward.function to MODULE:FUNCTION")
    return found  # type: ignore[no-any-return]


def _fault(row: Row, source: RowSource) -> str | None:
    """What is wrong with a row, in words for whoever wrote it."""
    return _question_fault(row, source.prompt_field) or (
        answer_fault(row, source.reward.math) if source.reward.math else None
    )


def _question_fault(row: Row, field: str) -> str | None:
    if field not in row:
        return f"has no {field!r}, only {', '.join(map(repr, row))}: set promptField"
    question = row[field]
    is_conversation = isinstance(question, list) and all(
        isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in question
    )
    if not question or not (isinstance(question, str) or is_conversation):
        return f"{field!r} should be a text, or a list of messages with role and content"
    return None
