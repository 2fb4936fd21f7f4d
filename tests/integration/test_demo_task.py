"""The demo's task: what is held out, what a right answer is, what the warm-up shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from colocated_rl_rollout.tasks.tasks import is_held_out
from examples.arithmetic.task import HELD_OUT_PERCENT, SumQuestion, problems, reward

ROOT = Path(__file__).resolve().parents[2]
SUM = SumQuestion("State the final answer to the following arithmetic problem: 7 + 8 - 9 =", "6", "7 + 8 - 9")


def test_held_out_and_training_questions_never_meet() -> None:
    held_out = {problem.question for problem in problems(500, seed=5, held_out=True)}
    assert held_out.isdisjoint({problem.question for problem in problems(4000, seed=3)})


def test_questions_of_one_draw_are_different() -> None:
    drawn = problems(2000, seed=1)
    assert len(drawn) == len({problem.question for problem in drawn})


def test_the_rollout_controller_splits_as_the_warm_up_does() -> None:
    both = problems(300, seed=2) + problems(300, seed=2, held_out=True)
    split = [is_held_out(problem.question, percent=HELD_OUT_PERCENT) for problem in both]
    assert [problem.is_held_out for problem in both] == split


def test_the_split_is_the_same_in_another_process() -> None:
    ask = "from examples.arithmetic.task import problems; print(problems(20, seed=5, held_out=True)[-1].question)"
    command = [sys.executable, "-W", "ignore", "-c", ask]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout.strip()
    assert problems(20, seed=5, held_out=True)[-1].question == output


def test_a_worked_answer_adds_two_numbers_a_line() -> None:
    assert SUM.worked_answer == "7+8=15\n15-9=6\nAnswer: 6"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("Answer: 6", 1.0),
        ("7+8=15\n15-9=6\nAnswer: 6", 1.0),
        ("Answer: 5\nAnswer: 6", 1.0),
        ("Answer: 5", 0.0),
        ("6", 0.0),
        ("Answer:", 0.0),
        ("", 0.0),
        ("Answer: 6 or 7", 0.0),
    ],
)
def test_only_what_follows_the_last_mark_counts(response: str, expected: float) -> None:
    assert expected == reward(response, SUM)


def test_both_demonstrations_are_right() -> None:
    for problem in problems(200, seed=4):
        assert 1.0 == reward(problem.worked_answer, problem) == reward(problem.terse_answer, problem)
