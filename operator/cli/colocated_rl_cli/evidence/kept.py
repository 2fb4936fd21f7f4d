"""Read who held the GPUs of a job without pods from what its store has kept of each step. Pure.

The store has the climbs of the group, not of each pod: how long the slowest pod took to each rung. They are given as
log lines of one pod, or of one on each side, so that whoever draws a job's lines draws them. Rows are of climbs that
followed each other; between two rows something failed, or nobody knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from colocated_rl_api import names
from colocated_rl_api.ladder import Ladder
from colocated_rl_api.rungs import Placement, Rung

Line = dict[str, Any]
SIDES = {
    Placement.DISAGGREGATED: {"trainers": names.ROLE_TRAINER, "engines": names.ROLE_ENGINE},
    Placement.MIXED: {"shared pods": names.ROLE_GPU, "engines": names.ROLE_ENGINE},
}
"""Rows of a job whose pods are of two roles, by placement, with the role of each."""


def kept_lines(batches: Iterable[Mapping[str, Any]], ladder: Ladder) -> list[Line]:
    """Return lines of the batches on page `/v1/batches`, oldest first, that have a climb with times."""
    sides = SIDES.get(ladder.placement, {"all pods": names.ROLE_GPU})
    lines, row, epoch = list[Line](), "", 0
    for batch in batches:
        climb = batch.get("climb")
        if climb is None:
            continue
        times = {Rung(rung): seconds for rung, seconds in climb["tookS"].items() if rung in set(Rung)}
        begins = climb["ended"] - sum(times.values())
        is_new = climb["epoch"] != epoch + 1 or not times
        if is_new:
            row = f"from step {batch['step']}"
        epoch = climb["epoch"]
        known = {"step": batch["step"], "epoch": epoch}
        if times:
            lines.append({"ts": begins, "event": "epoch raised", "role": "operator", "reason": "NextStep", **known})
            lines.append(_sealed(batch, begins))
        for name, role in sides.items():
            rises = [*_rises(times, begins, ladder, role)]
            if is_new:  # a climb with times began at the top, and each one ended there
                rises = [(ladder.top, begins, 0.0), *rises]
            for rung, ts, took_s in rises:
                of_pod = {"role": role, "pod": f"{name} {row}", "rung": rung, "took_s": took_s}
                lines.append({"ts": ts, "event": "rung reached", **of_pod, **known})
    return lines


def _rises(times: Mapping[Rung, float], ts: float, ladder: Ladder, role: str) -> Iterator[tuple[Rung, float, float]]:
    """Yield each rung, when it was reached, and how long that took. ts: when the climb began."""
    for rung, took_s in times.items():
        ts += took_s
        if role != names.ROLE_TRAINER or not ladder.reaches(rung, Rung.EXPORTED):
            yield rung, ts, took_s
        elif rung is Rung.EXPORTED:
            yield ladder.top, ts, took_s  # what follows is the engines'


def _sealed(batch: Mapping[str, Any], ts: float) -> Line:
    """Return the line of a batch that was sealed by the time that its climb began."""
    figures = {"reward_mean": batch["rewardMean"], "samples": batch["samples"], "loss_tokens": batch["lossTokens"]}
    more = {"resumed_samples": batch["resumedSamples"], "staleness": batch["staleness"]}
    return {"ts": ts, "event": "batch sealed", "role": "rollout", "step": batch["step"], **figures, **more}
