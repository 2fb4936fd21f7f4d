"""State what a run of a demo must show, and find what of it is missing."""

from __future__ import annotations

from dataclasses import dataclass

from colocated_rl_cli.draw.figures import read_figures
from colocated_rl_cli.evidence.records import Records


@dataclass(frozen=True)
class Lesson:
    """A lesson is what a job is to learn.

    about: one or two sentences of its report; {first} and {last} are the mean lengths of a response, in tokens, in the
    first batch and in the last.

    start_at_most, target: held-out exact match before the first step and after the last.
    """

    about: str
    start_at_most: float
    target: float
    questions_at_least: int
    job_seconds_at_most: float


ARITHMETIC = Lesson(
    about="Sums of two to four one-digit numbers. First the model finds that writing down its working pays (a response "
    "grows from {first} to {last} tokens), then it gets the sums right.",
    start_at_most=0.35,
    target=0.75,
    questions_at_least=400,
    job_seconds_at_most=600.0,
)
JOB_TOOK = "job, from its creation to its end"  # a name in `Records.took_s`


def job_s(records: Records) -> float | None:
    """Return the seconds from the job's creation to its end."""
    return records.took_s.get(JOB_TOOK)


def shortfalls(records: Records, lesson: Lesson = ARITHMETIC) -> list[str]:
    """Return what the run did not show of what a demo must show; nothing if it went well."""
    figures = read_figures(records.lines)
    status, steps = records.job.get("status", {}), records.job["spec"]["steps"]
    missing = []
    if status.get("phase") != "Complete":
        reasons = [f"{one['type']}: {one['message']}" for one in status.get("conditions", []) if one.get("message")]
        missing.append(f"the job is {status.get('phase') or 'not acted on'}, not Complete. {' '.join(reasons)}".strip())
    if figures.first is None or figures.last is None or figures.last.step != steps:
        missing.append("there is no evaluation of the first weights or of the last")
        return missing
    if figures.first.mean > lesson.start_at_most:
        missing.append(f"held-out exact match begins at {figures.first.mean:.3f}, above {lesson.start_at_most}")
    if figures.last.mean < lesson.target:
        missing.append(f"held-out exact match ends at {figures.last.mean:.3f}, below {lesson.target}")
    if figures.last.samples < lesson.questions_at_least:
        missing.append(f"{figures.last.samples} held-out questions were asked, fewer than {lesson.questions_at_least}")
    if (took_s := job_s(records) or 0.0) > lesson.job_seconds_at_most:
        missing.append(f"the job took {took_s:.0f} s, more than {lesson.job_seconds_at_most:.0f}")
    return missing
