"""Show who had the GPUs of jobs, and what sharing them saved, as tables and as plain data. The module is pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from colocated_rl_api.holders import PodHolder
from colocated_rl_cli.base.output import table
from colocated_rl_cli.draw.figures import Line, read_figures
from colocated_rl_cli.evidence.gpu_hours import HOUR_S, GpuHours
from colocated_rl_cli.evidence.records import ladder_of

Job = Mapping[str, Any]


def logged_seconds(job: Job, lines: Sequence[Line]) -> Mapping[str, float]:
    """Return the seconds of one device by who had it, from the log lines of its pod's agent."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in read_figures(lines, ladder_of(job)).spans:
        seconds[span.holder] += span.end - span.start
    return seconds


def as_data(hours: GpuHours) -> dict[str, Any]:
    """Return the hours as plain data, for programs."""
    return {"held": hours.held, "total": hours.total, "separate": hours.separate, "saved": hours.saved}


def text(hours: GpuHours) -> str:
    """Return the tables of one job: by holder, and beside GPUs of their own."""
    if not hours.held:
        return "no pod of this job has a GPU, none has had it yet, or none is kept: Prometheus may have more"
    rows = [
        _row("holder", holder, held, held / hours.total) for holder, held in (*hours.held.items(), ("sum", hours.total))
    ]
    shares = table(rows, ["holder", "gpu_seconds", "gpu_hours", "share"])
    if hours.separate is None or hours.saved is None:
        return f"{shares}\n\nengines and trainers share no GPU in this job: there is nothing to compare"
    unshared = f", and {hours.unshared:.4g} of GPUs that are not shared" if hours.unshared > 0 else ""
    compared = (
        {"gpus": "colocated", "gpu_hours": hours.total, "reckoned": "the sum"},
        {
            "gpus": "separate",
            "gpu_hours": hours.separate,
            "reckoned": f"2 x {hours.longer:.4g}, the longer of both sides{unshared}",
        },
        {"gpus": "saved", "gpu_hours": hours.saved, "reckoned": f"{_share(hours.saved, hours.separate)} of separate"},
    )
    return f"{shares}\n\n{table(compared, ['gpus', 'gpu_hours', 'reckoned'])}"


def _row(key: str, name: str, held: float, share: float) -> dict[str, Any]:
    return {key: name, "gpu_seconds": str(round(held * HOUR_S)), "gpu_hours": held, "share": f"{share:.0%}"}


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def text_of_many(jobs: Mapping[str, Job], found: Mapping[str, GpuHours], *, with_namespace: bool) -> str:
    """Return a line for each job and their sum, with dashes for what is not known. found: by the keys of jobs."""
    holders = [str(holder) for holder in PodHolder if any(hours.held.get(holder) for hours in found.values())]
    rows = [_line(job, found.get(key)) for key, job in jobs.items()]
    totals = {holder: sum(hours.held.get(holder, 0.0) for hours in found.values()) for holder in holders}
    saved = [hours.saved for hours in found.values() if hours.saved is not None]
    total = sum(hours.total for hours in found.values())
    end = {"namespace": "sum", "job": f"{len(jobs)} jobs" if with_namespace else "sum"}
    rows.append({**end, "gpu_hours": total, **totals, "saved": sum(saved) if saved else None})
    place = ["namespace", "job"] if with_namespace else ["job"]
    return table(rows, [*place, "phase", "gpu_hours", *holders, "saved"])


def _line(job: Job, hours: GpuHours | None) -> dict[str, Any]:
    metadata, phase = job["metadata"], job.get("status", {}).get("phase")
    line = {"namespace": metadata.get("namespace"), "job": metadata["name"], "phase": phase}
    if hours is None or not hours.held:
        return line
    return {**line, "gpu_hours": hours.total, **hours.held, "saved": hours.saved}
