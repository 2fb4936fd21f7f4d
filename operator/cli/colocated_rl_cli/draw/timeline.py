"""Draw who held each GPU, when and why, as text and as a stand-alone page. Pure: the same records give the same text.

A figure that was not measured is a dash, never a guess. The demo's report uses the same sections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median

from colocated_rl_api.holders import PodHolder
from colocated_rl_api.logs import printable
from colocated_rl_cli.draw.charts import (
    Bar,
    ChartRow,
    bar_table,
    row_chart,
    table,
)
from colocated_rl_cli.draw.figures import (
    RunFigures,
    RungSpan,
    holder_shares,
    read_figures,
    rung_times,
    staleness_tokens,
    switch_seconds,
    switches_of,
    typical_switch,
)
from colocated_rl_cli.evidence.causes import causes_by_epoch
from colocated_rl_cli.evidence.evidence import steps_of
from colocated_rl_cli.evidence.records import Records

COLOURS = {
    PodHolder.START: "start", PodHolder.ROLLOUT: "rollout", PodHolder.SWITCH: "switch", PodHolder.TRAINER: "trainer",
    PodHolder.BOTH: "both", PodHolder.IDLE: "idle",
}  # fmt: skip
LETTERS = {
    PodHolder.START: ".",
    PodHolder.ROLLOUT: "r",
    PodHolder.SWITCH: "s",
    PodHolder.TRAINER: "T",
    PodHolder.BOTH: "b",
    PodHolder.IDLE: "-",
}

STYLE = Path(__file__).with_name("style.css")
SPANS_AT_MOST = 20_000  # drawn spans; a browser has to load them all


# ---------------------------------------------------------------------------------------------------------------- text
def text(records: Records, *, width: int = 100, steps: int = 10) -> str:
    """Return the timeline for a terminal: a bar for each pod, the newest steps, the errors."""
    figures = read_figures(records.lines, records.ladder)
    if not figures.spans:
        return "nothing is known: no pod of the job has a log line about its GPU"
    return "\n".join([*_bars(figures, width), "", *_newest(records, figures, steps), "", *_marks(figures)]).rstrip()


def _bars(figures: RunFigures, width: int) -> Iterator[str]:
    name_width = max(len(pod) for pod in figures.pods)
    cells = max(10, width - name_width - 2)
    yield f"{_moment(figures.began)} to {_moment(figures.ended)} UTC, {_spoken(figures.ended - figures.began)}"
    for pod in figures.pods:
        yield f"{pod:{name_width}}  {_bar(figures, [span for span in figures.spans if span.pod == pod], cells)}"
    shares = ", ".join(f"{holder.value} {100 * share:.0f} %" for holder, share in holder_shares(figures).items())
    key = "  ".join(f"{LETTERS[holder]} {holder.value}" for holder in _present(figures.spans))
    yield key + (f"; {shares}" if shares else "")


def _bar(figures: RunFigures, spans: list[RungSpan], cells: int) -> str:
    """Draw a bar whose cells show the holder of most of their time."""
    length = (figures.ended - figures.began) / cells or 1.0
    held: list[dict[PodHolder, float]] = [{} for _ in range(cells)]
    for span in spans:
        first = min(cells - 1, int((span.start - figures.began) / length))
        last = min(cells - 1, int((span.end - figures.began) / length))
        for cell in range(first, last + 1):
            left = figures.began + cell * length
            part = min(span.end, left + length) - max(span.start, left)
            held[cell][span.holder] = held[cell].get(span.holder, 0.0) + part
    return "".join(LETTERS[max(cell, key=cell.__getitem__)] if cell else " " for cell in held)


def _newest(records: Records, figures: RunFigures, steps: int) -> Iterator[str]:
    yield f"{'step':>6}  {'ended':8}  {'why':20}  {'training':>10}  {'switch':>9}"
    causes = causes_by_epoch(records)
    for step, spans in list(switches_of(figures).items())[-steps:]:
        training = [span for span in spans if span.holder is PodHolder.TRAINER]
        whole = max(span.end for span in spans) - min(span.start for span in spans)
        held = max(span.end for span in training) - min(span.start for span in training) if training else 0.0
        cause = next((causes[span.epoch] for span in spans if span.epoch in causes), "-")
        ended = _clock(max(span.end for span in spans))
        yield f"{step:6}  {ended:8}  {cause:20}  {held:8.2f} s  {max(0.0, whole - held):7.2f} s"


def _marks(figures: RunFigures) -> Iterator[str]:
    for mark in figures.marks[-20:]:
        yield f"{_clock(mark.ts)}  {mark.who}: {mark.text}"[:200]


# ---------------------------------------------------------------------------------------------------------------- page
def page(title: str, sections: Iterable[str]) -> str:
    """Return a whole HTML page without external resources."""
    return printable(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE.read_text(encoding='utf-8')}</style></head><body><main>"
        f"<h1>{escape(title)}</h1>{''.join(sections)}</main></body></html>\n"
    )


def render(records: Records) -> str:
    """Return a job's timeline as an HTML page."""
    figures, job = read_figures(records.lines, records.ladder), records.job
    status = job.get("status", {})
    intro = (
        f"<p>Phase {escape(str(status.get('phase') or '-'))}, step {status.get('step') or 0} of "
        f"{steps_of(job)}. All figures are from the job's own log lines and status; what its "
        f"pods no longer keep is not here.</p>{table(_figures(figures), heading=['what', 'measured'])}"
    )
    metadata = job.get("metadata", {})
    return page(
        f"{metadata.get('namespace', '')}/{metadata.get('name', '')}: who held each GPU",
        [intro, holders(figures), switch(figures), staleness(figures), every_step(figures)],
    )


def _figures(figures: RunFigures) -> list[tuple[str, str]]:
    switches, shares = switch_seconds(figures), holder_shares(figures)
    return [
        ("from", f"{_moment(figures.began)} UTC, for {_spoken(figures.ended - figures.began)}"),
        ("time of the GPUs", _shares(shares) or "-"),
        ("switch, median and longest", f"{median(switches):.2f} s, {max(switches):.2f} s" if switches else "-"),
    ]


def holders(figures: RunFigures) -> str:
    """Return the section on who held each device."""
    began, spans = figures.began, figures.spans[-SPANS_AT_MOST:]
    rows = _rows(
        figures, spans, began, lambda span: f"{span.holder.value}, step {span.step}: {span.end - span.start:.2f} s"
    )
    words = _shares(holder_shares(figures))
    chart = row_chart(
        rows, label=f"who held the device: {words}", key=_key(spans), unit="seconds since the first pod answered"
    )
    marks = [(f"{mark.ts - began:.1f} s", mark.who, mark.text) for mark in figures.marks]
    return f"<h2>Who held each device</h2><p>After start-up: {escape(words) or 'not measured'}.</p>{chart}" + (
        details(f"{len(marks)} errors on the way", table(marks, heading=["when", "who", "what"])) if marks else ""
    )


def _rows(
    figures: RunFigures, spans: Sequence[RungSpan], began: float, title_of: Callable[[RungSpan], str]
) -> list[ChartRow]:
    """Return a row for each pod, with its spans in seconds since `began`. title_of: the title of a span."""
    return [
        ChartRow(
            pod,
            [
                Bar(span.start - began, span.end - began, COLOURS[span.holder], title_of(span))
                for span in spans
                if span.pod == pod
            ],
        )
        for pod in figures.pods
    ]


def switch(figures: RunFigures) -> str:
    """Return the section on the rungs of a switch."""
    times = rung_times(figures)
    spans = typical_switch(figures)
    began = min((span.start for span in spans), default=0.0)
    rows = _rows(
        figures,
        spans,
        began,
        lambda span: f"to {span.towards or 'its newest line'}: {1000 * (span.end - span.start):.0f} ms",
    )
    unit = "seconds since the gate closed" + (f", of step {spans[0].step}" if spans else "")
    chart = row_chart(rows, label="rungs of a switch", key=_key(spans), unit=unit, parted=True)
    bars = bar_table(
        [
            (one.rung.value, one.mean_s, f"{one.mean_s:.3f} s, longest {one.longest_s:.3f} s", COLOURS[one.holder])
            for one in times
        ],
        heading=("rung", "mean time from the rung before"),
    )
    return (
        "<h2>Inside a switch</h2><p>A switch of median length, and the mean time that pods needed for each rung over "
        f"all switches, waiting for each other at the barriers included.</p>{chart}{bars}"
    )


def staleness(figures: RunFigures) -> str:
    """Return the section on the staleness of trained tokens."""
    ages = staleness_tokens(figures)
    trained = sum(ages.values()) or 1
    rows = [
        (_steps_old(age), count, f"{count:,} tokens, {100 * count / trained:.1f} %", "rollout")
        for age, count in ages.items()
    ]
    return (
        "<h2>Staleness</h2><p>How many steps older than the newest weights the weights were that made a token, when it "
        f"was trained.</p>{bar_table(rows, heading=('age', 'trained tokens'))}"
    )


def every_step(figures: RunFigures) -> str:
    """Return the section with a row for each step."""
    rows = [
        (
            str(batch.step),
            f"{batch.reward:.3f}",
            str(batch.samples),
            f"{batch.tokens:,}",
            "-" if batch.resumed_samples is None else str(batch.resumed_samples),
            f"{(batch.ts - before.ts):.1f} s" if before else "-",
        )
        for before, batch in pairwise([None, *figures.batches])
        if batch is not None
    ]
    heading = ["step", "mean reward", "samples", "tokens", "interrupted and continued", "since the batch before"]
    return details("Every step", table(rows, heading=heading))


def details(name: str, body: str) -> str:
    """Return a section that is folded until a reader opens it."""
    return f"<details><summary>{escape(name)}</summary>{body}</details>"


def _present(spans: Iterable[RungSpan]) -> list[PodHolder]:
    held = {span.holder for span in spans}
    return [holder for holder in PodHolder if holder in held]


def _key(spans: Iterable[RungSpan]) -> list[tuple[str, str]]:
    """Return colour and meaning of each holder in the chart."""
    return [(COLOURS[holder], holder.value) for holder in _present(spans)]


# --------------------------------------------------------------------------------------------------------------- words
def _shares(shares: Mapping[PodHolder, float]) -> str:
    return ", ".join(f"{holder.value} {100 * share:.0f} %" for holder, share in shares.items())


def _steps_old(age: int) -> str:
    return f"{age} step{'s' if age != 1 else ''}"


def _moment(ts: float) -> str:
    return datetime.fromtimestamp(ts, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _clock(ts: float) -> str:
    return datetime.fromtimestamp(ts, UTC).strftime("%H:%M:%S")


def _spoken(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
