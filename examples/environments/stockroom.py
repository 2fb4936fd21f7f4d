"""An environment of verifiers: how many of two things are there? Only a tool can tell, one thing at a time.

Nothing in it knows of Colocated RL: `vf-eval stockroom` runs it against any model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["StockroomTaskset"]

THINGS = ("bolts", "gears", "nails", "ropes", "tiles", "wires")
TASKS = 1000
SYSTEM = "Look things up with the tool, one at a time. Then answer with the number alone."


def stock_of(thing: str) -> int:
    return random.Random(thing).randint(2, 40)


class StockroomData(vf.TaskData):
    answer: int


class Shelves(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def count(self, thing: str) -> int:
        """Return how many of a thing are in stock."""
        return stock_of(thing)


class StockroomTask(vf.Task[StockroomData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[Shelves]:
        return [Shelves(vf.ToolsetConfig())]

    @vf.reward
    async def answered(self, trace: vf.Trace) -> float:
        found = re.findall(r"\d+", trace.last_reply)
        return float(found[-1:] == [str(self.data.answer)])

    @vf.metric
    async def lookups(self, trace: vf.Trace) -> float:
        return float(trace.transcript.count("[tool_call "))


class StockroomTaskset(vf.Taskset[StockroomTask, vf.TasksetConfig]):
    def load(self) -> Iterable[StockroomTask]:
        chance = random.Random(0)
        for _ in range(TASKS):
            one, other = chance.sample(THINGS, 2)
            question = f"How many {one} and {other} are there together?"
            data = StockroomData(prompt=question, system_prompt=SYSTEM, answer=stock_of(one) + stock_of(other))
            yield StockroomTask(data, self.config.task)


if __name__ == "__main__":  # verifiers starts tools as processes
    Shelves.run()
