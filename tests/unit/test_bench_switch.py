"""These tests derive the parts of a switch from lines as agents write them."""

from __future__ import annotations

from typing import Any

import pytest

from bench.switch import switches


def line(ts: float, pod: str, event: str, **fields: Any) -> dict[str, Any]:
    return {"ts": ts, "pod": pod, "event": event, "role": "gpu", "step": 1, **fields}


CLIMB = [
    line(10.1, "a", "rung reached", rung="Closed", took_s=0.1),
    line(10.3, "b", "rung reached", rung="Closed", took_s=0.2),
    line(11.0, "a", "action ended", action="Pause", took_s=0.5),
    line(12.0, "b", "action ended", action="Pause", took_s=1.2),
    line(13.0, "a", "rung reached", rung="Serving", took_s=0.1),
    line(14.0, "b", "rung reached", rung="Serving", took_s=0.1),
    line(15.0, "b", "action ended", action="Save", took_s=0.9),
]


def test_what_lies_beside_the_busiest_pods_actions_is_the_systems_own() -> None:
    (climb,) = switches(CLIMB)
    assert (4.0, 1.2, 2.8) == pytest.approx((climb.whole_s, climb.working_s, climb.added_s))


def test_a_climb_whose_gates_close_with_nothing_in_flight_counts() -> None:
    """Agents name the highest rung that they reach: with nothing in flight that was not Closed, and two climbs of three
    were left out."""
    at_once = [{**one, "rung": "Settled"} if one.get("rung") == "Closed" else one for one in CLIMB]
    assert switches(CLIMB) == switches(at_once)


def test_a_climb_that_starts_an_engine_is_left_out() -> None:
    assert [] == switches([*CLIMB, line(12.5, "b", "action ended", action="StartEngine", took_s=0.1)])


def test_a_climb_that_a_pod_did_not_finish_is_left_out() -> None:
    assert [] == switches([one for one in CLIMB if one["ts"] != 14.0])
