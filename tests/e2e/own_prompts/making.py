"""Rows that are made, and what responses to them are worth; the log of their container says which were rewarded.

The first response is worth nothing: the function fails, with all that it knows.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

later = False


def problem(number: int) -> dict[str, Any]:
    left, right = 1 + number // 9, 1 + number % 9
    question = f"State the final answer to the following arithmetic problem: {left} + {right} ="
    return {"number": number, "question": question, "sum": left + right}


def score(response: str, row: dict[str, Any]) -> float:
    global later
    if not later:
        later = True
        raise ValueError(f"no score for {row['question']}{response} with {dict(os.environ)}")
    sys.stderr.write(json.dumps({"made": row["number"]}) + "\n")
    return float(response.rpartition("Answer:")[2].strip() == str(row["sum"]))
