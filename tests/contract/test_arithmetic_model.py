"""These tests say what the demo's small model must be able to do before it is trained, and what it must not."""

from math import sqrt

import pytest

from examples.arithmetic.model import Recipe
from examples.arithmetic.verdict import ARITHMETIC


@pytest.mark.parametrize(("held_out", "is_met"), [(0.0, False), (0.17, True), (0.35, False)])
def test_model_is_kept_if_some_sums_come_out_right_and_most_do_not(held_out: float, is_met: bool) -> None:
    assert is_met == Recipe().is_met(held_out)


def test_whatever_is_kept_begins_below_the_demos_bound_on_other_questions_too() -> None:
    most = Recipe().held_out_most
    standard_error = sqrt(most * (1 - most) / Recipe().held_out)
    assert most + 3 * standard_error <= ARITHMETIC.start_at_most
