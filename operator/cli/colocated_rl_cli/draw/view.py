"""Draw a job while it runs: a frame for a terminal, a line for each event elsewhere.

Pure: job, log lines and time in, something to print out. An unknown value is a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from colocated_rl_api.holders import PodHolder
from colocated_rl_cli.draw.figures import (
    HELD_OUT,
    Evaluated,
    Line,
    Sealed,
    Standing,
    batches_of,
    by_set,
    evaluations_of,
    standings,
)
from colocated_rl_cli.evidence.evidence import steps_of
from colocated_rl_cli.evidence.records import ladder_of

COLOURS = {
    PodHolder.START: "bright_black",
    PodHolder.ROLLOUT: "blue",
    PodHolder.SWITCH: "magenta",
    PodHolder.TRAINER: "yellow",
    PodHolder.BOTH: "cyan",
    PodHolder.IDLE: "white",
}
BLOCKS = " ▁▂▃▄▅▆▇█"
SPARKS = 40
ROWS_AT_MOST = 32  # of pods
STEPS_FOR_PACE = 20  # the time left is estimated from at most so many of the newest steps


def frame(job: Mapping[str, Any], lines: Sequence[Line], *, now: float, trouble: str | None = None) -> RenderableType:
    """Draw the job at this moment. now: seconds since the epoch. trouble: why the frame may be out of date."""
    status = job.get("status", {})
    steps, step = steps_of(job), int(status.get("step") or 0)
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(str(status.get("phase") or "Pending"), style="bold"),
        Text(f"step {step} of {steps}", no_wrap=True),
        ProgressBar(total=steps, completed=step, width=30),
    )
    words = [
        f"GPU: {status.get('gpuHolder') or '-'}",
        f"weights {status.get('weightVersion') or '-'}",
        f"epoch {status.get('epoch') or '-'}",
        f"restarts {status.get('restarts') or 0}",
    ]
    parts: list[RenderableType] = [
        head,
        Text("  ".join(words)),
        Text(),
        _pods(status, standings(lines, ladder_of(job)), now),
        Text(),
    ]
    parts.append(_learning(batches_of(lines), evaluations_of(lines), status, steps))
    if trouble:
        parts.append(Text(f"\nnot up to date: {trouble}", style="red"))
    return Panel(Group(*parts), title=_name(job), title_align="left")


def plain_line(line: Line) -> str | None:
    """Return one line for an event worth showing; None for all others."""
    match line.get("event"):
        case "batch sealed":
            return (
                f"step {line['step']:3d}: batch of {line['samples']} samples, {line['loss_tokens']} tokens, "
                f"mean reward {line['reward_mean']:.3f}"
            )
        case "evaluation ended":
            name = line.get("name", HELD_OUT)
            return f"step {line['step']:3d}: {name} mean reward {line['mean']:.3f} ± {line['stderr']:.3f}"
        case "agent started":
            return f"{line['pod']}: the agent is up, the trainer starts"
        case "trainers loaded":
            return (
                f"{line['pod']}: the trainer is up after {line['took_s']:.0f} s; the engine starts on its weights next"
            )
        case "engine started":
            return f"{line['pod']}: the engine is up after {line['took_s']:.0f} s"
        case "problem reported":
            return f"{line['pod']}: {line['reason']}: {line.get('message', '')}"
        case event if line.get("level") in ("error", "critical"):
            return f"{line.get('pod', '')}: {event}: {line.get('reason', '')}"
        case _:
            return None


def _pods(status: Mapping[str, Any], standings: Mapping[str, Standing], now: float) -> Table:
    """Return a table with a row for each known pod; pods out of line come first."""
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for name in ("pod", "rung", "GPU", "since", ""):
        table.add_column(name)
    odd = {pod["name"]: pod for pod in status.get("outOfLine", ())}
    known = sorted({*standings, *odd}, key=lambda name: (name not in odd, name))
    for name in known[:ROWS_AT_MOST]:
        stands, problem = standings.get(name), odd.get(name, {})
        words = " ".join(part for part in (problem.get("reason"), problem.get("message")) if part)
        table.add_row(
            name,
            stands.rung.value if stands else problem.get("rung") or "-",
            Text(stands.holder.value, style=COLOURS[stands.holder]) if stands else "-",
            f"{max(0.0, now - stands.since):.1f} s" if stands else "",
            Text(words, style="red", overflow="ellipsis", no_wrap=True),
        )
    if len(known) > ROWS_AT_MOST:
        table.add_row(f"and {len(known) - ROWS_AT_MOST} more", "", "", "", "")
    if not table.row_count:
        table.add_row("-", "no pod has answered yet", "", "", "")
    return table


def _learning(
    batches: Sequence[Sealed], evaluations: Sequence[Evaluated], status: Mapping[str, Any], steps: int
) -> Table:
    rollout = status.get("rollout") or {}
    grid = Table.grid(padding=(0, 2))
    rewards, left_s = [one.reward for one in batches], _left_s(batches, steps)
    newest = rewards[-1] if rewards else rollout.get("reward")
    grid.add_row("reward", _number(newest, ".3f"), Text(_spark(rewards), style="blue"))
    known = {one["name"]: one["mean"] for one in status.get("evaluations", ())}
    of_sets = by_set(evaluations)
    for name in {**known, **of_sets} or {HELD_OUT: None}:
        means = [one.mean for one in of_sets.get(name, ())]
        newest_mean = means[-1] if means else known.get(name)
        grid.add_row(f"{name} reward", _number(newest_mean, ".3f"), Text(_spark(means), style="green"))
    grid.add_row("staleness", _number(rollout.get("staleness"), ".2f", " steps"))
    grid.add_row("tokens per second", _number(rollout.get("tokensPerSecond"), ".0f"), "over 30 s")
    grid.add_row("last switch", _number(status.get("lastSwitchSeconds"), ".2f", " s"), "without training")
    grid.add_row("left, at this pace", "-" if left_s is None else _spoken(left_s))
    return grid


def _left_s(batches: Sequence[Sealed], steps: int) -> float | None:
    """Return the seconds left at the median pace; None before three steps are known."""
    newest = batches[-STEPS_FOR_PACE:]
    if len(newest) < 3:
        return None
    pace = median(after.ts - before.ts for before, after in pairwise(newest))
    return pace * max(0, steps - newest[-1].step)


def _number(value: Any, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _spark(shares: Sequence[float]) -> str:
    """Draw a sparkline, scaled over 0 to 1 or over the values' range if that is wider."""
    shown = shares[-SPARKS:]
    low, high = min([0.0, *shown]), max([1.0, *shown])
    return "".join(BLOCKS[round(8 * (share - low) / (high - low))] for share in shown)


def _spoken(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _name(job: Mapping[str, Any]) -> str:
    metadata = job.get("metadata", {})
    return f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
