"""Turns for large chunks at the gate: whoever pauses for want of room goes on once there is room."""

from __future__ import annotations

from colocated_rl_agent.gate.limiter import Limiter


def test_one_without_a_turn_does_not_wait_for_room() -> None:
    """A request of small chunks, looked at while large ones filled the room, was paused, and nobody called it again."""
    limiter = Limiter(2, 100)
    limiter.ask("large", lambda: None)
    limiter.hold("large", 101)

    assert not limiter.waits("small")


def test_those_held_up_go_on_when_the_first_holds_less() -> None:
    """The first's next large chunk came with the end of the former: the others stayed paused for ever."""
    limiter = Limiter(2, 100)
    called: list[str] = []
    limiter.ask("first", lambda: called.append("first"))
    limiter.ask("second", lambda: called.append("second"))
    limiter.hold("second", 40)
    limiter.hold("first", 90)
    assert limiter.waits("second")

    limiter.hold("first", 20)

    assert not limiter.waits("second")
    assert "second" in called
