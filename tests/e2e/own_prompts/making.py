"""Rows that are made, and what responses to them are worth; the log of their container says which were rewarded."""

from __future__ import annotations

import json
import sys
from typing import Any


def problem(number: int) -> dict[str, Any]:
    left, right = 1 + number // 9, 1 + number % 9
    question = f"State the final answer to the following arithmetic problem: {left} + {right} ="
    return {"number": number, "question": question, "sum": left + right}


def score(response: str, row: dict[str, Any]) -> float:
    sys.stderr.write(json.dumps({"made": row["number"]}) + "\n")
    return float(response.rpartition("Answer:")[2].strip() == str(row["sum"]))
