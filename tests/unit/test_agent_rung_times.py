"""These tests tell a pod what it has reached and when, and read how long that took and how long it waited."""

from __future__ import annotations

from colocated_rl_agent.planner.rung_times import RungTimes
from colocated_rl_api.facts import EPOCHS_OF_WAITS
from colocated_rl_api.ladder import TIME_SLICED
from colocated_rl_api.rungs import Rung


class CountedTimes:
    """Rung times of a pod, and what was counted of them."""

    def __init__(self) -> None:
        self.reached: list[tuple[Rung, float]] = []
        self.waits: list[float] = []
        self.of = RungTimes(
            TIME_SLICED, reached=lambda rung, took_s: self.reached.append((rung, took_s)), waited=self.waits.append
        )

    def stands(self, rung: Rung, now: float, *, epoch: int = 1, waits: bool = False) -> None:
        self.of.stands(rung, epoch=epoch, now=now, waits=waits)


def test_wait_counts_once_when_it_ends_however_often_it_is_seen() -> None:
    times = CountedTimes()
    times.stands(Rung.SEALED, 0)
    for now in (3, 5, 8):
        times.stands(Rung.DRAINED, now, waits=True)
        assert (0.0, []) == (times.of.waited_s, times.waits), "facts stay as they are while nothing happens"
    times.stands(Rung.DRAINED, 10)
    assert (7.0, [7]) == (times.of.waited_s, times.waits)
    times.stands(Rung.RELEASED, 11)
    times.stands(Rung.RELEASED, 12, waits=True)
    times.stands(Rung.RELEASED, 12.5)
    assert (7.5, [7, 0.5]) == (times.of.waited_s, times.waits)
    assert {Rung.DRAINED: 3, Rung.RELEASED: 8} == times.of.took_s == dict(times.reached)


def test_wait_that_an_epoch_ends_is_counted_and_belongs_to_the_old_one_which_is_forgotten() -> None:
    times = CountedTimes()
    times.stands(Rung.DRAINED, 0, waits=True)
    times.stands(Rung.DRAINED, 4, epoch=2, waits=True)
    assert (4.0, [4]) == (times.of.waited_s, times.waits)
    times.stands(Rung.DRAINED, 6, epoch=2)
    assert (6.0, [4, 2]) == (times.of.waited_s, times.waits)
    for epoch in range(3, 1 + EPOCHS_OF_WAITS):
        times.stands(Rung.SEALED, 7, epoch=epoch)
    assert 6.0 == times.of.waited_s
    times.stands(Rung.SEALED, 7, epoch=1 + EPOCHS_OF_WAITS)
    assert 2.0 == times.of.waited_s
    times.stands(Rung.SEALED, 7, epoch=2 + EPOCHS_OF_WAITS)
    assert (0.0, [4, 2]) == (times.of.waited_s, times.waits)


def test_pod_that_never_stands_at_its_target_below_the_top_has_waited_for_nobody() -> None:
    times = CountedTimes()
    for now, rung in enumerate((Rung.SEALED, Rung.DRAINED, Rung.RELEASED, Rung.SERVING)):
        times.stands(rung, now)
    assert (0.0, []) == (times.of.waited_s, times.waits)
