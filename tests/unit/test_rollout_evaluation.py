"""One evaluation is of one weights version."""

from __future__ import annotations

import math

from colocated_rl_api.ladder import WeightVersion
from colocated_rl_rollout.evaluation import Scoreboard

V = WeightVersion


def test_an_evaluation_ends_when_every_prompt_has_an_answer() -> None:
    board = Scoreboard(3, prompts=4)
    for place, reward in enumerate([1.0, 0.0, 1.0]):
        assert board.take(place, {V(3, 1)}, reward)
        assert board.result() is None
    assert [3] == board.missing()
    assert board.take(3, {V(3, 1)}, 1.0)
    result = board.result()
    assert result is not None
    assert (3, 4, 0.75) == (result.step, result.samples, result.mean)
    assert math.isclose(math.sqrt(0.75 * 0.25 / 4), result.stderr)


def test_rewards_that_are_no_shares_have_a_standard_error_of_their_own() -> None:
    """It was that of a binomial share whatever they were: the root of a negative number for a mean above 1."""
    board = Scoreboard(3, prompts=4)
    for place, reward in enumerate([-1.0, 3.0, 3.0, 3.0]):
        board.take(place, {V(3, 1)}, reward)
    result = board.result()
    assert result is not None
    assert 2.0 == result.mean
    assert math.isclose(math.sqrt(3.0 / 4), result.stderr)


def test_several_answers_to_a_prompt_have_a_best_one_and_count_as_one_for_the_error() -> None:
    board = Scoreboard(3, prompts=3, responses=2)
    for place, reward in enumerate([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]):
        assert board.result() is None
        board.take(place, {V(3, 1)}, reward)
    result = board.result()
    assert result is not None
    assert (6, 0.5, 2 / 3) == (result.samples, result.mean, result.best)
    assert math.isclose(math.sqrt((0.5**2 + 0.5**2) / 3 / 3), result.stderr)


def test_answers_of_other_weights_do_not_count() -> None:
    board = Scoreboard(3, prompts=1)
    assert not board.take(0, {V(2, 1)}, 1.0)
    assert not board.take(0, {V(2, 1), V(3, 1)}, 1.0)
    assert not board.take(0, {V(3, 1), V(3, 2)}, 1.0)
    assert not board.take(0, set(), 1.0)
    assert [0] == board.missing()


def test_weights_that_were_made_again_start_the_count_again() -> None:
    board = Scoreboard(3, prompts=2)
    assert board.take(0, {V(3, 1)}, 1.0)
    assert board.take(1, {V(3, 2)}, 0.0)
    assert [0] == board.missing()
    assert not board.take(0, {V(3, 1)}, 1.0)
    assert board.take(0, {V(3, 2)}, 0.0)
    result = board.result()
    assert result is not None
    assert 0.0 == result.mean
