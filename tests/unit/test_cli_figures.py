"""These tests read log lines: holders, switches, rungs, learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from colocated_rl_api.holders import PodHolder
from colocated_rl_api.ladder import DISAGGREGATED, RESIDENT, ROLLOUT_ONLY, SCORED_TIME_SLICED
from colocated_rl_api.rungs import Rung
from colocated_rl_cli.draw.figures import (
    by_set,
    holder_shares,
    read_figures,
    rung_times,
    staleness_tokens,
    standings,
    switch_seconds,
    typical_switch,
)

START = [("Released", 0.0), ("Trained", 5.0), ("Offloaded", 6.0), ("Updated", 20.0), ("Serving", 21.0)]
SWITCH = [("Closed", 0.0), ("Settled", 0.2), ("Drained", 0.3), ("Released", 0.4), ("Trained", 2.4), ("Exported", 2.5)]
BACK = [("Offloaded", 2.6), ("Updated", 2.8), ("Serving", 3.0)]

Line = Mapping[str, Any]


def rises(pod: str, rungs: list[tuple[str, float]], *, step: int, after: float = 0.0, role: str = "gpu") -> list[Line]:
    return [
        {
            "ts": after + at,
            "event": "rung reached",
            "role": role,
            "pod": pod,
            "rung": rung,
            "step": step,
            "epoch": step + 1,
        }
        for rung, at in rungs
    ]


def sealed(step: int, *, staleness: dict[str, int], ts: float = 0.0) -> Line:
    return {
        "ts": ts, "event": "batch sealed", "step": step, "samples": 8, "loss_tokens": sum(staleness.values()),
        "reward_mean": 0.5, "took_s": 1.0, "resumed_samples": 1, "staleness": staleness,
    }  # fmt: skip


def evaluated(step: int, mean: float) -> Line:
    return {"ts": float(step), "event": "evaluation ended", "step": step, "mean": mean, "stderr": 0.02, "samples": 400}


def one_switch() -> list[Line]:
    """A pod that starts, serves from 21 to 30, and switches from 30 to 33."""
    return rises("a", START, step=0) + rises("a", SWITCH + BACK, step=1, after=30.0)


def test_the_trainer_holds_the_device_from_released_until_offloaded() -> None:
    figures = read_figures(one_switch())
    held = [span for span in figures.spans if span.holder is PodHolder.TRAINER]
    assert [Rung.TRAINED, Rung.EXPORTED, Rung.OFFLOADED] == [span.towards for span in held]
    assert pytest.approx([30.4, 32.6]) == [held[0].start, held[-1].end]


def test_scoring_is_the_trainers_time_and_has_a_figure_of_its_own() -> None:
    down, trained = SWITCH[:4], [(rung, after + 1.5) for rung, after in SWITCH[4:] + BACK]
    step = rises("a", [*down, ("Scored", 1.9), *trained], step=1, after=30.0)
    figures = read_figures([*rises("a", START, step=0), *step], SCORED_TIME_SLICED)
    held = [span for span in figures.spans if span.holder is PodHolder.TRAINER]
    assert [Rung.SCORED, Rung.TRAINED, Rung.EXPORTED, Rung.OFFLOADED] == [span.towards for span in held]
    (scored,) = [time for time in rung_times(figures) if time.rung is Rung.SCORED]
    assert pytest.approx(1.5) == scored.mean_s
    assert switch_seconds(read_figures(one_switch())) == [pytest.approx(switch_seconds(figures)[0])]


def test_rollout_holds_the_device_until_the_gate_closes() -> None:
    figures = read_figures(one_switch())
    assert [(21.0, 30.0)] == [(span.start, span.end) for span in figures.spans if span.holder is PodHolder.ROLLOUT]


def test_a_gate_that_closes_with_nothing_in_flight_ends_rollout_when_it_was_asked_to() -> None:
    settled = [{**line, "took_s": 0.2} for line in rises("a", [("Settled", 0.2), *SWITCH[2:], *BACK], step=1, after=30)]
    figures = read_figures([*rises("a", START, step=0), *settled])
    assert read_figures(one_switch()).spans == figures.spans


def test_in_a_resident_job_rollout_goes_on_beside_training_and_the_switch_is_the_closed_gate() -> None:
    start = rises("a", [("Trained", 0.0), ("Exported", 1.0), ("Updated", 20.0), ("Serving", 21.0)], step=0)
    step = [("Trained", 2.0), ("Exported", 2.5), ("Closed", 2.6), ("Drained", 2.8), ("Updated", 3.0), ("Serving", 3.1)]
    climb = [
        {**line, "took_s": 2.0} if line["rung"] == "Trained" else line for line in rises("a", step, step=1, after=30)
    ]
    figures = read_figures([*start, *climb], RESIDENT)
    held = [(span.holder, span.start, span.end) for span in figures.spans if span.holder is not PodHolder.START]
    assert [
        (PodHolder.ROLLOUT, 21.0, 30.0), (PodHolder.BOTH, 30.0, 32.0), (PodHolder.BOTH, 32.0, 32.5),
        (PodHolder.ROLLOUT, 32.5, 32.6),
        (PodHolder.SWITCH, 32.6, 32.8), (PodHolder.SWITCH, 32.8, 33.0), (PodHolder.SWITCH, 33.0, 33.1),
    ] == held  # fmt: skip
    assert [pytest.approx(0.5)] == switch_seconds(figures)
    assert PodHolder.SWITCH is standings([*start, *climb[:3]], RESIDENT)["a"].holder


def test_trainers_in_pods_of_their_own_are_idle_between_steps_and_engines_serve_up_to_the_closed_gate() -> None:
    start = [("Trained", 0.0), ("Serving", 1.0)]
    lines = [*rises("t", start, step=0, role="trainer"), *rises("e", start, step=0, role="engine")]
    lines += rises("t", [("Sealed", 0.0), ("Trained", 2.0), ("Serving", 2.5)], step=1, after=30, role="trainer")
    switch = [("Trained", 0.0), ("Exported", 2.7), ("Closed", 2.8), ("Updated", 3.0), ("Serving", 3.1)]
    lines += [{**line, "took_s": 0.0} for line in rises("e", switch, step=1, after=30, role="engine")]
    figures = read_figures(sorted(lines, key=lambda line: line["ts"]), DISAGGREGATED)
    held = {
        pod: [(span.holder, span.start, span.end) for span in figures.spans if span.pod == pod and span.start >= 1]
        for pod in ("t", "e")
    }
    assert [
        (PodHolder.IDLE, 1.0, 30.0), (PodHolder.TRAINER, 30.0, 32.0), (PodHolder.TRAINER, 32.0, 32.5),
    ] == held["t"]  # fmt: skip
    assert [
        (PodHolder.ROLLOUT, 1.0, 30.0), (PodHolder.ROLLOUT, 30.0, 30.0), (PodHolder.ROLLOUT, 30.0, 32.7),
        (PodHolder.ROLLOUT, 32.7, 32.8), (PodHolder.SWITCH, 32.8, 33.0), (PodHolder.SWITCH, 33.0, 33.1),
    ] == held["e"]  # fmt: skip
    assert [pytest.approx(0.6)] == switch_seconds(figures), "from the weights written to the gate open"


def test_nothing_before_the_first_serving_counts_as_a_switch() -> None:
    figures = read_figures(rises("a", START, step=0))
    assert {PodHolder.START} == {span.holder for span in figures.spans}
    assert ([], [], {}) == (rung_times(figures), switch_seconds(figures), holder_shares(figures))


def test_a_switch_lasts_from_the_first_gate_closed_to_the_last_opened_without_training() -> None:
    slow = rises("b", START, step=0) + rises("b", [*SWITCH, ("Offloaded", 2.6), ("Serving", 4.0)], step=1, after=30.0)
    assert [pytest.approx(4.0 - 2.2)] == switch_seconds(read_figures(one_switch() + slow))


def test_a_switch_under_way_at_the_end_is_not_counted() -> None:
    figures = read_figures(one_switch() + rises("a", SWITCH, step=2, after=40.0))
    assert 1 == len(switch_seconds(figures))
    assert {1} == {span.step for span in typical_switch(figures)}


def test_each_rung_is_timed_from_the_one_before() -> None:
    times = {one.rung: one.mean_s for one in rung_times(read_figures(one_switch()))}
    assert pytest.approx(2.0) == times[Rung.TRAINED]
    assert pytest.approx(0.2) == times[Rung.SETTLED]


def test_start_up_begins_when_the_agent_is_up() -> None:
    up = {"ts": -10.0, "event": "agent started", "role": "gpu", "pod": "a"}
    figures = read_figures([up, *one_switch()])
    assert (-10.0, PodHolder.START) == (figures.began, figures.spans[0].holder)


@pytest.mark.parametrize("role", ["gpu", "engine"])
def test_whoever_has_the_device_on_the_last_rung_has_it_up_to_the_last_line_of_the_pod(role: str) -> None:
    """A job that only records comes to one rung, and generates there for hours: these were nobody's."""
    of_pod = {"role": role, "pod": "a"}
    started = {"ts": 0.0, "event": "agent started", **of_pod}
    (serving,) = rises("a", [("Serving", 60.0)], step=0, role=role)
    ended = {"ts": 3660.0, "event": "pod ended", **of_pod}
    figures = read_figures([started, serving, ended], ROLLOUT_ONLY)
    assert [(PodHolder.START, 60.0, Rung.SERVING), (PodHolder.ROLLOUT, 3600.0, None)] == [
        (span.holder, span.end - span.start, span.towards) for span in figures.spans
    ]
    loading = [span.holder for span in read_figures([started, ended], ROLLOUT_ONLY).spans]
    assert [PodHolder.START] == loading, "it never came to any"


def test_the_operators_lines_about_the_group_are_no_pod() -> None:
    assert [] == read_figures(rises("operator-1", START, step=0, role="operator")).pods


def test_the_order_of_lines_does_not_matter() -> None:
    assert read_figures(one_switch()) == read_figures(list(reversed(one_switch())))


def test_unknown_and_broken_lines_are_passed_over() -> None:
    odd: list[Line] = [{"event": "batch sealed"}, {"ts": "yesterday", "event": "rung reached"}, {"ts": 1.0}]
    assert () == read_figures(odd).spans


def test_a_rung_of_a_newer_agent_is_passed_over() -> None:
    newer = rises("a", [("Quantized", 31.0)], step=1)
    assert read_figures(one_switch()) == read_figures(one_switch() + newer)
    assert standings(one_switch()) == standings(one_switch() + newer)


def test_a_batch_sealed_again_after_a_restart_counts_once() -> None:
    figures = read_figures([sealed(1, staleness={"0": 10}), sealed(1, staleness={"0": 10}, ts=5.0)])
    assert 1 == len(figures.batches)


def test_staleness_adds_up_tokens_of_all_batches() -> None:
    figures = read_figures([sealed(1, staleness={"0": 10}), sealed(2, staleness={"1": 4, "0": 6})])
    assert {0: 16, 1: 4} == staleness_tokens(figures)


def test_evaluations_of_a_controller_that_is_gone_are_those_with_which_the_next_one_begins() -> None:
    """Its log goes with its pod: a job that was suspended showed those since its resumption alone."""
    of = [{"answers": 2, "mean": 0.3}]
    earlier = [
        {"step": step, "mean": 0.2, "stderr": 0.02, "samples": 400, "best": 0.5, "bestOf": of} for step in (0, 10)
    ]
    begun = {"ts": 15.0, "event": "rollout controller ready", "evaluations": earlier}
    found = read_figures([begun, evaluated(20, 0.9)]).evaluations
    assert [(0, None, 0.5), (10, None, 0.5), (20, 20.0, None)] == [(one.step, one.ts, one.best) for one in found]
    assert [{2: 0.3}, {2: 0.3}, {}] == [one.best_of for one in found]


def test_each_set_has_its_evaluations() -> None:
    lines = [{**evaluated(0, 0.2), "name": "aime"}, evaluated(0, 0.3), {**evaluated(10, 0.4), "name": "aime"}]
    found = by_set(read_figures(lines).evaluations)
    assert {"aime": [0.2, 0.4], "held-out": [0.3]} == {name: [one.mean for one in of] for name, of in found.items()}


def test_the_first_evaluation_is_of_step_0_and_the_last_is_the_newest() -> None:
    figures = read_figures([evaluated(10, 0.8), evaluated(0, 0.2)])
    assert figures.first is not None
    assert figures.last is not None
    assert (0.2, 0.8) == (figures.first.mean, figures.last.mean)


def test_shares_of_the_holders_add_up_to_one() -> None:
    assert pytest.approx(1.0) == sum(holder_shares(read_figures(one_switch())).values())


def test_the_live_view_knows_who_holds_each_device_now() -> None:
    lines = one_switch() + rises("b", START[:2], step=0)
    now = standings(lines)
    assert (Rung.SERVING, PodHolder.ROLLOUT) == (now["a"].rung, now["a"].holder)
    assert (Rung.TRAINED, PodHolder.START) == (now["b"].rung, now["b"].holder)
