"""Repeats the demo's learning and writes down what came out: `docs/learning.md`.

    python -m examples.arithmetic.prove_learning [--runs 10] [--controls 1]

Each run is the whole demo on a new cluster with prompts and minibatches of its own seed; a control is the same with
learning rate 0. What was recorded is kept in `.build/learning` and not done again, so that it can be interrupted; a
change of the job starts over. The document is written anew after each run, failed runs included.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from colocated_rl_cli.figures import read_figures
from colocated_rl_cli.records import Records
from examples.arithmetic.cluster import ClusterError
from examples.arithmetic.demo import HERE, ROOT, Demo, NotSetUp
from examples.arithmetic.verdict import START_AT_MOST, TARGET, job_s, shortfalls

RECORDS = ROOT / ".build/learning"
DOCUMENT = ROOT / "docs/learning.md"


def seeded(job: dict[str, Any], *, seed: int, is_control: bool) -> dict[str, Any]:
    """The demo's job with prompts and minibatches of another seed, and learning rate 0 if it is a control."""
    job = copy.deepcopy(job)
    job["spec"]["rollout"]["prompts"]["reasoningGym"]["seed"] = seed * 1_000_000
    job["spec"]["trainer"]["config"]["seed"] = seed
    if is_control:
        job["spec"]["trainer"]["config"]["learningRate"] = 0.0
    return job


def document(runs: dict[str, Records], job: dict[str, Any]) -> str:
    """What is written down. `runs`: by name, as they ended."""
    spec = job["spec"]
    evaluations = sorted({one.step for run in runs.values() for one in read_figures(run.lines).evaluations})
    heading = ["run", *(f"step {step}" for step in evaluations), "job, s", "shortfall"]
    rows = [heading, ["---"] * len(heading)]
    for name, run in runs.items():
        means = {one.step: one.mean for one in read_figures(run.lines).evaluations}
        shares = [f"{means[step]:.3f}" if step in means else "-" for step in evaluations]
        took_s = job_s(run)
        rows.append([name, *shares, f"{took_s:.0f}" if took_s else "-", "; ".join(shortfalls(run)) or "none"])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    learned = [name for name, run in runs.items() if not _is_control(name) and not shortfalls(run)]
    tried = [name for name in runs if not _is_control(name)]
    return f"""# What the demo learns, recorded

Written by `python -m examples.arithmetic.prove_learning` from the records of whole runs of the demo: real API server,
two engines (SGLang on the CPU), two trainer ranks, {spec["steps"]} steps of {spec["rollout"]["batchSize"]} prompts with
{spec["rollout"]["groupSize"]} samples each, on two cores. Each run has prompts, held-out questions and minibatches of
its own seed; the warm model is the same. A figure is the exact match of one sampled response to each of
{spec["evaluation"]["samples"]} held-out questions (standard error at most 0.022).

A run counts if the job completes within 10 minutes and exact match goes from at most {START_AT_MOST} to at least
{TARGET}: **{len(learned)} of {len(tried)} recorded runs**. A control is the same with learning rate 0; that it falls
short is the point: nothing but training moves the figure.

{table}
"""


def _is_control(name: str) -> bool:
    return name.startswith("control")


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
    parser.add_argument("--controls", type=int, default=1)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    args = parser.parse_args()
    console = Console()
    job = yaml.safe_load((HERE / "job.yaml").read_text())
    names = [f"run-{number}" for number in range(1, args.runs + 1)]
    names += [f"control-{number}" for number in range(1, args.controls + 1)]
    runs: dict[str, Records] = {}
    for name in names:
        of_run = seeded(job, seed=int(name.split("-")[1]), is_control=_is_control(name))
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
