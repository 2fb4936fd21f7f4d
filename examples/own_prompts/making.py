"""Rows that are made and not stored: `problem` of `spec.rollout.prompts.function`."""

import random
from typing import Any


def problem(number: int) -> dict[str, Any]:
    """Row `number`, whoever asks for it and however often."""
    draw = random.Random(number)
    left, right = draw.randrange(1000), draw.randrange(1000)
    return {"prompt": f"{left} + {right} = ? Write the number after ####.", "answer": left + right}
