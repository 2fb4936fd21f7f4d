"""What the demo shows while the job runs: a live view on a terminal, a line for each event elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from examples.arithmetic.figures import Figures, Holder, Line, holder_now, read_figures
from examples.arithmetic.verdict import TARGET

COLOURS = {Holder.START: "bright_black", Holder.ROLLOUT: "blue", Holder.SWITCH: "magenta", Holder.TRAINER: "yellow"}
BLOCKS = " ▁▂▃▄▅▆▇█"


def live_view(job: Mapping[str, Any], lines: Sequence[Line], *, elapsed_s: float) -> RenderableType:
    """The job at this moment."""
    spec, status, figures = job.get("spec", {}), job.get("status", {}), read_figures(lines)
    steps, step = int(spec.get("steps", 1)), int(status.get("step") or 0)
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(str(status.get("phase") or "Pending"), style="bold"),
        Text(f"step {step} of {steps}"),
        ProgressBar(total=steps, completed=step, width=30),
        Text(f"GPU: {status.get('gpuHolder') or '-'}"),
        Text(f"weights {status.get('weightVersion') or '-'}"),
        Text(f"epoch {status.get('epoch') or '-'}"),
        Text(f"{elapsed_s:.0f} s"),
    )
    return Panel(
        Group(head, Text(), _pods(lines), Text(), _learning(figures, status)), title=_name(job), title_align="left"
    )


def plain_line(line: Line) -> str | None:
    """One line for an event that is worth one; None for all others."""
    match line.get("event"):
        case "batch sealed":
            return (
                f"step {line['step']:3d}: batch of {line['samples']} samples, {line['loss_tokens']} tokens, "
                f"mean reward {line['reward_mean']:.3f}"
            )
        case "evaluation ended":
            return f"step {line['step']:3d}: held-out exact match {line['mean']:.3f} ± {line['stderr']:.3f}"
        case "agent up":
            return f"{line['pod']}: the agent is up, the trainer starts"
        case "trainers loaded":
            return (
                f"{line['pod']}: the trainer is up after {line['took_s']:.0f} s; the engine starts on its weights next"
            )
        case "engine up":
            return f"{line['pod']}: the engine is up after {line['took_s']:.0f} s"
        case "problem":
            return f"{line['pod']}: {line['reason']}: {line.get('message', '')}"
        case event if line.get("level") in ("error", "critical"):
            return f"{line.get('pod', '')}: {event}: {line.get('reason', '')}"
        case _:
            return None


def _pods(lines: Sequence[Line]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for name in ("pod", "rung", "holder", "since"):
        table.add_column(name)
    now = time.time()
    for pod, (rung, holder, since) in holder_now(lines).items():
        table.add_row(pod, rung, Text(holder.value, style=COLOURS[holder]), f"{max(0.0, now - since):.1f} s")
    if not table.row_count:
        table.add_row("-", "no pod has answered yet", "", "")
    return table


def _learning(figures: Figures, status: Mapping[str, Any]) -> Table:
    rollout = status.get("rollout") or {}
    grid = Table.grid(padding=(0, 2))
    batch = figures.batches[-1] if figures.batches else None
    rewards = [one.reward for one in figures.batches]
    grid.add_row("reward", Text(_spark(rewards), style="blue"), f"{rewards[-1]:.3f}" if rewards else "-")
    shares = [one.mean for one in figures.evaluations]
    words = " → ".join(f"{share:.3f}" for share in shares) or "-"
    grid.add_row("held-out exact match", Text(_spark(shares), style="green"), f"{words}   (target {TARGET})")
    trained = sum(batch.staleness.values()) if batch else 0
    age = sum(age * count for age, count in batch.staleness.items()) / trained if batch and trained else None
    grid.add_row("staleness of the newest batch", "", "-" if age is None else f"{age:.2f} steps")
    rate = rollout.get("tokensPerSecond")
    grid.add_row("tokens per second, over 30 s", "", "-" if rate is None else f"{rate:.0f}")
    switch = status.get("lastSwitchSeconds")
    grid.add_row("last switch, without training", "", "-" if switch is None else f"{switch:.2f} s")
    return grid


def _spark(shares: Sequence[float]) -> str:
    return "".join(BLOCKS[min(8, max(0, round(8 * share)))] for share in shares[-40:])


def _name(job: Mapping[str, Any]) -> str:
    metadata = job.get("metadata", {})
    return f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
