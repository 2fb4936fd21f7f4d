"""A rank measures how long its requests go on without progress, and tells where it stands meanwhile."""

from __future__ import annotations

import threading

import pytest

from colocated_rl_trainer.protocol.pace import STILL_S, Pace, where


class PaceClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> PaceClock:
    return PaceClock()


def run(pace: Pace, clock: PaceClock, *gaps_s: float, kind: str = "train", is_done: bool = True) -> None:
    """Run a request with these times between its moves."""
    pace.begin(kind)
    for gap_s in gaps_s[:-1]:
        clock.now += gap_s
        pace.progress()
    clock.now += gaps_s[-1]
    pace.end(is_done=is_done)


def test_a_standstill_is_compared_with_the_longest_of_finished_requests_of_its_kind(clock: PaceClock) -> None:
    pace, me = Pace(clock), threading.get_ident()
    run(pace, clock, 2.0, 7.0, 1.0)
    run(pace, clock, 3.0, 1.0)
    run(pace, clock, 90.0, kind="save")
    run(pace, clock, 50.0, is_done=False)
    pace.begin("train")
    pace.progress()
    pace.progress()
    clock.now += STILL_S
    found = pace.standstill(me)
    assert found is not None
    assert (STILL_S, 7.0, 2) == (found.seconds, found.usual_s, found.moved)


def test_the_time_before_the_end_of_a_request_without_progress_is_one_too(clock: PaceClock) -> None:
    pace = Pace(clock)
    run(pace, clock, 30.0)
    pace.begin("train")
    clock.now += 40.0
    found = pace.standstill(threading.get_ident())
    assert found is not None
    assert (40.0, 30.0, 0) == (found.seconds, found.usual_s, found.moved)


def test_a_request_that_had_nothing_to_do_says_nothing_about_the_next_one(clock: PaceClock) -> None:
    """A job whose first batch had no advantages ended: each step after that took longer than was usual."""
    pace, me = Pace(clock), threading.get_ident()
    run(pace, clock, 0.1)
    pace.begin("train")
    clock.now += 100.0
    found = pace.standstill(me)
    assert found is not None
    assert found.usual_s is None
    pace.end(is_done=True)
    run(pace, clock, 0.1)
    run(pace, clock, 0.1, 0.1)
    pace.begin("train")
    clock.now += STILL_S
    found = pace.standstill(me)
    assert found is not None
    assert found.usual_s == 100.0


def test_a_short_standstill_one_that_is_over_and_none_are_not_told(clock: PaceClock) -> None:
    pace, me = Pace(clock), threading.get_ident()
    assert pace.standstill(me) is None
    pace.begin("train")
    clock.now += STILL_S - 0.1
    assert pace.standstill(me) is None
    clock.now += 1.0
    pace.progress()
    assert pace.standstill(me) is None
    clock.now += STILL_S
    assert (found := pace.standstill(me)) is not None
    assert found.usual_s is None
    pace.end(is_done=True)
    assert pace.standstill(me) is None


def test_where_a_thread_stands_is_told_by_functions_and_lines_and_no_values() -> None:
    reached, go = threading.Event(), threading.Event()

    def inner(secret: str) -> None:
        reached.set()
        go.wait(len(secret))

    def outer() -> None:
        inner("a prompt" * 10)

    thread = threading.Thread(target=outer)
    thread.start()
    assert reached.wait(10)
    assert thread.ident is not None
    told = where(thread.ident)
    go.set()
    thread.join()
    names = [each.split(" ")[0] for each in told.split(" < ")]
    assert names.index("wait") < names.index("inner") < names.index("outer")
    assert "inner (test_trainer_pace.py:" in told
    assert "prompt" not in told
    assert "" == where(-1)
