"""Compare the answer in a response with that of its row, as math-verify compares mathematics.

It has so much time of a processor, which processes beside it do not shorten. The signal that ends it reaches Python
alone: a single operation on huge numbers that hangs is ended from outside, with its process, at the deadline of
`rewards`, which is by the clock. An answer of the policy that can't be parsed is wrong; a comparison that does not end
is neither right nor wrong, and fails its sample.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from colocated_rl_api.prompts import MathReward
from colocated_rl_rollout.tasks.gym import answer_in
from colocated_rl_rollout.tasks.rows import Row, RowsUnusable, member

PROCESSOR_S = 5
NEVER_S = 1_000_000  # math-verify's own deadline is by the clock, and it warns whoever sets none


class Endless(TimeoutError):
    """math-verify did not end in time."""


@contextmanager
def limited() -> Iterator[None]:
    """Limit the processor time of what is done meanwhile to PROCESSOR_S. Raises Endless."""
    from math_verify.errors import TimeoutException  # no Exception: math-verify and sympy catch any

    def interrupt(*_: object) -> NoReturn:
        raise TimeoutException

    try:
        former = signal.signal(signal.SIGPROF, interrupt)
        signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, former)
    except TimeoutException as error:
        raise Endless(f"math-verify came to no end within {PROCESSOR_S} s of a processor") from error


class NoMathematics(ValueError):
    """The row's own answer can't be parsed."""


def answer_fault(row: Row, reward: MathReward) -> str | None:
    """Return what is wrong with a row's answer, or None."""
    field = reward.answer_field
    try:
        written = member(row, field)
    except RowsUnusable as error:
        return f"{error}: set reward.math.answerField"
    if isinstance(written, bool) or not isinstance(written, str | int | float):
        return f"{field!r} should be a number or a text"
    answer = answer_in(str(written), reward.answer_after)
    if answer is None:
        return f"{field!r} has no {reward.answer_after!r} in it: set reward.math.answerAfter"
    return None if answer else f"{field!r} has no answer in it"


def load_math_reward(reward: MathReward) -> Callable[[str, Row], float]:
    """Return the reward function, which raises Endless and NoMathematics. Takes a second."""
    import math_verify

    def parse(text: str) -> Any:
        with limited():
            try:
                return math_verify.parse(text, parsing_timeout=NEVER_S, raise_on_error=True)
            except Exception:  # noqa: BLE001 - of whatever grammar: it is no answer
                return []

    def score(response: str, row: Row) -> float:
        text = answer_in(str(member(row, reward.answer_field)), reward.answer_after) or ""
        right = parse(text if "$" in text or "\\boxed" in text else f"${text}$") or parse(text)
        if not right:
            raise NoMathematics(f"{reward.answer_field!r} of its row is no mathematics: {len(text)} characters")
        given = parse(response)
        with limited():
            try:
                return float(math_verify.verify(right, given, timeout_seconds=NEVER_S, raise_on_error=True))
            except Exception:  # noqa: BLE001 - whatever sympy raises: what can't be compared is not equal
                return float(math_verify.verify(right, given, timeout_seconds=NEVER_S))

    return score
