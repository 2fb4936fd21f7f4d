"""The task of the demo: sums of two to four one-digit numbers, from reasoning-gym's `chain_sum`.

Owns the worked answers that the warm-up shows the model and the split of the questions. The job names the same task and
the same split (`job.yaml`), so that no question that an evaluation asks was ever trained on, in the warm-up or after.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from colocated_rl_rollout.tasks.gym import import_reasoning_gym

CHAIN_SUM: dict[str, int] = {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1}
HELD_OUT_PERCENT = 10
ANSWER_AFTER = "Answer:"


@dataclass(frozen=True)
class SumQuestion:
    """One question, its right answer, and the numbers and signs that it is made of."""

    question: str
    answer: str
    expression: str

    @property
    def is_held_out(self) -> bool:
        """Return whether the question's hash holds it out: the same in every process, as in the rollout controller."""
        return int(hashlib.sha256(self.question.encode()).hexdigest()[:8], 16) % 100 < HELD_OUT_PERCENT

    @property
    def terse_answer(self) -> str:
        """The answer alone, which the model can't give in its head for three or four terms."""
        return f"{ANSWER_AFTER} {self.answer}"

    @property
    def worked_answer(self) -> str:
        """One line for each sum of two numbers, then the answer: `7+8=15`, `15+9=24`, `Answer: 24`."""
        first, *rest = self.expression.split()
        total, lines = int(first), []
        for sign, term in zip(rest[::2], rest[1::2], strict=True):
            result = total + int(term) if sign == "+" else total - int(term)
            lines.append(f"{total}{sign}{term}={result}")
            total = result
        return "\n".join([*lines, f"{ANSWER_AFTER} {total}"])


def problems(count: int, *, seed: int, held_out: bool = False) -> list[SumQuestion]:
    """`count` different problems from one side of the split; the same for the same arguments."""
    return list(islice(_distinct(seed, held_out), count))


def reward(response: str, problem: SumQuestion) -> float:
    """1.0 if reasoning-gym's verifier gives full marks to what follows the last `Answer:`, else 0.0."""
    _, marker, answer = response.rpartition(ANSWER_AFTER)
    score: float = _verifier().score_answer(answer.strip(), {"answer": problem.answer})
    return float(bool(marker) and score == 1.0)


def _distinct(seed: int, held_out: bool) -> Iterator[SumQuestion]:
    seen: set[str] = set()
    size = 1_000_000  # problems are made one by one as they are asked for: the number costs nothing
    for entry in import_reasoning_gym().create_dataset("chain_sum", seed=seed, size=size, **CHAIN_SUM):
        problem = SumQuestion(entry["question"], entry["answer"], entry["metadata"]["expression"])
        if problem.is_held_out == held_out and problem.question not in seen:
            seen.add(problem.question)
            yield problem


@cache
def _verifier() -> Any:
    return import_reasoning_gym().create_dataset("chain_sum", seed=0, size=1, **CHAIN_SUM)
