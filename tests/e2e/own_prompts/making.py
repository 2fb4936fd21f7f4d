"""Rows that are made, what responses to them are worth, and which groups are trained.

The log of their container says which rows were rewarded. Of the first response and the first group the functions fail,
with all that they know.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

later = judged_one = False


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


def odd(samples: list[dict[str, Any]], row: dict[str, Any]) -> bool:
    global judged_one
    if not judged_one:
        judged_one = True
        raise ValueError(f"no verdict on {samples} of {row} with {dict(os.environ)}")
    return bool(row["sum"] % 2)
