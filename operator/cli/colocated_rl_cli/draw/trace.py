"""Write a job as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: JSON in the Trace Event Format. Pure.

Each pod is a process with two threads: who has its GPU, with the epoch's cause, and its rungs. The job is a process
with its batches as instants and its rewards as counters. Problems and Kubernetes events are instants.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from colocated_rl_cli.draw.figures import RunFigures, RungSpan, read_figures
from colocated_rl_cli.evidence.causes import causes_by_epoch, event_ts
from colocated_rl_cli.evidence.records import Records

HOLDER, RUNGS = 1, 2  # threads of a pod
JOB = 1  # the process for what belongs to no pod
Event = dict[str, Any]


def trace(records: Records) -> dict[str, Any]:
    """Return the trace; its times are microseconds since the epoch."""
    figures = read_figures(records.lines, records.ladder)
    numbers = {pod: number for number, pod in enumerate(figures.pods, start=JOB + 1)}
    events = [
        *_names(records, numbers),
        *_holders(figures, numbers, causes_by_epoch(records)),
        *_rungs(figures, numbers),
        *_learning(figures),
        *_marks(figures, numbers),
        *_kubernetes_events(records),
    ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _names(records: Records, numbers: dict[str, int]) -> Iterator[Event]:
    name = str(records.job.get("metadata", {}).get("name", "job"))
    yield _meta("process_name", JOB, None, f"job {name}")
    for pod, number in numbers.items():
        yield _meta("process_name", number, None, pod)
        yield _meta("thread_name", number, HOLDER, "who has the GPU")
        yield _meta("thread_name", number, RUNGS, "rungs")


def _meta(kind: str, process: int, thread: int | None, name: str) -> Event:
    place = {"pid": process} if thread is None else {"pid": process, "tid": thread}
    return {"ph": "M", "name": kind, **place, "args": {"name": name}}


def _holders(figures: RunFigures, numbers: dict[str, int], causes: dict[int, str]) -> Iterator[Event]:
    """Yield one slice for each run of spans with the same holder."""
    for pod, number in numbers.items():
        spans = [span for span in figures.spans if span.pod == pod]
        while spans:
            first = spans[0]
            count = next((at for at, span in enumerate(spans) if span.holder is not first.holder), len(spans))
            same, spans = spans[:count], spans[count:]
            epoch = next((span.epoch for span in same if span.epoch is not None), None)
            why = {} if epoch is None else {"epoch": epoch, "why": causes.get(epoch, "not recorded")}
            yield _slice(first.holder.value, number, HOLDER, first, same[-1], {"step": first.step, **why})


def _rungs(figures: RunFigures, numbers: dict[str, int]) -> Iterator[Event]:
    for span in figures.spans:
        if span.towards is not None:
            yield _slice(f"to {span.towards}", numbers[span.pod], RUNGS, span, span, {"step": span.step})


def _slice(name: str, process: int, thread: int, first: RungSpan, last: RungSpan, arguments: dict[str, Any]) -> Event:
    return {
        "ph": "X", "name": name, "cat": "gpu", "pid": process, "tid": thread,
        "ts": _us(first.start), "dur": _us(last.end) - _us(first.start), "args": arguments,
    }  # fmt: skip


def _learning(figures: RunFigures) -> Iterator[Event]:
    for batch in figures.batches:
        yield {"ph": "C", "name": "reward", "pid": JOB, "ts": _us(batch.ts), "args": {"mean": batch.reward}}
        yield _instant(f"batch {batch.step} sealed", JOB, batch.ts, {"samples": batch.samples, "tokens": batch.tokens})
    for one in figures.evaluations:
        if one.ts is None:
            continue
        yield {"ph": "C", "name": f"{one.name} reward", "pid": JOB, "ts": _us(one.ts), "args": {"mean": one.mean}}


def _marks(figures: RunFigures, numbers: dict[str, int]) -> Iterator[Event]:
    for mark in figures.marks:
        yield _instant(mark.text, numbers.get(mark.who, JOB), mark.ts, {"who": mark.who})


def _kubernetes_events(records: Records) -> Iterator[Event]:
    """Yield the job's Kubernetes events as instants."""
    for event in records.events:
        at = event_ts(event)
        if at is not None:
            arguments = {"message": event.get("message"), "type": event.get("type")}
            yield _instant(str(event.get("reason")), JOB, at, arguments)


def _instant(name: str, process: int, at: float, arguments: dict[str, Any]) -> Event:
    return {"ph": "i", "s": "p", "name": name, "pid": process, "tid": HOLDER, "ts": _us(at), "args": arguments}


def _us(seconds: float) -> int:
    return round(1_000_000 * seconds)
