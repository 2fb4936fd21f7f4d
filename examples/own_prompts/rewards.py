"""Score responses: `score` is the function of `spec.rollout.prompts.file.reward`."""

import re
from typing import Any


def score(response: str, row: dict[str, Any]) -> float:
    """1 for the right number after the last ####, 0.1 for a wrong one, 0 for none. `row` is the line of the file."""
    found = re.findall(r"####\s*(-?\d+)", response)
    if not found:
        return 0.0
    return 1.0 if int(found[-1]) == row["answer"] else 0.1
