"""Compute the figures of a run from its log lines. Pure: records in, values out; nothing is measured here.

Lines are the JSON objects of `colocated_rl_api.logs`, in any order; unknown lines are skipped. The holder of a pod's
GPU follows from the rungs that its agent reached: rollout until the gate closes, then the switch, the trainer from
Released until Offloaded, and the switch again until the gate opens on the new weights. In a resident job rollout goes
on beside training, and the switch lasts from the closed gate to the open one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any

from colocated_rl_api import names
from colocated_rl_api.holders import PodHolder, holder_of
from colocated_rl_api.ladder import TIME_SLICED, Ladder
from colocated_rl_api.rungs import Rung

Line = Mapping[str, Any]

HELD_OUT = "held-out"  # the one set of an older rollout controller, which does not name it


@dataclass(frozen=True)
class Sealed:
    """Describes a sealed batch.

    staleness: count of its tokens by the age of their weights, in steps behind the newest when they are trained.
    """

    step: int
    ts: float
    reward: float
    samples: int
    tokens: int
    resumed_samples: int | None  # None in a recording, which does not hold it
    staleness: Mapping[int, int]


@dataclass(frozen=True)
class Evaluated:
    """Describes an evaluation of one set. ts: None if its log went with its pod."""

    name: str  # of the set
    step: int
    ts: float | None
    mean: float
    stderr: float
    best: float | None  # mean reward of the best answer to each question; None with one answer each
    samples: int
    best_of: Mapping[int, float]  # the same of so many of a question's answers


@dataclass(frozen=True)
class RungSpan:
    """Holds a pod's time between two rungs. towards: the rung that ended it; None for the last span."""

    pod: str
    start: float
    end: float
    holder: PodHolder
    towards: Rung | None
    step: int
    epoch: int | None = None  # in which the rung that ended it was asked for


@dataclass(frozen=True)
class Standing:
    """States a pod's rung by its newest line, who has its GPU, and since when, in seconds since the epoch."""

    rung: Rung
    holder: PodHolder
    since: float


@dataclass(frozen=True)
class Mark:
    """Marks a single event worth showing: a loss, a restart."""

    ts: float
    who: str
    text: str


@dataclass(frozen=True)
class RungTime:
    """Holds the seconds that pods needed to reach a rung from the one before, over all switches of a run."""

    rung: Rung
    holder: PodHolder
    mean_s: float
    median_s: float
    longest_s: float
    count: int


@dataclass(frozen=True)
class RunFigures:
    """Holds the figures of one run."""

    batches: tuple[Sealed, ...]
    evaluations: tuple[Evaluated, ...]
    spans: tuple[RungSpan, ...]
    marks: tuple[Mark, ...]
    ladder: Ladder
    mismatch: float | None  # nats: mean over a step's tokens of |engine - trainer|, of the worst step; None: unmeasured

    @property
    def began(self) -> float:
        return min((span.start for span in self.spans), default=0.0)

    @property
    def ended(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @property
    def pods(self) -> list[str]:
        return sorted({span.pod for span in self.spans})

    @property
    def first(self) -> Evaluated | None:
        """Return the evaluation before the first step."""
        return next((one for one in self.evaluations if one.step == 0), None)

    @property
    def last(self) -> Evaluated | None:
        return self.evaluations[-1] if self.evaluations else None


def read_figures(lines: Iterable[Line], ladder: Ladder = TIME_SLICED) -> RunFigures:
    """Compute the figures of one job from its members' log lines. ladder: the one that the job climbs."""
    ordered = sorted((line for line in lines if isinstance(line.get("ts"), int | float)), key=lambda line: line["ts"])
    return RunFigures(
        batches=batches_of(ordered),
        evaluations=evaluations_of(ordered),
        spans=tuple(_spans(ordered, ladder)),
        marks=tuple(
            Mark(
                line["ts"], str(line.get("pod") or line.get("role") or ""), f"{line['event']}: {line.get('reason', '')}"
            )
            for line in ordered
            if line.get("level") in ("error", "critical")
        ),
        ladder=ladder,
        mismatch=max(
            (
                line["metrics"]["mismatch_mean"]
                for line in _named(ordered, "step trained")
                if "mismatch_mean" in line["metrics"]
            ),
            default=None,
        ),
    )


def batches_of(lines: Sequence[Line]) -> tuple[Sealed, ...]:
    """Return the batches in the order of their lines; a batch sealed again after a restart counts once."""
    return tuple({one.step: one for one in map(_sealed, _named(lines, "batch sealed"))}.values())


def evaluations_of(lines: Sequence[Line]) -> tuple[Evaluated, ...]:
    """Return the evaluations by step and set. A rollout controller begins with those of its predecessors."""
    known = [one for line in _named(lines, "rollout controller ready") for one in line.get("evaluations", ())]
    found = {(one.step, one.name): one for one in map(_evaluated, [*known, *_named(lines, "evaluation ended")])}
    return tuple(sorted(found.values(), key=lambda one: one.step))


def by_set(evaluations: Sequence[Evaluated]) -> dict[str, list[Evaluated]]:
    """Return the evaluations of each set, by its name."""
    found: dict[str, list[Evaluated]] = defaultdict(list)
    for one in evaluations:
        found[one.name].append(one)
    return dict(found)


def standings(lines: Iterable[Line], ladder: Ladder = TIME_SLICED) -> dict[str, Standing]:
    """Return where each pod stands, sorted by its name."""
    now: dict[str, Standing] = {}
    served: set[str] = set()
    for line in lines:
        if _is_of_a_rung(line) and line.get("role") in names.GPU_ROLES:
            rung, pod = Rung(line["rung"]), line["pod"]
            if rung is ladder.top:
                served.add(pod)
            now[pod] = Standing(
                rung, holder_of(rung, None, ladder, line["role"]) if pod in served else PodHolder.START, line["ts"]
            )
    return dict(sorted(now.items()))


def holder_shares(figures: RunFigures) -> dict[PodHolder, float]:
    """Return each holder's share of the pods' time after start-up; empty if nothing is known."""
    held: dict[PodHolder, float] = defaultdict(float)
    for span in figures.spans:
        if span.holder is not PodHolder.START:
            held[span.holder] += span.end - span.start
    total = sum(held.values())
    return {holder: seconds / total for holder, seconds in held.items()} if total else {}


def rung_times(figures: RunFigures) -> list[RungTime]:
    """Return how long each rung took, in ladder order, over all pods and all switches after start-up."""
    by_rung: dict[Rung, list[RungSpan]] = defaultdict(list)
    for span in figures.spans:
        if span.holder in (PodHolder.SWITCH, PodHolder.TRAINER) and span.towards is not None:
            by_rung[span.towards].append(span)
    times = []
    for rung in figures.ladder.rungs:
        if spans := by_rung.get(rung):
            took = [span.end - span.start for span in spans]
            times.append(RungTime(rung, spans[0].holder, mean(took), median(took), max(took), len(took)))
    return times


def switches_of(figures: RunFigures) -> dict[int, list[RungSpan]]:
    """Group by target step the spans in which the GPUs changed hands or the trainer had them."""
    found: dict[int, list[RungSpan]] = defaultdict(list)
    for span in figures.spans:
        if span.holder in (PodHolder.SWITCH, PodHolder.TRAINER):
            found[span.step].append(span)
    return dict(sorted(found.items()))


def switch_seconds(figures: RunFigures) -> list[float]:
    """Return each switch's seconds: from the first gate closed to all gates open, without the trainer's time."""
    seconds = []
    for spans in switches_of(figures).values():
        training = [span for span in spans if span.holder is PodHolder.TRAINER]
        if all(span.towards is not Rung.SERVING for span in spans):
            continue  # under way when the records end
        if not training and not figures.ladder.serves_on:
            continue  # no step: an engine restarted
        whole = max(span.end for span in spans) - min(span.start for span in spans)
        held = max(span.end for span in training) - min(span.start for span in training) if training else 0.0
        seconds.append(max(0.0, whole - held))
    return seconds


def typical_switch(figures: RunFigures) -> list[RungSpan]:
    """Return the spans of the switch of median length; empty if there was none."""
    whole = [spans for spans in switches_of(figures).values() if any(span.towards is Rung.SERVING for span in spans)]
    whole.sort(key=lambda spans: max(span.end for span in spans) - min(span.start for span in spans))
    return whole[len(whole) // 2] if whole else []


def staleness_tokens(figures: RunFigures) -> dict[int, int]:
    """Count the trained tokens of all batches by staleness."""
    tokens: dict[int, int] = defaultdict(int)
    for batch in figures.batches:
        for age, count in batch.staleness.items():
            tokens[age] += count
    return dict(sorted(tokens.items()))


def _named(lines: Sequence[Line], event: str) -> list[Line]:
    return [line for line in lines if line.get("event") == event]


def _sealed(line: Line) -> Sealed:
    return Sealed(
        step=line["step"],
        ts=line["ts"],
        reward=line["reward_mean"],
        samples=line["samples"],
        tokens=line["loss_tokens"],
        resumed_samples=line.get("resumed_samples"),
        staleness={int(age): count for age, count in line["staleness"].items()},
    )


def _evaluated(line: Line) -> Evaluated:
    return Evaluated(
        line.get("name", HELD_OUT),
        line["step"],
        line.get("ts"),
        line["mean"],
        line["stderr"],
        line.get("best"),
        line["samples"],
        best_of(line),
    )


def best_of(evaluation: Mapping[str, Any]) -> dict[int, float]:
    """Return the mean reward of the best answer by the number of answers, of a log line or of a status."""
    return {each["answers"]: each["mean"] for each in evaluation.get("bestOf") or ()}


def _spans(lines: Sequence[Line], ladder: Ladder) -> list[RungSpan]:
    rises: dict[str, list[Line]] = defaultdict(list)
    newest: dict[str, float] = {}
    for line in lines:
        if line.get("role") not in names.GPU_ROLES:  # the operator's lines are about the whole group
            continue
        newest[line.get("pod", "")] = line["ts"]
        if line.get("event") == "agent started" and line["pod"] not in rises:
            rises[line["pod"]].append({**line, "rung": Rung.UNKNOWN})
        elif _is_of_a_rung(line):
            rises[line["pod"]].append(line)
    return [span for pod, of_pod in sorted(rises.items()) for span in _spans_of(pod, of_pod, newest[pod], ladder)]


def _is_of_a_rung(line: Line) -> bool:
    """Return whether the line reports a rung that this release knows; a newer agent's own rungs are skipped."""
    return line.get("event") == "rung reached" and line.get("rung") in set(Rung)


def _spans_of(pod: str, rises: Sequence[Line], until: float, ladder: Ladder) -> list[RungSpan]:
    """Return the spans of a pod in the order of time. until: when it wrote its newest line, of whatever kind."""
    spans: list[RungSpan] = []
    has_served = False
    for line, following in pairwise(rises):
        rung, towards = Rung(line["rung"]), Rung(following["rung"])
        has_served |= rung is ladder.top
        role = following["role"]
        holder = holder_of(rung, towards, ladder, role) if has_served else PodHolder.START
        start, end = line["ts"], following["ts"]
        first = _first_of_climb(ladder)
        if rung is ladder.top and ladder.reaches(towards, first) and towards is not first:  # passed on the way
            began = max(start, end - following["took_s"])
            spans.append(RungSpan(pod, start, began, holder, first, following["step"], following.get("epoch")))
            start, holder = began, holder_of(first, towards, ladder, role)
        spans.append(RungSpan(pod, start, end, holder, towards, following["step"], following.get("epoch")))
    last = rises[-1]
    if until > last["ts"]:
        rung = Rung(last["rung"])
        has_served |= rung is ladder.top
        holder = holder_of(rung, None, ladder, last["role"]) if has_served else PodHolder.START
        spans.append(RungSpan(pod, last["ts"], until, holder, None, last.get("step", 0)))
    return spans


def _first_of_climb(ladder: Ladder) -> Rung:
    """Return the rung with which a climb begins for the GPU: the gate closes, or the trainer begins beside rollout."""
    return Rung.CLOSED if ladder.takes_turns else ladder.rungs[0]
