"""The times that a store has kept of each step are drawn as the log lines of pods are."""

from __future__ import annotations

from typing import Any

import pytest

from colocated_rl_api.holders import PodHolder
from colocated_rl_api.ladder import DISAGGREGATED, MIXED, RESIDENT, TIME_SLICED, Ladder
from colocated_rl_cli.draw import timeline
from colocated_rl_cli.draw.figures import read_figures, switch_seconds
from colocated_rl_cli.draw.trace import trace
from colocated_rl_cli.evidence.kept import kept_lines
from colocated_rl_cli.evidence.records import Records

SLICED = {"Sealed": 0.0, "Closed": 0.5, "Released": 1.5, "Trained": 20.0, "Exported": 1.0, "Offloaded": 0.5}
SLICED |= {"Updated": 3.0, "Serving": 1.0}
BESIDE = {"Sealed": 0.0, "Trained": 20.0, "Exported": 1.0, "Closed": 0.5, "Updated": 3.0, "Serving": 1.0}


def batch(step: int, *, ended: float, took: dict[str, float] | None = None, epoch: int | None = None) -> dict[str, Any]:
    """A record of `/v1/batches`. The epoch of a step is the one after it, unless something failed."""
    climb = {"epoch": epoch or step + 1, "step": step, "tookS": SLICED if took is None else took, "ended": ended}
    figures = {"samples": 8, "lossTokens": 40, "rewardMean": 0.25 * step, "resumedSamples": 1, "staleness": {"0": 40}}
    return {"step": step, "climb": climb, **figures}


def held(ladder: Ladder, *batches: dict[str, Any]) -> dict[str, list[tuple[PodHolder, float]]]:
    """Return who had the GPUs, and for how long, by row; what one had in a row is added up."""
    found: dict[str, list[tuple[PodHolder, float]]] = {}
    for span in read_figures(kept_lines(batches, ladder), ladder).spans:
        row = found.setdefault(span.pod, [])
        before = row.pop()[1] if row and row[-1][0] is span.holder else 0.0
        row.append((span.holder, before + span.end - span.start))
    return found


def test_steps_that_follow_each_other_are_one_row_in_which_rollout_has_the_gpus_between_them() -> None:
    steps = (batch(1, ended=127.5), batch(2, ended=200.0))
    switch = [(PodHolder.SWITCH, 1.5), (PodHolder.TRAINER, 21.5), (PodHolder.SWITCH, 4.0)]
    expected = [(PodHolder.ROLLOUT, 0.5), *switch, (PodHolder.ROLLOUT, 45.5), *switch]
    assert {"all pods from step 1": expected} == held(TIME_SLICED, *steps)
    figures = read_figures(kept_lines(steps, TIME_SLICED), TIME_SLICED)
    assert [pytest.approx(5.5)] * 2 == switch_seconds(figures)
    assert [(1, 100.0), (2, 172.5)] == [(one.step, one.ts) for one in figures.batches]


def test_between_steps_of_which_one_failed_nobody_is_said_to_have_the_gpus() -> None:
    steps = (batch(1, ended=127.5), batch(2, ended=300.0, took={}, epoch=4), batch(3, ended=400.0, epoch=5))
    rows = held(TIME_SLICED, *steps)
    assert ["all pods from step 1", "all pods from step 2"] == [*rows]
    first = read_figures(kept_lines(steps, TIME_SLICED), TIME_SLICED)
    assert (100.0, 127.5) == (first.began, max(span.end for span in first.spans if span.pod.endswith("step 1")))
    assert 300.0 == min(span.start for span in first.spans if span.pod.endswith("step 2"))


def test_engines_beside_trainers_serve_until_their_gates_close() -> None:
    (row,) = held(RESIDENT, batch(1, ended=25.5, took=BESIDE)).values()
    assert [PodHolder.ROLLOUT, PodHolder.BOTH, PodHolder.ROLLOUT, PodHolder.SWITCH] == [each for each, _ in row]


def test_pods_of_one_side_have_a_row_for_each_side() -> None:
    rows = held(DISAGGREGATED, batch(1, ended=25.5, took=BESIDE))
    assert [(PodHolder.IDLE, 0.0), (PodHolder.TRAINER, 21.0)] == rows["trainers from step 1"]
    assert [PodHolder.ROLLOUT, PodHolder.SWITCH] == [each for each, _ in rows["engines from step 1"]]


def test_engines_that_serve_on_beside_pods_that_take_turns_have_a_row_of_their_own() -> None:
    rows = held(MIXED, batch(1, ended=127.5))
    shared = [PodHolder.ROLLOUT, PodHolder.SWITCH, PodHolder.TRAINER, PodHolder.SWITCH]
    assert shared == [holder for holder, _ in rows["shared pods from step 1"]]
    assert (PodHolder.ROLLOUT, 23.5) == rows["engines from step 1"][0], "while the trainers of the others work"


def test_it_is_drawn_as_text_page_and_trace_with_causes() -> None:
    records = Records({"metadata": {"name": "sums"}}, kept_lines([batch(1, ended=127.5)], TIME_SLICED))
    text = timeline.text(records)
    assert "all pods from step 1" in text
    assert "NextStep" in text
    assert "21.50 s     5.50 s" in text
    assert "Who held each device" in timeline.render(records)
    assert any(event.get("args", {}).get("why") == "NextStep" for event in trace(records)["traceEvents"])


def test_a_batch_without_a_climb_and_a_rung_of_a_newer_operator_are_passed_over() -> None:
    known, newer = batch(1, ended=127.5), batch(1, ended=127.5, took=SLICED | {"Quantized": 1.0})
    assert [] == kept_lines([{**known, "climb": None}], TIME_SLICED)
    assert [line["rung"] for line in kept_lines([known], TIME_SLICED) if "rung" in line] == [
        line["rung"] for line in kept_lines([newer], TIME_SLICED) if "rung" in line
    ]
