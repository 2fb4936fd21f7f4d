"""Pauses that double."""

from __future__ import annotations

from colocated_rl_api.back_off import doubled_s


def test_a_pause_doubles_up_to_its_limit() -> None:
    assert [0.5, 1.0, 2.0, 3.0, 3.0] == [doubled_s(0.5, times, 3.0) for times in range(5)]


def test_a_pause_is_a_number_however_often_it_doubled() -> None:
    """A process that failed once a minute for a day had failed too often for a float."""
    assert 60.0 == doubled_s(1.0, 10_000, 60.0)
