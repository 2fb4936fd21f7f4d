"""The probe accepts an engine that is as near to the trainer as it was, and none that is further off."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocated_rl_agent.lanes.probe import ProbeDisagrees, require_agreement
from colocated_rl_api.weights import limit_nats

TRAINER = (-12.0, -14.5, -9.0, -17.25)  # of unlikely tokens, as of a trained model: standard deviation 3.05
FLAT = (-8.0, -8.01, -8.0, -7.99)  # of a small random one
NOISE = st.floats(1e-6, 0.5)


def off(by_nats: float, trainer: tuple[float, ...] = TRAINER) -> tuple[float, ...]:
    """Return an engine's answer that is so far from the trainer's on average, above and below it."""
    return tuple(logp + by_nats * (-1) ** place for place, logp in enumerate(trainer))


def agrees(
    by_nats: float, *, noise: float | None = None, exact: bool = False, trainer: tuple[float, ...] = TRAINER
) -> bool:
    try:
        found = require_agreement(trainer, off(by_nats, trainer), noise_nats=noise, is_exact=exact)
    except ProbeDisagrees:
        return False
    assert math.isclose(by_nats, found, abs_tol=1e-9)
    return True


@given(noise=NOISE, times=st.floats(0, 2.99))
def test_an_update_may_leave_an_engine_up_to_three_times_as_far_off_as_it_was(noise: float, times: float) -> None:
    assert agrees(noise * times, noise=noise)
    assert agrees(noise * times, noise=noise, exact=True)


@given(noise=NOISE, times=st.floats(3.01, 100))
def test_no_update_may_leave_it_further_off(noise: float, times: float) -> None:
    assert not agrees(max(noise * times, 1.01e-3), noise=noise)


def test_an_engine_without_noise_has_room_for_that_of_sums_in_another_order() -> None:
    assert agrees(0.99e-3, noise=2e-7)
    assert not agrees(1.01e-3, noise=2e-7)
    assert limit_nats(2e-7) == 1e-3
    assert limit_nats(0.1) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("trainer", "exact", "most"),
    [(FLAT, False, 0.5), (TRAINER, False, 0.762), (TRAINER, True, 0.01), (FLAT, True, 0.01)],
)
def test_an_engine_that_has_just_started_is_measured_and_only_gross_differences_are_refused(
    trainer: tuple[float, ...], exact: bool, most: float
) -> None:
    assert agrees(most * 0.99, exact=exact, trainer=trainer)
    assert not agrees(most * 1.01, exact=exact, trainer=trainer)


def test_what_is_refused_says_how_far_off_it_is_and_why_that_is_too_far() -> None:
    with pytest.raises(
        ProbeDisagrees, match=r"of 4 tokens are 0.4 nats .* 0.24 are allowed, because it was 0.08 apart"
    ):
        require_agreement(TRAINER, off(0.4), noise_nats=0.08, is_exact=False)


@pytest.mark.parametrize(
    "engine", [(), TRAINER[:3], (*TRAINER, -1.0), (math.nan, *TRAINER[1:]), (-math.inf, *TRAINER[1:])]
)
def test_an_answer_that_is_no_answer_is_refused(engine: tuple[float, ...]) -> None:
    for noise in (None, 0.5):
        with pytest.raises(ProbeDisagrees):
            require_agreement(TRAINER, engine, noise_nats=noise, is_exact=False)
