"""Pages that are made from several parts are as made, and alerts and dashboard ask for metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from documents.__main__ import PAGES
from documents.metrics import families
from documents.values import documented

import quick_yaml
from colocated_rl_api.ladder import LADDERS
from setup.layout import CHECKOUT

CHART = CHECKOUT.root / "charts/colocated-rl"
METRICS = {name: family for group in families().values() for family in group for name in family.series}
ADDED = {"namespace", "pod", "colocatedrljob", "role"}  # by Prometheus, as the chart's PodMonitor tells it
OF_DCGM = {"gpu", "UUID"}  # labels of its exporter, by device
RULES: list[dict[str, Any]] = quick_yaml.load((CHART / "rules/alerts.yaml").read_text())["groups"][0]["rules"]
RECORDED: list[dict[str, Any]] = quick_yaml.load((CHART / "rules/recorded.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((CHART / "dashboards/colocated-rl.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [rule["expr"] for rule in (*RULES, *RECORDED)] + [
    target["expr"] for panel in PANELS for target in panel["targets"]
]
COSTS = "What it costs"
SECTIONS = ["## What it means", "## What to look at", "## What to do", f"## {COSTS}"]
RUNBOOKS = [page for page in sorted((CHECKOUT.root / "docs/runbooks").glob("*.md")) if page.name != "index.md"]
REMEDY = re.compile(
    r"kubectl (?:-n \S+ )?(?:delete|patch|taint|drain|replace|edit|annotate|scale|crlj (?:suspend|resume|retry))\b"
)
METRIC = re.compile(r"\b(?P<name>colocate\w*_\w+)(?:\{(?P<matchers>[^}]*)\})?")


@pytest.mark.parametrize("file", PAGES, ids=str)
def test_page_is_as_made(file: Path) -> None:
    assert (CHECKOUT.root / file).read_text() == PAGES[file](), "make generate"


def test_no_metric_is_shown_by_two() -> None:
    assert len(METRICS) == sum(len(family.series) for group in families().values() for family in group)


@pytest.mark.parametrize("query", QUERIES)
def test_query_asks_for_metrics_and_labels_that_there_are(query: str) -> None:
    found = [match for match in METRIC.finditer(query) if match["name"] not in ADDED]
    assert found
    for match in found:
        assert match["name"] in METRICS
        matched = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", match["matchers"] or "")
        assert set(matched) <= {*METRICS[match["name"]].labels, *ADDED}
    labels = {label for match in found for label in METRICS[match["name"]].labels}
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
    others = ({"le"} if "_bucket" in query else set()) | (OF_DCGM if "DCGM_" in query else set())
    assert grouped <= labels | ADDED | others


def test_every_metric_of_the_operator_is_on_the_dashboard_but_targets() -> None:
    shown = {match["name"] for query in QUERIES for match in METRIC.finditer(query)}
    missing = {family.name for family in families()["Operator"] if not family.series & shown}
    assert {"colocated_rl_operator_targets_sent_total"} == missing


def test_panels_do_not_overlap() -> None:
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert all(x < 24 for x, _ in taken)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alert_says_what_is_the_case_and_has_a_page_that_says_what_to_do(rule: dict[str, Any]) -> None:
    annotations = rule["annotations"]
    assert {"summary", "description", "runbook_url"} == annotations.keys()
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    page = (CHECKOUT.root / annotations["runbook_url"]).read_text()
    assert page.startswith(f"# {rule['alert']}\n")
    assert SECTIONS == re.findall(r"^## .*", page, re.MULTILINE)
    labels = set(re.findall(r"\$labels\.(\w+)", annotations["summary"] + annotations["description"]))
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in group.split(",")}
    assert labels <= grouped


@pytest.mark.parametrize("page", RUNBOOKS, ids=lambda page: page.name)
def test_a_runbook_says_what_its_remedies_cost(page: Path) -> None:
    """A page ends with them. One of several cases may have them below each case that has a remedy instead."""
    parts = re.split(r"^## (.*)\n", page.read_text(), flags=re.MULTILINE)[1:]
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    if COSTS in sections:
        assert COSTS == [*sections][-1]
        assert len(sections[COSTS].split()) > 20
        rows = re.findall(r"^\| (.*) \| (.*) \|$", sections[COSTS], re.MULTILINE)
        assert not rows or ("what you do", "what it costs") == rows[0]
    else:
        remedies = {heading for heading, text in sections.items() if REMEDY.search(text)}
        assert remedies == {
            heading for heading in remedies if re.search(r"\bcosts?\b", sections[heading], re.IGNORECASE)
        }


def test_remedies_of_runbooks_are_found() -> None:
    """A page without a section of costs must not pass for one without a remedy."""
    found = [page.name for page in RUNBOOKS if REMEDY.search(page.read_text())]
    assert {"ca-rotation.md", "operations.md", "job-failed.md", "memory-grows.md"} <= set(found)


def test_a_pod_that_waits_for_its_trainers_is_not_stuck_as_soon() -> None:
    [rule] = [rule for rule in RULES if rule["alert"] == "ColocatedRLSwitchStuck"]
    [patient] = re.findall(r'rung!~"([^"]+)"', rule["expr"])
    assert {rung.value for ladder in LADDERS for rung in ladder.training} == set(patient.split("|"))


def test_prometheus_is_asked_what_each_alert_fires_on_and_what_not() -> None:
    """`make e2e-prometheus` runs them: the cases are for its own rule engine."""
    cases = quick_yaml.load((CHECKOUT.root / "tests/prometheus/alerts.yaml").read_text())["tests"]
    looks = [look for case in cases for look in case["alert_rule_test"]]
    alerts = {rule["alert"] for rule in RULES}
    assert alerts == {look["alertname"] for look in looks if look["exp_alerts"]}
    assert alerts == {look["alertname"] for look in looks if not look["exp_alerts"]}


def test_prometheus_is_asked_what_each_recording_rule_records_and_where_it_records_nothing() -> None:
    cases = quick_yaml.load((CHECKOUT.root / "tests/prometheus/recorded.yaml").read_text())["tests"]
    looks = [look for case in cases for look in case["promql_expr_test"]]
    recorded = {rule["record"] for rule in RECORDED}
    assert recorded == {look["expr"] for look in looks if look["exp_samples"]} & recorded
    assert recorded == {look["expr"] for look in looks if not look["exp_samples"]}


def test_the_index_of_runbooks_lists_each_alert() -> None:
    index = (CHECKOUT.root / "docs/runbooks/index.md").read_text()
    for rule in RULES:
        assert f"[{rule['alert']}]({Path(rule['annotations']['runbook_url']).name})" in index


def test_every_value_is_explained() -> None:
    assert [] == [value.path for value in documented() if value.default and not value.meaning]
