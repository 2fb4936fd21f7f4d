"""Divide a switch into its parts, from the log lines of a run. Pure.

An agent logs each action with the time it took, and each rung it reached. What lies between the two is the system's
own: deciding, telling, waiting for the slowest pod.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from colocated_rl_api.rungs import Rung

Line = Mapping[str, Any]


@dataclass(frozen=True)
class SwitchTimes:
    """One step's climb, over all pods. Seconds.

    whole_s: from the first gate closed to the last gate open. working_s: engine and trainer actions of the pod that
    spent most time in them.
    """

    step: int
    whole_s: float
    working_s: float

    @property
    def added_s(self) -> float:
        """Return the time that operator and agents add, the wait for a slower pod between barriers included."""
        return self.whole_s - self.working_s

    @property
    def added_share(self) -> float:
        return self.added_s / self.whole_s


def switches(lines: Iterable[Line]) -> list[SwitchTimes]:
    """Every whole climb of a step after start-up, in order."""
    rungs: dict[int, list[Line]] = defaultdict(list)
    actions: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        if line.get("step") and line.get("role") == "gpu":
            if line["event"] == "rung reached":
                rungs[line["step"]].append(line)
            elif line["event"] == "action ended":
                actions[line["step"]].append(line)
    found = []
    for step, reached in sorted(rungs.items()):
        pods = {line["pod"] for line in reached}
        serving = [line for line in reached if line["rung"] == Rung.SERVING]
        if sorted(pods) != sorted(line["pod"] for line in serving) or any(
            line["action"] == "StartEngine" for line in actions[step]
        ):
            continue  # a pod was lost on the way, or the records end here
        began, ended = min(line["ts"] - line["took_s"] for line in reached), max(line["ts"] for line in serving)
        working: dict[str, float] = defaultdict(float)
        for line in actions[step]:
            if began <= line["ts"] <= ended:
                working[line["pod"]] += line["took_s"]
        found.append(SwitchTimes(step, ended - began, max(working.values(), default=0.0)))
    return found
