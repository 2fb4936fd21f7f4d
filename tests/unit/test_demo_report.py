"""The demo's report and verdict, from records of a real run and from broken ones."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from colocated_rl_cli.evidence.records import Records
from examples.arithmetic.report import render, summary
from examples.arithmetic.verdict import JOB_TOOK, shortfalls

RECORDED = Path(__file__).parent / "records/run.json"


@pytest.fixture
def run() -> Records:
    return Records.read(RECORDED)


class Page(HTMLParser):
    """Tags of a page; fails on one that is closed and was not open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert [] == self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert tag == self._open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def without_lines(run: Records) -> Records:
    return replace(run, lines=[])


def changed(run: Records, event: str, **fields: Any) -> Records:
    """The records with fields of the last line of an event changed."""
    lines = [dict(line) for line in run.lines]
    next(line for line in reversed(lines) if line["event"] == event).update(fields)
    return replace(run, lines=lines)


# ---------------------------------------------------------------------------------------------------------- the report
def test_the_report_needs_nothing_from_elsewhere(run: Records) -> None:
    text = render(run)
    assert not re.search(r"https?:|url\(|@import|src=", text)
    assert [] == Page(text).all("script") + Page(text).all("link") + Page(text).all("img")


def test_the_same_records_give_the_same_report(run: Records) -> None:
    assert render(run) == render(copy.deepcopy(run))


def test_every_chart_says_in_words_what_it_shows(run: Records) -> None:
    charts = Page(render(run)).all("svg")
    assert charts
    assert all(chart["role"] == "img" and chart["aria-label"] for chart in charts)


def test_the_report_is_made_for_light_dark_and_narrow_screens(run: Records) -> None:
    text = render(run)
    assert "prefers-color-scheme:dark" in text.replace(" ", "")
    assert any(meta.get("name") == "viewport" for meta in Page(text).all("meta"))


def test_every_pod_has_a_row_of_who_held_its_device(run: Records) -> None:
    pods = {line["pod"] for line in run.lines if line["event"] == "rung reached"}
    text = "".join(Page(render(run)).text)
    assert pods
    assert all(pod in text for pod in pods)


def test_every_step_is_in_the_report(run: Records) -> None:
    sealed = [line for line in run.lines if line["event"] == "batch sealed"]
    text = "".join(Page(render(run)).text)
    assert all(f"{line['loss_tokens']:,}" in text for line in sealed)


def test_names_from_the_records_can_not_become_markup(run: Records) -> None:
    lines = [{**line, "pod": "<script>alert(1)</script>"} for line in run.lines]
    assert [] == Page(render(replace(run, lines=lines))).all("script")


def test_a_run_of_which_nothing_is_known_has_a_report_of_dashes(run: Records) -> None:
    empty = without_lines(run)
    assert "-" == dict(summary(empty))["held-out exact match, after"]
    assert Page(render(empty)).all("h2")


# --------------------------------------------------------------------------------------------------------- the verdict
def test_the_recorded_run_shows_what_it_must(run: Records) -> None:
    assert [] == shortfalls(run)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"mean": 0.7}, "ends at 0.700, below 0.75"), ({"samples": 399}, "399 held-out questions were asked")],
)
def test_a_run_that_learned_too_little_falls_short(run: Records, fields: dict[str, Any], message: str) -> None:
    assert message in "".join(shortfalls(changed(run, "evaluation ended", **fields)))


def test_a_run_that_could_do_it_from_the_start_falls_short(run: Records) -> None:
    lines = [{**line, "mean": 0.8} if line["event"] == "evaluation ended" else line for line in run.lines]
    assert "begins at 0.800, above 0.35" in "".join(shortfalls(replace(run, lines=lines)))


def test_a_run_without_its_last_evaluation_falls_short(run: Records) -> None:
    last = max(line["step"] for line in run.lines if line["event"] == "evaluation ended")
    lines = [line for line in run.lines if (line["event"], line.get("step")) != ("evaluation ended", last)]
    assert ["there is no evaluation of the first weights or of the last"] == shortfalls(replace(run, lines=lines))


def test_a_failed_job_says_why(run: Records) -> None:
    condition = {"type": "Failed", "message": "pods were not ready in time"}
    job = {**run.job, "status": {"phase": "Failed", "conditions": [condition]}}
    assert "the job is Failed, not Complete. Failed: pods were not ready in time" in shortfalls(replace(run, job=job))


def test_a_job_that_took_too_long_falls_short(run: Records) -> None:
    assert ["the job took 601 s, more than 600"] == shortfalls(replace(run, took_s={JOB_TOOK: 601.0}))
