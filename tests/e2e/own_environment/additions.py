"""An environment of verifiers: sums, in one turn. The nearer an answer is, the more it is worth."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["AdditionsTaskset"]

TASKS = 200


class AdditionsData(vf.TaskData):
    answer: int


class AdditionsTask(vf.Task[AdditionsData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def near(self, trace: vf.Trace) -> float:
        found = re.findall(r"\d+", trace.last_reply)
        return 1 / (1 + abs(int(found[-1][:9]) - self.data.answer)) if found else 0.0


class AdditionsTaskset(vf.Taskset[AdditionsTask, vf.TasksetConfig]):
    def load(self) -> Iterable[AdditionsTask]:
        chance = random.Random(0)
        for _ in range(TASKS):
            one, other = chance.randint(1, 9), chance.randint(1, 9)
            question = f"State the final answer to the following arithmetic problem: {one} + {other} ="
            yield AdditionsTask(AdditionsData(prompt=question, answer=one + other), self.config.task)
