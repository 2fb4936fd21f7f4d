"""Turn rows of data into prompts, rewarded as their source names: by a function, by mathematics, by an endpoint."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat

from pydantic import ValidationError

from colocated_rl_api.prompts import HuggingFace, PromptFile, PromptFunction, Reward, RowSource, Source
from colocated_rl_rollout.tasks.hub import fetch
from colocated_rl_rollout.tasks.mathematics import answer_fault, load_math_reward
from colocated_rl_rollout.tasks.passes import Passes
from colocated_rl_rollout.tasks.rows import (
    MadeRows,
    Row,
    Rows,
    RowsUnusable,
    data_files,
    member,
)
from colocated_rl_rollout.tasks.task_wire import FIGURES_AT_MOST, REWARD_AT_MOST, PromptContent, RewardAnswer

Score = Callable[[str, Row], Any]


class NoReward(ValueError):
    """A reward function returned something that is no reward."""


class FunctionUnusable(Exception):
    """A function that the job names can't be called with the arguments it gets."""


class RewardedRows:
    """Holds the rows of a source, in another order in each pass."""

    def __init__(self, source: PromptFile | HuggingFace | PromptFunction, *, claims: Path, cache: Path) -> None:
        self._field = source.prompt_field
        self._rows = _rows(source, claims=claims, cache=cache)
        self.size, self.digest = len(self._rows), self._rows.digest
        self._score = _score(source.reward, beside(source, claims=claims))
        self._passes = Passes(range(self.size), seed=source.seed)

    def prompt(self, position: int) -> tuple[int, PromptContent]:
        data_pass, place = divmod(position, self.size)
        index = self._passes[data_pass][place]
        prompt: PromptContent = member(self._rows[index], self._field)
        return index, prompt

    def row(self, index: int) -> Row:
        return self._rows[index]

    def score(self, index: int, response: str) -> RewardAnswer | dict[str, Any]:
        """Return the reward; or the row, for an endpoint."""
        row = self._rows[index]
        if self._score is None:
            return {"prompt": member(row, self._field), "fields": row}
        return _answer(self._score(response, row))


def _answer(given: Any) -> RewardAnswer:
    """Return what a reward function has returned: a number, or a dict of a reward and figures. Raises NoReward."""
    if not isinstance(given, Mapping):
        return RewardAnswer(reward=_number(given, "reward"))
    figures = given.get("figures", {})
    if not {"reward"} <= given.keys() <= {"reward", "figures"} or not isinstance(figures, Mapping):
        raise NoReward('it is another dict than {"reward": NUMBER, "figures": {NAME: NUMBER}}: return that or a number')
    numbers = {name: _number(figure, "figure") for name, figure in figures.items()}
    try:
        return RewardAnswer(reward=_number(given["reward"], "reward"), figures=numbers)
    except ValidationError as error:  # its message may quote a name, and a name a response
        raise NoReward(
            f"its figures have other names, or are too many: name at most {FIGURES_AT_MOST}, each with at most 64 of "
            "A-Z, a-z, 0-9, '_', '.', '/' and '-'"
        ) from error


def _number(given: Any, what: str) -> float:
    is_number = isinstance(given, SupportsFloat) and not isinstance(given, str)  # numpy's are no int or float
    number = float(given) if is_number else None
    if number is None or not abs(number) <= REWARD_AT_MOST:
        found = f"a {type(given).__name__}" if number is None else number  # a str may be a response
        raise NoReward(f"{found} is no {what}: return a finite number, at most {REWARD_AT_MOST:.0f} either way")
    return number


def beside(source: Source, *, claims: Path) -> list[Path]:
    """Return where modules may be beside those of the image."""
    match source:
        case PromptFile():
            return [(claims / source.claim_name / source.path).parent]
        case PromptFunction(claim_name=str(claim)):
            return [claims / claim]
        case _:
            return []


def _rows(source: PromptFile | HuggingFace | PromptFunction, *, claims: Path, cache: Path) -> Rows | MadeRows:
    check = partial(_fault, source=source)
    match source:
        case PromptFile():
            path = claims / source.claim_name / source.path
            return Rows(data_files(path), cache=cache / "rows", check=check)
        case HuggingFace():
            return Rows(fetch(source, cache=cache / "hub"), cache=cache / "rows", check=check)
        case PromptFunction():
            make = load_function(source.name, beside(source, claims=claims), of={"a number": 0})
            return MadeRows(make, size=source.size, check=check)


def _score(reward: Reward, places: list[Path]) -> Score | None:
    """Return the reward function; None where an endpoint is asked, and not from here."""
    if reward.function:
        return load_function(reward.function, places, of={"a response": "", "its row": {}})
    return load_math_reward(reward.math) if reward.math else None


def load_function(name: str, places: list[Path], *, of: Mapping[str, object]) -> Callable[..., Any]:
    """Return MODULE:FUNCTION, in the image or beside the rows. of: its arguments, each by what it is."""
    sys.path += [str(path) for path in places if str(path) not in sys.path]  # last: a `random.py` is nobody else's
    sys.dont_write_bytecode = True  # a claim is mounted read-only
    module, _, function = name.partition(":")
    loaded = importlib.import_module(module)
    origin = getattr(loaded, "__file__", None)
    for path in places:
        own = path / f"{module.replace('.', '/')}.py"
        if own.exists() and not (origin and own.samefile(origin)):
            hidden = f"module {module} beside the rows is hidden by {origin or 'Python'}"
            raise FunctionUnusable(f"{hidden}: give it another name")
    found = getattr(loaded, function, None)
    if not callable(found):
        raise FunctionUnusable(f"module {module} has no function {function}: write MODULE:FUNCTION")
    if inspect.iscoroutinefunction(found):
        raise FunctionUnusable(f"{name} is async: write it with def, it has a process of its own")
    with contextlib.suppress(ValueError):  # a function in C may hide its parameters
        signature = inspect.signature(found)
        try:
            signature.bind(*of.values())
        except TypeError as error:
            raise FunctionUnusable(f"{name} can't be called with {' and '.join(of)}: {error}") from error
    return found  # type: ignore[no-any-return]


def _fault(row: Row, source: RowSource) -> str | None:
    """Return what is wrong with a row, in words for its author."""
    if fault := _prompt_fault(row, source.prompt_field):
        return fault
    if source.reward.math:
        return answer_fault(row, source.reward.math)
    return _endpoint_fault(row) if source.reward.http else None


def _endpoint_fault(row: Row) -> str | None:
    """Return the fault of a row with NaN or infinities: only Python has them in JSON; an endpoint would get null."""
    for name, value in row.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            return f"{name!r} has a number that is NaN or infinite, which no endpoint can be sent: write null or a text"
    return None


def _prompt_fault(row: Row, field: str) -> str | None:
    try:
        prompt = member(row, field)
    except RowsUnusable as error:
        return f"{error}: set promptField"
    is_conversation = isinstance(prompt, list) and all(map(_is_message, prompt))
    if not prompt or not (isinstance(prompt, str) or is_conversation):
        return f"{field!r} should be a text, or a list of messages with role and content, which is text or parts of it"
    return None


def _is_message(message: Any) -> bool:
    match message:
        case {"role": str(), "content": None | str()}:
            return True
        case {"role": str(), "content": list(parts)}:
            return all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts)
        case {"role": "assistant", "tool_calls": [_, *_]}:
            return "content" not in message  # which may be left out then, as in a request
        case _:
            return False
