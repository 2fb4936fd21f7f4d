"""Values, their schema and their comments belong together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from colocated_rl_api import __version__
from setup.layout import CHECKOUT

CHART = CHECKOUT.root / "charts/colocated-rl"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
FREE = ("free", "strings")  # definitions of what belongs to Kubernetes


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    return SCHEMA["definitions"][reference.removeprefix("#/definitions/")] if reference else schema


def objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    schema = resolved(schema)
    if "properties" in schema:
        yield path, schema
        for name, part in schema["properties"].items():
            yield from objects(part, f"{path}.{name}")


def value_at(path: str) -> Any:
    value = VALUES
    for name in path.split(".")[1:]:
        value = value[name]
    return value


@pytest.mark.parametrize(("path", "schema"), [*objects(SCHEMA)], ids=lambda part: part if isinstance(part, str) else "")
def test_schema_knows_each_value_and_no_other(path: str, schema: dict[str, Any]) -> None:
    assert schema["additionalProperties"] is False
    known = set(schema["properties"]) - ({"enabled", "global"} if path == "" else set())  # of a parent chart
    if path != ".resources":  # limits of what kind is the user's choice
        assert known == set(value_at(path))


def test_each_value_is_explained_where_it_stands() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    plain = {"crds", "watch", "leaderElection", "metrics", "serviceAccount", "create", "rbac", "requests", "limits"}
    plain |= {"enabled", "annotations", "tolerations", "affinity", "topologySpreadConstraints", "priorityClassName"}
    plain |= {
        "podAnnotations",
        "podDisruptionBudget",
        "networkPolicy",
        "monitoring",
        "faultInjection",
        "disk",
        "nodes",
        "test",
    }  # said by their parent or by the line before
    for above, line in zip(["", *lines], lines, strict=False):
        key = re.match(r" *([A-Za-z]+):", line)
        if key and key[1] not in plain:
            assert above.lstrip().startswith("# "), f"{key[1]} has no comment"


def test_chart_and_command_line_are_of_the_version_of_this_checkout() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = (CHECKOUT.root / "operator/VERSION").read_text().strip()
    assert version == chart["appVersion"] == __version__
    assert re.sub(r"\.dev(\d+)$", r"-dev.\1", version) == chart["version"]  # the same, as Helm spells it


def test_page_of_the_operators_token_has_each_right_of_its_roles_and_no_other() -> None:
    rule = re.compile(
        r"^- \{apiGroups: \[.*?\], resources: \[(.*?)\], (?:resourceNames: .*?)?verbs: \[(.*?)\]\}", re.MULTILINE
    )
    granted: dict[str, set[str]] = {}
    rules = (CHART / "templates/rbac.yaml").read_text().partition("aggregate }}")[0]
    for resources, verbs in rule.findall(rules):
        granted.setdefault(resources, set()).update(verbs.split(", "))
    page = (CHECKOUT.root / "docs/operator-token.md").read_text()
    rights: dict[str, set[str]] = {}
    for resource, verbs in re.findall(r"^\| `([a-z/]+)`: ([a-z, ]+) \|", page, flags=re.MULTILINE):
        rights.setdefault(resource, set()).update(verbs.split(", "))
    assert granted == rights
