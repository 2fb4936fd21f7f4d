"""The demo's report: records of a run in, one HTML file out, which needs nothing else to be read.

    python -m examples.arithmetic.report RECORDS.json REPORT.html

Pure but for `main`: the same records give the same bytes. A figure that was not measured is a dash, never a guess.
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from pathlib import Path
from statistics import median

from colocated_rl_cli.draw import timeline
from colocated_rl_cli.draw.charts import Series, line_chart, table
from colocated_rl_cli.draw.figures import (
    Evaluated,
    RunFigures,
    holder_shares,
    read_figures,
    staleness_tokens,
    switch_seconds,
)
from colocated_rl_cli.evidence.records import Records
from examples.arithmetic.verdict import ARITHMETIC, Lesson, job_s


def render(records: Records, lesson: Lesson = ARITHMETIC) -> str:
    """The report of a run."""
    figures = read_figures(records.lines, records.ladder)
    title = f"{records.job['metadata']['name']}: rollout and training on the same devices"
    sections = [
        _headline(records, figures, lesson),
        _learning(figures, lesson),
        timeline.holders(figures),
        timeline.switch(figures),
        timeline.staleness(figures),
        timeline.every_step(figures),
        _table(records, figures),
    ]
    return timeline.page(title, sections)


def summary(records: Records) -> list[tuple[str, str]]:
    """The run's figures, each with its name: for the terminal's last table and the report's."""
    figures = read_figures(records.lines, records.ladder)
    spec, status = records.job["spec"], records.job.get("status", {})
    switches, shares, ages = switch_seconds(figures), holder_shares(figures), staleness_tokens(figures)
    tokens = sum(batch.tokens for batch in figures.batches)
    trained = sum(ages.values())
    first, last = figures.first, figures.last
    return [
        ("phase", str(status.get("phase", "-"))),
        ("steps", f"{status.get('step', '-')} of {spec['steps']}"),
        ("replicas", f"{spec['replicas']}, each one engine and one trainer rank"),
        ("held-out exact match, before", _exact(first, spread=True)),
        ("held-out exact match, after", _exact(last, spread=True)),
        ("held-out questions", str(last.samples) if last else "-"),
        (
            "mean reward, first and last batch",
            " to ".join(f"{b.reward:.3f}" for b in figures.batches[:: max(1, len(figures.batches) - 1)]) or "-",
        ),
        ("samples trained", f"{sum(batch.samples for batch in figures.batches):,}"),
        ("tokens trained", f"{tokens:,}"),
        (
            "samples that a switch interrupted",
            f"{sum(batch.resumed_samples or 0 for batch in figures.batches):,}, all continued",
        ),
        (
            "mean staleness of a token, steps",
            f"{sum(age * n for age, n in ages.items()) / trained:.2f}" if trained else "-",
        ),
        ("log-probabilities, engine against trainer", _mismatch(figures)),
        ("switch, median and longest", f"{median(switches):.2f} s, {max(switches):.2f} s" if switches else "-"),
        (
            "time of the GPUs",
            ", ".join(f"{holder.value} {100 * share:.0f} %" for holder, share in shares.items()) or "-",
        ),
        ("trainer restarts", str(status.get("restarts") or 0)),
        *((name, f"{took:.0f} s") for name, took in records.took_s.items()),
    ]


def _headline(records: Records, figures: RunFigures, lesson: Lesson) -> str:
    first, last, switches, took_s = figures.first, figures.last, switch_seconds(figures), job_s(records)
    cells = [
        ("held out, before", _exact(first), "good" if first and first.mean <= lesson.start_at_most else "bad"),
        ("held out, after", _exact(last), "good" if last and last.mean >= lesson.target else "bad"),
        ("steps", str(len(figures.batches)), ""),
        ("median switch", f"{median(switches):.2f} s" if switches else "-", ""),
        ("from job to its end", f"{took_s:.0f} s" if took_s else "-", ""),
    ]
    body = "".join(f'<div class="{kind}"><b>{escape(value)}</b>{escape(name)}</div>' for name, value, kind in cells)
    spec = records.job["spec"]
    return (
        f"<p>{spec['replicas']} pods, each with one SGLang engine and one rank of the trainer on the same device. They "
        "take turns: the engines generate a batch, the devices change hands, the trainer makes a step, the engines go "
        "on with the new weights. All figures are from the job's own log lines and status.</p>"
        f'<div class="headline">{body}</div>'
    )


def _learning(figures: RunFigures, lesson: Lesson) -> str:
    first, last = figures.first, figures.last
    chart = line_chart(
        [
            Series("mean reward of a batch", "rollout", [(batch.step, batch.reward) for batch in figures.batches]),
            Series(
                "exact match on held-out questions",
                "held-out",
                [(one.step, one.mean) for one in figures.evaluations],
                spread=[one.stderr for one in figures.evaluations],
                dots=True,
            ),
        ],
        label=f"Held-out exact match goes from {_exact(first)} to {_exact(last)}.",
        across="step",
        unit="share that is right",
        lines=[(lesson.target, f"target {lesson.target}")],
    )
    rows = [(str(one.step), _exact(one, spread=True), str(one.samples)) for one in figures.evaluations]
    about = escape(lesson.about.format(first=_length(figures, 0), last=_length(figures, -1)))
    return (
        f"<h2>What was learned</h2><p>{about} Held-out questions are never trained on.</p>"
        f"{chart}"
        f"{timeline.details('The evaluations as a table', table(rows, heading=['step', 'exact match', 'questions']))}"
    )


def _table(records: Records, figures: RunFigures) -> str:
    return f"<h2>Figures</h2>{table(summary(records), heading=['what', 'measured'])}"


def _exact(one: Evaluated | None, *, spread: bool = False) -> str:
    if one is None:
        return "-"
    return f"{one.mean:.3f} ± {one.stderr:.3f}" if spread else f"{one.mean:.3f}"


def _mismatch(figures: RunFigures) -> str:
    return "-" if figures.mismatch is None else f"{figures.mismatch:.1e} nats apart, mean of the worst step"


def _length(figures: RunFigures, place: int) -> str:
    """Mean tokens of a response in the first or last batch."""
    batch = figures.batches[place] if figures.batches else None
    return f"{batch.tokens / batch.samples:.0f}" if batch and batch.samples else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the report of a recorded run.")
    parser.add_argument("records", type=Path)
    parser.add_argument("report", type=Path)
    args = parser.parse_args()
    args.report.write_text(render(Records.read(args.records)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
