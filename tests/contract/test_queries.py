"""Rules and panels are queries to a parser of Prometheus' language, not only texts with names of metrics in them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from unit.test_documents import QUERIES, RULES

from setup.layout import CHECKOUT
from setup.toolchain import clean_environment

PARSER = "promql-parser==0.11.0"  # a port of Prometheus' own
PARSE = """
import json, sys
import promql_parser
given = json.load(sys.stdin)
for call, texts in ((promql_parser.parse, given["queries"]), (promql_parser.parse_duration, given["durations"])):
    for text in texts:
        try:
            call(text)
        except Exception as error:
            print(f"{text}: {error}")
"""
PARSE_S = 180.0


def refused(queries: list[str], durations: list[str]) -> str:
    command: list[str | Path] = [CHECKOUT.uv, "run", "--quiet", "--no-project", "--with", PARSER, "python", "-c", PARSE]
    given = json.dumps({"queries": queries, "durations": durations})
    done = subprocess.run(
        command, input=given, env=clean_environment(), capture_output=True, text=True, timeout=PARSE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_query_of_alerts_and_dashboard_is_one() -> None:
    durations = [rule["for"] for rule in RULES if "for" in rule]
    assert len(QUERIES) > len(RULES) > len(durations) > 0
    assert "" == refused(QUERIES, durations)


def test_what_is_no_query_is_refused() -> None:
    """Otherwise the other test would show nothing."""
    lines = refused(["sum by (pod (up)", "rate(up)", "up > 0"], ["5 minutes"]).splitlines()
    assert ["sum by (pod (up)", "rate(up)", "5 minutes"] == [line.split(": ")[0] for line in lines]
