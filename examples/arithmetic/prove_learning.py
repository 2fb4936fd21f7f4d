"""Repeats the demo's learning and writes down what came out: `docs/learning.md`.

    python -m examples.arithmetic.prove_learning [--runs 10] [--newest 10] [--controls 1]

Each run is the whole demo on a new cluster with prompts and minibatches of its own seed. `newest-N` is `run-N` with
`maxStaleness: 0`: nothing it trains is older than the newest weights. A control has learning rate 0. What was recorded
is kept in `.build/learning` and not done again, so that it can be interrupted; a change of the job starts over. The
document is written anew after each run, failed runs included.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from colocated_rl_cli.draw.figures import RunFigures, read_figures
from colocated_rl_cli.evidence.records import Records
from examples.arithmetic.cluster import ClusterError
from examples.arithmetic.demo import HERE, ROOT, Demo, NotSetUp
from examples.arithmetic.pairs import compared, verdict
from examples.arithmetic.verdict import START_AT_MOST, TARGET, job_s, shortfalls

RECORDS = ROOT / ".build/learning"
DOCUMENT = ROOT / "docs/learning.md"


class Kind(StrEnum):
    RUN = "run"
    NEWEST = "newest"
    CONTROL = "control"


def seeded(job: dict[str, Any], kind: Kind, seed: int) -> dict[str, Any]:
    """The demo's job with prompts, held-out questions and minibatches of another seed, and what its kind changes."""
    job = copy.deepcopy(job)
    job["spec"]["rollout"]["prompts"]["reasoningGym"]["seed"] = seed * 1_000_000
    job["spec"]["trainer"]["config"]["seed"] = seed
    if kind is Kind.NEWEST:
        rollout = job["spec"]["rollout"]
        rollout["maxStaleness"], rollout["maxConcurrency"] = 0, rollout["batchSize"]  # more would never be admitted
    if kind is Kind.CONTROL:
        job["spec"]["trainer"]["config"]["learningRate"] = 0.0
    return job


def document(runs: Mapping[str, Records], job: dict[str, Any]) -> str:
    """What is written down. `runs`: by kind and seed (`run-1`), as they ended."""
    spec = job["spec"]
    figures = {name: read_figures(run.lines) for name, run in runs.items()}
    means = {name: {one.step: one.mean for one in of_run.evaluations} for name, of_run in figures.items()}
    steps = sorted({step for of_run in means.values() for step in of_run})
    rows = [["run", *(f"step {step}" for step in steps), "older, %", "job, s", "shortfall"]]
    for name in sorted(runs, key=_place):
        run = runs[name]
        shares = [f"{means[name][step]:.3f}" if step in means[name] else "-" for step in steps]
        took_s = job_s(run)
        older = f"{100 * older_share(figures[name]):.0f}" if figures[name].batches else "-"
        rows.append([name, *shares, older, f"{took_s:.0f}" if took_s else "-", "; ".join(shortfalls(run)) or "none"])
    tried = [name for name in runs if kind_of(name) is Kind.RUN]
    learned = [name for name in tried if not shortfalls(runs[name])]
    return f"""# What the demo learns, recorded

Written by `python -m examples.arithmetic.prove_learning` from the records of whole runs of the demo: real API server,
two engines (SGLang on the CPU), two trainer ranks, {spec["steps"]} steps of {spec["rollout"]["batchSize"]} prompts with
{spec["rollout"]["groupSize"]} samples each, on two cores. Each run has prompts, held-out questions and minibatches of
its own seed; the warm model is the same. A figure is the exact match of one sampled response to each of
{spec["evaluation"]["samples"]} held-out questions (standard error at most 0.022). *Older* is the share of the trained
tokens that weights older than the newest made. *job, s* is from its creation to its end, with whatever else the machine
had to do.

A run counts if the job completes within 10 minutes and exact match goes from at most {START_AT_MOST} to at least
{TARGET}: **{len(learned)} of {len(tried)} recorded runs**. A control is the same with learning rate 0; that it falls
short is the point: nothing but training moves the figure.

{_table(rows)}
{_paired(means, steps)}"""


def older_share(figures: RunFigures) -> float:
    """Of the trained tokens, 0 to 1."""
    older = sum(count for batch in figures.batches for age, count in batch.staleness.items() if age > 0)
    return older / sum(batch.tokens for batch in figures.batches)


def kind_of(name: str) -> Kind:
    return Kind(name.split("-")[0])


def _place(name: str) -> tuple[int, int]:
    return list(Kind).index(kind_of(name)), int(name.split("-")[1])


def _paired(means: Mapping[str, Mapping[int, float]], steps: Sequence[int]) -> str:
    """The runs beside those of their seeds without staleness; empty while no two pairs are through."""
    rows = [["step", "pairs", "difference", "standard error", "95 %", "it is"]]
    for step in steps[1:]:
        seeds = [name.split("-")[1] for name in means if kind_of(name) is Kind.NEWEST]
        both = [(means.get(f"newest-{seed}", {}).get(step), means.get(f"run-{seed}", {}).get(step)) for seed in seeds]
        found = compared([(newest, run) for newest, run in both if newest is not None and run is not None])
        if found:
            interval = f"{found.low:+.3f} to {found.high:+.3f}"
            numbers = [str(step), str(found.pairs), f"{found.mean:+.3f}", f"{found.error:.3f}", interval]
            rows.append([*numbers, verdict(found)])
    if len(rows) == 1:
        return ""
    return f"""
## Beside runs of the newest weights alone

`newest-N` is `run-N` with `maxStaleness: 0`: the same seed, questions and number of samples, and no token of older
weights. Its rollout waits for each step; that of `run-N` goes on across them, and continues what a switch interrupted.
A difference is exact match of `run-N` less that of `newest-N`; its error and interval are of the pairs' own spread.

{_table(rows)}
"""


def _table(rows: Sequence[Sequence[str]]) -> str:
    heading, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *others))


def _record(name: str, job: dict[str, Any], console: Console) -> Records:
    out = RECORDS / name
    out.mkdir(parents=True, exist_ok=True)
    records = Demo(out, console, job).run()
    records.write(out / "records.json")
    (out / "job.sha256").write_text(_digest(job))
    return records


def _recorded(name: str, job: dict[str, Any]) -> Records | None:
    out = RECORDS / name
    try:
        return Records.read(out / "records.json") if (out / "job.sha256").read_text() == _digest(job) else None
    except FileNotFoundError:
        return None


def _digest(job: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--newest", type=int, default=10)
    parser.add_argument("--controls", type=int, default=1)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    args = parser.parse_args()
    console = Console()
    job = yaml.safe_load((HERE / "job.yaml").read_text())
    asked = {Kind.RUN: args.runs, Kind.NEWEST: args.newest, Kind.CONTROL: args.controls}
    in_turn = sorted((seed, kind) for kind, runs in asked.items() for seed in range(1, runs + 1))
    runs: dict[str, Records] = {}
    for seed, kind in in_turn:
        name, of_run = f"{kind}-{seed}", seeded(job, kind, seed)
        try:
            runs[name] = _recorded(name, of_run) or _record(name, of_run, console)
        except (ClusterError, NotSetUp) as error:
            console.print(f"{name}: {error}", highlight=False, markup=False)
            return 1
        except KeyboardInterrupt:
            return 130
        args.document.write_text(document(runs, job))
        console.print(
            f"{name}: {'; '.join(shortfalls(runs[name])) or 'as it should be'}", highlight=False, markup=False
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
