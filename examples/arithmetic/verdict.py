"""What a run of the demo must show, and what of it is missing."""

from __future__ import annotations

from colocated_rl_cli.draw.figures import read_figures
from colocated_rl_cli.evidence.records import Records

START_AT_MOST = 0.35  # held-out exact match before the first step
TARGET = 0.75  # and after the last
QUESTIONS_AT_LEAST = 400
JOB_SECONDS_AT_MOST = 600.0
JOB_TOOK = "job, from its creation to its end"  # a name in `Records.took_s`


def job_s(records: Records) -> float | None:
    """From the job's creation to its end."""
    return records.took_s.get(JOB_TOOK)


def shortfalls(records: Records) -> list[str]:
    """What is missing of what the demo must show; nothing if it went well."""
    figures = read_figures(records.lines)
    status, steps = records.job.get("status", {}), records.job["spec"]["steps"]
    missing = []
    if status.get("phase") != "Complete":
        reasons = [f"{one['type']}: {one['message']}" for one in status.get("conditions", []) if one.get("message")]
        missing.append(f"the job is {status.get('phase') or 'not acted on'}, not Complete. {' '.join(reasons)}".strip())
    if figures.first is None or figures.last is None or figures.last.step != steps:
        missing.append("there is no evaluation of the first weights or of the last")
        return missing
    if figures.first.mean > START_AT_MOST:
        missing.append(f"held-out exact match begins at {figures.first.mean:.3f}, above {START_AT_MOST}")
    if figures.last.mean < TARGET:
        missing.append(f"held-out exact match ends at {figures.last.mean:.3f}, below {TARGET}")
    if figures.last.samples < QUESTIONS_AT_LEAST:
        missing.append(f"{figures.last.samples} held-out questions were asked, fewer than {QUESTIONS_AT_LEAST}")
    if (took_s := job_s(records) or 0.0) > JOB_SECONDS_AT_MOST:
        missing.append(f"the job took {took_s:.0f} s, more than {JOB_SECONDS_AT_MOST:.0f}")
    return missing
